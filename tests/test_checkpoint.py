"""What checkpoint.py promises: digests by content, writes that a kill cannot tear, checkpoints that prove themselves
whole, locks that die with their process.

`ToyRun` writes a run with the real functions and without a model. The crash matrix kills it with SIGKILL at every
single file operation, resumes it, and asks audit.py whether it equals a run that was never touched. It runs in one
child process that forks per case (`python test_checkpoint.py crash_run FOLDER`): the kill is real and costs little.
"""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import pytest

import audit
import checkpoint

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "cases"
CHILD = {**os.environ, "PYTHONPATH": str(ROOT)}
HEX = "ab" * 32

# ---------------------------------------------------------------------------------------------------------------------
# A run without a model: every number is a function of the update


def hash_of(*words) -> str:
    return checkpoint.blake3("/".join(map(str, words)).encode()).hexdigest()


def completion(update: int, sample: int, epoch: int) -> dict:
    draw = random.Random(f"{update}/{sample}")
    length = draw.randint(1, 5)
    return {
        "sample": sample,
        "group": sample // 2,
        "prompt": "1+1=\u202e\x1b[31m",
        "prompt_tokens": [1, 2, 3],
        "response_tokens": [draw.randrange(100) for _ in range(length)],
        "log_probs": [-draw.random() for _ in range(length)],
        "reward": float(draw.random() < 0.5),
        "finish_reason": "stop",
        "trace": {
            "policy_version": update + 1,
            "digest": hash_of("policy", update),
            "model_revision": None,
            "engine_revision": "0.32.0",
            "epoch": epoch,
            "seed": draw.getrandbits(63),
            "loops": 2,
            "temperature": 0.8,
            "finish_reason": "stop",
        },
    }


def metrics_row(update: int, rows: list[dict]) -> dict:
    mean = sum(row["reward"] for row in rows) / len(rows)
    return {
        "update": update,
        "policy_version": update + 1,
        "reward_mean": mean,
        "max_logprob_error": 1e-6 / (update + 1),
        "loss": 0.1 / (update + 3),
        "grad_norm": 1 / (update + 7),
        "seconds": {"total": time.monotonic()},
    }


def state_of(updates: int, layout: str = "") -> dict:
    tensors = {
        kind: {f"layer.{i}": hash_of(kind, i, updates) for i in range(3)} for kind in ("actor", "critic", "optimizer")
    }
    return {
        "policy_version": updates + 1,
        "policy_digest": hash_of("policy", updates),
        "cursor": 4 * updates,
        "tensors": tensors,
        "scheduler": {"step": updates},
        "rng": {"torch": hash_of("rng", updates)},
        "layout": layout,
    }


class ToyRun:
    """Writes a run in the order in which run.py writes one; `go` starts it, or resumes it wherever it was killed."""

    def __init__(self, path: Path, updates: int = 3, keep: int = 2, samples: int = 4, layout: str = ""):
        self.path, self.updates, self.keep, self.samples, self.layout = path, updates, keep, samples, layout

    def go(self, stop_after: int | None = None, release: bool = True) -> checkpoint.RunLock:
        said = []
        if not (self.path / "run.json").exists():
            checkpoint.create_run(self.path, {"recipe": {"updates": self.updates, "lr": 1e-5}})
        lock = checkpoint.lock_run(self.path, wait_s=5)
        found = checkpoint.newest_checkpoint(self.path, said.append)
        assert not said, said
        start = found[0] if found else 0
        checkpoint.truncate_to(self.path, start)
        checkpoint.drop_commits_above(self.path, start + 1)
        epoch = checkpoint.next_epoch(self.path)
        for update in range(start, stop_after or self.updates):
            self.commit(update, epoch)
            rows = [completion(update, sample, epoch) for sample in range(self.samples)]
            checkpoint.append_rollouts(self.path, update, rows)
            checkpoint.append_metrics(self.path, metrics_row(update, rows))
            self.save(update + 1)
        if stop_after is None:
            self.commit(self.updates, epoch)
        if release:
            lock.release()
        return lock

    def commit(self, update: int, epoch: int) -> None:
        record = {"version": update + 1, "digest": hash_of("policy", update), "epoch": epoch, "tensors": 3, "time": 0.5}
        checkpoint.append_commit(self.path, record)

    def save(self, updates: int) -> None:
        root = checkpoint.staging(self.path, updates)
        (root / "actor").mkdir()
        (root / "actor" / f"{self.layout}__0_0.distcp").write_bytes(f"weights {updates}".encode())
        (root / "actor" / "common.pt").write_bytes(b"rng")
        checkpoint.publish_checkpoint(self.path, updates, state_of(updates, self.layout), self.keep)


