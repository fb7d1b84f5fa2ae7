"""What audit.py promises: equal runs are equal, one changed value is found and named, nothing else is reported."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_checkpoint import CHILD, ROOT, ToyRun, hash_of, same, state_of, toy

import audit
import checkpoint


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    return toy(tmp_path_factory.mktemp("finished") / "run")


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def edit(path: Path, line: int, change) -> None:
    """Applies `change` to the object in one line of a JSONL file."""
    rows = [json.loads(text) for text in path.read_text().splitlines()]
    change(rows[line])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def put(run: Path, updates: int, change) -> None:
    """Applies `change` to state.json and signs it again."""
    state = checkpoint.read_state(run, updates)
    change(state)
    state["self"] = checkpoint._self_digest(state)
    (checkpoint.checkpoint_path(run, updates) / "state.json").write_bytes(checkpoint._encode_state(state))


def bad(rows: list[audit.Row]) -> dict[str, str]:
    return {row.what: row.detail for row in rows if row.good is False}


def audit_command(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "audit.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=CHILD)


# ---------------------------------------------------------------------------------------------------------------------
# Equal


def test_an_interrupted_and_resumed_run_equals_an_uninterrupted_one(finished, tmp_path):
    ToyRun(tmp_path / "b").go(stop_after=1)
    ToyRun(tmp_path / "b").go(stop_after=2)
    ToyRun(tmp_path / "b").go()
    assert {r["epoch"] for r in checkpoint.read_commits(tmp_path / "b")} == {0, 1, 2}
    assert same(finished, tmp_path / "b")
    found = {row.what: row.detail for row in audit.compare(finished, tmp_path / "b")}
    assert found["updates"] == "3 compared" and found["completions"] == "12"
    assert found["actor"] == "3 tensors" and "2, 3" in found["checkpoints"]


def test_runs_of_other_parallel_layouts_compare_by_full_tensors(finished, tmp_path):
    other = toy(tmp_path / "b", layout="tp2")
    left, right = (checkpoint.read_state(r, 3)["files"] for r in (finished, other))
    assert left != right
    assert same(finished, other)


def test_state_json_alone_is_enough_where_tensor_files_were_deleted(finished, run):
    for updates in (2, 3):
        (checkpoint.checkpoint_path(run, updates) / "actor" / "__0_0.distcp").unlink()
    rows = audit.check(run)
    assert not bad(rows)
    assert [row.detail for row in rows if row.what == "checkpoint 000003"][0].startswith(
        "digests only (9 tensors; 1 of 2"
    )
    assert same(finished, run)
    shutil.rmtree(checkpoint.checkpoint_path(run, 3) / "actor")
    assert same(finished, run)


def test_one_lost_file_is_not_taken_for_tensors_deleted_on_purpose(run):
    (checkpoint.checkpoint_path(run, 3) / "actor" / "common.pt").unlink()
    assert "common.pt: missing" in bad(audit.check(run))["checkpoint 000003"]


def test_times_the_epoch_and_keys_beside_them_may_differ(finished, run):
    edit(run / "metrics.jsonl", 1, lambda row: row.update(seconds={"total": 9.0}, peak_gib=1, limits=3))
    edit(checkpoint.rollouts_file(run, 1), 1, lambda row: row.update(elapsed=1.5, request_id="x"))
    assert not bad(audit.compare(finished, run))


# ---------------------------------------------------------------------------------------------------------------------
# Different

CHANGES = {
    "prompts": (lambda row: row["prompt_tokens"].__setitem__(2, 9), "update 1, sample 3, prompt_tokens[2]: 3 | 9"),
    "response tokens": (lambda row: row["response_tokens"].append(7), "update 1, sample 3, response_tokens length: "),
    "log-probabilities": (
        lambda row: row["log_probs"].__setitem__(0, row["log_probs"][0] * (1 + 2**-52)),
        "update 1, sample 3, log_probs[0]: -0.",
    ),
    "rewards": (lambda row: row.update(reward=0.25), "update 1, sample 3, reward: "),
    "finish reasons": (lambda row: row.update(finish_reason="length"), "finish_reason: stop | length"),
    "traces": (lambda row: row["trace"].update(seed=1), "update 1, sample 3, trace.seed: "),
}


@pytest.mark.parametrize("what", CHANGES)
def test_one_changed_value_of_a_completion_is_found_and_named(finished, run, what):
    change, said = CHANGES[what]
    edit(checkpoint.rollouts_file(run, 1), 3, change)
    found = bad(audit.compare(finished, run))
    assert set(found) == {what}
    assert found[what].startswith("first difference: ") and said in found[what]


def test_the_first_difference_is_the_one_reported_with_both_values_in_full(finished, run):
    for update, sample in ((2, 0), (0, 2), (0, 3)):
        edit(checkpoint.rollouts_file(run, update), sample, lambda row: row["log_probs"].__setitem__(0, -0.1 - 0.2))
    was = checkpoint.read_rollouts(finished, 0)[2]["log_probs"][0]
    found = bad(audit.compare(finished, run))
    expected = f"first difference: update 0, sample 2, log_probs[0]: {was!r} | -0.30000000000000004"
    assert found == {"log-probabilities": expected}


def test_the_sign_of_zero_counts_and_the_spelling_of_a_number_does_not():
    assert audit.first_difference({"a": [1, 0.0]}, {"a": [1.0, 0]}) is None
    assert audit.first_difference({"a": [0.0]}, {"a": [-0.0]}) == ("a[0]", 0.0, -0.0)
    assert audit.first_difference([1], [True]) is not None
    assert audit.first_difference({"a": None}, {}) is not None


@pytest.mark.parametrize("key", ["reward_mean", "loss", "grad_norm", "max_logprob_error"])
def test_a_changed_metric_is_found(finished, run, key):
    edit(run / "metrics.jsonl", 2, lambda row: row.update({key: 0.123}))
    assert f"update 2, {key}: " in bad(audit.compare(finished, run))["metrics"]


def test_changed_held_out_accuracy_is_found_and_the_time_it_took_is_not(finished, run, tmp_path):
    other = Path(shutil.copytree(finished, tmp_path / "other"))
    for path, accuracy, seconds in ((run, 0.5, 1.0), (other, 0.5, 2.0)):
        edit(
            path / "metrics.jsonl",
            2,
            lambda r, a=accuracy, s=seconds: r.update(eval={"after": {"acc": a, "seconds": s}}),
        )
    assert not bad(audit.compare(other, run))
    edit(run / "metrics.jsonl", 2, lambda row: row["eval"]["after"].update(acc=0.75))
    assert "eval.after.acc: 0.5 | 0.75" in bad(audit.compare(other, run))["metrics"]


def test_a_changed_publication_is_found(finished, run):
    edit(checkpoint.commits_file(run), 3, lambda record: record.update(digest="ab" * 32))
    said = bad(audit.compare(finished, run))["publications"]
    assert "version 4" in said and "ab" * 32 in said


@pytest.mark.parametrize("key", ["policy_digest", "cursor", "scheduler", "rng"])
def test_a_changed_part_of_the_state_is_found(finished, run, key):
    value = {"policy_digest": "ab" * 32, "cursor": 9, "scheduler": {"step": 9}, "rng": {"torch": "x"}}[key]
    put(run, 3, lambda state: state.update({key: value}))
    found = bad(audit.compare(finished, run))
    assert set(found) == {key.replace("_", " ")}
    assert "checkpoint 000003" in found[key.replace("_", " ")]


@pytest.mark.parametrize("kind", ["actor", "critic", "optimizer"])
def test_a_changed_tensor_is_named(finished, run, kind):
    put(run, 2, lambda state: state["tensors"][kind].update({"layer.1": "ab" * 32}))
    put(run, 3, lambda state: state["tensors"][kind].update({"layer.2": "ab" * 32, "layer.1": "cd" * 32}))
    found = bad(audit.compare(finished, run))
    digests = f"BLAKE3 {hash_of(kind, 1, 2)[:16]} | abababababababab"
    assert found == {kind: f"first difference: checkpoint 000002, layer.1: {digests}"}
    put(run, 2, lambda state: state["tensors"][kind].pop("layer.0"))
    assert "layer.0" in bad(audit.compare(finished, run))[kind]
    assert "(missing) (2 of 3 tensors differ)" in bad(audit.compare(finished, run))[kind]


def test_fewer_updates_are_a_difference_once_the_run_has_ended(finished, tmp_path):
    ToyRun(tmp_path / "b").go(stop_after=2)
    found = bad(audit.compare(finished, tmp_path / "b"))
    assert found["updates"] == "3 | 2; the first 2 compared"
    assert "checkpoints" in found and "publications" in found
    assert set(found) <= {"updates", "checkpoints", "publications"}


def test_a_damaged_state_json_is_a_difference_and_not_a_crash(finished, run):
    path = checkpoint.checkpoint_path(run, 3) / "state.json"
    path.write_bytes(path.read_bytes().replace(b"cursor", b"cursed"))
    assert "state.json" in bad(audit.compare(finished, run))["state.json"]
    assert "cursor" in bad(audit.check(run))["checkpoint 000003"]


# ---------------------------------------------------------------------------------------------------------------------
# While a run is going on


def test_a_run_that_is_going_on_is_compared_as_far_as_it_is(finished, tmp_path):
    path = tmp_path / "b"
    with ToyRun(path).go(stop_after=2, release=False):
        with open(path / "metrics.jsonl", "ab") as file:
            file.write(b'{"update": 2, "po')
        rows = audit.compare(finished, path)
        assert not bad(rows)
        assert rows[0].detail == "2 compared (3 | 2 so far; run B is going on)"
        assert not bad(audit.check(path))
        edit(checkpoint.rollouts_file(path, 0), 0, lambda row: row.update(reward=9))
        assert set(bad(audit.compare(finished, path))) == {"rewards"}
    assert "torn" in bad(audit.check(path))["updates"] and "--resume" in bad(audit.check(path))["updates"]


# ---------------------------------------------------------------------------------------------------------------------
# One run


def test_a_finished_run_is_consistent(finished):
    rows = audit.check(finished)
    assert not bad(rows)
    assert {row.what: row.detail for row in rows}["end"] == "finished: version 4 committed"


def test_a_stopped_run_is_consistent_and_said_to_be_unfinished(tmp_path):
    ToyRun(tmp_path / "a").go(stop_after=2)
    rows = audit.check(tmp_path / "a")
    assert not bad(rows)
    assert "stopped after 2 of 3" in {row.what: row.detail for row in rows}["end"]


INCONSISTENT = {
    "a completion of another version": ("traces", lambda r: r["trace"].update(policy_version=1), "policy_version is 1"),
    "a completion of another policy": ("traces", lambda r: r["trace"].update(digest="ab" * 32), "digest is abab"),
    "a completion of an epoch that never was": ("traces", lambda r: r["trace"].update(epoch=7), "epoch 7"),
    "a completion without trace": ("traces", lambda r: r.update(trace=[]), "no trace"),
    "a lost log-probability": ("completions", lambda r: r["log_probs"].append(-1.0), "differ in length"),
    "a log-probability above 0": ("completions", lambda r: r["log_probs"].__setitem__(0, 0.5), "log_probs[0] is 0.5"),
    "a reward that is no number": ("completions", lambda r: r.update(reward="1"), "reward is 1"),
    "a wrong sample number": ("completions", lambda r: r.update(sample=0), "sample is 0"),
    "a reward changed later": ("completions", lambda r: r.update(reward=5.0), "reward_mean"),
    "an unknown finish reason": ("completions", lambda r: r.update(finish_reason="\x1b[31m"), r"'\x1b[31m'"),
}


@pytest.mark.parametrize("case", INCONSISTENT)
def test_an_inconsistent_completion_is_found(run, case):
    what, change, said = INCONSISTENT[case]
    edit(checkpoint.rollouts_file(run, 1), 3, change)
    assert said in bad(audit.check(run))[what]


def test_lost_repeated_and_surplus_records_are_found(run):
    def case(path: Path, data: bytes | None) -> dict[str, str]:
        good = path.read_bytes() if path.exists() else None
        path.unlink() if data is None else path.write_bytes(data)
        found = bad(audit.check(run))
        path.unlink(missing_ok=True) if good is None else path.write_bytes(good)
        return found

    metrics = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    commits = checkpoint.commits_file(run).read_bytes().splitlines(keepends=True)
    rollouts = checkpoint.rollouts_file(run, 1)
    assert "update is 2, not 1" in case(run / "metrics.jsonl", metrics[0] + metrics[2])["updates"]
    assert "no rollouts" in case(rollouts, None)["updates"]
    assert "update 4 has rollouts" in case(checkpoint.rollouts_file(run, 4), b"{}\n")["updates"]
    assert (
        "has 2, update 0 has 4" in case(rollouts, b"".join(rollouts.read_bytes().splitlines(True)[:2]))["completions"]
    )
    assert "never committed" in case(checkpoint.commits_file(run), commits[0] + commits[2])["publications"]
    assert "follows" in case(checkpoint.commits_file(run), b"".join([*commits, commits[1]]))["publications"]
    assert "version 4 was not committed" in case(checkpoint.commits_file(run), b"".join(commits[:3]))["end"]
    assert "commits.jsonl:1" in case(checkpoint.commits_file(run), b"{}\n")["publications"]
    assert not bad(audit.check(run))


def test_damage_and_a_foreign_policy_in_a_checkpoint_are_found(run):
    data = checkpoint.checkpoint_path(run, 2) / "actor" / "__0_0.distcp"
    data.write_bytes(data.read_bytes().replace(b"w", b"W"))
    put(run, 3, lambda state: state.update(policy_digest="ab" * 32))
    found = bad(audit.check(run))
    assert "__0_0.distcp: damaged" in found["checkpoint 000002"]
    assert "its policy has digest abab" in found["checkpoint 000003"]


# ---------------------------------------------------------------------------------------------------------------------
# The command


def test_exit_codes_and_the_table(finished, run, tmp_path):
    done = audit_command(finished, run, "--json", tmp_path / "table.json")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.endswith("\nequal\n")
    assert json.loads((tmp_path / "table.json").read_text())["good"] is True
    done = audit_command(finished)
    assert done.returncode == 0 and done.stdout.endswith("\nconsistent\n")
    edit(checkpoint.rollouts_file(run, 1), 3, lambda row: row.update(reward=0.25))
    done = audit_command(finished, run)
    assert done.returncode == 1 and done.stdout.endswith("\nNOT equal\n")
    assert any(line.split()[:2] == ["rewards", "DIFFERENT"] for line in done.stdout.splitlines())
    done = audit_command(run)
    assert done.returncode == 1 and done.stdout.endswith("\nNOT consistent\n")


def test_bad_input_is_one_line_and_exit_code_2(finished, tmp_path):
    (tmp_path / "run.json").write_text("[" * 100_000)
    for arguments in ((tmp_path / "none",), (finished, tmp_path / "none"), (tmp_path,), (finished, tmp_path)):
        done = audit_command(*arguments)
        assert done.returncode == 2 and not done.stdout
        assert done.stderr.count("\n") == 1 and done.stderr.startswith("audit.py: ")
    assert audit_command().returncode == 2


def test_text_from_runs_is_never_printed_raw(finished, run):
    evil = "\x1b[2J\r\u202eevil\ud800" * 50
    (run / "run.json").write_text(json.dumps({"recipe": {"updates": 3, evil: evil}}))
    edit(run / "metrics.jsonl", 0, lambda row: row.update(loss=evil, eval={evil: 1}))
    edit(checkpoint.rollouts_file(run, 0), 0, lambda r: r.update(finish_reason=evil, trace={evil: evil}, reward=[evil]))
    put(run, 3, lambda state: state.update(rng={evil: evil}, tensors={evil: {evil: "ab" * 32}}))
    for arguments in ((finished, run), (run,)):
        done = audit_command(*arguments)
        assert done.returncode == 1
        assert all(32 <= ord(c) < 127 or c == "\n" for c in done.stdout + done.stderr)
        assert max(map(len, done.stdout.splitlines())) < 1000


@pytest.mark.parametrize(
    "junk", [b"null\n", b"[]\n", b'{"trace": 1}\n', b'{"log_probs": "x"}\n', b"\xff\n", b"[" * 9999 + b"\n"]
)
def test_junk_in_any_file_of_a_run_is_a_finding_and_never_a_crash(finished, run, junk):
    files = ["metrics.jsonl", "rollouts/000001.jsonl", "publications/commits.jsonl", "checkpoints/000003/state.json"]
    for name in files:
        good = (run / name).read_bytes()
        (run / name).write_bytes(junk)
        assert bad(audit.check(run)) and bad(audit.compare(finished, run)) and bad(audit.compare(run, finished))
        (run / name).write_bytes(good)


# ---------------------------------------------------------------------------------------------------------------------
# Elements of stored tensors


def stored_run(path: Path, tensors: dict) -> Path:
    """A run whose checkpoint after one update holds real tensors in the format of torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp

    ToyRun(path, updates=2).go(stop_after=1)
    shutil.rmtree(checkpoint.checkpoint_path(path, 1))
    root = checkpoint.staging(path, 1)
    dcp.save(tensors, checkpoint_id=root / "actor", no_dist=True)
    state = state_of(1)
    state["tensors"] = {"optimizer": {f"actor.{n}": checkpoint.tensor_digest(t)[2] for n, t in tensors.items()}}
    state["tensors"]["actor"] = {"lm_head.weight": hash_of(path)}
    checkpoint.publish_checkpoint(path, 1, state, 1)
    return path


