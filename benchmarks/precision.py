"""How far do trainer and engine disagree, by precision? And in FP32: which of the two is farther from float64?

    python benchmarks/precision.py --model DIR --data FILE --name official --device cuda

For FP32, FP32 with TF32 matmuls, BF16 and FP16: `run.py` with GRPO for two updates and a replay bound that stops nothing;
the largest and mean difference of a selected log-probability stand in its metrics. Then the FP32 run's first completions
are scored three times: by the engine (what it reported), by the trainer, and by the tests' own float64 forward.
Writes results/precision-NAME.json. DESIGN §5 bounds the difference by 1e-3 in FP32 and 0.03 otherwise.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms ask for it on CUDA
PRECISIONS = {
    "fp32": ["--precision", "fp32"],
    "tf32": ["--precision", "fp32", "--matmul-precision", "high"],
    "bf16": ["--precision", "bf16"],
    "fp16": ["--precision", "fp16"],
}


def measure(precision: str, options, run: Path) -> dict:
    command = ["run.py", "--algorithm", "grpo", "--model", options.model, "--data", options.data, "--output", str(run)]
    command += ["--updates", "2", "--max-logprob-error", "1e9", "--reward", "benchmarks/varied_reward.py:reward"]
    command += ["--device", options.device, *(["--colocate"] if options.device == "cuda" else []), "--keep-checkpoints", "1"]
    command += [*PRECISIONS[precision], *options.extra.split()]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    if done.returncode:
        return {"failed": (done.stdout + done.stderr)[-600:]}
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "max": max(row["max_logprob_error"] for row in rows),
        "mean": sum(row["mean_logprob_error"] for row in rows) / len(rows),
        "entropy": rows[0]["entropy"],
        "rollout_s": rows[1]["seconds"]["rollout"],
        "train_s": rows[1]["seconds"]["train"],
    }


def against_float64(options, run: Path) -> dict:
    """{"engine"|"trainer": {"max", "mean"}}: distance from float64 over the run's first completions."""
    import reference
    import torch

    import provider
    import trainer

    completions = [json.loads(line) for line in (run / "rollouts" / "000000.jsonl").read_text().splitlines()]
    completions = completions[: options.float64]
    temperature = completions[0]["trace"]["temperature"]
    gpu = options.device == "cuda"
    settings = trainer.TrainerSettings(options.model, "grpo", device=options.device, temperature=temperature, split_matmul=gpu)
    network, scored = trainer.Trainer(settings), {}
    packs = trainer.make_packs(completions, list(range(len(completions))), settings.micro_batch_tokens, options.device)
    network._score(packs, scored, {})
    config = network.config
    del network
    if options.device == "cuda":
        torch.cuda.empty_cache()
    torch.set_default_device(options.device)
    read = provider.read_checkpoint(options.model, config)
    weights = {name: tensor.to(options.device, torch.float64) for name, tensor in read}
    gaps = {"engine": [], "trainer": []}
    with torch.no_grad():
        for n, c in enumerate(completions):
            tokens = torch.tensor([*c["prompt_tokens"], *c["response_tokens"]])
            hidden = reference.hidden_states(weights, config, tokens[:-1])[len(c["prompt_tokens"]) - 1 :]
            logits = hidden @ weights["lm_head.weight"].T / temperature
            exact = logits.log_softmax(-1).gather(1, tokens[len(c["prompt_tokens"]) :, None]).squeeze(1)
            gaps["engine"].append((torch.tensor(c["log_probs"], dtype=torch.float64) - exact).abs())
            gaps["trainer"].append((scored[n].double() - exact).abs())
    return {who: {"max": float(torch.cat(g).max()), "mean": float(torch.cat(g).mean())} for who, g in gaps.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="native checkpoint")
    parser.add_argument("--data", required=True, help="prompts, JSONL")
    parser.add_argument("--name", required=True, help="of the evidence file")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--precisions", default=",".join(PRECISIONS), help="comma-separated")
    parser.add_argument("--float64", type=int, default=16, help="completions held against float64; 0 is none")
    parser.add_argument("--extra", default="", help="more options of run.py, one string")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="precision-"))
    evidence = {"device": options.device, "by_precision": {}}

    def write() -> None:
        (options.out / f"precision-{options.name}.json").write_text(json.dumps(evidence, indent=1) + "\n")

    try:
        for precision in options.precisions.split(","):
            evidence["by_precision"][precision] = row = measure(precision, options, work / precision)
            print(f"{precision}: {row}", flush=True)
            write()  # as it comes: a machine may be taken away half way
        if options.float64 and (work / "fp32" / "rollouts").exists():
            evidence["float64"] = against_float64(options, work / "fp32")
            evidence["float64_split_matmul"] = options.device == "cuda"
            print(f"against float64: {evidence['float64']}", flush=True)
            write()
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