def toy(path: Path, **settings) -> Path:
    ToyRun(path, **settings).go()
    return path


def same(a: Path, b: Path) -> bool:
    return all(row.good is not False for row in (*audit.compare(a, b), *audit.check(a), *audit.check(b)))


def refused(kind: type[Exception], function, *arguments, **settings) -> str:
    """The message of the exception that the call must raise."""
    try:
        function(*arguments, **settings)
    except kind as error:
        return str(error)
    raise AssertionError(f"{function.__name__} did not raise {kind.__name__}")


# ---------------------------------------------------------------------------------------------------------------------
# Kill -9 at every file operation (this part runs in a child process)

# What changes files. A kill at fsync leaves what a kill at the next of these does; fsyncs have a test of their order.
OPERATIONS = ("write", "replace", "rename", "unlink", "rmdir", "mkdir", "ftruncate")


def kill_at(position: int) -> list[int]:
    """Patches `os` so that this process is killed in front of file operation number `position`. A write is half done
    first. Returns the counter."""
    counter = [0]

    def patch(name: str) -> None:
        real = getattr(os, name)

        def operation(*arguments, **settings):
            counter[0] += 1
            if counter[0] == position:
                if name == "write":
                    real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **settings)

        setattr(os, name, operation)

    for name in OPERATIONS:
        patch(name)
    return counter


def forked(function, position: int) -> int | None:
    """Runs `function` in a fork killed at `position`. Returns the operations it took, or None when it was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            counter = kill_at(position)
            function()
            data = str(counter[0]).encode()
            counter[0] = -(10**9)
            os.write(writing, data)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return None
    assert status == 0, f"the child failed when killed at {position}"
    return int(said)


def audited(run: Path, reference: Path) -> None:
    rows = [*audit.compare(reference, run), *audit.check(run)]
    assert all(row.good is not False for row in rows), audit.table(rows, ("good", "WRONG"))


def crash_run(folder: Path) -> None:
    """Kills a run at each file operation; after one resume it must equal one that was never killed."""
    reference, run = folder / "reference", folder / "run"
    total = forked(small(reference).go, 0)
    for position in range(1, total + 1):
        assert forked(small(run).go, position) is None
        resumed(run, reference)
        shutil.rmtree(run)
    print(total)


def crash_resume(folder: Path) -> None:
    """Kills a run once, kills its resume at each file operation, and resumes again: still equal."""
    reference, start, run = folder / "reference", folder / "start", folder / "run"
    forked(small(reference).go, 0)
    # A run killed while it wrote its second checkpoint, with later rollouts and commits, a torn line, a stale folder.
    forked(lambda: ToyRun(start, updates=2, keep=2, samples=2).go(), 0)
    shutil.rmtree(checkpoint.checkpoint_path(start, 2))
    checkpoint.checkpoint_path(start, 1).with_name(".000002.tmp").mkdir()
    with open(start / "metrics.jsonl", "ab") as file:
        file.write(b'{"update": 2, "po')
    shutil.copytree(start, run)
    total = forked(small(run).go, 0)
    for position in range(1, total + 1):
        shutil.rmtree(run)
        shutil.copytree(start, run)
        assert forked(small(run).go, position) is None
        resumed(run, reference)
    print(total)


def small(path: Path) -> "ToyRun":
    return ToyRun(path, updates=2, keep=1, samples=2)


def resumed(run: Path, reference: Path) -> None:
    """Resumes a killed run; it must be consistent, equal to the reference, and hold no leftovers."""
    assert forked(small(run).go, 0) is not None
    fork_check(lambda: audited(run, reference))
    assert {p.name for p in run.rglob(".*")} == {".lock", ".lock.workers"}


def fork_check(function) -> None:
    """Runs a check in a fork: BLAKE3's threads, started in this process, would not survive the forks to come."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def run_self(*arguments: str, **settings) -> subprocess.CompletedProcess:
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=CHILD, **settings)


