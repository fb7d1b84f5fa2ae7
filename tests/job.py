"""Runs of the whole job in fresh processes, for the tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "examples" / "tiny"
DRIVER = "import os, sys; os.environ['KILL_DRIVER'] = str(os.getpid()); import run; sys.exit(run.command(sys.argv[1:]))"

# Small, but with gradients: Adam at a visible rate, prompts × completions even for flow-dppo.
SMALL = [
    "--model", str(TINY / "model"), "--data", str(TINY / "train.jsonl"), "--max-prompt-len", "32",
    "--max-response-len", "12", "--rollout-batch-size", "4", "--lr", "1e-3",
]  # fmt: skip


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **extra}


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


def audit(*runs: Path) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "audit.py", *map(str, runs)], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
