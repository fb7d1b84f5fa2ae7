"""timing.py and plan.py held against what was measured, and what they say of up to 1,024 GPUs; writes both into docs/scaling.md.

    python benchmarks/predict.py             # print the tables
    python benchmarks/predict.py --write     # put them into docs/scaling.md, between their marks
    python benchmarks/predict.py --driver    # measure what a token costs the driver; writes results/driver.json

A source of evidence is a function that yields `Row`s; list it in EVIDENCE. What timing.Hardware
was set from is a row too, and says so: it fits by making. All others are predictions.
"""

import argparse
import dataclasses
import functools
import json
import math
import pickle
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from machine import machine, versions
from make_checkpoint import OFFICIAL

import plan
import provider
import run
import timing

ROOT = Path(__file__).resolve().parent.parent
DOC = ROOT / "docs" / "scaling.md"
CONFIG = provider.parse_config(OFFICIAL, "the official shape")
WIDER = provider.parse_config(
    OFFICIAL | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 64, "intermediate_size": 14336}, "wider"
)


def table(head: list[str], rows: list[list]) -> list[str]:
    return ["| " + " | ".join(map(str, r)) + " |" for r in (head, ["---"] * len(head), *rows)]


def figures(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def recipe(**settings) -> run.Recipe:
    """A recipe with run.py's defaults; settings of one that a file recorded and that are no more are left out."""
    known = {field.name for field in dataclasses.fields(run.Recipe)}
    r = run.Recipe(**{"model": "m", "data": "d", "output": "o"} | {k: v for k, v in settings.items() if k in known})
    if r.n_samples_per_prompt is None:
        r = dataclasses.replace(r, n_samples_per_prompt=4 if r.algorithm == "grpo" else 1)
    return r


# --- held against measurements ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Row:
    """what was measured where; numbers in `unit`; `calibrates`: the constant of timing.Hardware that was set from it; `missed`:
    why the model is known to be far off, said in the table."""

    where: str
    what: str
    predicted: float
    measured: float
    unit: str
    calibrates: str = ""
    missed: str = ""


FRESH = "a new machine's first checkpoint"  # its host memory had never been touched


def before() -> Iterator[Row]:
    """What was measured before the project began (official shape, one H200, 16 × (128 + 48) tokens; typed from those notes)."""
    engine = {"fp32": (454, 23e-3), "bf16": (1545, 8e-3)}
    trainer = {"fp32": (0.76, 2.26), "tf32": (0.16, 0.54), "bf16": (0.11, 0.26)}
    where = "before the project"
    for kind, (forward, backward) in trainer.items():
        # Sequences of 176 tokens, logits for 48 positions of each; the backward pass makes the layers' forward pass once more.
        layers = 16 * 176 * timing.token_flops(CONFIG) + timing.attention_flops(CONFIG, 16 * 176**2)
        head, rate = timing.head_flops(CONFIG, 16 * 48), timing.H200.matmul[kind]
        yield Row(where, f"{kind}: forward + backward", (4 * layers + 3 * head) / rate, forward + backward, "s", "`matmul`")
        yield Row(where, f"{kind}: forward alone", (layers + head) / rate, forward, "s")
    for kind, (rate, step) in engine.items():
        # Another prompt for each completion: nothing in the prefix cache.
        r = recipe(precision=kind, split_matmul=False, rollout_batch_size=16, n_samples_per_prompt=1, algorithm="ppo")
        found = timing.rollout(r, CONFIG, 1.0, timing.H200)
        yield Row(where, f"{kind}: decode step of 16", 1000 * found["decode"] / 47, 1000 * step, "ms", "`decode`")
        yield Row(where, f"{kind}: engine, 16 at once", 768 / sum(found.values()), rate, "tokens/s")
    shared = timing.rollout(recipe(split_matmul=False), CONFIG, 1.0, timing.H200)
    yield Row(where, "fp32: engine, four completions a prompt", sum(shared.values()), 1.40, "s")


def products() -> Iterator[Row]:
    """results/products.json: what an official shape's products take as matmul.py takes them. A decode step is that, and what the
    step of 16 before the project had beside its products."""
    path = ROOT / "results" / "products.json"
    seen = json.loads(path.read_text())
    beside = 23e-3 - seen["decode"]["16"]["step_s"]["cublas"]
    for rows in (16, 32, 64):
        r = recipe(rollout_batch_size=rows, n_samples_per_prompt=1, algorithm="ppo")
        step = timing.rollout(r, CONFIG, 1.0, timing.H200)["decode"] / (r.max_response_len - 1)
        measured = seen["decode"][str(rows)]["step_s"]["split"] + beside
        what = f"fp32, split products: decode step of {rows}, put together"
        yield Row(path.name, what, 1000 * step, 1000 * measured, "ms", "`decode`" if rows == 16 else "")
    training = seen["training"]
    parts = training["cublas_s"] * (1 + timing.H200.parts / 3)
    yield Row(path.name, "fp32: products of training, sums in parts", parts, training["split_s"], "s", "`parts`")


def budget() -> Iterator[Row]:
    """results/budget.json: GRPO's update with split products, medians without the first; how long a checkpoint's writer took."""
    path = ROOT / "results" / "budget.json"
    evidence = json.loads(path.read_text())
    config = provider.parse_config({k: v for k, v in evidence["shape"].items() if k in OFFICIAL}, path.name)
    for part in ("plain", "recompute"):
        found = timing.seconds(recipe(colocate=True, recompute=part == "recompute"), config)
        seen, where = evidence[part], f"{path.name}, {part}"
        for phase in ("publish", "rollout", "train"):
            yield Row(where, phase, found["total"][phase], seen["phases"][phase]["median"], "s")
        if part == "plain":
            yield Row(where, "checkpoint", sum(found["checkpoint"].values()), seen["saving"]["pause"], "s", missed=FRESH)
        for updates, took in seen["writers"]:
            spent = sum(found["writer"].values())
            late = "the disk's rate varies" if part == "plain" else ""
            yield Row(where, f"writer after update {updates}", spent, took, "s", missed=late)
        if part == "plain":
            yield Row(where, "save interval that hides the slowest writer", timing.save_interval(found),
                      seen["saving"]["smallest_interval"], "updates", missed="the disk's rate varies")  # fmt: skip


def official() -> Iterator[Row]:
    """results/official: whole runs of three updates. Seconds of the second, as in RESULTS.md."""
    for path in sorted((ROOT / "results" / "official").glob("*.json")):
        evidence = json.loads(path.read_text())
        if len(evidence.get("metrics", ())) < 3:
            continue
        config = provider.parse_config(evidence["shape"], path.name)
        r = recipe(**evidence["record"]["recipe"])
        found = timing.seconds(r, config)
        where = f"official/{path.name}"
        measured = evidence["metrics"][1]["seconds"]
        for phase in ("publish", "rollout", "train"):
            yield Row(where, phase, found["total"][phase], measured[phase], "s")
        waited = evidence["metrics"][2]["seconds"]["checkpoint"]
        calibrates = "`snapshot`" if path.name == "grpo.json" else ""
        fresh = FRESH if path.name == "flow-dppo.json" else ""
        yield Row(where, "checkpoint", sum(found["checkpoint"].values()), waited, "s", calibrates, fresh)
        yield Row(where, "trainer's peak", plan.trainer_of(r, config)["total"], evidence["metrics"][1]["trainer_peak_gib"], "GiB")
        if "checkpoint_gb" in evidence:
            yield Row(where, "checkpoint on disk", plan.checkpoint_bytes(r, config) / 1e9, evidence["checkpoint_gb"], "GB")


def precisions() -> Iterator[Row]:
    """results/precision-official-h200.json: the default update at the official shape in each precision."""
    path = ROOT / "results" / "precision-official-h200.json"
    for name, seen in json.loads(path.read_text())["by_precision"].items():
        kinds = {"tf32": {"precision": "fp32", "matmul_precision": "high"}}
        found = timing.seconds(recipe(colocate=True, **kinds.get(name, {"precision": name})), CONFIG)
        for phase in ("rollout", "train"):
            if f"{phase}_s" in seen:
                yield Row(path.name, f"{name}: {phase}", found["total"][phase], seen[f"{phase}_s"], "s")


EVIDENCE = (before, products, official, budget, precisions)


def check() -> list[str]:
    rows = [row for source in EVIDENCE for row in source()]
    lines = [
        [row.where, row.what, f"{figures(row.predicted)} {row.unit}", f"{figures(row.measured)} {row.unit}",
         f"sets {row.calibrates}" if row.calibrates else f"{round(100 * (row.predicted / row.measured - 1)):+d}%"
         + (f" ({row.missed})" if row.missed else "")]
        for row in rows
    ]  # fmt: skip
    return table(["where", "what", "predicted", "measured", "error"], lines)


# --- memory of 8 GPUs ------------------------------------------------------------------------------------------------


def memory(config) -> list[str]:
    """GiB on each GPU: GRPO, BF16, Adam, with recompute, by layout and tokens of the largest micro-batch."""

    def row(name: str, tensor: int, data: int, sequence_parallel: bool = True) -> list[str]:
        settings = {
            "critic": False, "precision": "bf16", "optimizer": "adam", "recompute": True, "offload": False, "tensor": tensor,
            "data": data, "sequence_parallel": sequence_parallel and tensor > 1, "distributed_optimizer": data > 1,
        }  # fmt: skip
        found = [plan.trainer_gib(config, tokens=tokens * 1024, **settings) for tokens in (16, 32, 128, 256)]
        return [name, f"{found[0]['state']:.1f}", *(f"+{one['total'] - one['state']:.1f}" for one in found)]

    rows = [
        row("one GPU only, for comparison", 1, 1), row("T 1, N/T 8, distributed optimizer", 1, 8),
        row("T 2, N/T 4, sequence parallel, distributed optimizer", 2, 4), row("T 4, N/T 2, same", 4, 2),
        row("T 8, sequence parallel", 8, 1), row("T 8 without sequence parallelism", 8, 1, False),
    ]  # fmt: skip
    return table(["layout of 8 GPUs", "state", "16k tokens", "32k", "128k", "256k"], rows)


# --- up to 1,024 GPUs ------------------------------------------------------------------------------------------------

MODELS = {"3B": CONFIG, "9.4B": WIDER}
GPUS = (8, 64, 256, 1024)
SAMPLES, PROMPT, MEAN = 8, 512, 0.5
ROOM = 0.9 * timing.H200.gib


def candidates(config, gpus: int, prompts: int, longest: int) -> Iterator[run.Recipe]:
    """Recipes for `gpus`: a quarter, half or three quarters of them train; of each the fastest layout of engines and of trainers
    that fits the memory."""
    responses = timing.spread(prompts * SAMPLES, longest, MEAN)
    common = {
        "algorithm": "grpo", "precision": "bf16", "optimizer": "adam", "recompute": True, "rollout_batch_size": prompts,
        "n_samples_per_prompt": SAMPLES, "max_prompt_len": PROMPT, "max_response_len": longest, "temperature": 1.0,
        "ray_address": "other nodes" if gpus > 8 else None,
    }  # fmt: skip
    for share in (1, 2, 3):
        train_gpus = gpus * share // 4
        engines = []
        for ranks in (1, 2, 4, 8):
            if (gpus - train_gpus) % ranks:
                continue
            r = recipe(**common, train_gpus=train_gpus, rollout_gpus=gpus - train_gpus, rollout_tensor_parallel_size=ranks)
            held = plan.weights(config) * timing.element_bytes(r) / ranks / plan.GIB
            places = int((ROOM - held) / plan.kv_cache_gib(config, r.precision, 1000, PROMPT + longest, ranks) * 1000)
            if places >= 1:
                r = dataclasses.replace(r, max_num_seqs=min(256, places))
                engines.append((sum(timing.rollout(r, config, MEAN, timing.H200).values()), ranks, r))
        trainers = []
        for tensor in (1, 2, 4, 8):
            data = train_gpus // tensor
            if not engines or train_gpus % tensor:
                continue
            parallel = {"tensor_model_parallel_size": tensor, "sequence_parallel": tensor > 1, "distributed_optimizer": data > 1}
            r = dataclasses.replace(min(engines)[2], **parallel)
            if plan.trainer_of(r, config)["total"] < ROOM:
                trainers.append((sum(timing.train(r, config, responses, timing.H200).values()), tensor, r))
        if trainers:
            yield min(trainers)[2]


@functools.cache
def fastest(config, gpus: int, prompts: int, longest: int) -> tuple[run.Recipe, dict]:
    tried = [(r, timing.seconds(r, config, MEAN)) for r in candidates(config, gpus, prompts, longest)]
    return min(tried, key=lambda one: sum(one[1]["total"].values()))


def curve(prompts_at) -> list[str]:
    lines = []
    for name, config in MODELS.items():
        for longest in (1024, 32768):
            for gpus in GPUS:
                prompts = prompts_at(gpus)
                r, found = fastest(config, gpus, prompts, longest)
                total, tokens = sum(found["total"].values()), sum(timing.spread(prompts * SAMPLES, longest, MEAN))
                phases = [f"{spent:,.0f}" if spent >= 10 else f"{spent:.1f}" for spent in found["total"].values()]
                part, share = timing.largest(found)
                lines.append([
                    name, f"{longest // 1024}k", f"{gpus:,}", f"{r.train_gpus} (T {r.tensor_model_parallel_size})",
                    f"{r.rollout_gpus // r.rollout_tensor_parallel_size} × {r.rollout_tensor_parallel_size}",
                    *phases, f"{total:,.0f}", f"{tokens / total / gpus:,.0f}", f"{part}, {share:.0%}",
                ])  # fmt: skip
    head = ["model", "longest", "GPUs", "trainers", "engines", "publish", "rollout", "grade", "train", "record", "update, s",
            "tokens/s a GPU", "largest part"]  # fmt: skip
    return table(head, lines)


def strong() -> list[str]:
    return curve(lambda gpus: 128)


def weak() -> list[str]:
    return curve(lambda gpus: 2 * gpus)


def sensitivity() -> list[str]:
    """The 3B model on 1,024 GPUs, one thing changed at a time; layout as in the curves."""
    cases = [("fixed batch, 1k", 128, 1024), ("fixed batch, 32k", 128, 32768), ("2,048 prompts, 1k", 2048, 1024)]
    cases.append(("2,048 prompts, 32k", 2048, 32768))
    found = [fastest(CONFIG, 1024, prompts, longest)[0] for _, prompts, longest in cases]

    def scaled(hw, name, by):
        value = getattr(hw, name)
        return {name: {k: v * by for k, v in value.items()} if isinstance(value, dict) else value * by}

    def nccl(hw, r):
        """No host, no file, no reading: a broadcast's ring carries the policy at the network's rate. The digests stay."""
        return {"snapshot": math.inf, "disk": math.inf, "share_node": math.inf, "share_all": math.inf,
                "load": hw.network * hw.ring}  # fmt: skip

    def spare(hw, r):
        return {"driver_send": 0.0, "driver_write": 0.0, "driver_receive": 0.0, "driver_decode": 0.0, "rank_receive": 0.0}

    changes = {
        "as it is": lambda hw, r: {},
        "network halved": lambda hw, r: scaled(hw, "network", 0.5),
        "rings reach half as much": lambda hw, r: scaled(hw, "ring", 0.5),
        "ten times as long a hop": lambda hw, r: scaled(hw, "hop", 10),
        "shared file system halved": lambda hw, r: scaled(hw, "share_node", 0.5) | scaled(hw, "share_all", 0.5),
        "decode reaches half the share": lambda hw, r: scaled(hw, "decode", 0.5),
        "matrix products at half the rate": lambda hw, r: scaled(hw, "matmul", 0.5),
        "attention at a third of their rate": lambda hw, r: {"attention": 1 / 3},
        "mended: publication by NCCL": nccl,
        "mended: no completions through the driver": spare,
        "both mended": lambda hw, r: spare(hw, r) | nccl(hw, r),
    }
    lines = []
    for name, change in changes.items():
        row = []
        for r in found:
            hw = dataclasses.replace(timing.H200, **change(timing.H200, r))
            row.append(f"{sum(timing.seconds(r, CONFIG, MEAN, hw)['total'].values()):,.0f}")
        lines.append([name, *row])
    return table(["s an update", *(case[0] for case in cases)], lines)


SECTIONS = {
    "memory 3B": lambda: memory(CONFIG),
    "memory 9.4B": lambda: memory(WIDER),
    "check": check,
    "strong": strong,
    "weak": weak,
    "sensitivity": sensitivity,
}


def filled(text: str) -> str:
    """docs/scaling.md with every section between its marks as it should be."""
    for name, lines in SECTIONS.items():
        begin, end = f"<!-- predict {name} -->", "<!-- end -->"
        before, found, rest = text.partition(begin)
        if not found or end not in rest:
            raise SystemExit(f"{DOC}: the marks of {name!r} are missing")
        text = "\n".join([before + begin, *lines(), end + rest.partition(end)[2]])
    return text


# --- what a token costs the driver -----------------------------------------------------------------------------------


def driver() -> dict:
    """Seconds a response token of what is done with every completion of an update in one process; best of five."""
    import torch
    from ray import cloudpickle

    import checkpoint
    import data

    draw, count, length = random.Random(0), 64, 4096
    tokenizer = data.load_tokenizer(str(ROOT / "examples" / "tiny" / "model"))
    rows = [
        {
            "sample": i, "group": i // 8, "prompt": "p", "label": "l", "prompt_tokens": [5] * 128,
            "response_tokens": [draw.randrange(CONFIG.vocab_size) for _ in range(length)],
            "log_probs": [float(torch.tensor(-10 * draw.random())) for _ in range(length)], "reward": 0.5,
        }
        for i in range(count)
    ]  # fmt: skip
    known = [[draw.randrange(3, len(tokenizer)) for _ in range(length)] for _ in range(count)]
    packed = cloudpickle.dumps(rows, protocol=5)
    with tempfile.TemporaryDirectory() as folder:
        work = {
            "receive": lambda: pickle.loads(packed),
            "send": lambda: cloudpickle.dumps(rows, protocol=5),
            "decode": lambda: [data.decode(tokenizer, ids) for ids in known],
            "write": lambda: checkpoint.append_rollouts(folder, 0, rows),
            "rank": lambda: [torch.tensor(r["log_probs"], dtype=torch.float32) for r in pickle.loads(packed)],
        }
        seconds = {}
        for name, do in work.items():
            took = []
            for _ in range(5):
                began = time.perf_counter()
                do()
                took.append(time.perf_counter() - began)
            seconds[name] = min(took) / count / length
    return {
        "machine": machine(),
        "versions": versions("ray", "torch"),
        "seconds_a_token": seconds,
        "bytes_a_token_pickled": len(packed) / count / length,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into docs/scaling.md")
    parser.add_argument("--driver", action="store_true", help="measure the driver; writes results/driver.json")
    options = parser.parse_args()
    if options.driver:
        (ROOT / "results" / "driver.json").write_text(json.dumps(driver(), indent=1) + "\n")
    elif options.write:
        DOC.write_text(filled(DOC.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        for name, lines in SECTIONS.items():
            print(f"\n{name}\n")
            print("\n".join(lines()))


if __name__ == "__main__":
    main()
