"""The trainer in several processes: the same batch gives the same losses, gradients and parameters in every layout.

Each layout is one set of processes that runs every case (layout_child.py): importing torch costs more than the cases do.
"""

import os
import shutil
import subprocess
import sys
import threading
import time

import job
import pytest
import torch

import audit
import checkpoint
import cluster
import layout
import plan
import provider
import rollout
import run as command

# Rounding: a sum in another order. Log-probabilities of up to 20 in float32 differ by 1e-6; the ratio, which is their
# exponential, as much; the loss is a difference of such numbers.
LOSS = 5e-6
NORM = 1e-5  # relative
# Two updates' worth of movement, and how much of it may differ. SGD moves in proportion to the gradient. Adam divides each
# number by its own size, so where a gradient is all rounding, its sign decides: a few elements differ by whole steps.
MOVED = {"sgd": 2e-4, "adam": 2e-3}
SAME = {  # case -> the case of one process that it must equal
    **{f"{a} {o}": f"{a} {o}" for a in ("grpo", "ppo", "dppo", "flow-dppo") for o in ("sgd", "adam")},
    "few": "few", "empty grpo": "empty grpo", "empty ppo": "empty ppo", "empty flow-dppo": "empty flow-dppo",
    "recompute": "flow-dppo adam", "sequence": "flow-dppo adam", "sequence recompute": "ppo adam",
    "distributed": "flow-dppo adam", "all": "ppo adam",
}  # fmt: skip
LAYOUTS = ["2x1", "1x2", pytest.param("2x2", marks=pytest.mark.slow)]  # tensor x data parallel; 2x2 runs every case
ALONE = ["grpo sgd", "ppo adam", "dppo sgd", "flow-dppo adam", "few", "empty grpo", "empty ppo", "empty flow-dppo"]
FEW = [*ALONE, "bf16", "distributed bf16", "guard", "gradient"]
FEW += ["save", "save distributed", "load", "load distributed"]


def spawn(folder, size: int, tensor: int, *jobs: str, timeout: float = 400) -> list[dict]:
    """Results by rank of layout_child.py in `size` processes. A rank that does not end fails the test with its output."""
    folder.mkdir()
    command = [sys.executable, str(job.ROOT / "tests" / "layout_child.py")]
    environment = job.environment(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", GLOO_SOCKET_IFNAME="lo")
    environment["PYTHONPATH"] += os.pathsep + str(job.ROOT / "tests")
    logs = [folder / f"log{rank}" for rank in range(size)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), str(tensor), str(folder), *jobs],
            env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT, start_new_session=True,
        )
        for rank, log in enumerate(logs)
    ]  # fmt: skip
    end = time.monotonic() + timeout
    try:
        for rank, log in zip(ranks, logs, strict=True):
            assert rank.wait(max(0.1, end - time.monotonic())) == 0, log.read_text()[-3000:]
    finally:
        for rank in ranks:
            rank.kill()
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(size)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


@pytest.fixture(scope="module")
def one(folder):
    return spawn(folder / "1x1", 1, 1, *ALONE, "save", "save distributed")[0]


@pytest.fixture(scope="module", params=LAYOUTS)
def several(request, folder, one):
    """(T, DP), results by rank."""
    tensor, data = map(int, request.param.split("x"))
    if request.param == "2x2":  # the rest of what it is compared with
        rest = [*(name for name in sorted(set(SAME.values())) if name not in one), "save bf16", "save bf16 distributed"]
        one |= spawn(folder / "1x1-all", 1, 1, *rest)[0]
    cases = [] if request.param == "2x2" else FEW + (["sequence", "all"] if tensor > 1 else ["distributed"])
    return tensor, data, spawn(folder / request.param, tensor * data, tensor, *cases)


def length(tensors: dict) -> float:
    return sum(float(t.double().square().sum()) for t in tensors.values()) ** 0.5


def minus(a: dict, b: dict) -> dict:
    assert a.keys() == b.keys()
    return {name: a[name].double() - b[name].double() for name in a}


def test_losses_norms_parameters_and_moments_of_two_updates_are_those_of_one_process(one, several):
    first = several[2][0]
    cases = [name for name in SAME if name in first]
    assert len(cases) == {(2, 1): 10, (1, 2): 9, (2, 2): 17}[several[:2]]
    for name in cases:
        want, have = one[SAME[name]], first[name]
        assert "error" not in want and "error" not in have, (name, want, have)
        for update, (a, b) in enumerate(zip(want["metrics"], have["metrics"], strict=True)):
            assert a.keys() == b.keys()
            for key in a:
                # A ratio is an exponential of what has been trained: its error is relative, and has that of one step in it.
                bound = NORM if "grad_norm" in key else 1e-4
                assert b[key] == pytest.approx(a[key], rel=bound, abs=LOSS * 10), (name, update, key)
            assert b["loss"] == pytest.approx(a["loss"], rel=NORM, abs=LOSS), (name, update)
        moved = length(minus(want["after"], want["before"]))
        apart = length(minus(want["after"], have["after"]))
        assert 0 < apart < MOVED["sgd" if "sgd" in name else "adam"] * moved or apart == 0, (name, apart / moved)
        assert length(minus(want["before"], have["before"])) == 0, name
        if want["moments"]:
            assert length(minus(want["moments"], have["moments"])) < 1e-4 * length(want["moments"]), name


