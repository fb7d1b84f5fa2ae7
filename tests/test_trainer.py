"""The trainer in one process: guards stop before the optimizer, snapshots stand still, layout of the batch changes nothing."""

import contextlib
import errno
import os
import random
import re
import resource
import subprocess
import sys
from pathlib import Path

import job
import pytest
import torch
from safetensors.torch import load_file, save_file

import checkpoint
import hostmemory
import trainer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


pytestmark = pytest.mark.usefixtures("one_process")


def make(algorithm="grpo", **changes) -> trainer.Trainer:
    settings = {"device": DEVICE, "optimizer": "adam", "lr": 1e-3, "critic_lr": 1e-3, "max_logprob_error": 1e9, **changes}
    return trainer.Trainer(trainer.TrainerSettings(model=str(job.TINY / "model"), algorithm=algorithm, **settings))


def batch(count=8, seed=0, lengths=None) -> list[dict]:
    draw = random.Random(seed)
    rows = []
    for i in range(count):
        n = lengths[i] if lengths else draw.randrange(1, 12)
        rows.append(
            {
                "prompt_tokens": [draw.randrange(3, 40) for _ in range(draw.randrange(3, 20))],
                "response_tokens": [draw.randrange(3, 40) for _ in range(n)],
                "reward": float(i % 2),
            }
        )
    return rows


def replayed(t: trainer.Trainer, rows: list[dict]) -> list[dict]:
    """The same completions with the log-probabilities that the trainer itself gives them."""
    rows = [{**row, "log_probs": [0.0] * len(row["response_tokens"])} for row in rows]
    old = {}
    t._only(t.actor)
    t._score(trainer.make_packs(rows, list(range(len(rows))), 10**6, DEVICE), old, {})
    return [{**row, "log_probs": old[i].tolist()} for i, row in enumerate(rows)]


