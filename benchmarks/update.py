"""One GRPO update on CPU in the shape of the TRL comparison: 4 prompts × 4 completions × 48 tokens, hidden 128, 8 layer visits.

    python benchmarks/update.py            # prints medians by phase; writes results/update.json

The peer figure to hold beside it (TRL 1.16 with Transformers generation, an unlooped Llama of the same arithmetic, two
cores, FP32): 0.88 s an update. Random weights almost never end a completion, so all 16 run to 48 tokens.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHAPE = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_loops": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rope_theta": 10000.0,
    "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
UPDATES = 12


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "shape.json").write_text(json.dumps(SHAPE))
        make = ["examples/make_checkpoint.py", "--shape", str(work / "shape.json"), "--seed", "0", "--dtype", "fp32"]
        make += ["--shards", "1", "--device", "cpu", "--out", str(work / "model")]
        subprocess.run([sys.executable, *make], cwd=ROOT, check=True)
        rows = [{"prompt": " ".join(f"t{(17 * i + j) % 500 + 3}" for j in range(24)), "label": "0"} for i in range(64)]
        (work / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = ["run.py", "--algorithm", "grpo", "--model", str(work / "model"), "--data", str(work / "data.jsonl")]
        command += ["--reward", "benchmarks/varied_reward.py:reward", "--optimizer", "adam", "--lr", "1e-5"]
        command += ["--updates", str(UPDATES), "--save-interval", "1000", "--output", str(work / "run")]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        metrics = [json.loads(line) for line in (work / "run" / "metrics.jsonl").read_text().splitlines()]
    phases = {}
    for name in metrics[0]["seconds"]:
        seen = sorted(row["seconds"][name] for row in metrics[2:-1])  # the first two warm up, the last writes the checkpoint
        phases[name] = {"median": statistics.median(seen), "min": seen[0], "max": seen[-1]}
        print(f"{name:11} median {phases[name]['median']:.3f} s   {seen[0]:.3f} to {seen[-1]:.3f}")
    tokens = statistics.mean(row["response_tokens_mean"] for row in metrics) * 16
    print(f"{tokens / phases['rollout']['median']:,.0f} tokens/s in the rollout; {len(metrics) - 3} updates counted")
    evidence = {"phases": phases, "tokens": tokens, "cores": os.cpu_count(), "python": platform.python_version()}
    (ROOT / "results" / "update.json").write_text(json.dumps(evidence, indent=1) + "\n")


if __name__ == "__main__":
    main()