def test_every_rank_reports_the_same_and_holds_the_same_full_tensors(several):
    _, _, ranks = several
    for other in ranks[1:]:
        for name in [*SAME, "bf16"]:
            if name not in other:
                continue
            have, want = other[name], ranks[0][name]
            assert have["metrics"] == want["metrics"], name
            assert have["facts"]["tensors"] == want["facts"]["tensors"], name
            assert all(torch.equal(have["after"][k], want["after"][k]) for k in want["after"]), name


def test_a_layout_of_its_own_changes_no_bit_of_bf16_between_optimizers(several):
    """The distributed optimizer does the same arithmetic on pieces; only its norm is summed in another order."""
    _, _, (first, *_) = several
    a, b = first["bf16"], first["distributed bf16"]
    assert b["metrics"][0]["loss"] == a["metrics"][0]["loss"]
    assert b["metrics"][0]["grad_norm"] == pytest.approx(a["metrics"][0]["grad_norm"], rel=1e-5)
    assert length(minus(a["moments"], b["moments"])) < 1e-4 * length(a["moments"])
    assert a["facts"]["tensors"]["optimizer"].keys() == b["facts"]["tensors"]["optimizer"].keys()


@pytest.mark.parametrize("case", ["guard", "gradient"])
def test_a_guard_stops_every_rank_with_the_same_words_and_nothing_moves(several, case):
    _, _, ranks = several
    said = {rank[case]["said"] for rank in ranks}
    assert len(said) == 1 and all(rank[case]["still"] for rank in ranks), said


def test_the_senders_parts_make_the_full_tensors_and_none_holds_the_whole_model(several):
    tensor, data, ranks = several
    for rank, result in enumerate(ranks):
        published = result["save"]["published"]
        if rank >= tensor:  # of another data-parallel rank: it sends nothing
            assert published == {}
            continue
        assert published["held"] == published["stated"]
        assert len(published["parts"] or [0]) == tensor
    whole = sum(4 * torch.Size(shape).numel() for _, shape in ranks[0]["save"]["published"]["tensors"].values())
    for part in ranks[0]["save"]["published"]["parts"] or []:
        assert os.path.getsize(part["location"]) < 0.55 * whole


def test_a_checkpoint_verifies_and_its_digests_are_of_the_full_tensors_in_its_files(several):
    _, _, ranks = several
    for case in ("save", "save distributed"):
        run = ranks[0][case]["run"]
        state = checkpoint.verify_checkpoint(run, 2)
        writers = {name.split("/")[1].split("_")[2] for name in state["files"] if name.endswith(".distcp")}
        assert writers == {str(rank) for rank in range(len(ranks))}, "a rank wrote nothing"
        for kind, name in (
            ("actor", "model.embed_tokens.weight"), ("actor", "model.layers.1.mlp.gate_proj.weight"),
            ("critic", "model.layers.0.self_attn.o_proj.weight"), ("actor", "model.norm.weight"),
            ("optimizer", "actor.optimizer.state.exp_avg.embedding.weight"),
            ("optimizer", "critic.optimizer.state.exp_avg_sq.layers.2.mlp.linear_fc1.weight"),
        ):  # fmt: skip
            stored = audit.load_tensor(run, 2, kind, name)
            assert checkpoint.tensor_digest(stored)[2] == state["tensors"][kind][name], (case, name)


def test_a_checkpoint_goes_on_under_any_layout_and_bit_for_bit_under_its_own(several, folder):
    tensor, data, (first, *_) = several
    own = f"run-{tensor}x{data}-"
    for case in ("load", "load distributed"):
        loaded = {name: found for name, found in first[case].items() if name != "seconds"}
        assert {"run-1x1-plain", "run-1x1-distributed", f"{own}plain", f"{own}distributed"} <= set(loaded)
        for name, found in loaded.items():
            agrees_with_what_was_saved(found, folder / name, exact=name == own + ("plain" if case == "load" else "distributed"))


