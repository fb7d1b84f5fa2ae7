# PYTHON_ARGCOMPLETE_OK
"""How good is it? Held-out accuracy of a checkpoint, or of a run's newest checkpoint.

    python evaluate.py --run RUN --data heldout.jsonl
    python evaluate.py --model DIR --data heldout.jsonl --samples 16 --temperature 1.0 --json result.json

Each row of the data (every form that run.py takes: see data.py) is answered once greedily and `--samples` times at
`--temperature`; a reward grades every completion as in a run. Printed are

    greedy   mean reward of the greedy completions
    mean     mean reward of the sampled ones, and ±, its standard error over rows
    pass@k   the chance that at least one of k samples is correct (its reward is at least `--correct-from`), averaged over
             rows: 1 - C(n-c, k) / C(n, k) with c of the row's n samples correct, which is unbiased (arXiv 2107.03374)

for all rows and, where rows carry a string `source`, for each source (beyond the 50 largest, for the others together). With
`--run`, settings that are left out are the run's own, and so are the seeds: after the last update the result is the run's own
held-out accuracy, number for number.

The engine is the run's (rollout.RolloutEngine), in this process and without Ray, and so is its rule: the weights are
published to it with their digest and committed before a token is generated. Nothing is written to RUN.

Exit codes: 0 done; 1 a fault; 2 bad input; 3 a digest differs, or the weights are not finite.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import audit
import checkpoint
import export
import plan
import provider
import rollout

if TYPE_CHECKING:
    import torch

# Of --model; those of run.py. A run brings its own under the same names, but for `samples`, which it calls eval_samples.
DEFAULTS = {
    "temperature": 0.8, "samples": 4, "max_response_len": 48, "seed": 42, "reward": None, "max_num_seqs": 256,
    "input_key": "prompt", "label_key": "label", "label_as_string": False, "apply_chat_template": False,
    "chat_template_args": "{}", "drop_long_prompts": False,
}  # fmt: skip
MOST_SOURCES = 50


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="evaluate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )

    def option(flag: str, help: str, kind=None, **extra) -> None:
        parser.add_argument(flag, help=help, type=kind, **extra)

    def switch(flag: str, help: str) -> None:
        parser.add_argument(flag, help=f"{help} (default: as in the run, or no)", action=argparse.BooleanOptionalAction)

    option("--run", "evaluate this run's newest whole checkpoint", metavar="RUN")
    option("--model", "folder of a native checkpoint; with --run: the run's model folder, where it has moved", metavar="DIR")
    option("--data", "held-out rows: JSONL, gzip, Parquet, a folder (default with --run: its --eval-data)", metavar="FILE")
    option("--input-key", "field of a row that holds the prompt (default: the run's, or prompt)", metavar="NAME")
    option("--label-key", "field of a row that holds the label (default: the run's, or label)", metavar="NAME")
    switch("--label-as-string", "take a number as label, as text")
    switch("--apply-chat-template", "prompts are chat messages, or one of the user; the model's template")
    option("--chat-template-args", "JSON object of arguments for the template (default: the run's, or none)", metavar="JSON")
    switch("--drop-long-prompts", "drop and count prompts that are too long, which are else refused")
    option("--max-prompt-len", "longest prompt, tokens (default: the model's, or of a run that drops, its)", int, metavar="N")
    option("--max-prompts", "evaluate the first N rows; 0 is all (default: 0)", int, default=0, metavar="N")
    option("--updates", "with --run: the checkpoint after N updates", int, metavar="N")
    option("--samples", "samples a row; 0 is greedy only (default: the run's, or 4)", int, metavar="N")
    option("--temperature", "of the samples (default: the run's, or 0.8)", float, metavar="T")
    option("--max-response-len", "longest completion, tokens (default: the run's, or 48)", int, metavar="N")
    option("--seed", "of the samples (default: the run's, or 42)", int, metavar="N")
    option("--reward", "module:function or file.py:function (default: the run's, or Math-Verify on \\boxed{})", metavar="SPEC")
    option("--correct-from", "least reward of a correct completion, for pass@k (default: 1)", float, default=1.0, metavar="X")
    option("--device", "where the engine runs (default: auto)", choices=("auto", "cpu", "cuda"), default="auto")
    option("--precision", "of the engine (default: the run's, or the type that config.json names)", choices=(*rollout.DTYPES,))
    option("--max-num-seqs", "completions the engine decodes at once (default: the run's, or 256)", int, metavar="N")
    option("--kv-cache-gib", "the engine's KV cache, GiB (default: as needed on CPU, what is free on a GPU)", float, metavar="X")
    option("--json", "write the result there, too", metavar="FILE")
    option("--completions", "write every completion there, as JSONL", metavar="FILE")
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what could stand here
        import argcomplete

        argcomplete.autocomplete(parser)
    asked = parser.parse_args(argv)
    if not (asked.run or asked.model):
        raise ValueError("--run RUN or --model DIR is missing")
    if asked.updates is not None and not asked.run:
        raise ValueError("--updates names a checkpoint of --run")
    return asked


def settle(asked: argparse.Namespace, policy: export.Policy | None, record: dict) -> None:
    """Fill in what was left out, from the run or DEFAULTS, and check it. ValueError names the option."""
    import data

    recipe = policy.recipe if policy else {}
    for name, default in DEFAULTS.items():
        if getattr(asked, name) is None:
            setattr(asked, name, recipe.get({"samples": "eval_samples"}.get(name, name), default))
            if name == "reward" and asked.reward:
                check_reward(asked.reward, record)
    if not asked.data:
        if not (own := recipe.get("eval_data")):
            raise ValueError("--data FILE is missing")
        if (known := contents(record).get("eval_data")) and data.content(own) != known:
            raise ValueError(f"{own}: not the file that the run was evaluated on; --data {own} takes it as it is now")
        asked.data = own
    if asked.max_prompt_len is None and asked.drop_long_prompts and isinstance(recipe.get("max_prompt_len"), int):
        asked.max_prompt_len = recipe["max_prompt_len"]  # the rows that the run was evaluated on
    for name in (field.name for field in dataclasses.fields(data.Reading)):
        if type(getattr(asked, name)) is not type(DEFAULTS[name]) or getattr(asked, name) == "":
            raise ValueError(f"--{name.replace('_', '-')} cannot be {getattr(asked, name)!r}")
    if data.parse_template_arguments(asked.chat_template_args) and not asked.apply_chat_template:
        raise ValueError("--chat-template-args needs --apply-chat-template")
    least = {"samples": 0, "max_response_len": 1, "max_num_seqs": 1, "seed": 0, "max_prompts": 0}
    if asked.max_prompt_len is not None:
        least["max_prompt_len"] = 1
    for name, low in least.items():
        if not isinstance(value := getattr(asked, name), int) or value < low:
            raise ValueError(f"--{name.replace('_', '-')} must be a whole number of at least {low}, not {value}")
    if not isinstance(asked.temperature, int | float) or not (math.isfinite(asked.temperature) and asked.temperature > 0):
        raise ValueError(f"--temperature must be a finite number above 0, not {asked.temperature}")
    if not math.isfinite(asked.correct_from):
        raise ValueError(f"--correct-from must be a finite number, not {asked.correct_from}")
    if asked.kv_cache_gib is not None and not (math.isfinite(asked.kv_cache_gib) and asked.kv_cache_gib > 0):
        raise ValueError(f"--kv-cache-gib must be a finite number above 0, not {asked.kv_cache_gib}")


def contents(record: dict) -> dict:
    """What run.json holds of the inputs' content; {} where it holds nothing."""
    return record["contents"] if isinstance(record.get("contents"), dict) else {}


