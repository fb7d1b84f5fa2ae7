"""What ends a run, and how: numbers that are not finite, processes that die, a clock that jumps, secrets, open ports."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import job
import psutil
import pytest
import torch
from test_resume import arguments, equal, resumed, wait_for, whole  # noqa: F401
from test_trainer import batch, make, replayed

import checkpoint
import cluster
import run as command

pytestmark = pytest.mark.usefixtures("one_process")
ALGORITHMS = ("grpo", "ppo", "dppo", "flow-dppo")


# --- numbers ---------------------------------------------------------------------------------------------------------


def weights(t) -> list:
    return [p.detach().clone() for n in (t.actor, t.critic) if n is not None for p in n.model.parameters()]


def stopped(t, rows: list[dict], update: int = 7) -> str:
    """The message of the guard that stops this update; nothing was optimized."""
    before = weights(t)
    with pytest.raises(checkpoint.GuardError) as caught:
        t.train(rows, update)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(t), strict=True))
    return str(caught.value)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_reward_beyond_float32_stops_the_update_and_names_the_sample(algorithm):
    t = make(algorithm)
    rows = replayed(t, batch())
    rows[5]["reward"] = 1e39
    assert stopped(t, rows).startswith("update 7: the reward of sample 5 is inf; ")


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_an_infinite_loss_stops_the_update_and_names_sample_and_token(algorithm):
    """The ratio of new to old policy overflows at one token, in one of several micro-batches."""
    t = make(algorithm, micro_batch_tokens=40)
    rows = replayed(t, [{**row, "reward": 0.0} for row in batch(lengths=[4] * 8)])
    rows[6]["reward"] = -1.0  # a negative advantage: the clip does not bound the loss
    rows[6]["log_probs"][2] = -200.0
    assert stopped(t, rows).startswith("update 7: the policy loss of sample 6, response token 2 is inf; ")


def test_a_value_that_is_no_number_stops_the_update_before_the_actor_moves():
    t = make("ppo")
    rows = replayed(t, batch(lengths=[3] * 8))
    with torch.no_grad():
        next(p for n, p in t.critic.model.named_parameters() if "head" in n).fill_(float("nan"))
    before = t.policy()["digest"]
    with pytest.raises(checkpoint.GuardError, match="^update 7: the critic's value of sample 0, response token 0 is nan; "):
        t.train(rows, 7)
    t._digest_cache = None
    assert t.policy()["digest"] == before


@pytest.mark.parametrize("network", ["actor", "critic"])
def test_a_gradient_that_is_not_finite_is_named_with_update_and_tensor(network):
    t = make("flow-dppo")
    rows = replayed(t, batch())
    model = getattr(t, network).model
    before = [p.detach().clone() for p in model.parameters()]
    model.layers[1].mlp.linear_fc2.weight.register_hook(lambda g: g * float("nan"))
    with pytest.raises(checkpoint.GuardError, match=rf"^update 7: {network}: gradient of layers\.1\.mlp\.linear_fc2\.weight"):
        t.train(rows, 7)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_that_leaves_a_parameter_not_finite_ends_before_it_is_published_or_saved(precision, tmp_path):
    run = tmp_path / "run"
    checkpoint.create_run(run, {})
    settings = {"optimizer": "sgd", "clip_grad": 0.0, "precision": precision, "lr": 1e-3}
    t = make("grpo", **settings)
    t.train(replayed(t, batch()), 0)
    checkpoint.append_rollouts(run, 0, [{}])
    checkpoint.append_metrics(run, {"update": 0})
    t.snapshot(str(run), 1)
    t.write_checkpoint(str(run), 1, 8, 2)
    t.wait_for_checkpoint()
    for group in t.actor.optimizer.param_groups:
        group["lr"] = 1e38
    t.actor.model.layers[1].mlp.linear_fc2.weight.register_hook(lambda g: g * 1e9)
    broken = r"^update 1: actor: the optimizer step left .*layers\.1\.mlp\.linear_fc2\.weight not finite"
    with pytest.raises(checkpoint.GuardError, match=broken):
        t.train(replayed(t, batch(seed=1)), 1)
    checkpoint.verify_checkpoint(run, 1)
    make("grpo", **settings).load(str(run), 1)


def test_a_step_that_breaks_only_the_optimizers_own_state_is_caught_too():
    """Adam's second moment of a gradient of 1e20 is infinite: the parameter would never move again, and stay finite."""
    t = make("grpo", clip_grad=0.0)
    rows = replayed(t, batch())
    t.actor.model.layers[0].mlp.linear_fc2.weight.register_hook(lambda g: torch.full_like(g, 1e15))
    t.actor.model.layers[1].mlp.linear_fc2.weight.register_hook(lambda g: torch.full_like(g, 1e16))
    t.train(rows, 6)  # large, and fine
    optimizer = t.actor.optimizer
    state = next(s for _, s in optimizer.state.items() if "exp_avg_sq" in s)
    state["exp_avg_sq"].view(-1)[0] = float("inf")
    with pytest.raises(checkpoint.GuardError, match=r"^update 7: actor: the optimizer step left exp_avg_sq of .* not finite"):
        t.train(replayed(t, batch(seed=1)), 7)


