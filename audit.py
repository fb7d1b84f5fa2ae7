"""Are two runs the same, bit for bit? Is one run consistent with itself?

    python audit.py RUN_A RUN_B       compares them; one table shows the first difference of each kind
    python audit.py RUN               checks one run: counts, versions, digests, traces, checkpoints

Exit code 0: equal, or consistent. 1: a difference, or an inconsistency. 2: bad input (no run directory, for example).

Compared are completions (prompts, tokens, log-probabilities, rewards, finish reasons, traces but for the engine epoch,
which a resume raises), the metrics that a repetition must reproduce (times are not among them), the digests of the
published policies, and what state.json holds of each checkpoint that both runs kept: dataset cursor and one digest for
every full, unsharded tensor. That makes the parallel layout, files and shards irrelevant, and the tensor files
themselves unnecessary: they may have been deleted to save room. Of the first differing tensor the first differing
element is printed, where both runs still have the tensor files and torch is installed; `--no-values` leaves that out.

Bit for bit is promised under one parallel layout. Under another (--train-gpus and the options beside it) sums have another
order: at the point where the layout changed all digests are equal still, and from there on the numbers agree to rounding.
`--tolerance X` compares such runs: tokens, rewards and all whole numbers must be equal, other numbers may differ by X times
the larger of them and 1, and a tensor whose digests differ by X times its 2-norm, for which the tensor files are read.

A run that is going on can be audited: the updates complete so far are looked at, and the table says how many.
What a run contains is text that a model wrote; nothing of it is printed without escaping.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import checkpoint

COMPLETION_PARTS = {  # row of the table -> keys of a completion
    "prompts": ("sample", "group", "prompt_tokens"),
    "response tokens": ("response_tokens",),
    "log-probabilities": ("log_probs",),
    "rewards": ("reward",),
    "finish reasons": ("finish_reason",),
    "traces": ("trace",),
}
# Metrics that are functions of what was sampled and trained. Others (times, memory, graders' limits) may differ.
METRICS = (
    "policy_version", "reward_mean", "reward_std", "response_tokens_mean", "truncated_fraction", "loss", "grad_norm",
    "max_logprob_error", "mean_logprob_error", "clip_fraction", "entropy", "kl_rollout", "categorical_kl",
    "blocked_fraction", "correction_clip_fraction", "value_loss", "value_mean", "return_mean", "explained_variance",
    "critic_grad_norm", "frac_reward_zero_std", "eval",
)  # fmt: skip
STATE_PARTS = ("policy_version", "policy_digest", "cursor", "scheduler", "rng")  # of state.json, beside `tensors`
MISSING = type("Missing", (), {"__repr__": lambda self: "(missing)"})()


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. good: True or False, or None for a remark that does not count."""

    what: str
    good: bool | None
    detail: str


# ---------------------------------------------------------------------------------------------------------------------
# Showing


