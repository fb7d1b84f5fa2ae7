"""Show a run: `python report.py RUN` draws its reward curve, with held-out accuracy where it was evaluated."""

from __future__ import annotations

import sys
from pathlib import Path

import checkpoint


def draw_curve(run: str | Path) -> Path:
    """Write RUN/reward.png from RUN/metrics.jsonl and return its path."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = checkpoint.read_metrics(run)
    figure, axes = plt.subplots(figsize=(7, 4))
    done = [row["update"] + 1 for row in rows]
    rewards = [row["reward_mean"] for row in rows]
    axes.plot(done, rewards, color="0.75", linewidth=1, label="reward of an update")
    width = min(10, max(1, len(rows) // 5))
    smooth = [sum(rewards[max(0, i - width + 1) : i + 1]) / len(rewards[max(0, i - width + 1) : i + 1]) for i in range(len(rows))]
    axes.plot(done, smooth, color="C0", label=f"mean of the last {width}")
    evaluations = [e for row in rows for e in row.get("eval", {}).values()]
    for key, colour, label in (("accuracy", "C3", "held-out, sampled"), ("greedy", "C2", "held-out, greedy")):
        if evaluations:
            axes.plot([e["updates"] for e in evaluations], [e[key] for e in evaluations], "o-", color=colour, label=label)
    axes.set_xlabel("updates")
    axes.set_ylabel("reward, accuracy")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    path = Path(run) / "reward.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python report.py RUN")
    print(draw_curve(sys.argv[1]))