@pytest.mark.slow
def test_half_precision_keeps_its_main_parameters_through_every_change_of_layout_and_optimizer(several, folder):
    tensor, data, (first, *_) = several
    if "load bf16" not in first:
        pytest.skip("half precision is saved and loaded in the layout that runs every case, 2x2")
    again = spawn(folder / f"again-{tensor}x{data}-bf16", 1, 1, "load bf16", "load bf16 distributed")[0]
    for found in (first["load bf16"], first["load bf16 distributed"], again["load bf16"], again["load bf16 distributed"]):
        names = [name for name in found if name != "seconds"]
        assert {"run-1x1-all-bf16", "run-1x1-all-bf16-distributed"} < set(names) and len(names) == 4
        for name in names:
            assert found[name]["held"]["tensors"] == checkpoint.read_state(folder / name, 2)["tensors"], name


@pytest.mark.slow
def test_one_process_goes_on_with_what_several_saved(several, folder):
    for case, found in spawn(folder / f"again-{several[0]}x{several[1]}", 1, 1, "load", "load distributed")[0].items():
        for name, one_run in found.items():
            if name != "seconds":
                own = name == ("run-1x1-plain" if case == "load" else "run-1x1-distributed")
                agrees_with_what_was_saved(one_run, folder / name, exact=own)


def agrees_with_what_was_saved(found: dict, run, exact: bool) -> None:
    """`Trainer.load` has compared every digest; here that it could not have done otherwise, and the update that follows."""
    saved, state = torch.load(run / "rows.pt"), checkpoint.read_state(run, 2)
    assert found["held"]["tensors"] == state["tensors"], run
    assert found["held"]["policy_digest"] == state["policy_digest"] != saved["facts"]["policy_digest"], run
    if exact:
        assert found["metrics"] == saved["metrics"] and found["facts"] == saved["facts"], run
    for key in ("loss", "grad_norm", "value_loss", "critic_grad_norm"):
        assert found["metrics"][key] == pytest.approx(saved["metrics"][key], rel=NORM, abs=LOSS), (run, key)


def test_the_batch_is_divided_by_tokens_without_loss_and_the_same_way_each_time():
    sizes = [900, 10, 10, 450, 450, 10, 10, 880]
    parts = layout.divide(sizes, list(range(8)), 3)
    assert sorted(i for part in parts for i in part) == list(range(8))
    assert parts == layout.divide(sizes, list(range(8)), 3) and all(part == sorted(part) for part in parts)
    assert max(sum(sizes[i] for i in part) for part in parts) <= 910
    assert layout.divide(sizes, [4, 2], 1) == [[2, 4]]
    assert layout.divide(sizes, [3], 4) == [[3], [], [], []]


def test_the_rendezvous_listens_where_it_was_told_and_nowhere_else():
    store, address = layout.open_store("127.0.0.1", 2)
    port = int(address.rpartition(":")[2])
    listening = [line.split()[1] for line in open("/proc/net/tcp").readlines()[1:] if line.split()[3] == "0A"]
    listening += [line.split()[1] for line in open("/proc/net/tcp6").readlines()[1:] if line.split()[3] == "0A"]
    assert [place for place in listening if place.endswith(f":{port:04X}")] == [f"0100007F:{port:04X}"]
    joined = []
    other = threading.Thread(target=lambda: joined.append(layout.join_store(address, 2)))
    other.start()
    store.set("greeting", "here")
    other.join()
    assert joined[0].get("greeting") == b"here"


# ---------------------------------------------------------------------------------------------------------------------
# Parts that do not make a whole, layouts that cannot be


@pytest.mark.parametrize(
    "spoil, said",
    [
        (lambda parts: parts.pop(), "a: the senders gave 12 of its 24 numbers"),
        (lambda parts: parts[1]["slices"]["a"].__setitem__(1, 4), r"a has shape \[3, 4\], which is none of \[6, 4\] at 4"),
        (lambda parts: parts[1]["slices"]["a"].__setitem__(1, -1), "at -1"),
        (lambda parts: parts[1]["slices"]["a"].__setitem__(0, 1), "which is none of"),
        (lambda parts: parts.append(parts[1]), "a: the senders gave 36 of its 24 numbers"),
        (lambda parts: parts[0]["slices"].pop("b"), "b: the senders gave 0 of its 2 numbers"),
    ],
)
def test_parts_that_leave_a_gap_or_lie_outside_are_refused(spoil, said, tmp_path):
    from safetensors.torch import save_file

    a, b = torch.arange(24.0).view(6, 4), torch.ones(2)
    save_file({"a": a[:3].contiguous(), "b": b}, tmp_path / "1")
    save_file({"a": a[3:].contiguous()}, tmp_path / "2")
    parts = [
        {"location": str(tmp_path / "1"), "slices": {"a": [0, 0], "b": [0, 0]}},
        {"location": str(tmp_path / "2"), "slices": {"a": [0, 3]}},
    ]
    manifest = {"transport": "disk", "tensors": {"a": ["F32", [6, 4]], "b": ["F32", [2]]}, "parts": parts}
    whole = dict(rollout.received(manifest, "cpu"))
    assert torch.equal(whole["a"], a) and torch.equal(whole["b"], b)
    spoil(parts)
    with pytest.raises(checkpoint.GuardError, match=said):
        dict(rollout.received(manifest, "cpu"))