def safe(text: str, limit: int = 400) -> str:
    """Text on one line in printable ASCII, the rest escaped, cut at `limit` characters."""
    shown = "".join(c if " " <= c <= "~" else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def show(value: Any) -> str:
    """A JSON value: floats in full precision, strings escaped, long values cut."""
    if isinstance(value, str) and value.isalnum():
        return safe(value, 80)
    if isinstance(value, int) and abs(value) > 10**40:
        return "(a huge number)"
    return safe(repr(value), 80)


def table(rows: list[Row], words: tuple[str, str]) -> str:
    """The rows as text. words: what to say of a good and of a bad row."""
    verdicts = [{True: words[0], False: words[1], None: "note"}[row.good] for row in rows]
    widths = max(len(row.what) for row in rows), max(map(len, verdicts))
    lines = [f"{row.what:{widths[0]}}  {v:{widths[1]}}  {row.detail}" for row, v in zip(rows, verdicts, strict=True)]
    return "\n".join(line.rstrip() for line in lines)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


class RunFiles:
    """What a run holds at one moment. ValueError when `path` is no run directory."""

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self.record = checkpoint.read_run(self.path)
        # Asked before reading: a run that ends meanwhile is treated as one that is going on, which asks less of it.
        self.live = checkpoint.is_locked(self.path)

    def metrics(self) -> list[dict[str, Any]]:
        """Rows of the completed updates; ValueError for a torn line of a run that nobody writes, or wrong numbering."""
        try:
            rows = checkpoint.read_metrics(self.path, torn=self.live)
        except ValueError as error:
            hint = "; the run was killed here, --resume drops the line" if "torn" in str(error) else ""
            raise ValueError(f"{error}{hint}") from None
        for index, row in enumerate(rows):
            if row.get("update") != index:
                raise ValueError(f"metrics.jsonl:{index + 1}: update is {show(row.get('update'))}, not {index}")
        return rows

    def wanted(self) -> int | None:
        """Updates in total, from the recipe."""
        recipe = self.record.get("recipe")
        value = recipe.get("updates") if isinstance(recipe, dict) else None
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

    def digests(self) -> dict[int, str]:
        """Version -> digest of the committed policies. ValueError when a version has two digests."""
        found: dict[int, str] = {}
        for record in checkpoint.read_commits(self.path):
            version, digest = record["version"], record["digest"]
            if found.setdefault(version, digest) != digest:
                raise ValueError(f"version {show(version)} was committed with {found[version]} and with {digest}")
        return found

    def state(self, updates: int) -> dict[str, Any] | None:
        """state.json of a checkpoint; None when the run that is going on removed the checkpoint meanwhile."""
        try:
            return checkpoint.read_state(self.path, updates)
        except ValueError:
            if self.live and updates not in checkpoint.list_checkpoints(self.path):
                return None
            raise


def finding(what: str, check: Callable[[], Row]) -> Row:
    """The row that `check` returns, or one that says what was unreadable."""
    try:
        return check()
    except (ValueError, OSError) as error:
        return Row(what, False, safe(str(error)))
    except RecursionError:
        return Row(what, False, "nested too deeply")


# ---------------------------------------------------------------------------------------------------------------------
# Two runs


def first_difference(a: Any, b: Any, path: str = "", tolerance: float = 0.0) -> tuple[str, Any, Any] | None:
    """(path, value in a, value in b) of the first place where two JSON values differ, or None.

    Numbers are equal when all their bits are: 0.0 and -0.0 differ, 1 and 1.0 do not. With `tolerance`, numbers that are
    not both whole are equal when they differ by no more than it, times the larger of their sizes and 1.
    """
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b}):
            inner = f"{path}.{safe(key, 80)}" if path else safe(key, 80)
            if found := first_difference(a.get(key, MISSING), b.get(key, MISSING), inner, tolerance):
                return found
        return None
    if isinstance(a, list) and isinstance(b, list):
        if a == b and repr(a) == repr(b):  # repr tells 0.0 from -0.0
            return None
        for index, (x, y) in enumerate(zip(a, b, strict=False)):
            if found := first_difference(x, y, f"{path}[{index}]", tolerance):
                return found
        return None if len(a) == len(b) else (f"{path} length", len(a), len(b))
    if isinstance(a, bool) or isinstance(b, bool) or not (isinstance(a, int | float) and isinstance(b, int | float)):
        return None if type(a) is type(b) and a == b else (path, a, b)
    if tolerance and float in (type(a), type(b)) and abs(a - b) <= tolerance * max(1, abs(a), abs(b)):
        return None
    same = a == b and (a != 0 or math.copysign(1, a) == math.copysign(1, b))
    return None if same else (path, a, b)


def difference(place: str, found: tuple[str, Any, Any]) -> str:
    path, a, b = found
    return f"first difference: {place}{', ' if path else ''}{path}: {show(a)} | {show(b)}"