SHAPES = {  # prompts, completions and rewards that leave little to learn from
    "one token each": lambda n: (n, [1] * n, [float(i % 2) for i in range(n)]),
    "one prompt": lambda n: (n, [5] * n, [float(i % 2) for i in range(n)]),
    "equal rewards": lambda n: (4 * n, [3] * 4 * n, [1.0] * 4 * n),
    "some empty": lambda n: (4 * n, [0, 3] * 2 * n, [float(i % 3 == 0) for i in range(4 * n)]),
    "all cut off": lambda n: (4 * n, [12] * 4 * n, [0.0] * 4 * n),
}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_smallest_and_the_emptiest_batches_are_defined(algorithm):
    n = {"grpo": 2, "flow-dppo": 2}.get(algorithm, 1)  # completions of the smallest batch
    t = make(algorithm, n_samples_per_prompt=n if algorithm == "grpo" else 1, max_logprob_error=1e-3)
    for name, shape in SHAPES.items():
        count, lengths, rewards = shape(n)
        rows = replayed(t, batch(count, lengths=lengths))
        finish = "length" if name == "all cut off" else "stop"
        metrics = t.train([{**row, "reward": r, "finish_reason": finish} for row, r in zip(rows, rewards, strict=True)], 0)
        assert all(torch.isfinite(torch.tensor(v)).all() for v in metrics.values()), (name, metrics)
        if algorithm == "grpo" and name in ("equal rewards", "all cut off"):
            assert metrics["grad_norm"] == 0
    rows = replayed(t, batch(2 * n, lengths=[0] * 2 * n))
    assert stopped(t, rows) == "update 7: every completion is empty; the step was not taken"


# --- secrets and modes -----------------------------------------------------------------------------------------------

SECRET = "correct-horse-battery-staple"
VARIABLES = json.dumps({"MY_SERVICE_KEY": SECRET, "OMP_DYNAMIC": "FALSE"})


@contextlib.contextmanager
def umask(mask: int):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def test_a_value_that_may_be_secret_stands_nowhere_and_must_be_given_again(tmp_path):
    run = tmp_path / "run"
    values, names = command.parse([*job.SMALL, "--train-env-vars", VARIABLES, "--output", str(run)])
    recipe = command.resolve(values, names)
    shown = {k: v for k, v in command.shown_recipe(recipe).items() if k not in ("resume", "output", "dry_run")}
    record = {"recipe": shown, "contents": command.check(recipe).contents, "device": "cpu", "threads": 1}
    checkpoint.create_run(run, record)
    kept = json.loads(json.loads((run / "run.json").read_text())["recipe"]["train_env_vars"])
    assert kept["OMP_DYNAMIC"] == "FALSE" and SECRET not in (run / "run.json").read_text()

    def resume(*more: str) -> None:
        command.main(["--resume", "--output", str(run), *more])

    with checkpoint.lock_run(run):
        with pytest.raises(ValueError, match="run.json does not keep the value of MY_SERVICE_KEY; give --train-env-vars again"):
            resume()
        with pytest.raises(ValueError, match="train_env_vars: the run has") as caught:
            resume("--train-env-vars", VARIABLES.replace(SECRET, "another-" + SECRET))
        assert SECRET not in str(caught.value)
        with pytest.raises(checkpoint.RunLocked):  # nothing is refused: it comes as far as the lock
            resume("--train-env-vars", VARIABLES)
    again = ["--config", str(run / "run.json"), "--output", str(tmp_path / "other")]
    with pytest.raises(ValueError, match="MY_SERVICE_KEY; give --train-env-vars again"):
        command.resolve(*command.parse(again))
    assert command.resolve(*command.parse([*again, "--train-env-vars", VARIABLES])).train_env_vars == VARIABLES