def check_reward(spec: str, record: dict) -> None:
    """ValueError when the run's reward file is another by now; naming it with --reward takes it as it is."""
    from reward import reward_source

    known = contents(record).get("reward")
    if isinstance(known, str) and known.partition(":")[0] != reward_source(spec)[1]:
        raise ValueError(f"{spec}: not the reward file that the run began with; --reward {spec} takes it as it is now")


# --- the engine ------------------------------------------------------------------------------------------------------


def choose_device(asked: str, wanted: str | None) -> str:
    """cpu or cuda. `auto` is what the run ran on (`wanted`), where that is here, otherwise what there is."""
    import torch

    there = torch.cuda.is_available()
    if asked == "cuda" and not there:
        raise ValueError("--device cuda: there is no CUDA device")
    device = asked if asked != "auto" else "cpu" if wanted == "cpu" or not there else "cuda"
    if wanted in ("cpu", "cuda") and device != wanted:
        print(f"note: the run ran on {wanted}, this is {device}: rounding differs", file=sys.stderr, flush=True)
    return device


@contextlib.contextmanager
def quiet():
    """Keeps off the screen what vLLM and torch print, C++ code past Python's streams among it; shown where they fail.

    In a run this goes to RUN/logs.
    """
    with tempfile.TemporaryFile() as kept:
        streams = (sys.stdout, sys.stderr)
        saved = [os.dup(1), os.dup(2)]
        failed = True
        try:
            for fd in (1, 2):
                streams[fd - 1].flush()
                os.dup2(kept.fileno(), fd)
            yield
            failed = False
        except (ValueError, checkpoint.GuardError, KeyboardInterrupt):
            failed = False  # one line says what it was
            raise
        finally:
            for fd in (1, 2):
                streams[fd - 1].flush()
                os.dup2(saved[fd - 1], fd)
                os.close(saved[fd - 1])
            if failed:
                kept.seek(0)
                sys.stderr.write(kept.read().decode("utf-8", "replace"))


