"""Runs of the whole job in fresh processes, for the tests."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "examples" / "tiny"
DRIVER = "import os, sys; os.environ['SEAM_DRIVER'] = str(os.getpid()); import run; sys.exit(run.command(sys.argv[1:]))"

# Small, but with gradients: Adam at a visible rate, prompts × completions even for flow-dppo.
SMALL = [
    "--model", str(TINY / "model"), "--data", str(TINY / "train.jsonl"), "--max-prompt-len", "32",
    "--max-response-len", "12", "--rollout-batch-size", "4", "--lr", "1e-3",
]  # fmt: skip


def seam(*points: str) -> dict[str, str]:
    """Environment that puts tests/seam/sitecustomize.py in place, with these points."""
    return {"PYTHONPATH": f"{ROOT / 'tests' / 'seam'}{os.pathsep}{ROOT}", "SEAM": " ".join(points)}


@contextlib.contextmanager
def kept_environment():
    """Whatever is set in this process's environment meanwhile, afterwards it is as it was."""
    kept = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def environment(**extra: str) -> dict[str, str]:
    own = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": own, **extra}


def start(*args: str, **extra: str) -> subprocess.Popen:
    """`run.py` with `args`, in a process of its own; stdout and stderr are one text."""
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, *args],
        cwd=ROOT,
        env=environment(**extra),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(*args: str, timeout: float = 300, **extra: str) -> tuple[int, str]:
    """Exit code and output of `run.py` with `args`."""
    process = start(*args, **extra)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"no end within {timeout} s:\n{output}") from None
    return process.returncode, output


def living(driver: int) -> list[int]:
    """Processes, zombies apart, of the session that `start` opened for this driver: itself, Ray's, trainer and engine."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if entry.name.isdecimal() and int(session) == driver and state not in "ZX":
            found.append(int(entry.name))
    return found


def audit(*runs: Path | str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "audit.py", *map(str, runs)], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