def test_a_log_probability_off_by_more_than_the_bound_stops_before_anything_is_optimized():
    t = make("ppo", max_logprob_error=1e-3)
    rows = replayed(t, batch())
    before, critic = t.policy()["digest"], [p.detach().clone() for p in t.critic.model.parameters()]
    rows[5]["log_probs"][0] += 2e-3
    with pytest.raises(checkpoint.GuardError, match=r"update 3: replay guard: sample 5, response token 0"):
        t.train(rows, 3)
    t._digest_cache = None
    assert t.policy()["digest"] == before
    assert all(torch.equal(a, b) for a, b in zip(critic, t.critic.model.parameters(), strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_log_probability_that_is_no_number_is_the_worst_there_is(bad):
    t = make(max_logprob_error=1e-3)
    rows = replayed(t, batch())
    rows[2]["log_probs"][0] = bad
    with pytest.raises(checkpoint.GuardError, match="sample 2, response token 0"):
        t.train(rows, 0)


def test_a_gradient_that_is_not_finite_stops_before_the_step_and_is_named():
    t = make()
    rows = replayed(t, batch())
    before = t.policy()["digest"]
    t.actor.model.layers[1].mlp.linear_fc2.weight.register_hook(lambda g: g * float("inf"))
    with pytest.raises(checkpoint.GuardError, match=r"layers\.1\.mlp\.linear_fc2\.weight is not finite"):
        t.train(rows, 0)
    t._digest_cache = None
    assert t.policy()["digest"] == before


def test_micro_batches_change_no_number_beyond_rounding():
    results = []
    for budget in (10**6, 40, 1):
        t = make("dppo", micro_batch_tokens=budget)
        results.append(t.train(replayed(t, batch()), 0))
    for other in results[1:]:
        for name in ("loss", "grad_norm", "value_loss", "critic_grad_norm", "entropy"):
            assert other[name] == pytest.approx(results[0][name], rel=1e-4, abs=1e-6), name


def test_recompute_gives_bitwise_the_same_update():
    digests = set()
    for recompute in (False, True):
        t = make("flow-dppo", recompute=recompute)
        t.train(replayed(t, batch()), 0)
        digests.add(t.policy()["digest"])
    assert len(digests) == 1


def test_recompute_takes_every_product_again_but_each_visits_last(monkeypatch):
    import matmul

    taken, in_parts = [], matmul.in_parts
    monkeypatch.setattr(matmul, "in_parts", lambda x, weight: taken.append(weight) or in_parts(x, weight))
    counts = []
    for recompute in (False, True):
        t = make(split_matmul=True, recompute=recompute)
        rows = replayed(t, batch())
        taken.clear()
        t.train(rows, 0)
        counts.append(len(taken))
    visits = t.config.num_hidden_layers * t.config.num_loops * len(t._packs(rows, list(range(len(rows)))))
    assert counts[1] - counts[0] == 3 * visits  # of four: queries, keys and values; output; gate and up; down


@pytest.mark.parametrize("algorithm", ["grpo", "flow-dppo"])
@pytest.mark.parametrize("recompute", [False, True])
def test_products_in_parts_change_no_number_beyond_rounding(algorithm, recompute):
    seen = []
    for split in (False, True):
        t = make(algorithm, split_matmul=split, optimizer="sgd", micro_batch_tokens=40, recompute=recompute)
        metrics = t.train(replayed(t, batch()), 0)
        buffers = [b.grad_data.clone() for n in (t.actor, t.critic) if n for b in n.ddp.buffers]
        seen.append((metrics, buffers))
    for name in ("loss", "grad_norm", "entropy"):
        assert seen[1][0][name] == pytest.approx(seen[0][0][name], rel=1e-4, abs=1e-6), name
    for ours, plain in zip(seen[1][1], seen[0][1], strict=True):
        assert torch.allclose(ours, plain, rtol=1e-4, atol=1e-6) and plain.abs().max() > 1e-3


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing moves between devices without a GPU")
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_offloading_the_idle_network_changes_no_number(optimizer):
    seen = []
    for offload in (False, True):
        t = make("flow-dppo", optimizer=optimizer, offload_train=offload)
        for update in (0, 1):
            metrics = t.train(replayed(t, batch(seed=update)), update)
        seen.append((t._facts(), {k: v for k, v in metrics.items() if not k.endswith("_gib")}))
    assert seen[0] == seen[1]


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is pinned without a GPU")
def test_memory_that_was_pinned_can_be_used_again():
    for size in (1 << 20, 8 << 20, 64 << 20):
        buffer = hostmemory.pinned(size)
        assert buffer.is_pinned()
        del buffer
        for other in (size // 2, size, 2 * size):
            plain = torch.empty(other, dtype=torch.uint8)
            assert torch.equal(plain.fill_(7).cuda().cpu(), plain)


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is pinned without a GPU")
def test_a_fork_does_not_copy_pinned_memory():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    size = 1 << 30
    before = resident()
    buffer = hostmemory.pinned(size)
    assert resident() - before > 0.9 * size
    read, write = os.pipe()
    if not (child := os.fork()):
        os.write(write, str(resident()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(read, 100)) < before + 0.1 * size
    assert buffer.is_pinned()


def test_equal_rewards_in_every_group_leave_the_policy_as_it_is():
    t = make(optimizer="sgd", n_samples_per_prompt=4)
    before = t.policy()["digest"]
    metrics = t.train(replayed(t, [{**row, "reward": 1.0} for row in batch()]), 0)
    assert metrics["grad_norm"] == 0 and t.policy()["digest"] == before


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "dppo", "flow-dppo"])
@pytest.mark.parametrize("lengths", [[1] * 8, [3, 0, 5, 1, 0, 2, 7, 4]])
def test_one_token_and_empty_responses_are_defined(algorithm, lengths):
    t = make(algorithm)
    metrics = t.train(replayed(t, batch(lengths=lengths)), 0)
    assert all(torch.isfinite(torch.tensor(v)).all() for v in metrics.values())


@pytest.mark.parametrize("algorithm", ["grpo", "flow-dppo"])
@pytest.mark.parametrize("precision, offload", [("fp32", False), ("bf16", False), ("fp32", True)])
def test_a_checkpoint_holds_the_moment_of_its_snapshot_whatever_the_next_updates_do(
    algorithm, precision, offload, tmp_path, capsys
):
    run = tmp_path / "run"
    checkpoint.create_run(run, {})
    t = make(algorithm, precision=precision, offload_train=offload)
    for update in (0, 1):
        t.train(replayed(t, batch(seed=update)), update)
        checkpoint.append_rollouts(run, update, [{}])
        checkpoint.append_metrics(run, {"update": update})
    t.snapshot(str(run), 2)
    later = [replayed(t, batch(seed=9))]
    t.train(later[0], 2)  # before the writer has begun
    t.write_checkpoint(str(run), 2, 8, 2)
    t.wait_for_checkpoint()
    assert re.search(r"^checkpoint 2: \d+\.\d\d s in the background$", capsys.readouterr().out, re.MULTILINE)
    after = t.policy()["digest"]

    other = make(algorithm, precision=precision, offload_train=offload)
    other.load(str(run), 2)  # proves every tensor against state.json
    other.train(later[0], 2)
    assert other.policy()["digest"] == after
    assert t._facts() == other._facts()


@pytest.mark.skipif(DEVICE == "cuda", reason="the limit on file sizes also stops files of CUDA's own")
def test_a_full_disk_is_named_with_what_to_do_and_nothing_half_written_stays(tmp_path):
    """A real limit on file sizes, first too small for the common state, then for the first tensors."""
    run = tmp_path / "run"
    checkpoint.create_run(run, {})
    t = make("ppo")
    checkpoint.append_rollouts(run, 0, [{}])
    checkpoint.append_metrics(run, {"update": 0})
    place = run / "publications" / "current.safetensors"

    def save():
        t.snapshot(str(run), 1)
        t.write_checkpoint(str(run), 1, 8, 2)
        t.wait_for_checkpoint()

    writes = ((lambda: t.publish(1, "disk", str(place)), str(place)), (save, str(run / "checkpoints" / ".000001.tmp")))
    for write, path in writes:
        for size in (1000, 100_000):
            with largest_file(size), pytest.raises(OSError, match=r"make room, then --resume the run") as caught:
                write()
            assert caught.value.filename == path
            assert not os.listdir(os.path.dirname(path))
        write()
    checkpoint.verify_checkpoint(run, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_by_pieces_is_the_tensor_whatever_its_size(dtype, monkeypatch):
    monkeypatch.setattr(checkpoint, "_pinned", {checkpoint._PIECES: torch.empty(1000, dtype=torch.uint8)})
    for shape in [(1,), (499,), (250,), (251, 3), (1000, 4)]:
        source, target = torch.randn(shape).to(dtype), torch.zeros(shape, dtype=dtype)
        checkpoint.copy_pinned(source, target)
        assert torch.equal(source, target)


READER = """
import sys
from safetensors.torch import load_file
import checkpoint
print(checkpoint.digest_of(load_file(sys.argv[1])))
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_publication_by_shared_memory_is_a_file_without_a_name_which_the_next_one_overwrites(precision, tmp_path):
    def read(manifest):
        done = subprocess.run([sys.executable, "-c", READER, manifest["location"]], cwd=job.ROOT, capture_output=True, text=True)
        return done.stdout.strip() or done.stderr

    named, t = set(os.listdir("/dev/shm")), make(precision=precision)
    first = t.publish(1, "shm", str(tmp_path / "unused"))
    assert read(first) == first["digest"] == t.policy()["digest"]
    t.train(replayed(t, batch()), 0)
    second = t.publish(2, "shm", str(tmp_path / "unused"))
    assert second["location"] == first["location"] and second["digest"] != first["digest"]
    assert read(second) == second["digest"]
    assert not list(tmp_path.iterdir()) and not [n for n in set(os.listdir("/dev/shm")) - named if "nanbeige" in n]


def test_a_policy_file_shows_what_is_written_to_it_later_and_any_safetensors_file_is_one(tmp_path):
    like = {"a": torch.empty(3, 2), "b": torch.empty(5, dtype=torch.bfloat16, device="meta")}
    made = hostmemory.make_policy_file(like, gpu=False)
    seen = hostmemory.open_policy_file(made.path, gpu=False)
    for value in (1.5, 2.5):
        for tensor in made.tensors.values():
            tensor.fill_(value)
        for tensors in (seen.tensors, hostmemory.open_policy_file(made.path, gpu=False).tensors, load_file(made.path)):
            assert torch.equal(tensors["a"], torch.full((3, 2), value))
            assert torch.equal(tensors["b"], torch.full((5,), value, dtype=torch.bfloat16))
    for named in ({"x": torch.arange(3)}, {"y": torch.rand(2), "z": torch.tensor(True)}):
        save_file(named, tmp_path / "file", metadata={"format": "pt"})
        read = hostmemory.open_policy_file(str(tmp_path / "file"), gpu=False).tensors
        assert read.keys() == named.keys() and all(torch.equal(read[name], named[name]) for name in named)


@pytest.mark.skipif(DEVICE == "cpu", reason="nothing is pinned without a GPU")
def test_a_policy_in_memory_is_pinned_at_both_ends_and_a_refused_pin_leaves_no_error_behind(tmp_path):
    made = hostmemory.make_policy_file({"a": torch.empty(1 << 20), "b": torch.empty(3)}, gpu=True)
    assert all(tensor.is_pinned() for tensor in made.tensors.values())
    source = torch.randn(1 << 20, device="cuda")
    checkpoint.copy_pinned(source, made.tensors["a"])
    there = torch.empty_like(source)
    checkpoint.copy_pinned(made.tensors["a"], there)
    assert torch.equal(there, source) and torch.equal(load_file(made.path)["a"], source.cpu())
    wide = torch.randn(2, 3, device="cuda").T[:, 0]  # strided
    policy = {"a": 2 * source, "b": wide}
    found = checkpoint.tensor_digests(policy.items(), into=made.tensors)
    assert found == checkpoint.tensor_digests(policy.items()) == checkpoint.tensor_digests(made.tensors.items())
    assert torch.equal(made.tensors["b"], wide.cpu())
    plain = torch.empty(1 << 20, dtype=torch.uint8)
    hostmemory.pin(plain)
    with pytest.raises(RuntimeError):
        hostmemory.pin(plain)
    assert float(torch.ones(3, device="cuda").sum()) == 3


def test_no_room_for_a_publication_in_memory_is_said_before_anything_is_written(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match=r"No space left on device \(no room in memory for a policy of .* GB; --publication-tr"):
        make().publish(1, "shm", "unused")


@contextlib.contextmanager
def largest_file(size: int):
    """No file that this process writes may grow beyond `size` bytes meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_half_precision_moves_main_parameters_where_the_cast_does_not_move():
    t = make(precision="bf16", optimizer="sgd", lr=1e-5)
    main = [p for g in t.actor.optimizer.param_groups for p in g["params"]]
    assert all(p.dtype == torch.float32 for p in main)
    cast = list(t.actor.model.parameters())
    before = [[p.detach().clone() for p in group] for group in (main, cast)]
    t.train(replayed(t, batch()), 0)
    moved = [
        sum(int((a != b).sum()) for a, b in zip(old, new, strict=True)) for old, new in zip(before, (main, cast), strict=True)
    ]
    assert moved[0] > 100 * max(1, moved[1]), f"{moved[0]} main parameters moved, {moved[1]} of their casts"