def compare(path_a: Path | str, path_b: Path | str, values: bool = False, tolerance: float = 0.0) -> list[Row]:
    """The table of two runs. values: whether a differing tensor is looked up in the tensor files. tolerance: 0 for bit for
    bit, else what runs of different layouts may differ by (see the head of this file).

    ValueError when one of them is no run directory.
    """
    a, b = RunFiles(path_a), RunFiles(path_b)
    try:
        rows_a, rows_b = a.metrics(), b.metrics()
    except ValueError as error:
        return [Row("updates", False, safe(str(error)))]
    live = a.live or b.live
    count = min(len(rows_a), len(rows_b))
    rows = [_updates_row(a, b, len(rows_a), len(rows_b))]
    if settings := _settings(a.record.get("recipe"), b.record.get("recipe")):
        rows.append(Row("settings", None, "; ".join(settings)))
    rows += _compare_completions(a, b, count, tolerance)
    rows.append(finding("metrics", lambda: _compare_metrics(rows_a[:count], rows_b[:count], tolerance)))
    rows.append(finding("publications", lambda: _compare_commits(a, b, count, live, tolerance)))
    rows += _compare_checkpoints(a, b, live, values, tolerance)
    return rows


def _settings(a: Any, b: Any) -> list[str]:
    """Every setting that differs: "name: in A | in B"."""
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return [] if a == b else [difference("the recipe", ("", a, b))]
    names = (name for name in sorted({*a, *b}) if first_difference(a.get(name, MISSING), b.get(name, MISSING)))
    return [f"{safe(name, 80)}: {show(a.get(name, MISSING))} | {show(b.get(name, MISSING))}" for name in names]


def _updates_row(a: RunFiles, b: RunFiles, n_a: int, n_b: int) -> Row:
    going = [f"run {name} is going on" for name, run in (("A", a), ("B", b)) if run.live]
    count = min(n_a, n_b)
    compared = f"{count} compared" + (f" ({n_a} | {n_b} so far; {', '.join(going)})" if going else "")
    # A run that is going on may lag behind; one that has ended with fewer updates than the other has is different.
    lags = n_a == n_b or (n_a < n_b and a.live) or (n_b < n_a and b.live)
    return Row("updates", True, compared) if lags else Row("updates", False, f"{n_a} | {n_b}; the first {compared}")


def _compare_completions(a: RunFiles, b: RunFiles, count: int, tolerance: float) -> list[Row]:
    found: dict[str, str] = {}
    total = 0
    for update in range(count):
        try:
            left, right = checkpoint.read_rollouts(a.path, update), checkpoint.read_rollouts(b.path, update)
            total += len(left)
            if len(left) != len(right):
                found.setdefault("completions", f"first difference: update {update}: {len(left)} | {len(right)}")
            for sample, (x, y) in enumerate(zip(left, right, strict=False)):
                if x == y and repr(x) == repr(y):
                    continue
                for what, keys in COMPLETION_PARTS.items():
                    left_part, right_part = _part(x, keys, tolerance), _part(y, keys, tolerance)
                    if what not in found and (place := first_difference(left_part, right_part, "", tolerance)):
                        found[what] = difference(f"update {update}, sample {sample}", place)
        except (ValueError, OSError) as error:
            found.setdefault("completions", safe(str(error)))
        except RecursionError:
            found.setdefault("completions", f"update {update}: nested too deeply")
    rows = [Row("completions", "completions" not in found, found.get("completions", f"{total}"))]
    return rows + [Row(what, what not in found, found.get(what, "")) for what in COMPLETION_PARTS]


def _part(completion: Mapping[str, Any], keys: tuple[str, ...], tolerance: float) -> dict[str, Any]:
    part = {key: completion[key] for key in keys if key in completion}
    if isinstance(part.get("trace"), dict):
        apart = ("epoch", "digest") if tolerance else ("epoch",)  # a digest knows no tolerance
        part["trace"] = {key: value for key, value in part["trace"].items() if key not in apart}
    return part


def _compare_metrics(rows_a: list[dict[str, Any]], rows_b: list[dict[str, Any]], tolerance: float) -> Row:
    names = {*METRICS, *(f"{name}_steps" for name in METRICS)}
    for update, (x, y) in enumerate(zip(rows_a, rows_b, strict=True)):
        left, right = ({k: _timeless(v) for k, v in row.items() if k in names} for row in (x, y))
        if place := first_difference(left, right, "", tolerance):
            return Row("metrics", False, difference(f"update {update}", place))
    compared = sorted(names & {key for row in rows_a for key in row})
    return Row("metrics", True, ", ".join(compared))


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(item) for key, item in value.items() if key != "seconds"}
    return value


