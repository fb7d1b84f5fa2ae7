"""Interrupted + resumed equals uninterrupted, bit for bit: stops, signals, SIGKILL at named points and at random, a full
disk; and what a resume refuses, repeats, truncates and waits for."""

import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import job
import pytest

import audit
import checkpoint
import cluster
import run as command

HELD_OUT = ["--eval-data", str(job.TINY / "heldout.jsonl"), "--eval-interval", "1", "--eval-samples", "1"]
KINDS = {
    "grpo": ["--algorithm", "grpo", "--optimizer", "sgd", *HELD_OUT],
    "ppo": ["--algorithm", "ppo", "--optimizer", "adam"],
    "dppo": ["--algorithm", "dppo", "--optimizer", "sgd"],
    "flow-dppo": ["--algorithm", "flow-dppo", "--optimizer", "adam"],
}


def arguments(kind: str) -> list[str]:
    return [*KINDS[kind], *job.SMALL, "--updates", "3", "--save-interval", "1"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """kind → an uninterrupted run of it, made once."""
    made = {}

    def get(kind: str):
        if kind not in made:
            run = tmp_path_factory.mktemp(kind) / "whole"
            code, output = job.run(*arguments(kind), "--output", str(run))
            assert code == 0, output
            made[kind] = run
        return made[kind]

    return get


def equal(run, other) -> None:
    code, output = job.audit(run, other)
    assert code == 0, output
    code, output = job.audit(other)
    assert code == 0, output


def resumed(run, *more: str) -> str:
    code, output = job.run("--resume", "--output", str(run), *more)
    assert code == 0, output
    return output


def wait_for(condition, seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- stops and signals -----------------------------------------------------------------------------------------------

STOPS = {  # what ends the run after its second update → (more arguments, fault, exit code)
    "--stop-after": (["--stop-after", "2"], "", 0),
    "SIGTERM": ([], "run:grade:after:2:terminate", 143),
    "Ctrl-C": ([], "run:grade:before:2:interrupt", 130),
}
SLOW_STOPS = [
    ("grpo", "Ctrl-C"), ("ppo", "Ctrl-C"), ("ppo", "SIGTERM"), ("dppo", "--stop-after"), ("flow-dppo", "--stop-after"),
    ("flow-dppo", "SIGTERM"),
]  # fmt: skip


@pytest.mark.parametrize("kind, how", [("grpo", "--stop-after"), *(pytest.param(*s, marks=pytest.mark.slow) for s in SLOW_STOPS)])
def test_stopped_moved_and_resumed_with_other_free_settings_equals_uninterrupted(kind, how, whole, tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"
    more, fault, expected = STOPS[how]
    code, output = job.run(*arguments(kind), "--output", str(run), *more, **job.seam(*fault.split()))
    assert code == expected, output
    assert f"stopped after update 2 of 3, saved; go on with: python run.py --resume --output {run}" in output
    os.rename(run, moved)
    free = ["--keep-checkpoints", "3", "--save-interval", "7", "--publication-transport", "disk", "--stop-after", "3"]
    assert "resuming after update 2 of 3" in resumed(moved, *free)
    equal(whole(kind), moved)
    assert checkpoint.list_checkpoints(whole(kind)) == [2, 3] and checkpoint.list_checkpoints(moved) == [1, 2, 3]
    evaluated = [row["eval"]["after"]["updates"] for row in checkpoint.read_metrics(moved) if "eval" in row]
    assert evaluated == ([1, 2, 3] if kind == "grpo" else [])
    for path in (p for p in moved.rglob("*") if p.is_file()):
        data = path.read_bytes()
        assert str(run).encode() not in data and str(moved).encode() not in data, f"{path} holds where the run lies"


def test_a_signal_that_comes_when_an_update_is_being_recorded_ends_the_run_after_the_next_one_saved(whole, tmp_path):
    """It is too late for this update's checkpoint; to end without one would lose all since the last."""
    run = tmp_path / "run"
    seam = job.seam("checkpoint:append_rollouts:before:1:terminate")
    code, output = job.run(*arguments("flow-dppo"), "--save-interval", "9", "--output", str(run), **seam)
    assert code == 143 and "stopped after update 2 of 3, saved" in output, output
    assert checkpoint.list_checkpoints(run) == [2]
    resumed(run)
    equal(whole("flow-dppo"), run)


@pytest.mark.slow
def test_a_signal_to_the_whole_process_group_while_ray_starts_waits_for_the_first_update(whole, tmp_path):
    """As `timeout` and SLURM send it. Ray's own processes go on, and its own handler does not end the run."""
    run = tmp_path / "run"
    process = job.start(*arguments("grpo"), "--output", str(run))
    wait_for(lambda: cluster.children(process.pid, "gcs_server"))
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 143, output
    assert "stopped after update 1 of 3, saved" in output
    resumed(run)
    equal(whole("grpo"), run)


@pytest.mark.slow
def test_a_second_ctrl_c_quits_at_once_and_the_run_resumes(whole, tmp_path):
    run = tmp_path / "run"
    process = job.start(*arguments("flow-dppo"), "--output", str(run), **job.seam("run:grade:before:2:stall=100"))
    wait_for((run / "metrics.jsonl").exists)
    time.sleep(1)
    for _ in range(2):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(1)
    assert process.wait(timeout=20) == 130
    resumed(run)
    equal(whole("flow-dppo"), run)


# --- what a resume goes on from --------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_named_and_passed_over(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole("grpo"), run)
    victim = max((run / "checkpoints" / "000003" / "actor").iterdir(), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    output = resumed(run)
    assert f"checkpoint 000003 is passed over: {victim}: damaged" in output and "resuming after update 2" in output
    equal(whole("grpo"), run)


def test_one_changed_byte_in_any_file_of_a_real_checkpoint_is_detected_and_named(whole, tmp_path):
    run, draw = tmp_path / "run", random.Random(0)
    shutil.copytree(whole("flow-dppo"), run)
    root = checkpoint.checkpoint_path(run, 3)
    files = sorted(p for p in root.rglob("*") if p.is_file())
    assert {p.name for p in files} >= {"state.json", ".metadata", "common.pt", "metadata.json", "__0_0.distcp"}
    for path in files:
        size = path.stat().st_size
        with open(path, "r+b", buffering=0) as file:
            for at in (0, size - 1, *(draw.randrange(size) for _ in range(10))):
                was = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([was[0] ^ 1 << draw.randrange(8)]), at)
                with pytest.raises(ValueError, match=path.name):
                    checkpoint.verify_checkpoint(run, 3)
                os.pwrite(file.fileno(), was, at)
    checkpoint.verify_checkpoint(run, 3)


def test_a_kill_between_checkpoints_repeats_and_drops_no_prompt_and_the_writer_changes_nothing(whole, tmp_path):
    """Every second update is saved. The writer stalls, the third update runs beside it, and the kill comes after that
    update's rollouts and metrics, before its own checkpoint."""
    run = tmp_path / "run"
    faults = job.seam("checkpoint:_sync_tree:before:1:stall=2", "checkpoint:append_metrics:after:3:kill")
    code, output = job.run(*arguments("flow-dppo"), "--save-interval", "2", "--output", str(run), **faults)
    assert code == -signal.SIGKILL, output
    assert checkpoint.list_checkpoints(run) == [2] and len(checkpoint.read_metrics(run)) == 3
    third = [c["time"] for c in checkpoint.read_commits(run) if c["version"] == 3]
    written = (checkpoint.checkpoint_path(run, 2) / "state.json").stat().st_mtime
    assert third and third[0] < written - 1, "the third update waited for the writer"
    assert "resuming after update 2 of 3" in resumed(run)
    equal(whole("flow-dppo"), run)
    prompts = [c["prompt"] for update in range(3) for c in checkpoint.read_rollouts(run, update)]
    assert prompts == [row["prompt"] for row in job.rows(job.TINY / "train.jsonl")[:12]]


def test_the_last_checkpoint_holds_the_published_policy(whole):
    run = whole("grpo")
    state = checkpoint.read_state(run, 3)
    assert state["policy_digest"] == checkpoint.read_commits(run)[-1]["digest"]


# --- one process a run -----------------------------------------------------------------------------------------------


def test_a_second_process_on_one_run_is_refused_and_an_audit_is_not(tmp_path):
    run = tmp_path / "run"
    first = job.start(*arguments("grpo"), "--updates", "500", "--output", str(run))
    try:
        wait_for((run / "metrics.jsonl").exists)
        code, output = job.run("--resume", "--output", str(run))
        assert code == 2 and "another process" in output and str(first.pid) in output
        code, output = job.audit(run)
        assert code == 0 and "the run is going on" in output, output
    finally:
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=120) == 143


WRITER = "import checkpoint, sys, time; lock = checkpoint.hold_run(*sys.argv[1:]); print('holds', flush=True); time.sleep(300)"


def test_a_resume_started_at_once_waits_for_an_orphan_that_could_still_write(whole, tmp_path):
    """One process of the killed run lives on: the resume waits until it is gone. (Not a real trainer held by SIGSTOP: the
    kernel wakes a stopped process group when the parent outside it dies, and Ray's worker then ends at once.)"""
    run = tmp_path / "run"
    first = job.start(*arguments("flow-dppo"), "--output", str(run), **job.seam("trainer:Trainer.train:before:2:stall=100"))
    wait_for((run / "metrics.jsonl").exists)
    workers = {checkpoint.read_run(run)["facts"][who]["pid"] for who in ("trainer", "engine")}
    assert workers < set(job.living(first.pid))
    joined = [sys.executable, "-c", WRITER, str(run), checkpoint._lock_record(run)["owner"]]
    with subprocess.Popen(joined, cwd=job.ROOT, env=job.environment(), stdout=subprocess.PIPE, text=True) as orphan:
        try:
            assert orphan.stdout.readline() == "holds\n"
            first.kill()
            second = job.start("--resume", "--output", str(run))
            wait_for(lambda: checkpoint._lock_record(run).get("pid") == second.pid)
            time.sleep(3)
            epoch = (run / "publications" / "epoch").read_text()
        finally:
            orphan.kill()
    output, _ = second.communicate(timeout=240)
    assert second.returncode == 0, output
    assert epoch == "0\n", "the resume did not wait"
    equal(whole("flow-dppo"), run)
    assert not workers & set(job.living(first.pid))


# --- kill -9 ---------------------------------------------------------------------------------------------------------

POINTS = {  # in the second update, so that there is something to lose
    "before publication": "rollout:RolloutEngine.pause:before:3:kill",
    "between tensors": "rollout:received:item:{between}:kill",
    "after the digest check and before the commit record": "checkpoint:append_commit:before:2:kill",
    "during generation": "rollout:RolloutEngine.generate:during:2:kill",
    "after grading": "run:grade:after:2:kill",
    "between the two optimizer steps": "trainer:Network.step:after:5:kill",
    "during checkpoint write": "trainer:write_state:during:3:kill",
    "between files and the rename": "checkpoint:_show:before:2:kill",
    "between rename and clean-up": "checkpoint:prune_checkpoints:before:2:kill",
}
FAST = {"between the two optimizer steps"}


@pytest.mark.parametrize("point", [pytest.param(p, marks=() if p in FAST else pytest.mark.slow) for p in POINTS])
def test_killed_at_a_named_point_and_resumed_equals_uninterrupted(point, whole, tmp_path):
    run = tmp_path / "run"
    tensors = checkpoint.read_commits(whole("flow-dppo"))[0]["tensors"]
    fault = job.seam(POINTS[point].format(between=tensors + tensors // 2))
    code, output = job.run(*arguments("flow-dppo"), "--keep-checkpoints", "1", "--output", str(run), **fault)
    assert code == -signal.SIGKILL, f"the kill point was not reached:\n{output}"
    resumed(run)
    equal(whole("flow-dppo"), run)


@pytest.mark.slow
def test_a_trainer_that_dies_alone_ends_the_command_and_the_run_resumes(whole, tmp_path):
    run = tmp_path / "run"
    code, output = job.run(*arguments("flow-dppo"), "--output", str(run), **job.seam("trainer:Trainer.train:before:2:die"))
    assert code == 1 and "run.py: error: " in output, output
    resumed(run)
    equal(whole("flow-dppo"), run)


DEATHS = {  # of every engine, in or after the third update; a replacement does not come so far
    "while it generates": "rollout:RolloutEngine.generate:during:6:die",  # evaluations generate, too
    "between tensors": "rollout:received:item:{between}:die",
    "after the commit record": "rollout:RolloutEngine.commit:before:4:die",
}


@pytest.mark.slow
@pytest.mark.parametrize("point", DEATHS)
@pytest.mark.parametrize("engines", ["1", "2"])
def test_an_engine_that_dies_is_replaced_and_the_run_equals_an_undisturbed_one(engines, point, whole, tmp_path):
    """Evaluations included. With two engines each answers half of the prompts, and the undisturbed run had one engine."""
    run = tmp_path / "run"
    tensors = checkpoint.read_commits(whole("grpo"))[0]["tensors"]
    fault = job.seam(DEATHS[point].format(between=2 * tensors + tensors // 2))
    code, output = job.run(*arguments("grpo"), "--rollout-gpus", engines, "--output", str(run), **fault)
    assert code == 0, output
    died = [line for line in output.splitlines() if "another takes its place" in line]
    assert [line.split(" (pid")[0] for line in died] == [f"engine {n}" for n in range(int(engines))], output
    equal(whole("grpo"), run)
    assert {c["epoch"] for c in checkpoint.read_commits(run)} == {0}


@pytest.mark.slow
def test_an_engine_that_dies_twice_is_named_and_the_run_resumes_with_other_engines(whole, tmp_path):
    """It dies in every second generation of its process: in update 2, and its replacement in update 3."""
    run = tmp_path / "run"
    fault = job.seam("rollout:RolloutEngine.generate:before:2:die")
    code, output = job.run(*arguments("flow-dppo"), "--output", str(run), **fault)
    last = output.splitlines()[-1]
    assert code == 1 and last.startswith("run.py: error: engine 0 (pid "), output
    assert "died a second time in this run, during generate; " in last and "logs/engine-0.log " in last
    assert output.count("another takes its place") == 1
    resumed(run, "--rollout-gpus", "2", "--placement", "spread")
    equal(whole("flow-dppo"), run)


@pytest.mark.slow
def test_a_resume_killed_half_way_harms_nothing(whole, tmp_path):
    run = tmp_path / "run"
    code, output = job.run(*arguments("flow-dppo"), "--output", str(run), "--stop-after", "2")
    assert code == 0, output
    for at in ("checkpoint:_truncate_metrics:before:1", "checkpoint:next_epoch:after:1", "trainer:Network.load:after:1"):
        code, output = job.run("--resume", "--output", str(run), **job.seam(f"{at}:kill"))
        assert code == -signal.SIGKILL, output
    assert "resuming after update 2" in resumed(run)
    equal(whole("flow-dppo"), run)


@pytest.mark.slow
@pytest.mark.parametrize("instant", range(20))
def test_killed_at_a_random_instant_and_resumed_equals_uninterrupted(instant, whole, tmp_path):
    run, expected = tmp_path / "run", whole("flow-dppo")
    began, ended = (p.stat().st_mtime for p in (expected / "run.json", expected / "checkpoints" / "000003" / "state.json"))
    process = job.start(*arguments("flow-dppo"), "--output", str(run))
    wait_for((run / "run.json").exists)
    time.sleep((instant + random.Random(instant).random()) / 20 * (ended - began))  # one in each twentieth of a run
    process.kill()
    assert process.wait() == -signal.SIGKILL
    resumed(run)  # at once: orphans of the killed run may still be dying
    equal(expected, run)


# --- a full disk -----------------------------------------------------------------------------------------------------

FULL = [  # limits on what the writing process may write, from the nth call on → the file that the error names
    ("checkpoint:_sync_tree:before:1:stall=3 checkpoint:append_commit:before:2:full=10", "publications/commits.jsonl"),
    ("checkpoint:append_rollouts:before:1:full=1000", "rollouts/000001.jsonl"),
    ("trainer:Trainer.publish:before:2:full=100000", "publications/current.safetensors"),
    ("trainer:write_state:before:1:full=3500000", "checkpoints/.00000"),  # more than a publication takes
]


@pytest.mark.slow
def test_a_full_disk_is_a_clear_error_and_the_run_resumes_once_there_is_room(whole, tmp_path):
    run = tmp_path / "run"
    for fault, named in FULL:
        start = ["--resume"] if run.exists() else arguments("flow-dppo")
        code, output = job.run(*start, "--publication-transport", "disk", "--output", str(run), **job.seam(*fault.split()))
        assert code in (1, 3), output
        # Where the driver itself is out of room, TensorBoard's thread says so, too, when the process ends.
        (error,) = (line for line in output.splitlines() if line.startswith("run.py: error: "))
        assert named in error and "make room, then --resume the run" in error
        assert checkpoint.list_checkpoints(run), "the fault cost the checkpoint that was being written"
    resumed(run)
    equal(whole("flow-dppo"), run)


# --- settings --------------------------------------------------------------------------------------------------------

OTHER = {  # a value that differs from the one of `recorded`; of choices and flags the other one is taken
    "algorithm": "ppo", "train_env_vars": '{"OMP_DYNAMIC": "FALSE"}', "model_revision": "x", "engine_revision": "x",
    "chat_template_args": '{"A": "1"}',
}  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run directory with the record of a run that has done nothing yet."""
    folder = tmp_path_factory.mktemp("recorded")
    reward = folder / "reward.py"
    reward.write_text("def a(prompt, response, label):\n    return 1.0\n\n\nb = a\n")
    shutil.copy(job.TINY / "train.jsonl", folder / "train.jsonl")
    args = ["--algorithm", "dppo", *job.SMALL, "--updates", "3", "--data", str(folder / "train.jsonl")]
    values, names = command.parse([*args, "--reward", f"{reward}:a", "--output", str(folder / "run")])
    recipe = command.resolve(values, names)
    kept = {k: v for k, v in dataclasses.asdict(recipe).items() if k not in ("resume", "output", "dry_run")}
    record = {"recipe": kept, "contents": command.check(recipe).contents, "device": "cpu", "threads": 1}
    checkpoint.create_run(folder / "run", record)
    return folder


def refusal(folder, *more: str) -> str:
    with pytest.raises(ValueError, match="^--resume: ") as caught:
        command.main(["--resume", "--output", str(folder / "run"), *more])
    return str(caught.value)


def other_value(field, value) -> list[str]:
    """Command-line words that give a setting another value."""
    flag = "--" + field.name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--no-{flag[2:]}" if value else flag]
    if field.name in OTHER:
        return [flag, OTHER[field.name]]
    if field.metadata["choices"]:
        return [flag, next(c for c in field.metadata["choices"] if c != value)]
    return [flag, str(value * 2 if value else 1)]


NEEDS = {
    "eval_interval": ["--eval-data", str(job.TINY / "heldout.jsonl")],
    "kl_budget": ["--algorithm", "flow-dppo"],
    "chat_template_args": ["--apply-chat-template"],
}
MATTER = [f for f in dataclasses.fields(command.Recipe) if f.name not in command.FREE]


@pytest.mark.parametrize("field", MATTER, ids=lambda f: f.name)
def test_a_resume_refuses_a_changed_setting_and_names_both_values(field, recorded):
    saved = checkpoint.read_run(recorded / "run")["recipe"][field.name]
    words = other_value(field, saved)
    asked = command.parse(words)[0][field.name]
    assert f"{field.name}: the run has {saved!r}, asked {asked!r}" in refusal(recorded, *words, *NEEDS.get(field.name, ()))


def test_a_resume_refuses_several_changes_and_names_them_all(recorded):
    message = refusal(recorded, "--updates", "9", "--lr", "0.5", "--seed", "7")
    for said in ("updates: the run has 3, asked 9", "lr: the run has 0.001, asked 0.5", "seed: the run has 42, asked 7"):
        assert said in message


def test_epochs_that_give_other_updates_are_refused_on_a_resume_and_those_that_give_the_same_are_not(recorded):
    assert "updates: the run has 3, asked 1050 by --epochs" in refusal(recorded, "--epochs", "1")
    with checkpoint.lock_run(recorded / "run"):  # nothing is refused: it comes as far as the lock
        with pytest.raises(checkpoint.RunLocked):
            command.main(["--resume", "--output", str(recorded / "run"), "--epochs", "0.002"])


def test_inputs_are_compared_by_content_wherever_they_lie(recorded, tmp_path):
    def digest(message: str, name: str) -> None:
        assert f"{name}: the run began with " in message and ", now it is " in message, message

    data, model = tmp_path / "elsewhere.jsonl", tmp_path / "model"
    shutil.copy(recorded / "train.jsonl", data)
    shutil.copytree(job.TINY / "model", model)
    shutil.copy(recorded / "reward.py", tmp_path / "reward.py")
    moved = ["--data", str(data), "--model", str(model), "--reward", f"{tmp_path / 'reward.py'}:a"]
    with checkpoint.lock_run(recorded / "run"):  # nothing is refused: it comes as far as the lock
        with pytest.raises(checkpoint.RunLocked):
            command.main(["--resume", "--output", str(recorded / "run"), *moved])
    digest(refusal(recorded, "--reward", f"{tmp_path / 'reward.py'}:b"), "reward")
    with open(data, "a") as file:
        file.write('{"prompt": "1+1=", "label": "2"}\n')
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    message = refusal(recorded, *moved)
    digest(message, "data")
    digest(message, "model config.json")
    digest(refusal(recorded, "--eval-data", str(data)), "eval_data")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert "model chat_template.jinja" in refusal(recorded, *moved)


@pytest.mark.parametrize(
    "changes, message",
    [({"updates": 1}, '"updates" is 1, and there is a checkpoint after 3'), ({"lr": None}, '"recipe" lacks lr')],
    ids=["updates", "lr"],
)
def test_a_run_json_that_cannot_be_of_this_run_is_refused_before_the_start(changes, message, whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole("flow-dppo"), run)
    record = checkpoint.read_run(run)
    recipe = {**record["recipe"], **changes}
    recipe = {name: value for name, value in recipe.items() if name not in changes or value is not None}
    checkpoint.write_atomic(run / "run.json", checkpoint._dumps({**record, "recipe": recipe}))
    code, output = job.run("--resume", "--output", str(run), timeout=60)
    assert code == 2 and message in output and "starting Ray" not in output, output


@pytest.mark.slow
def test_a_resume_stays_on_the_device_of_the_run(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole("flow-dppo"), run)
    checkpoint.remove_checkpoint(run, 3)
    record = checkpoint.read_run(run)
    assert record["device"] == "cpu" and record["recipe"]["device"] == "auto"
    checkpoint.write_atomic(run / "run.json", checkpoint._dumps({**record, "device": "cuda"}))
    code, output = job.run("--resume", "--output", str(run))
    assert code == 2 and "placement needs" in output and "GPU" in output, output


# --- audits of real runs ---------------------------------------------------------------------------------------------

BARE = "import sys; sys.modules.update(dict.fromkeys(('torch', 'ray', 'vllm', 'megatron', 'transformers', 'numpy')))"


def test_digests_alone_are_enough_for_an_audit_and_so_is_a_machine_without_torch(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole("flow-dppo"), run)
    for path in run.glob("checkpoints/*/*/*.distcp"):
        path.unlink()
    code = f"{BARE}; import audit; sys.exit(audit.main(sys.argv[1:]))"
    for arguments, expected in (([whole("flow-dppo"), run], 0), ([run], 0), ([whole("grpo"), run], 1)):
        words = [sys.executable, "-c", code, *map(str, arguments)]
        done = subprocess.run(words, cwd=job.ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == expected and not done.stderr, done.stdout + done.stderr
    assert "values unknown: " in done.stdout


def test_the_first_difference_of_two_real_runs_is_named_to_the_element_with_both_values(whole):
    a, b = whole("grpo"), whole("flow-dppo")
    code, output = job.audit(a, b)
    assert code == 1
    line = next(line for line in output.splitlines() if line.startswith("actor "))
    assert "DIFFERENT  first difference: checkpoint 000002, lm_head.weight: BLAKE3 " in line
    x, y = (audit.load_tensor(run, 2, "actor", "lm_head.weight") for run in (a, b))
    row, column = (x != y).nonzero()[0].tolist()
    assert f"; [{row}, {column}]: {x[row, column].item()!r} | {y[row, column].item()!r}" in line


def test_the_tensor_files_hold_what_state_json_says_of_them(whole):
    run = whole("flow-dppo")
    seen = 0
    for kind, digests in checkpoint.read_state(run, 3)["tensors"].items():
        for name, digest in digests.items():
            if any(part in name for part in ("q_proj", "k_proj", "v_proj")):
                continue  # stored as one tensor
            assert checkpoint.tensor_digest(audit.load_tensor(run, 3, kind, name))[2] == digest, f"{kind} {name}"
            seen += 1
    assert seen > 30