@pytest.mark.filterwarnings("ignore")
def test_the_first_differing_element_is_read_from_the_tensor_files(tmp_path):
    import torch

    whole = {"optimizer.exp_avg": torch.arange(12.0).reshape(3, 4), "same": torch.ones(2, dtype=torch.bfloat16)}
    whole |= {"output_layer.weight": torch.ones(5), "layers.10.mlp.linear_fc1.weight": torch.arange(8.0).reshape(4, 2)}
    changed = {name: tensor.clone() for name, tensor in whole.items()}
    changed["optimizer.exp_avg"][1, 2] = 6.5
    changed["optimizer.exp_avg"][2, 0] = 0
    a, b = stored_run(tmp_path / "a", whole), stored_run(tmp_path / "b", changed)
    assert torch.equal(audit.load_tensor(a, 1, "optimizer", "actor.same"), whole["same"])
    said = bad(audit.compare(a, b, values=True))["optimizer"]
    assert "actor.optimizer.exp_avg: BLAKE3" in said and said.endswith("; [1, 2]: 6.0 | 6.5")
    found = bad(audit.compare(a, b, values=True))["actor"]
    assert found.endswith("the stored values are equal, so what state.json says of one of them is not")
    assert audit.load_tensor(a, 1, "actor", "model.layers.10.mlp.up_proj.weight").tolist() == [[4, 5], [6, 7]]
    assert "[1, 2]" not in bad(audit.compare(a, b))["optimizer"]
    for name in ("actor.none", "../actor.x", "critic.same"):
        with pytest.raises(ValueError):
            audit.load_tensor(a, 1, "optimizer", name)
    shutil.rmtree(checkpoint.checkpoint_path(b, 1) / "actor")
    assert "values unknown" in bad(audit.compare(a, b, values=True))["optimizer"]