@pytest.mark.slow
def test_variables_with_which_no_process_starts_are_named_and_not_waited_for(tmp_path):
    code, output = job.run(*job.SMALL, "--train-env-vars", '{"PATH": ""}', "--output", str(tmp_path / "run"), timeout=300)
    assert code == 2 and "--train-env-vars: no process starts with PATH as given" in output, output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mask, mode", [(0o077, 0o600), (0o022, 0o644)])
def test_the_publication_by_file_has_the_users_mode(mask, mode, tmp_path):
    place = tmp_path / "current.safetensors"
    with umask(mask):
        make().publish(1, "disk", str(place))
    assert place.stat().st_mode & 0o777 == mode


def test_rays_folder_is_the_users_own_and_what_a_killed_run_left_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "nanbeige-ray-dead" / "r").mkdir(parents=True)
    (tmp_path / "nanbeige-ray-link").symlink_to(tmp_path)
    other = tmp_path / "somebody-else"
    other.mkdir()
    with umask(0o022), cluster.ray_folder(tmp_path / "run") as first:
        assert not (tmp_path / "nanbeige-ray-dead").exists() and other.is_dir()
        assert Path(first).parent.stat().st_mode & 0o777 == 0o700
        with cluster.ray_folder(tmp_path / "run") as second:  # beside it: the first one is alive
            assert first != second and Path(first).parent.is_dir()
        assert Path(first).parent.is_dir() and not Path(second).parent.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["nanbeige-ray-link", "somebody-else"]


# --- one real run, looked at and then deprived of Ray's head ---------------------------------------------------------


@dataclasses.dataclass
class Seen:
    """What was seen of a run under umask 077 while it lived, and how it ended once Ray's head was killed."""

    listening: dict
    open_to_others: list
    folder: Path
    code: int
    last: str
    seconds: float
    left: list
    run: Path


def processes(driver: int) -> list[psutil.Process]:
    return [psutil.Process(driver), *psutil.Process(driver).children(recursive=True)]