@pytest.mark.parametrize(
    "options, said",
    [
        ("--train-gpus 3 --tensor-model-parallel-size 2", "--train-gpus 3 is no multiple of --tensor-model-parallel-size 2"),
        ("--train-gpus 4 --tensor-model-parallel-size 4", '"num_key_value_heads" is 2, which tensor parallel size 4 does not'),
        ("--train-gpus 2 --sequence-parallel", "--tensor-model-parallel-size is 1"),
        ("--train-gpus 2 --distributed-optimizer", "--optimizer sgd has no state to share"),
        ("--train-gpus 0", "--train-gpus must be from 1"),
        ("--pipeline-model-parallel-size 2", "passes all its layers again in each loop"),
        ("--context-parallel-size 4", "each loop has keys and values of its own"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_the_reason(options, said, tmp_path, capsys):
    asked = [*job.SMALL, "--output", str(tmp_path / "run"), "--dry-run", *options.split()]
    try:
        code = command.command(asked)
    except SystemExit as ended:  # argparse
        code = ended.code
    assert code == 2 and said in capsys.readouterr().err


def test_the_plan_divides_what_the_layout_divides():
    config = provider.read_config(job.TINY / "model")
    asked = {"critic": True, "precision": "bf16", "optimizer": "adam", "recompute": True, "offload": False, "tokens": 4096}
    one = plan.trainer_gib(config, **asked)
    held = {t: plan.trainer_gib(config, **asked, tensor=t) for t in (1, 2)}
    assert held[1] == one and 0.5 * one["state"] < held[2]["state"] < 0.51 * one["state"]
    shared = plan.trainer_gib(config, **asked, data=4, distributed_optimizer=True)
    assert shared["state"] == pytest.approx(one["state"] * (2 + 4 + 12 / 4) / 18)
    spread = plan.trainer_gib(config, **asked, tensor=2, sequence_parallel=True)
    assert spread["activations"] < held[2]["activations"] < one["activations"]


# ---------------------------------------------------------------------------------------------------------------------
# The whole job


@pytest.mark.slow
def test_a_run_of_two_trainers_resumes_bit_for_bit_and_goes_on_under_another_layout(tmp_path):
    args = [*job.SMALL, "--device", "cpu", "--updates", "2", "--optimizer", "adam", "--algorithm", "ppo"]
    args[args.index("--lr") + 1] = "1e-4"
    tensor = ["--train-gpus", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    data = ["--train-gpus", "2", "--tensor-model-parallel-size", "1", "--no-sequence-parallel", "--distributed-optimizer"]
    whole, parted, other = (tmp_path / name for name in ("whole", "parted", "other"))
    for output, more in ((whole, []), (parted, ["--stop-after", "1"])):
        code, text = job.run(*args, *tensor, *more, "--output", str(output))
        assert code == 0, text
    shutil.copytree(parted, other)
    for output, more in ((parted, []), (other, data)):
        code, text = job.run("--resume", "--output", str(output), *more)
        assert code == 0, text
        assert job.audit(output)[0] == 0
    code, text = job.audit(whole, parted)
    assert code == 0, text
    code, text = job.audit(whole, other)
    assert code == 1 and "critic" in text, text
    code, text = job.audit(whole, other, "--tolerance", "1e-3")
    assert code == 0, text
    assert checkpoint.read_state(other, 1)["layout"]["tensor_model_parallel_size"] == 2
    assert checkpoint.read_state(other, 2)["layout"]["distributed_optimizer"] is True
    assert not list((other / "publications").glob("*.safetensors")) and {p.name for p in (other / "logs").iterdir()} >= {
        "trainer.log",
        "trainer-1.log",
    }


@pytest.mark.slow
def test_what_the_loop_waits_for_ends_with_the_first_failure():
    """`each` on several actors: Ray hands out the first error, whether or not the rest have answered."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False, _node_ip_address="127.0.0.1")
    try:

        class Rank:
            def __init__(self, rank):
                self.rank = rank

            def work(self):
                if self.rank == 0:
                    time.sleep(60)
                raise checkpoint.GuardError("rank 1 failed")

        ranks = [ray.remote(Rank).remote(rank) for rank in (0, 1)]
        began = time.monotonic()
        with pytest.raises(checkpoint.GuardError, match="rank 1 failed"):
            cluster.each(ranks, "work")
        assert time.monotonic() - began < 30
    finally:
        ray.shutdown()