def test_a_pickle_in_a_checkpoint_executes_nothing(tmp_path):
    import os
    import pickle

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="unreadable"):
        audit.read_stored(tmp_path, "x")
    assert not (tmp_path / "executed").exists()


def test_with_a_tolerance_rounding_passes_and_everything_else_is_still_a_difference(finished, run):
    def nudge(row):
        row["log_probs"] = [value * (1 + 1e-6) for value in row["log_probs"]]
        row["trace"]["digest"] = "0" * 64

    edit(checkpoint.rollouts_file(run, 1), 3, nudge)
    edit(run / "metrics.jsonl", 1, lambda row: row.update(loss=row["loss"] + 1e-6))
    assert {"log-probabilities", "traces", "metrics"} == set(bad(audit.compare(finished, run)))
    assert not bad(audit.compare(finished, run, tolerance=1e-5))
    assert {"log-probabilities", "metrics"} <= set(bad(audit.compare(finished, run, tolerance=1e-8)))
    edit(checkpoint.rollouts_file(run, 1), 3, lambda row: row["response_tokens"].__setitem__(0, 77))
    assert set(bad(audit.compare(finished, run, tolerance=1e-5))) == {"response tokens"}
    assert audit_command(run, "--tolerance", "1e-5").returncode == 2
    assert audit_command(run, run, "--tolerance", "7").returncode == 2


def test_with_a_tolerance_a_differing_tensor_is_measured_in_the_tensor_files(finished, run):
    kind = "actor"
    name = next(iter(checkpoint.read_state(run, 3)["tensors"][kind]))
    put(run, 3, lambda state: state["tensors"][kind].__setitem__(name, "0" * 64))
    put(run, 3, lambda state: state.update(policy_digest="1" * 64))
    assert "values unknown" in bad(audit.compare(finished, run, tolerance=1e-5))[kind]
