"""Interrupted + resumed equals uninterrupted, bit for bit: stops, signals, and SIGKILL at named points and at random."""

import os
import random
import shutil
import signal
import time

import job
import pytest

import checkpoint

KINDS = {
    "grpo": ["--algorithm", "grpo", "--optimizer", "sgd"],
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


@pytest.mark.parametrize("kind", ["grpo", "flow-dppo"])
def test_stop_and_resume_equals_uninterrupted(kind, whole, tmp_path):
    check_stop_and_resume(kind, whole, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ppo", "dppo"])
def test_stop_and_resume_equals_uninterrupted_with_a_critic(kind, whole, tmp_path):
    check_stop_and_resume(kind, whole, tmp_path)


def check_stop_and_resume(kind, whole, tmp_path):
    run = tmp_path / "run"
    code, output = job.run(*arguments(kind), "--output", str(run), "--stop-after", "2")
    assert code == 0 and "--resume" in output, output
    moved = tmp_path / "moved"  # a run directory moved elsewhere resumes there
    os.rename(run, moved)
    code, output = job.run("--resume", "--output", str(moved))
    assert code == 0 and "resuming after update 2" in output, output
    equal(whole(kind), moved)


def test_a_damaged_checkpoint_is_named_and_passed_over(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole("grpo"), run)
    victim = max((run / "checkpoints" / "000003" / "actor").iterdir(), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    code, output = job.run("--resume", "--output", str(run))
    assert code == 0, output
    assert "000003" in output and "resuming after update 2" in output
    equal(whole("grpo"), run)


def test_a_second_process_on_one_run_is_refused(tmp_path):
    run = tmp_path / "run"
    first = job.start(*arguments("grpo"), "--updates", "500", "--output", str(run))
    try:
        wait_for(lambda: (run / "metrics.jsonl").exists())
        code, output = job.run("--resume", "--output", str(run))
        assert code == 2 and "another process" in output
    finally:
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=90) == 143


# module:function:when:nth call. Two updates in, so that there is something to lose.
POINTS = {
    "before publication": "rollout:RolloutEngine.pause:before:2",
    "between tensors": "checkpoint:tensor_digest:before:60",
    "before the commit record": "checkpoint:append_commit:before:2",
    "during generation": "rollout:RolloutEngine.generate:during:2",
    "after grading": "run:grade:after:2",
    "between the two optimizer steps": "trainer:Network.step:after:3",
    "during checkpoint write": "checkpoint:_sync_tree:before:2",
    "between rename and clean-up": "checkpoint:prune_checkpoints:before:2",
}
FAST = {"before the commit record", "between the two optimizer steps", "during checkpoint write"}


@pytest.mark.parametrize("point", [pytest.param(p, marks=() if p in FAST else pytest.mark.slow) for p in POINTS])
def test_killed_at_a_named_point_and_resumed_equals_uninterrupted(point, whole, tmp_path):
    run = tmp_path / "run"
    seam = f"{job.ROOT / 'tests' / 'seam'}{os.pathsep}{job.ROOT}"
    code, output = job.run(*arguments("flow-dppo"), "--output", str(run), PYTHONPATH=seam, KILL_AT=POINTS[point])
    assert code == -signal.SIGKILL, f"the kill point was not reached:\n{output}"
    code, output = job.run("--resume", "--output", str(run))
    assert code == 0, output
    equal(whole("flow-dppo"), run)


@pytest.mark.slow
def test_a_resume_killed_half_way_harms_nothing(whole, tmp_path):
    run = tmp_path / "run"
    code, output = job.run(*arguments("flow-dppo"), "--output", str(run), "--stop-after", "2")
    assert code == 0, output
    seam = f"{job.ROOT / 'tests' / 'seam'}{os.pathsep}{job.ROOT}"
    for at in ("checkpoint:_truncate_metrics:before:1", "checkpoint:next_epoch:after:1", "trainer:Network.load:after:1"):
        code, output = job.run("--resume", "--output", str(run), PYTHONPATH=seam, KILL_AT=at)
        assert code == -signal.SIGKILL, output
    code, output = job.run("--resume", "--output", str(run))
    assert code == 0, output
    equal(whole("flow-dppo"), run)


@pytest.mark.slow
@pytest.mark.parametrize("instant", range(20))
def test_killed_at_a_random_instant_and_resumed_equals_uninterrupted(instant, whole, tmp_path):
    run = tmp_path / "run"
    expected = whole("flow-dppo")
    process = job.start(*arguments("flow-dppo"), "--output", str(run))
    wait_for(lambda: (run / "run.json").exists() or process.poll() is not None)
    time.sleep(random.Random(instant).uniform(0, 8))
    process.kill()
    process.wait()
    code, output = job.run("--resume", "--output", str(run))
    assert code == 0, output
    equal(expected, run)


def wait_for(condition, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_last_checkpoint_holds_the_published_policy(whole):
    run = whole("grpo")
    state = checkpoint.read_state(run, 3)
    assert state["policy_digest"] == checkpoint.read_commits(run)[-1]["digest"]