def _compare_commits(a: RunFiles, b: RunFiles, count: int, live: bool, tolerance: float) -> Row:
    left, right = a.digests(), b.digests()
    if tolerance and left.keys() == right.keys():
        same = sum(left[version] == right[version] for version in left)
        return Row("publications", True, f"{len(left)} versions, {same} with the same digest")
    for version in sorted({*left, *right}):
        x, y = left.get(version, MISSING), right.get(version, MISSING)
        if x != y and not (live and MISSING in (x, y) and version > count):
            return Row("publications", False, difference(f"version {show(version)}", ("", x, y)))
    return Row("publications", True, f"{len({*left} & {*right})} versions, same digests")


def _compare_checkpoints(a: RunFiles, b: RunFiles, live: bool, values: bool, tolerance: float) -> list[Row]:
    kept_a, kept_b = checkpoint.list_checkpoints(a.path), checkpoint.list_checkpoints(b.path)
    both = sorted({*kept_a} & {*kept_b})
    kept = f"{_numbers(kept_a)} | {_numbers(kept_b)}"
    if not live and kept_a[-1:] != kept_b[-1:]:
        rows = [Row("checkpoints", False, f"the last ones differ: {kept}")]
    elif not both:
        return [Row("checkpoints", None, f"none in common: {kept}")]
    else:
        rows = [Row("checkpoints", True, f"after {_numbers(both)} updates compared (kept: {kept})")]
    parts: dict[str, str | None] = {}  # row -> first difference
    sizes: dict[str, int] = {}
    for updates in both:
        try:
            x, y = a.state(updates), b.state(updates)
        except (ValueError, OSError) as error:
            parts.setdefault("state.json", safe(str(error)))
            continue
        if x is None or y is None:
            continue
        for what, place, size in _state_differences(a, b, updates, x, y, values, tolerance):
            sizes[what] = max(size, sizes.get(what, 0))
            parts[what] = parts.get(what) or place
    order = [*STATE_PARTS, "actor", "critic", "optimizer"]
    for what in sorted(parts, key=lambda w: (order.index(w) if w in order else len(order), w)):
        same = f"{sizes[what]} tensors" if sizes.get(what) else ""
        rows.append(Row(safe(what.replace("_", " "), 40), parts[what] is None, parts[what] or same))
    return rows


def _numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def _state_differences(
    a: RunFiles, b: RunFiles, updates: int, x: dict[str, Any], y: dict[str, Any], values: bool, tolerance: float
) -> Iterator[tuple[str, str | None, int]]:
    """(row, first difference or None, number of tensors) for each part of two state.json."""
    place = f"checkpoint {updates:06d}"
    # Another number of processes has another number of RNG states, and rounding another digest.
    apart = ("policy_digest", "rng") if tolerance else ()
    for key in STATE_PARTS:
        if key not in apart and (key in x or key in y):
            found = first_difference(x.get(key, MISSING), y.get(key, MISSING))
            yield key, difference(place, found) if found else None, 0
    for kind in sorted({*x["tensors"], *y["tensors"]}):
        left, right = x["tensors"].get(kind, {}), y["tensors"].get(kind, {})
        names = [name for name in sorted({*left, *right}) if left.get(name) != right.get(name)]
        if tolerance and names and left.keys() == right.keys():
            yield kind, _beyond(a, b, updates, kind, names, tolerance), len(left)
            continue
        if not names:
            yield kind, None, len(left)
            continue
        digests = f"{left.get(names[0], MISSING)!s:.16} | {right.get(names[0], MISSING)!s:.16}"
        text = f"first difference: {place}, {safe(names[0], 120)}: BLAKE3 {digests}"
        if values:
            text += "; " + _element(a, b, updates, kind, names[0])
        if len(names) > 1:
            text += f" ({len(names)} of {len({*left, *right})} tensors differ)"
        yield kind, text, len(left)


# ---------------------------------------------------------------------------------------------------------------------
# Elements of stored tensors


