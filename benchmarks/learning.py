"""Does each algorithm learn? The tiny model, the same data, three seeds; curves with their spread.

    python benchmarks/learning.py                        # all four, three seeds: about half an hour on two cores
    python benchmarks/learning.py --algorithms ppo --seeds 42

Each run is `run.py` as a user starts it, with the settings in SETTINGS. Held-out accuracy is sampled at the training
temperature, four samples a row, before and after. Writes results/learning.json and results/learning.png.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "examples" / "tiny"
COMMON = ["--model", str(TINY / "model"), "--data", str(TINY / "train.jsonl"), "--eval-data", str(TINY / "heldout.jsonl"),
          "--max-prompt-len", "32", "--max-response-len", "16", "--optimizer", "adam", "--lr", "2e-4", "--save-interval", "1000"]  # fmt: skip  # noqa: E501
# 64 completions an update for all: grpo as 8 groups of 8, the others as 64 prompts of one completion each.
CRITIC = ["--updates", "100", "--rollout-batch-size", "64"]
SETTINGS = {
    "grpo": ["--updates", "140", "--rollout-batch-size", "8", "--n-samples-per-prompt", "8"],
    "ppo": CRITIC,
    "dppo": CRITIC,
    "flow-dppo": CRITIC,
}


def train(algorithm: str, seed: int, run: Path) -> dict:
    began = time.perf_counter()
    command = [sys.executable, "run.py", "--algorithm", algorithm, *COMMON, *SETTINGS[algorithm], "--seed", str(seed)]
    done = subprocess.run([*command, "--output", str(run)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{algorithm}, seed {seed}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [e for row in rows for e in row.get("eval", {}).values()]
    result = {
        "seed": seed,
        "seconds": round(time.perf_counter() - began, 1),
        "before": evaluations[0],
        "after": evaluations[-1],
        "reward": [round(row["reward_mean"], 4) for row in rows],
        "max_logprob_error": max(row["max_logprob_error"] for row in rows),
    }
    gain = result["after"]["accuracy"] - result["before"]["accuracy"]
    print(f"{algorithm:10} seed {seed}: {result['before']['accuracy']:.1%} -> {result['after']['accuracy']:.1%}"
          f" ({gain * 100:+.1f} points, greedy {result['after']['greedy']:.1%}) in {result['seconds']:.0f} s", flush=True)  # fmt: skip  # noqa: E501
    return result


def draw(results: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for number, (algorithm, runs) in enumerate(results.items()):
        curves = np.array([np.convolve(run["reward"], np.ones(8) / 8, "valid") for run in runs])
        at = np.arange(8, 8 + curves.shape[1])
        axes.plot(at, curves.mean(0), color=f"C{number}", label=f"{algorithm} ({len(runs)} seeds)")
        axes.fill_between(at, curves.min(0), curves.max(0), color=f"C{number}", alpha=0.2)
    axes.set_xlabel("updates")
    axes.set_ylabel("training reward, mean of 8 updates; band: all seeds")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", default=",".join(SETTINGS), help="comma-separated")
    parser.add_argument("--seeds", default="42,43,44", help="comma-separated")
    parser.add_argument("--out", type=Path, default=ROOT / "results", help="where learning.json and learning.png go")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="learning-"))
    path = options.out / "learning.json"
    evidence = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    evidence |= {"machine": {"cores": os.cpu_count(), "python": platform.python_version()},
                 "settings": {k: [*(c.removeprefix(f"{ROOT}/") for c in COMMON), *v] for k, v in SETTINGS.items()}}  # fmt: skip
    try:
        for algorithm in options.algorithms.split(","):
            evidence["runs"][algorithm] = []
            for seed in options.seeds.split(","):
                evidence["runs"][algorithm].append(train(algorithm, int(seed), work / f"{algorithm}-{seed}"))
                path.write_text(json.dumps(evidence, indent=1) + "\n")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    draw(evidence["runs"], options.out / "learning.png")


if __name__ == "__main__":
    main()