def publish(engine: rollout.RolloutEngine, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict:
    """Publish full native tensors as `version`; returns the commit record. GuardError: see rollout.py.

    The digest is made here, of what is sent, before the engine sees it; the engine's own is of what it holds.
    """
    entries = {}

    def hashed():
        for name, tensor in tensors:
            entries[name] = checkpoint.tensor_digest(tensor)
            yield name, tensor

    engine.pause()
    engine.start(version)
    engine.receive(hashed())
    return engine.finish(version, checkpoint.policy_digest(entries))


def checkpoint_tensors(model: Path, config: provider.NanbeigeConfig, precision: str):
    """(name, tensor in `precision`) of a native checkpoint."""
    import torch

    for name, tensor in provider.read_checkpoint(model, config):
        yield name, tensor.to(getattr(torch, rollout.DTYPES[precision]))


def named_precision(model: Path) -> str:
    """The precision that a model's config.json names; fp32 where it names none that an engine runs."""
    raw = json.loads((model / provider.CONFIG).read_text(encoding="utf-8"))
    return {v: k for k, v in rollout.DTYPES.items()}.get(raw.get("torch_dtype") or raw.get("dtype"), "fp32")


def requests(prompts: list, samples: int, temperature: float, max_tokens: int, seed: int, updates: int) -> list[dict]:
    """`samples` sampled and one greedy request a row, in row order, seeded as in run.py's evaluation after `updates`."""
    k = samples
    return [
        {
            "prompt_tokens": list(prompt.tokens),
            "seed": rollout.completion_seed(seed, updates, row * (k + 1) + j, purpose="eval"),
            "max_tokens": max_tokens,
            "temperature": temperature if j < k else 0.0,
        }
        for row, prompt in enumerate(prompts)
        for j in range(k + 1)
    ]


# --- the numbers -----------------------------------------------------------------------------------------------------


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold a correct one: 1 - C(n-c, k) / C(n, k).

    Unbiased for the chance that k fresh samples do (arXiv 2107.03374, eq. 1). ValueError unless 0 <= c <= n, 1 <= k <= n.
    """
    if not (0 <= correct <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {correct} correct in {n}")
    return 1 - math.comb(n - correct, k) / math.comb(n, k)


def figures(rows: list[list[dict]], samples: int, correct_from: float) -> dict:
    """What the table and --json say of some rows; a row is its samples' completions, then the greedy one."""
    sampled = [[c["reward"] for c in row[:samples]] for row in rows]
    every = [c for row in rows for c in row]
    result = {
        "rows": len(rows),
        "greedy": mean([row[samples]["reward"] for row in rows]),
        "tokens": mean([len(c["response_tokens"]) for c in every]),
        "truncated": mean([float(c["finish_reason"] == "length") for c in every]),
    }
    if samples:
        means, ks = [mean(rewards) for rewards in sampled], [k for k in (2**i for i in range(30)) if k < samples]
        counts = [sum(r >= correct_from for r in rewards) for rewards in sampled]
        centre = mean(means)
        spread = math.fsum((m - centre) ** 2 for m in means) / max(1, len(means) - 1)
        result |= {
            "accuracy": mean([r for rewards in sampled for r in rewards]),
            "standard_error": math.sqrt(spread / len(means)),
            "pass_at": {str(k): mean([pass_at_k(samples, c, k) for c in counts]) for k in (*ks, samples)},
        }
    return result


def breakdown(rows: list[list[dict]], origin: list[str | None], samples: int, correct_from: float) -> dict:
    """`figures` of all rows, and under `sources` those of each source by name; {} there where no row has a source.

    origin: the source of each row. Beyond MOST_SOURCES the smaller ones are "(other)" together: a field of that name may be
    anything, and every number here is a curve of its own.
    """
    named = [one or "(none)" for one in origin] if any(origin) else []
    counts = collections.Counter(named)
    kept = sorted(counts, key=lambda name: (-counts[name], name))[:MOST_SOURCES]
    named = [name if name in kept else "(other)" for name in named]
    parts = {name: [row for row, own in zip(rows, named, strict=True) if own == name] for name in sorted(set(named))}
    sources = {name: figures(part, samples, correct_from) for name, part in parts.items()}
    return {**figures(rows, samples, correct_from), "sources": sources}


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def table(parts: dict[str, dict]) -> str:
    """Text: one line a part, the numbers of `figures` in columns."""
    first = next(iter(parts.values()))
    ks = list(first.get("pass_at", ()))
    lines = [["", "rows", "greedy", *(["mean", "±"] if ks else []), *(f"pass@{k}" for k in ks), "tokens", "truncated"]]
    for name, f in parts.items():
        percents = [f["greedy"], *((f["accuracy"], f["standard_error"], *f["pass_at"].values()) if ks else ())]
        shown = [f"{x:.1%}" for x in percents]
        lines.append([audit.safe(name, 40), f"{f['rows']}", *shown, f"{f['tokens']:.1f}", f"{f['truncated']:.1%}"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


# --- the command -----------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    asked = parse(argv)
    # Before torch is loaded. One thread: with more, vLLM's log-probabilities on CPU depend on the batch in the last bit.
    # The names for a GPU change nothing without one.
    os.environ.update(rollout.engine_environment(rollout.EngineSettings(device="cuda")))
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")
    warnings.simplefilter("ignore", FutureWarning)  # vLLM's own calls of torch, nothing that a user can mend
    import data
    from reward import Grader

    policy, record = None, {}
    if asked.run:
        policy = export.find_policy(asked.run, asked.updates, asked.model, lambda text: print(text, file=sys.stderr, flush=True))
        record = checkpoint.read_run(asked.run)
    model = policy.model if policy else Path(asked.model)
    config = policy.config if policy else provider.read_config(model)
    if not policy:
        provider.check_checkpoint(model, config)
    settle(asked, policy, record)
    if asked.max_response_len >= config.max_position_embeddings:
        raise ValueError(f"--max-response-len must be below max_position_embeddings, {config.max_position_embeddings}")
    tokenizer = data.load_tokenizer(model)
    how = data.Reading(**{field.name: getattr(asked, field.name) for field in dataclasses.fields(data.Reading)})
    most = config.max_position_embeddings - asked.max_response_len
    most = min(most, asked.max_prompt_len or most)
    dropped = [] if asked.drop_long_prompts else None
    prompts = data.capped(data.read_prompts(asked.data, tokenizer, most, config.vocab_size, how, dropped), asked.max_prompts)
    if dropped:
        print(f"{asked.data}: {len(dropped):,} prompts above {most} tokens are dropped, the first {dropped[0]}")
    for path in (asked.json, asked.completions):
        if path and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"{path}: no such directory")

    updates, version = (policy.updates, policy.state["policy_version"]) if policy else (0, 1)
    precision = asked.precision or (policy.precision if policy else named_precision(model))
    device = choose_device(asked.device, record.get("device"))
    prompt_len = max(len(p.tokens) for p in prompts)
    if policy and isinstance(own := policy.recipe.get("max_prompt_len"), int):
        prompt_len = max(prompt_len, min(own, config.max_position_embeddings - asked.max_response_len))
    length, count = prompt_len + asked.max_response_len, len(prompts) * (asked.samples + 1)
    needed = plan.kv_cache_gib(config, precision, min(asked.max_num_seqs, count), length) if device == "cpu" else 0.0
    settings = rollout.EngineSettings(
        precision=precision,
        device=device,
        max_model_len=length,
        max_num_seqs=asked.max_num_seqs,
        kv_cache_gib=asked.kv_cache_gib or needed,
        cuda_graphs=device == "cuda" and (policy is None or policy.recipe.get("cuda_graphs") is not False),
        split_matmul=(device, precision) == ("cuda", "fp32") and (not policy or policy.recipe.get("split_matmul") is not False),
        seed=asked.seed,
        temperature=asked.temperature,
    )
    with contextlib.ExitStack() as stack:
        grader = stack.enter_context(Grader(asked.reward))
        with quiet():
            engine = rollout.RolloutEngine(str(model.absolute()), None, settings)
        stack.callback(engine.close)
        tensors = export.policy_tensors(policy, precision) if policy else checkpoint_tensors(model, config, precision)
        commit = publish(engine, version, tensors)
        what = f"{asked.run} after {updates} updates" if policy else str(model)
        print(f"{what}: version {version} committed, digest {commit['digest']}", flush=True)
        print(
            f"{asked.data}: {len(prompts)} rows, each greedy and {asked.samples} × at temperature {asked.temperature:g}, "
            f"seed {asked.seed}; {device}, {precision}",
            flush=True,
        )
        began = time.perf_counter()
        asked_for = requests(prompts, asked.samples, asked.temperature, asked.max_response_len, asked.seed, updates)
        with quiet():
            answers = engine.generate(asked_for)
        seconds = time.perf_counter() - began
        each = asked.samples + 1
        for i, answer in enumerate(answers):
            prompt = prompts[i // each]
            answer |= {"row": i // each, "sample": i % each if i % each < asked.samples else "greedy"}
            answer |= {"prompt": prompt.prompt, "label": prompt.label, "source": prompt.source}
            answer["response"] = data.decode(tokenizer, answer["response_tokens"])
        grades = grader.grade([(a["prompt"], a["response"], a["label"]) for a in answers])
    for answer, grade in zip(answers, grades, strict=True):
        answer["reward"] = grade.reward
    rows = [answers[i : i + each] for i in range(0, len(answers), each)]
    numbers = breakdown(rows, [prompt.source for prompt in prompts], asked.samples, asked.correct_from)
    print("\n" + table({"all": numbers, **{f"  {name}": part for name, part in numbers["sources"].items()}}))
    limited = sum(g.limit is not None for g in grades)
    tokens = sum(len(a["response_tokens"]) for a in answers)
    print(f"\n{tokens:,} tokens in {seconds:.1f} s" + (f"; the grader cut {limited} answers short" if limited else ""))
    if asked.json:
        used = {name: getattr(asked, name) for name in (*DEFAULTS, "correct_from", "data")}
        result = {
            **{"model": str(model), "run": asked.run, "updates": updates, "policy_version": version},
            **{"policy_digest": commit["digest"], "settings": {**used, "device": device, "precision": precision}},
            **{"engine": engine.engine_version, "seconds": seconds, "generated_tokens": tokens, "grader_limits": limited},
            "samples": asked.samples,
            "dropped": len(dropped or ()),
            **numbers,
        }
        Path(asked.json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if asked.completions:
        Path(asked.completions).write_text("".join(json.dumps(a) + "\n" for a in answers), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(export.exit_code("evaluate.py", main, sys.argv[1:]))