def _beyond(a: RunFiles, b: RunFiles, updates: int, kind: str, names: list[str], tolerance: float) -> str | None:
    """The first of the tensors `names` that differs by more than `tolerance` times its 2-norm, in words; or None."""
    for name in names:
        try:
            x, y = (load_tensor(run.path, updates, kind, name).double() for run in (a, b))
        except (ValueError, OSError, ImportError) as error:
            return f"checkpoint {updates:06d}, {safe(name, 120)}: digests differ, values unknown: {safe(str(error), 160)}"
        apart, size = (x - y).norm().item(), x.norm().item()
        if not apart <= tolerance * size:
            return f"checkpoint {updates:06d}, {safe(name, 120)}: the 2-norm of the difference is {apart:.3g}, of A's {size:.3g}"
    return None


def _element(a: RunFiles, b: RunFiles, updates: int, kind: str, name: str) -> str:
    """The first differing element of one tensor, in words."""
    try:
        import torch

        x, y = (load_tensor(run.path, updates, kind, name) for run in (a, b))
    except (ValueError, OSError, ImportError) as error:
        return f"values unknown: {safe(str(error), 160)}"
    if x.shape != y.shape or x.dtype != y.dtype:
        return f"{x.dtype} {tuple(x.shape)} | {y.dtype} {tuple(y.shape)}"
    bits = torch.ne(*(t.contiguous().reshape(-1).view(torch.uint8).view(t.numel(), -1) for t in (x, y))).any(1)
    if not bits.any():
        return "the stored values are equal, so what state.json says of one of them is not"
    flat = int(bits.nonzero()[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), x.shape)]
    fused = " of q, k and v as they are stored together" if ".self_attn." in name and "o_proj" not in name else ""
    return f"{index}{fused}: {x.reshape(-1)[flat].item()!r} | {y.reshape(-1)[flat].item()!r}"


def load_tensor(run: Path | str, updates: int, kind: str, name: str) -> Any:
    """One full tensor out of a checkpoint's files, by the digest's `kind` and `name`. ValueError when it is not there.

    Optimizer tensors carry the name `network.key`, key being the one under which Megatron's dist_checkpointing stored
    them. Actor and critic have native names in state.json and Megatron's in the files. Query, key and value of a layer
    are stored as one tensor, interleaved by head: for each of the three the whole is returned.
    """
    network, key = (kind, name) if kind != "optimizer" else name.partition(".")[::2]
    root = checkpoint.checkpoint_path(run, updates) / network
    if network not in ("actor", "critic") or not root.is_dir():
        raise ValueError(f"{run}: no tensor files")
    if kind == "optimizer":
        return read_stored(root, key)
    layer, _, part = key.removeprefix("model.").rpartition(".")[0].partition(".")[2].partition(".")
    stored = _STORED.get(part) if key.startswith("model.layers.") else _STORED.get(key)
    if stored is None:
        raise ValueError(f"{network}: {safe(key, 80)} is not a tensor of this model")
    tensor = read_stored(root, f"layers.{layer}.{stored}" if part else stored)
    return tensor.chunk(2)[part == "mlp.up_proj"] if part in ("mlp.gate_proj", "mlp.up_proj") else tensor


_STORED = {  # native name, or its part behind the layer number -> Megatron's name in `provider.LoopedModel`
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "final_norm.weight",
    "lm_head.weight": "output_layer.weight",
    "value_head.weight": "value_head.weight",
    "input_layernorm": "self_attention.linear_qkv.layer_norm_weight",
    "self_attn.q_proj": "self_attention.linear_qkv.weight",
    "self_attn.k_proj": "self_attention.linear_qkv.weight",
    "self_attn.v_proj": "self_attention.linear_qkv.weight",
    "self_attn.o_proj": "self_attention.linear_proj.weight",
    "post_attention_layernorm": "mlp.linear_fc1.layer_norm_weight",
    "mlp.gate_proj": "mlp.linear_fc1.weight",
    "mlp.up_proj": "mlp.linear_fc1.weight",
    "mlp.down_proj": "mlp.linear_fc2.weight",
}