@pytest.fixture
def fast_folder(tmp_path):
    """A folder in memory where there is one: SIGKILL leaves the same on every file system, and fsync costs nothing."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("what", ["crash_run", "crash_resume"])
def test_a_run_and_a_resume_killed_at_any_file_operation_resume_to_exactly_the_same_run(fast_folder, what):
    done = run_self(what, fast_folder)
    assert done.returncode == 0, done.stderr[-3000:]
    print(f"{what}: killed at each of {int(done.stdout)} file operations")
    assert int(done.stdout) > 20


def test_everything_a_checkpoint_stands_on_is_durable_before_its_one_rename(tmp_path, monkeypatch):
    events = []
    fsync, rename, replace = os.fsync, os.rename, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append(f"shown {b}"), rename(a, b)))
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append(f"shown {b}"), replace(a, b)))
    ToyRun(tmp_path).go(stop_after=1)
    shown = events.index(f"shown {checkpoint.checkpoint_path(tmp_path, 1)}")
    before, staged = events[:shown], tmp_path / "checkpoints" / ".000001.tmp"
    for name in ("actor/__0_0.distcp", "actor/common.pt", "actor", "."):
        assert str(staged / name) in before
    assert any(e.startswith(f"{staged}/.state.json") for e in before)
    for name in ("metrics.jsonl", "publications/commits.jsonl", "rollouts", "publications", "."):
        assert str(tmp_path / name) in before
    rows = next(i for i, e in enumerate(before) if e.startswith(f"{tmp_path}/rollouts/.000000.jsonl"))
    assert rows < before.index(f"shown {checkpoint.rollouts_file(tmp_path, 0)}")
    assert events[shown + 1] == str(tmp_path / "checkpoints")


# ---------------------------------------------------------------------------------------------------------------------
# Digests


def tensor_of(dtype: str, shape: list[int], data: str):
    import torch

    kind = {"F32": torch.float32, "BF16": torch.bfloat16}[dtype]
    return torch.frombuffer(bytearray.fromhex(data), dtype=torch.uint8).view(kind).reshape(shape)


def test_policy_digest_is_the_one_of_the_shared_vector():
    case = json.loads((SHARED / "digest.json").read_text())
    tensors = {name: tensor_of(t["dtype"], t["shape"], t["bytes"]) for name, t in case["tensors"].items()}
    entries = {name: checkpoint.tensor_digest(tensor) for name, tensor in tensors.items()}
    lines = {f"{n}\t{d}\t{','.join(map(str, s))}\t{h}\n" for n, (d, s, h) in entries.items()}
    assert lines == set(case["lines"])
    assert checkpoint.digest_of(tensors) == checkpoint.policy_digest(entries) == case["digest"]
    assert checkpoint.digest_of(dict(reversed(tensors.items()))) == case["digest"]


def test_tensor_digest_depends_on_content_and_not_on_storage():
    import torch

    whole = torch.arange(2_000_000, dtype=torch.float32).reshape(1000, 2000)  # 8 MB: the threaded path
    raw = checkpoint.blake3(whole.numpy().tobytes()).hexdigest()
    assert checkpoint.tensor_digest(whole) == ("F32", (1000, 2000), raw)
    assert checkpoint.tensor_digest(whole.t().contiguous().t())[2] == raw
    assert checkpoint.tensor_digest(torch.cat([whole, whole])[1000:])[2] == raw
    assert checkpoint.tensor_digest(whole.clone().requires_grad_())[2] == raw
    changed = whole.clone()
    changed[999, 1999] += 1
    assert checkpoint.tensor_digest(changed)[2] != raw


def test_the_digest_of_a_generators_state_changes_with_every_draw():
    import numpy as np
    import torch

    def state() -> dict:
        return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate(), "n": 1}

    first = state()
    assert checkpoint.tree_digest(first) == checkpoint.tree_digest(dict(reversed(first.items())))
    for draw in (lambda: torch.rand(1), lambda: np.random.rand(), random.random):
        before = checkpoint.tree_digest(state())
        assert checkpoint.tree_digest(state()) == before
        draw()
        assert checkpoint.tree_digest(state()) != before
    assert (
        checkpoint.tree_digest({"a": 1}) != checkpoint.tree_digest({"a": 1.0}) != checkpoint.tree_digest({"a": "1.0"})
    )


def test_tensor_digest_names_every_dtype_as_safetensors_does():
    import torch

    names = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"}
    names |= {torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}
    for dtype, name in names.items():
        one = torch.ones(3, dtype=dtype)
        data = one.view(torch.uint8).numpy().tobytes()
        assert checkpoint.tensor_digest(one) == (name, (3,), checkpoint.blake3(data).hexdigest())
    assert checkpoint.tensor_digest(torch.tensor(1.0))[:2] == ("F32", ())
    assert checkpoint.tensor_digest(torch.empty(0, 4)) == ("F32", (0, 4), checkpoint.blake3(b"").hexdigest())
    assert checkpoint.tensor_digest(torch.tensor(0.0))[2] != checkpoint.tensor_digest(torch.tensor(-0.0))[2]
    refused(TypeError, checkpoint.tensor_digest, torch.ones(1, dtype=torch.complex64))


# ---------------------------------------------------------------------------------------------------------------------
# The run directory


def test_a_directory_that_holds_a_run_is_refused_and_a_log_in_it_is_not(tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "out.log").write_text("x")
    checkpoint.create_run(tmp_path / "new", {"recipe": {"a": 1}})
    assert checkpoint.read_run(tmp_path / "new") == {"recipe": {"a": 1}}
    assert "holds a run" in refused(ValueError, checkpoint.create_run, tmp_path / "new", {})
    (tmp_path / "part" / "checkpoints" / "000001").mkdir(parents=True)
    assert "holds a run" in refused(ValueError, checkpoint.create_run, tmp_path / "part", {})
    (tmp_path / "file").write_text("")
    assert "not a directory" in refused(ValueError, checkpoint.create_run, tmp_path / "file", {})
    assert "no run.json" in refused(ValueError, checkpoint.read_run, tmp_path)


def test_a_run_that_was_moved_resumes_there(tmp_path):
    ToyRun(tmp_path / "a").go(stop_after=2)
    (tmp_path / "b").mkdir()
    shutil.move(tmp_path / "a", tmp_path / "b" / "c")
    ToyRun(tmp_path / "b" / "c").go()
    assert same(tmp_path / "b" / "c", toy(tmp_path / "reference"))
    stored = [p.read_bytes() for p in (tmp_path / "b" / "c").rglob("*") if p.is_file()]
    assert not any(str(tmp_path).encode() in data for data in stored)


def test_settings_that_differ_are_listed_with_both_values():
    saved = {"lr": 1e-5, "seed": 42, "betas": [0.9, 0.95], "ray": "a", "old": 1, "flag": True}
    asked = {"lr": 1e-4, "seed": 42.0, "betas": (0.9, 0.95), "ray": "b", "new": 2, "flag": 1}
    found = checkpoint.compare_recipes(saved, asked, {"ray"})
    assert found == [("flag", True, 1), ("lr", 1e-5, 1e-4), ("new", None, 2), ("old", 1, None)]


def test_rollouts_keep_every_bit_and_escape_what_a_model_wrote(tmp_path):
    row = {"text": "\ud800\x00\x1b[31m\u202e\u2028", "log_probs": [-0.1 - 0.2, -1e-308, -0.0], "n": 2**63}
    checkpoint.append_rollouts(tmp_path, 0, [row, row])
    assert repr(checkpoint.read_rollouts(tmp_path, 0)) == repr([row, row])
    assert all(32 <= byte < 127 or byte == 10 for byte in checkpoint.rollouts_file(tmp_path, 0).read_bytes())
    message = refused(
        checkpoint.GuardError, checkpoint.append_rollouts, tmp_path, 1, [{}, {"log_probs": [float("nan")]}]
    )
    assert message.startswith("update 1, sample 1")
    assert not checkpoint.rollouts_file(tmp_path, 1).exists()


def test_a_torn_last_line_is_dropped_by_the_next_writer(tmp_path):
    checkpoint.append_metrics(tmp_path, {"update": 0, "explained_variance": float("nan")})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"update": 1, "lo')
    assert checkpoint.read_metrics(tmp_path) == [{"update": 0, "explained_variance": None}]
    assert "metrics.jsonl:2" in refused(ValueError, checkpoint.read_metrics, tmp_path, torn=False)
    checkpoint.append_metrics(tmp_path, {"update": 1})
    assert [row["update"] for row in checkpoint.read_metrics(tmp_path, torn=False)] == [0, 1]


def test_truncation_leaves_what_the_resume_point_contains_and_nothing_else(tmp_path):
    ToyRun(tmp_path, keep=9).go()
    checkpoint.truncate_to(tmp_path, 1)
    checkpoint.drop_commits_above(tmp_path, 2)
    assert checkpoint.list_checkpoints(tmp_path) == [1]
    assert [row["update"] for row in checkpoint.read_metrics(tmp_path)] == [0]
    assert [p.name for p in (tmp_path / "rollouts").iterdir()] == ["000000.jsonl"]
    assert [record["version"] for record in checkpoint.read_commits(tmp_path)] == [1, 2]
    checkpoint.verify_checkpoint(tmp_path, 1)


@pytest.mark.parametrize("after", [b"\0\0\0\n", b'{"update": 0}\n', b"{torn", b"\xff\n{}\n"])
def test_whatever_follows_the_resume_point_is_dropped_unread(tmp_path, after):
    ToyRun(tmp_path, keep=9).go()
    path = tmp_path / "metrics.jsonl"
    first = path.read_bytes().splitlines(keepends=True)[0]
    path.write_bytes(first + after)
    checkpoint.verify_checkpoint(tmp_path, 1)
    checkpoint.truncate_to(tmp_path, 1)
    assert path.read_bytes() == first


@pytest.mark.parametrize("update", [b"true", b"0.0", b"false", b"null"])
def test_an_update_that_is_no_whole_number_does_not_verify(tmp_path, update):
    ToyRun(tmp_path, keep=9).go()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"update":0', b'"update":' + update, 1))
    with pytest.raises(ValueError, match="update 0 is missing or out of order"):
        checkpoint.verify_checkpoint(tmp_path, 1)


def test_broken_json_is_one_clear_line_with_file_and_line(tmp_path):
    bad = [
        b"{",
        b"[1]",
        b'{"a": NaN}',
        b"\xff\xfe",
        b"[" * 100_000,
        b"\xef\xbb\xbf{}",
        b'{"a":' + b"9" * 5000 + b"}",
        b"",
    ]
    for data in bad:
        (tmp_path / "run.json").write_bytes(data)
        message = refused(ValueError, checkpoint.read_run, tmp_path)
        assert "run.json" in message and "\n" not in message
        (tmp_path / "metrics.jsonl").write_bytes(b"{}\n" + data + b"\n")
        message = refused(ValueError, checkpoint.read_metrics, tmp_path)
        assert "metrics.jsonl:2" in message and "\n" not in message


# ---------------------------------------------------------------------------------------------------------------------
# Publications


def commit(version: int, epoch: int = 0, digest: str = HEX) -> dict:
    return {"version": version, "digest": digest, "epoch": epoch, "tensors": 3, "time": 0.0}


def test_versions_grow_within_an_epoch_and_a_digest_never_changes(tmp_path):
    for version in (1, 2, 2):
        checkpoint.append_commit(tmp_path, commit(version))
    checkpoint.append_commit(tmp_path, commit(2, epoch=1))
    assert [(r["version"], r["epoch"]) for r in checkpoint.read_commits(tmp_path)] == [(1, 0), (2, 0), (2, 1)]
    for record in (commit(2, 1, "cd" * 32), commit(1, 1), commit(3, 0)):
        refused(checkpoint.GuardError, checkpoint.append_commit, tmp_path, record)
    for record in ({}, commit(0), commit(1) | {"digest": "x"}, commit(1) | {"epoch": True}):
        refused(ValueError, checkpoint.append_commit, tmp_path, record)
    assert len(checkpoint.read_commits(tmp_path)) == 3


def test_no_epoch_is_used_twice(tmp_path):
    assert [checkpoint.next_epoch(tmp_path) for _ in range(3)] == [0, 1, 2]
    (tmp_path / "publications" / "epoch").write_text("x")
    assert "epoch" in refused(ValueError, checkpoint.next_epoch, tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


def test_state_json_has_the_keys_of_the_design(tmp_path):
    toy(tmp_path)
    state = checkpoint.verify_checkpoint(tmp_path, 3)
    assert (state["updates"], state["policy_version"], state["cursor"]) == (3, 4, 12)
    assert set(state["files"]) == {"actor/__0_0.distcp", "actor/common.pt"}
    assert state["files"]["actor/common.pt"] == checkpoint.blake3(b"rng").hexdigest()
    assert set(state["tensors"]) == {"actor", "critic", "optimizer"}
    assert state["scheduler"] == {"step": 3}


def test_any_byte_changed_in_any_file_of_a_checkpoint_is_detected(tmp_path):
    toy(tmp_path)
    flips = 0
    for path in [p for p in checkpoint.checkpoint_path(tmp_path, 3).rglob("*") if p.is_file()]:
        good = path.read_bytes()
        for position in range(len(good)):
            bad = bytearray(good)
            bad[position] ^= 1 << random.Random(position).randrange(8)
            path.write_bytes(bad)
            assert str(path.parent.parent if path.name != "state.json" else path) in refused(
                ValueError, checkpoint.verify_checkpoint, tmp_path, 3
            )
            flips += 1
        for bad in (good[:-1], good + b"\n", b""):
            path.write_bytes(bad)
            refused(ValueError, checkpoint.verify_checkpoint, tmp_path, 3)
        path.write_bytes(good)
    checkpoint.verify_checkpoint(tmp_path, 3)
    assert flips > 1000


def test_state_json_says_the_same_with_other_white_space_and_is_still_detected(tmp_path):
    toy(tmp_path)
    path = checkpoint.checkpoint_path(tmp_path, 3) / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=2, sort_keys=True) + "\n")
    assert "state.json" in refused(ValueError, checkpoint.verify_checkpoint, tmp_path, 3)


def test_a_checkpoint_with_a_file_too_many_or_too_few_or_a_link_does_not_verify(tmp_path):
    toy(tmp_path)
    actor = checkpoint.checkpoint_path(tmp_path, 3) / "actor"
    (actor / "more").write_text("")
    assert "not part of" in refused(ValueError, checkpoint.verify_checkpoint, tmp_path, 3)
    (actor / "more").unlink()
    (actor / "common.pt").rename(tmp_path / "common.pt")
    assert "common.pt: missing" in refused(ValueError, checkpoint.verify_checkpoint, tmp_path, 3)
    (actor / "common.pt").symlink_to(tmp_path / "common.pt")
    assert "not a plain file" in refused(ValueError, checkpoint.verify_checkpoint, tmp_path, 3)


def test_a_checkpoint_without_the_rollouts_and_metrics_of_its_updates_does_not_verify(tmp_path):
    toy(tmp_path)
    rollouts, metrics = checkpoint.rollouts_file(tmp_path, 1), tmp_path / "metrics.jsonl"
    for path, bad in ((rollouts, b""), (rollouts, rollouts.read_bytes()[:-1]), (metrics, b'{"update": 0}\n')):
        good = path.read_bytes()
        path.write_bytes(bad)
        assert path.name in refused(ValueError, checkpoint.verify_checkpoint, tmp_path, 3)
        path.write_bytes(good)
    rollouts.unlink()
    assert "000001.jsonl: missing" in refused(ValueError, checkpoint.verify_checkpoint, tmp_path, 3)
    (checkpoint.staging(tmp_path, 4) / "x").write_text("")
    assert "000001.jsonl" in refused(ValueError, checkpoint.publish_checkpoint, tmp_path, 4, state_of(4), 2)


def test_the_newest_checkpoint_that_verifies_is_used_and_damaged_ones_are_named(tmp_path):
    said = []
    assert checkpoint.newest_checkpoint(tmp_path, said.append) is None
    toy(tmp_path)
    (tmp_path / "checkpoints" / ".000009.tmp").mkdir()
    assert checkpoint.newest_checkpoint(tmp_path, said.append)[0] == 3 and not said
    (checkpoint.checkpoint_path(tmp_path, 3) / "actor" / "common.pt").write_bytes(b"rnG")
    assert checkpoint.newest_checkpoint(tmp_path, said.append)[0] == 2
    assert "000003" in said[0] and "common.pt" in said[0]
    (checkpoint.checkpoint_path(tmp_path, 2) / "state.json").unlink()
    assert "no checkpoint verifies" in refused(ValueError, checkpoint.newest_checkpoint, tmp_path, said.append)


def test_older_checkpoints_go_only_after_the_new_one_is_visible(tmp_path):
    seen = []
    real = checkpoint.prune_checkpoints

    def watch(run, keep):
        seen.append(checkpoint.list_checkpoints(run))
        real(run, keep)

    checkpoint.prune_checkpoints = watch
    try:
        ToyRun(tmp_path, updates=4, keep=1).go()
    finally:
        checkpoint.prune_checkpoints = real
    assert seen == [[1], [1, 2], [2, 3], [3, 4]]
    assert checkpoint.list_checkpoints(tmp_path) == [4]
    refused(ValueError, checkpoint.publish_checkpoint, tmp_path, 4, state_of(4), 0)


def test_publishing_a_checkpoint_again_keeps_it_and_refuses_another_state(tmp_path):
    toy(tmp_path)
    before = (checkpoint.checkpoint_path(tmp_path, 3) / "state.json").read_bytes()
    ToyRun(tmp_path).save(3)
    assert (checkpoint.checkpoint_path(tmp_path, 3) / "state.json").read_bytes() == before
    checkpoint.staging(tmp_path, 3)
    other = state_of(3) | {"cursor": 1}
    assert "another state" in refused(checkpoint.GuardError, checkpoint.publish_checkpoint, tmp_path, 3, other, 2)
    (checkpoint.checkpoint_path(tmp_path, 3) / "actor" / "common.pt").unlink()
    ToyRun(tmp_path).save(3)
    checkpoint.verify_checkpoint(tmp_path, 3)


def test_a_state_that_lacks_or_mistakes_a_key_is_refused(tmp_path):
    toy(tmp_path)
    cases = [
        ("policy_version", 9),
        ("policy_digest", "x"),
        ("cursor", -1),
        ("cursor", None),
        ("tensors", {"actor": {"a": 1}}),
    ]
    for key, value in cases:
        checkpoint.staging(tmp_path, 3)
        message = refused(ValueError, checkpoint.publish_checkpoint, tmp_path, 3, state_of(3) | {key: value}, 2)
        assert key in message
    for name in ("../x", "/etc/passwd", "a/../../x", "./a", "state.json"):
        assert not checkpoint._is_inside(name)


# ---------------------------------------------------------------------------------------------------------------------
# A full disk


def full_disk(folder: Path) -> None:
    """Child process: files may not grow beyond 20 kB. Each writer must name its file and leave nothing behind."""
    import resource

    run = folder / "run"
    ToyRun(run).go(stop_after=2)
    before = {p: p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()}
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    long = "x" * 30_000
    state = state_of(2) | {"long": long}
    checkpoint.staging(run, 2)
    shutil.rmtree(checkpoint.checkpoint_path(run, 2))
    before = {p: data for p, data in before.items() if "000002" not in str(p)}
    for function, arguments, name in (
        (checkpoint.append_rollouts, (run, 2, [{"x": long}]), "000002.jsonl"),
        (checkpoint.append_metrics, (run, {"x": long}), "metrics.jsonl"),
        (checkpoint.append_commit, (run, commit(9) | {"x": long}), "commits.jsonl"),
        (checkpoint.publish_checkpoint, (run, 2, state, 2), "state.json"),
    ):
        try:
            function(*arguments)
        except OSError as error:
            assert error.errno in (errno.EFBIG, errno.ENOSPC) and name in str(error), error
            assert "make room" in str(error) and error.filename.endswith(name)
        else:
            raise AssertionError(f"{name} was written")
    after = {p: p.read_bytes() for p in sorted(run.rglob("*")) if p.is_file()}
    assert after == before, set(after) ^ set(before)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    ToyRun(run).go()
    audited(run, toy(folder / "reference"))
    print("resumed")


def test_a_full_disk_is_a_clear_error_and_the_run_resumes_once_there_is_room(tmp_path):
    done = run_self("full_disk", tmp_path)
    assert done.stdout == "resumed\n", done.stderr[-3000:]


# ---------------------------------------------------------------------------------------------------------------------
# Locks, with real processes


def hold(run: str, kind: str, owner: str = "") -> None:
    """Child process: takes a lock, says so, and sleeps until killed."""
    lock = checkpoint.hold_run(run, owner or None) if kind.startswith("worker") else checkpoint.lock_run(run)
    said = lock.owner
    if kind in ("forks", "worker forks") and (said := os.fork()) == 0:
        time.sleep(60)
    if kind == "executes":
        said = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL).pid
    print("locked", said, flush=True)
    time.sleep(0 if kind == "forks" else 60)


def holder(run: Path, kind: str, owner: str = "") -> subprocess.Popen:
    child = subprocess.Popen(
        [sys.executable, __file__, "hold", str(run), kind, owner], stdout=subprocess.PIPE, text=True
    )
    child.owner = (child.stdout.readline().split() + [""])[1]
    return child


def end(child: subprocess.Popen) -> None:
    child.kill()
    child.wait()
    child.stdout.close()


def test_a_second_process_on_a_run_is_refused_at_once_and_let_in_after_a_kill(tmp_path):
    checkpoint.create_run(tmp_path, {})
    first = holder(tmp_path, "driver")
    try:
        assert checkpoint.is_locked(tmp_path)
        for wait in (0, 30):
            start = time.monotonic()
            message = refused(checkpoint.RunLocked, checkpoint.lock_run, tmp_path, wait_s=wait)
            assert time.monotonic() - start < 3
            assert str(tmp_path) in message and str(first.pid) in message
    finally:
        first.kill()  # not waited for: the next line may come while it is still dying
    with checkpoint.lock_run(tmp_path, wait_s=10):
        assert checkpoint.is_locked(tmp_path)
    assert not checkpoint.is_locked(tmp_path)
    end(first)


def test_a_resume_waits_for_orphaned_workers_of_a_killed_run(tmp_path):
    checkpoint.create_run(tmp_path, {})
    with checkpoint.lock_run(tmp_path) as lock:
        worker = holder(tmp_path, "worker", lock.owner)
    try:
        assert "still write" in refused(checkpoint.RunLocked, checkpoint.lock_run, tmp_path, wait_s=0.3)
        killer = subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {worker.pid}"])
        start = time.monotonic()
        with checkpoint.lock_run(tmp_path, wait_s=30):
            assert 0.5 < time.monotonic() - start < 10
        killer.wait()
    finally:
        end(worker)


def test_a_worker_of_a_dead_driver_is_refused_even_when_it_starts_late(tmp_path):
    checkpoint.create_run(tmp_path, {})
    with checkpoint.lock_run(tmp_path) as old:
        with checkpoint.hold_run(tmp_path, old.owner):
            pass
    with checkpoint.lock_run(tmp_path) as new:
        assert "taken this run over" in refused(checkpoint.RunLocked, checkpoint.hold_run, tmp_path, old.owner)
        checkpoint.hold_run(tmp_path, new.owner).release()
        checkpoint.hold_run(tmp_path).release()


def test_a_forked_child_keeps_the_lock_and_an_executed_program_does_not(tmp_path):
    checkpoint.create_run(tmp_path, {})
    parent = holder(tmp_path, "executes")
    end(parent)  # the program that it started lives on, without the lock
    checkpoint.lock_run(tmp_path, wait_s=5).release()
    os.kill(int(parent.owner), signal.SIGKILL)
    parent = holder(tmp_path, "forks")  # its fork could still write after it has ended
    parent.wait()
    refused(checkpoint.RunLocked, checkpoint.lock_run, tmp_path)
    os.kill(int(parent.owner), signal.SIGKILL)
    checkpoint.lock_run(tmp_path, wait_s=5).release()
    parent.stdout.close()


def test_a_fork_of_a_killed_worker_dies_with_it_and_keeps_no_lock(tmp_path):
    checkpoint.create_run(tmp_path, {})
    worker = holder(tmp_path, "worker forks")
    refused(checkpoint.RunLocked, checkpoint.lock_run, tmp_path)
    end(worker)
    checkpoint.lock_run(tmp_path, wait_s=10).release()


def test_a_start_removes_what_a_killed_one_left_half_written(tmp_path):
    toy(tmp_path)
    left = [
        ".run.json.1.tmp",
        "rollouts/.000001.jsonl.1.tmp",
        "checkpoints/.000004.tmp/a/b",
        "checkpoints/.000001.old/c",
    ]
    for name in left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / ".keep").write_text("the user's")
    checkpoint.lock_run(tmp_path).release()
    assert {p.name for p in tmp_path.rglob(".*")} == {".lock", ".lock.workers", ".keep"}
    checkpoint.verify_checkpoint(tmp_path, 3)


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    functions = {"hold": hold, "full_disk": full_disk, "crash_run": crash_run, "crash_resume": crash_resume}
    functions[name](*(arguments if name == "hold" else map(Path, arguments)))


def test_what_a_commit_and_a_checkpoint_need_of_memory_does_not_grow_with_the_run(tmp_path):
    checkpoint.create_run(tmp_path, {})
    updates, record = 300, {"version": 1, "digest": "0" * 64, "epoch": 0, "more": "x" * 4000}
    (tmp_path / "publications").mkdir(exist_ok=True)
    lines = [json.dumps({**record, "version": v + 1}) + "\n" for v in range(updates)]
    checkpoint.commits_file(tmp_path).write_text("".join(lines))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"update": u, "more": "x" * 4000}) + "\n" for u in range(updates)))
    for update in range(updates):
        checkpoint.append_rollouts(tmp_path, update, [{}])
    for work in (
        lambda: checkpoint.append_commit(tmp_path, {**record, "version": updates + 1}),
        lambda: checkpoint._check_records(tmp_path, updates),
    ):
        tracemalloc.start()
        try:
            work()
            assert tracemalloc.get_traced_memory()[1] < 300_000  # of 1.2 MB that are looked through
        finally:
            tracemalloc.stop()