def child(driver: int, name: str) -> int:
    return next(p.pid for p in psutil.Process(driver).children() if p.name() == name)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    run = tmp_path_factory.mktemp("seen") / "run"
    secrets = {"HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET}
    more = ["--updates", "5000", "--save-interval", "2", "--train-env-vars", VARIABLES]
    with umask(0o077):
        process = job.start("--algorithm", "grpo", *job.SMALL, *more, "--output", str(run), **secrets)
    try:
        wait_for(lambda: process.poll() is not None or (run / "checkpoints" / "000002").exists())
        assert process.poll() is None, process.communicate()[0]
        listening = {
            f"{p.name()} {p.pid} port {c.laddr.port}": c.laddr.ip
            for p in processes(process.pid)
            for c in p.net_connections("inet")
            if c.status == psutil.CONN_LISTEN or (c.type.name == "SOCK_DGRAM" and not c.raddr)
        }
        line = psutil.Process(child(process.pid, "gcs_server")).cmdline()
        folder = Path(next(w.partition("=")[2] for w in line if "/nanbeige-ray-" in w).partition("/r/")[0])
        others = [str(p) for p in (folder, run, *run.rglob("*")) if p.lstat().st_mode & 0o077]
        os.kill(child(process.pid, "gcs_server"), signal.SIGKILL)
        began = time.monotonic()
        output, _ = process.communicate(timeout=100)
        seconds = time.monotonic() - began
        deadline = time.monotonic() + 30
        while (left := job.living(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return Seen(listening, others, folder, process.returncode, output.splitlines()[-1], seconds, left, run)
    finally:
        process.kill()


def test_every_process_of_a_run_listens_on_loopback_alone(seen):
    assert len(seen.listening) > 5
    assert not {k: ip for k, ip in seen.listening.items() if ip.removeprefix("::ffff:") != "127.0.0.1" and ip != "::1"}


def test_under_umask_077_nothing_that_a_run_makes_is_open_to_others(seen):
    assert not seen.open_to_others


def test_no_secret_of_the_environment_stands_in_a_run_directory(seen):
    files = [p for p in seen.run.rglob("*") if p.is_file()]
    assert {"run.json", "trainer.log", "raylet.out"} <= {p.name for p in files}
    assert not [p for p in files if SECRET.encode() in p.read_bytes()]


def test_the_death_of_rays_head_is_one_clear_line_within_a_minute_and_no_process_outlives_it(seen):
    assert seen.code == 1 and seen.seconds < 60
    assert seen.last.startswith("run.py: error: Ray's head (GCS) at 127.0.0.1:") and seen.last.endswith(
        " died: it no longer answers; --resume goes on with the run"
    )
    assert not seen.left and not seen.folder.exists()


# --- the rest of the matrix: each fault, then a resume that equals the uninterrupted run -----------------------------


@pytest.fixture
def short():
    """A folder for Ray with a short name: the path of a socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder


def faulty(run: Path, *points: str, **more: str) -> tuple[int, str, float]:
    began = time.monotonic()
    code, output = job.run(*arguments("flow-dppo"), "--output", str(run), **job.seam(*points), **more)
    return code, output.splitlines()[-1], time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("name, said", [("gcs_server", "Ray's head (GCS) at"), ("raylet", "died")])
def test_a_run_whose_ray_died_resumes_exactly(name, said, whole, tmp_path):  # noqa: F811
    run = tmp_path / "run"
    process = job.start(*arguments("flow-dppo"), "--output", str(run), **job.seam("trainer:Trainer.train:before:3:stall=300"))
    wait_for(lambda: len(checkpoint.list_checkpoints(run)) == 2)
    os.kill(child(process.pid, name), signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert output.splitlines()[-1].startswith("run.py: error: ") and said in output.splitlines()[-1]
    wait_for(lambda: not job.living(process.pid), 30)
    resumed(run)
    equal(whole("flow-dppo"), run)


@pytest.mark.slow
def test_after_kill_9_of_the_driver_no_process_of_its_ray_lives_for_half_a_minute(tmp_path, short):
    run = tmp_path / "run"
    process = job.start(*arguments("grpo"), "--updates", "5000", "--output", str(run), RAY_TMPDIR=short)
    wait_for((run / "metrics.jsonl").exists)
    all_of_them = processes(process.pid)
    assert len(all_of_them) > 6
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(all_of_them, timeout=30)
    assert not alive


@pytest.mark.slow
def test_a_clock_that_jumps_by_a_day_changes_nothing(whole, tmp_path):  # noqa: F811
    """Back in the driver, forth in the trainer, back in the engine, each in the second update."""
    run = tmp_path / "run"
    points = ["run:grade:before:2:clock=-86400", "trainer:Trainer.train:before:2:clock=86400"]
    code, last, seconds = faulty(run, *points, "rollout:RolloutEngine.generate:before:2:clock=-86400")
    assert code == 0 and seconds < 120, last
    times = [c["time"] for c in checkpoint.read_commits(run)]
    assert times[2] < times[1] - 80_000, "the clock did not jump"
    equal(whole("flow-dppo"), run)


@pytest.mark.slow
@pytest.mark.parametrize("who, point", [("trainer", "trainer:Trainer.train"), ("engine", "rollout:RolloutEngine.generate")])
def test_a_worker_out_of_memory_is_one_clear_line_and_the_run_resumes_exactly(who, point, whole, tmp_path):  # noqa: F811
    run = tmp_path / "run"
    code, last, _ = faulty(run, f"{point}:before:2:memory")
    assert code == 1 and last.startswith(f"run.py: error: the {who} ({point.split('.')[1]}) ran out of memory: "), last
    resumed(run)
    equal(whole("flow-dppo"), run)


@pytest.mark.slow
def test_a_worker_that_the_memory_monitor_or_the_kernel_ends_is_named(tmp_path):
    """SIGKILL is what the kernel does; Ray's monitor, told that nearly all memory is used, does it with a reason."""
    code, last, _ = faulty(tmp_path / "a", "trainer:Trainer.train:before:2:die")
    assert code == 1 and last.startswith("run.py: error: the trainer died (process "), last
    code, last, _ = faulty(tmp_path / "b", RAY_memory_usage_threshold="0.01", RAY_memory_monitor_refresh_ms="100")
    assert code == 1 and "ended by Ray's memory monitor: " in last and len(last) < 500, last


CLUSTER = """
import sys, ray
ray.init("local", num_cpus=2, _node_ip_address="127.0.0.1", include_dashboard=False, log_to_driver=False)

@ray.remote(num_cpus=1.5)
class Busy:
    def here(self):
        return 1

busy = Busy.remote()
ray.get(busy.here.remote())
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_busy_cluster_is_an_error_that_lists_what_is_needed_and_what_is_free(tmp_path, short):
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    environment = job.environment(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_TMPDIR=short, **token)
    words = [sys.executable, "-c", CLUSTER]
    cluster = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        address = cluster.stdout.readline().strip()
        before = {p.pid for p in processes(cluster.pid) if "IDLE" not in p.name()}  # Ray ends its idle workers by itself
        began = time.monotonic()
        to = ["--output", str(tmp_path / "run"), "--ray-address", address]
        code, output = job.run(*job.SMALL, *to, timeout=90, **token)
        last = output.splitlines()[-1]
        assert code == 2 and "placement needs [{'CPU': 1}, {'CPU': 1}]; the cluster has 2 CPU (0.5 free)" in last, output
        assert time.monotonic() - began < 45 and not (tmp_path / "run").exists()
        assert before <= {p.pid for p in processes(cluster.pid)}, "the run ended a process of somebody else's cluster"
    finally:
        cluster.communicate("")


NODES = """
import sys, time, ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
ray.init(cluster.address, log_to_driver=False)
print(cluster.address, flush=True)
while len(groups := placement_group_table()) < 2 or any(g["state"] != "CREATED" for g in groups.values()):
    time.sleep(0.1)
sys.stdin.readline()
place = next(g["bundles_to_node_id"][0] for g in groups.values() if g["strategy"] == "SPREAD")
cluster.remove_node(next(n for n in nodes if n.node_id == place))
print("removed", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before its actors start", "at work"])
def test_an_engine_whose_node_goes_away_is_not_waited_for(when, tmp_path, short):
    """The trainer is on one node and the engine on another: reserved, but an actor that has no place any more would be
    created when there is one, and Ray waits for that without a word."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    environment = job.environment(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_TMPDIR=short, **token)
    words = [sys.executable, "-c", NODES]
    cluster = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, bufsize=1)
    run, stall = tmp_path / "run", 5  # long enough for Ray to give the node up
    try:
        more = ["--placement", "spread", "--output", str(run), "--ray-address", cluster.stdout.readline().strip()]
        early = job.seam(f"cluster:reserve:after:1:stall={stall}") if when == "before its actors start" else {}
        process = job.start(*job.SMALL, "--updates", "5000", *more, **token, **early)
        if not early:
            wait_for(lambda: process.poll() is not None or (run / "metrics.jsonl").exists())
        cluster.stdin.write("now\n")
        assert cluster.stdout.readline() == "removed\n"
        began = time.monotonic()
        output, _ = process.communicate(timeout=60)
        seconds, last = time.monotonic() - began, output.splitlines()[-1]
        assert "placement needs [{'CPU': 1}]; the cluster has 1 CPU (" in last, output
        if early:
            assert process.returncode == 2 and seconds < stall + 10 + 3 and not run.exists(), (seconds, output)
        else:
            assert process.returncode == 1 and "engine 0 (pid " in last and "no place for another: " in last, output
            assert seconds < 30, output
    finally:
        cluster.communicate("")