def read_stored(root: Path, key: str) -> Any:
    """A full tensor from a torch.distributed.checkpoint directory, put together from its shards, in this one process.

    Nothing in the directory is trusted: the pickled index may name only the classes of such an index, and the shards
    are read with `weights_only`. ValueError when the tensor is not there or cannot be read.
    """
    import io
    import pickle

    import torch

    class Index(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            known = (module, name) in _INDEX_NAMES
            return super().find_class(module, name) if known else type(name, (_Opaque,), {})

    try:
        index = Index(io.BytesIO((root / ".metadata").read_bytes())).load()
        entry = index.state_dict_metadata[key]
        full = torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        filled = 0
        for where, stored in index.storage_data.items():
            if where.fqn != key:
                continue
            if Path(stored.relative_path).name != stored.relative_path:
                raise ValueError("a shard outside the checkpoint")
            with open(root / stored.relative_path, "rb") as file:
                file.seek(stored.offset)
                part = torch.load(io.BytesIO(file.read(stored.length)), map_location="cpu", weights_only=True)
            offsets = where.offset or (0,) * full.dim()
            full[tuple(slice(o, o + s) for o, s in zip(offsets, part.shape, strict=True))] = part
            filled += part.numel()
        if filled != full.numel():
            raise ValueError("shards are missing")
        return full
    except KeyError:
        raise ValueError(f"{root.name}: {safe(key, 80)} is not stored under this name") from None
    except FileNotFoundError:
        raise ValueError(f"{root.name}: the tensor files are gone") from None
    except Exception as error:  # hostile or torn bytes can fail in any way inside pickle and torch
        raise ValueError(f"{root.name}: unreadable ({type(error).__name__}: {safe(str(error), 80)})") from None


class _Opaque:
    """Stands for whatever class an index names that has no business here; takes any state, does nothing."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __setstate__(self, _: Any) -> None:
        pass


_INDEX_NAMES = {
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch", name) for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool")),
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# One run


def check(path: Path | str) -> list[Row]:
    """The table of one run: is it consistent with itself? ValueError when `path` is no run directory."""
    run = RunFiles(path)
    try:
        metrics = run.metrics()
    except ValueError as error:
        return [Row("updates", False, safe(str(error)))]
    rows = [finding("updates", lambda: _check_updates(run, metrics))]
    rows.append(finding("publications", lambda: _check_commits(run, len(metrics))))
    rows.append(finding("completions", lambda: _check_completions(run, metrics)))
    rows.append(finding("traces", lambda: _check_traces(run, len(metrics))))
    for updates in checkpoint.list_checkpoints(run.path):
        what = f"checkpoint {updates:06d}"
        rows.append(finding(what, lambda w=what, n=updates: _check_checkpoint(run, w, n)))
    rows.append(finding("end", lambda: _check_end(run, len(metrics))))
    return rows


def _check_updates(run: RunFiles, metrics: list[dict[str, Any]]) -> Row:
    count, wanted = len(metrics), run.wanted()
    for update, row in enumerate(metrics):
        if row.get("policy_version") != update + 1:
            version = show(row.get("policy_version"))
            return Row("updates", False, f"update {update}: policy_version is {version}, {update + 1} was expected")
    if wanted is not None and count > wanted:
        return Row("updates", False, f"{count} recorded, the recipe asks for {wanted}")
    folder = run.path / "rollouts"
    there = {int(file.stem) for file in folder.glob("*.jsonl") if file.stem.isdecimal()} if folder.is_dir() else set()
    if missing := set(range(count)) - there:
        return Row("updates", False, f"update {min(missing)} has metrics but no rollouts")
    # The rollouts of an update are written before its metrics: one more is a run at work, or one that was killed then.
    if (beyond := there - set(range(count + 1))) and not run.live:
        return Row("updates", False, f"update {min(beyond)} has rollouts, but {count} updates are recorded")
    state = f" of {wanted}" if wanted is not None else ""
    return Row("updates", True, f"{count}{state}" + ("; the run is going on" if run.live else ""))


def _check_commits(run: RunFiles, count: int) -> Row:
    records, last = checkpoint.read_commits(run.path), None
    for line, record in enumerate(records, 1):
        now = (record["epoch"], record["version"])
        if last is not None and not (now[0] > last[0] or (now[0] == last[0] and now[1] > last[1])):
            where = f"commits.jsonl:{line}: (epoch, version) ({show(now[0])}, {show(now[1])})"
            return Row("publications", False, f"{where} follows ({show(last[0])}, {show(last[1])})")
        last = now
    digests = run.digests()
    for version in range(1, count + 1):
        if version not in digests:
            return Row("publications", False, f"version {version} was sampled from and never committed")
    epochs = len({record["epoch"] for record in records})
    return Row("publications", True, f"{len(digests)} versions in {epochs} engine epochs")


def _check_completions(run: RunFiles, metrics: list[dict[str, Any]]) -> Row:
    total, size = 0, None
    for update, row in enumerate(metrics):
        completions = checkpoint.read_rollouts(run.path, update)
        size = len(completions) if size is None else size
        if len(completions) != size or not completions:
            return Row("completions", False, f"update {update} has {len(completions)}, update 0 has {size}")
        for sample, completion in enumerate(completions):
            if wrong := _wrong_completion(completion, sample):
                return Row("completions", False, f"update {update}, sample {sample}: {wrong}")
        mean, said = math.fsum(c["reward"] for c in completions) / size, row.get("reward_mean")
        if not _number(said) or not math.isclose(mean, said, rel_tol=1e-5, abs_tol=1e-6):
            return Row("completions", False, f"update {update}: reward_mean is {show(said)}, the rewards give {mean!r}")
        total += size
    return Row("completions", True, f"{total}, {size or 0} an update")


def _wrong_completion(completion: Mapping[str, Any], sample: int) -> str | None:
    """What is wrong with a completion, or None."""
    tokens, log_probs = completion.get("response_tokens"), completion.get("log_probs")
    if completion.get("sample") != sample:
        return f"sample is {show(completion.get('sample'))}"
    for key in ("prompt_tokens", "response_tokens"):
        value = completion.get(key)
        if not isinstance(value, list) or not all(type(t) is int and t >= 0 for t in value):
            return f"{key} is no list of token numbers"
    if not isinstance(log_probs, list) or len(log_probs) != len(tokens):
        return "log_probs and response_tokens differ in length"
    for index, value in enumerate(log_probs):
        if not _number(value) or value > 1e-4:  # rounding may lift 0
            return f"log_probs[{index}] is {show(value)}"
    if completion.get("finish_reason") not in ("stop", "length"):
        return f"finish_reason is {show(completion.get('finish_reason'))}"
    return None if _number(completion.get("reward")) else f"reward is {show(completion.get('reward'))}"


def _number(value: Any) -> bool:
    """Whether a JSON value is a number that is finite as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < 1e300


def _check_traces(run: RunFiles, count: int) -> Row:
    digests, epochs = run.digests(), {}
    for record in checkpoint.read_commits(run.path):
        epochs.setdefault(record["version"], set()).add(record["epoch"])
    for update in range(count):
        for sample, completion in enumerate(checkpoint.read_rollouts(run.path, update)):
            trace, version = completion.get("trace"), update + 1
            place = f"update {update}, sample {sample}"
            if not isinstance(trace, dict):
                return Row("traces", False, f"{place}: no trace")
            for key, want in (("policy_version", version), ("digest", digests.get(version))):
                if trace.get(key) != want:
                    what = f"{key} is {show(trace.get(key))}, version {version} has {show(want)}"
                    return Row("traces", False, f"{place}: {what}")
            if trace.get("epoch") not in [*epochs.get(version, ())]:
                what = f"version {version} was not committed in epoch {show(trace.get('epoch'))}"
                return Row("traces", False, f"{place}: {what}")
            if trace.get("finish_reason", completion.get("finish_reason")) != completion.get("finish_reason"):
                return Row("traces", False, f"{place}: the trace has another finish_reason than the completion")
    return Row("traces", True, "every completion is of the committed policy of its update")


def _check_checkpoint(run: RunFiles, what: str, updates: int) -> Row:
    state = run.state(updates)
    if state is None:
        return Row(what, None, "removed by the run meanwhile")
    digest = run.digests().get(state["policy_version"])
    if digest is not None and digest != state["policy_digest"]:
        version = state["policy_version"]
        return Row(what, False, f"its policy has digest {state['policy_digest']}, version {version} has {digest}")
    tensors = sum(len(kind) for kind in state["tensors"].values())
    root = checkpoint.checkpoint_path(run.path, updates)
    gone = [name for name in state["files"] if not (root / name).exists()]
    if gone and _deleted_on_purpose(gone, state["files"]):
        return Row(what, True, f"digests only ({tensors} tensors; {len(gone)} of {len(state['files'])} files deleted)")
    try:
        checkpoint.verify_checkpoint(run.path, updates)
    except ValueError:
        if run.live and updates not in checkpoint.list_checkpoints(run.path):
            return Row(what, None, "removed by the run meanwhile")
        raise
    return Row(what, True, f"{len(state['files'])} files verified, {tensors} tensors")


def _deleted_on_purpose(gone: list[str], files: Mapping[str, str]) -> bool:
    """Whether what is missing is the tensor data of whole networks, and not one file that got lost."""
    folders = {name.rpartition("/")[0] for name in gone}
    data = {name for name in files if name.rpartition("/")[0] in folders and name.endswith(".distcp")}
    return len(gone) == len(files) or (bool(data) and data <= set(gone))


def _check_end(run: RunFiles, count: int) -> Row:
    wanted = run.wanted()
    if run.live:
        return Row("end", None, "the run is going on")
    if wanted is None:
        return Row("end", None, "run.json does not say how many updates were asked for")
    if count < wanted:
        return Row("end", None, f"stopped after {count} of {wanted} updates")
    if wanted + 1 not in run.digests():
        return Row("end", False, f"all updates are done, but version {wanted + 1} was not committed; --resume does it")
    if wanted not in checkpoint.list_checkpoints(run.path):
        return Row("end", False, f"all updates are done, but there is no checkpoint {wanted:06d}")
    return Row("end", True, f"finished: version {wanted + 1} committed")


# ---------------------------------------------------------------------------------------------------------------------
# The command


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="audit.py",
        description="Compares two runs bit for bit, or checks one run against itself.",
        epilog="exit code: 0 equal or consistent, 1 not, 2 bad input",
    )
    parser.add_argument("run", metavar="RUN", help="run directory (the --output of run.py)")
    parser.add_argument("other", metavar="RUN_B", nargs="?", help="second run directory, to be compared with the first")
    parser.add_argument(
        "--values",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="print the first differing element of a tensor, from the tensor files",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="X",
        help="for runs of different parallel layouts: what numbers may differ by, relative (default: bit for bit)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the table there as JSON, too")
    asked = parser.parse_args(arguments)
    if not 0 <= asked.tolerance < 1:
        parser.error(f"--tolerance {asked.tolerance} must be from 0 to below 1")
    if asked.tolerance and asked.other is None:
        parser.error("--tolerance compares two runs")
    try:
        rows = check(asked.run) if asked.other is None else compare(asked.run, asked.other, asked.values, asked.tolerance)
        good = all(row.good is not False for row in rows)
        if asked.json:
            found = {"runs": [r for r in (asked.run, asked.other) if r], "good": good}
            text = json.dumps({**found, "rows": [dataclasses.asdict(row) for row in rows]}, indent=1)
            Path(asked.json).write_text(text + "\n")
    except (ValueError, OSError) as error:
        print(f"audit.py: {safe(str(error))}", file=sys.stderr)
        return 2
    if asked.other is None:
        print(f"audit of {safe(asked.run)}\n{table(rows, ('good', 'WRONG'))}")
        print("consistent" if good else "NOT consistent")
    else:
        print(f"A = {safe(asked.run)}\nB = {safe(asked.other)}\n{table(rows, ('equal', 'DIFFERENT'))}")
        same = f"equal within {asked.tolerance:g}" if asked.tolerance else "equal"
        print(same if good else f"NOT {same}")
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
