"""Give me the weights: a run's newest checkpoint as a native model folder.

    python export.py RUN OUT                       the newest checkpoint that verifies, in the type it was trained in
    python export.py RUN OUT --updates 70          the checkpoint after 70 updates
    python export.py RUN OUT --dtype bf16          converted

OUT holds config.json (its `torch_dtype` says the written type), safetensors shards with their index, and the tokenizer
files of the model that the run began with, so provider.read_checkpoint, vLLM with this project's plugin, and the
model's own Transformers code load it. (vLLM serves FP32 weights in BF16, unless it is told `--dtype float32`.)

Nothing is exported that is not what the run published: digests of the tensors are made on the way, and a policy digest
other than the checkpoint's, or than the commit record's of its version, ends with exit code 3 and no OUT. The files
are then read back and must hold what was meant to be written.

What `--dtype` means. `as-trained`: the published weights, whose digest is printed. Runs in bf16 and fp16 also keep FP32
main parameters in the optimizer's state, and publish their cast: `--dtype fp32` (and bf16 of an fp16 run) takes those
main parameters, after showing that their cast has the published digest. An FP32 run has one set of weights.

Neither Megatron nor a GPU is needed: stored tensors are read one at a time from the checkpoint's files (and nothing in
them is executed), and one shard of OUT is held in memory. OUT appears by one rename, and only if it was not there or empty.

Exit codes: 0 done; 1 a fault, such as a full disk; 2 bad input; 3 a digest differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import audit
import checkpoint
import provider
from rollout import DTYPES, STORED  # --precision -> name of torch, of safetensors

if TYPE_CHECKING:
    import torch

# Beside config and weights, what a model folder needs to be used: tokenizer, generation defaults, the model's own code
# (copied, never run), licence. The model card is left out: it describes other weights.
COPIED = ("*.json", "*.model", "*.txt", "*.jinja", "*.py", "LICENSE*", "NOTICE*")
MAIN = "optimizer.state.fp32_param."  # before Megatron's name of a weight: its FP32 main parameter


# --- the policy of a checkpoint --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Policy:
    """A verified checkpoint's policy, and the model folder that its config and tokenizer come from."""

    run: Path
    recipe: dict  # as run.json holds it
    updates: int
    state: dict  # state.json
    model: Path
    config: provider.NanbeigeConfig
    precision: str  # fp32, bf16 or fp16: what the run trained and published in
    committed: bool  # whether the engine committed this version (a run may stop just before)


def find_policy(run: Path | str, updates: int | None, model: str | None, say: Callable[[str], None]) -> Policy:
    """The policy after `updates` updates (None: of the newest checkpoint that verifies; damaged ones go to `say`).

    model: the model folder, where it is no longer where run.json says; its JSON files must be the run's, by content.
    ValueError: no run, no such or no whole checkpoint, no such model folder or another one. GuardError: the commit
    record of this version has another digest than the checkpoint.
    """
    run = Path(run)
    record = checkpoint.read_run(run)
    recipe = record.get("recipe")
    if not isinstance(recipe, dict) or recipe.get("precision") not in DTYPES or not isinstance(recipe.get("model"), str):
        raise ValueError(f'{run / "run.json"}: "recipe" needs "model" and a "precision" of {", ".join(DTYPES)}')
    folder = Path(model or recipe["model"])
    if not folder.is_dir():
        hint = "" if model else ", where the run found its model; --model names where it lies now"
        raise ValueError(f"{folder}: no such directory{hint}")
    check_model(folder, record)
    config = provider.read_config(folder)
    if updates is None:
        found = checkpoint.newest_checkpoint(run, say)
        if found is None:
            raise ValueError(f"{run}: no checkpoint yet")
        updates, state = found
    else:
        there = checkpoint.list_checkpoints(run)
        if updates not in there:
            raise ValueError(f"{run}: no checkpoint after {updates} updates; there are: {', '.join(map(str, there)) or 'none'}")
        state = checkpoint.verify_checkpoint(run, updates)
    version, digest = state["policy_version"], state["policy_digest"]
    commits = {commit["digest"] for commit in checkpoint.read_commits(run) if commit["version"] == version}
    if commits - {digest}:
        raise checkpoint.GuardError(
            f"{run}: version {version} was committed with digest {min(commits - {digest})}, the checkpoint has {digest}"
        )
    return Policy(run, recipe, updates, state, folder, config, recipe["precision"], bool(commits))


def check_model(folder: Path, record: dict) -> None:
    """ValueError when a JSON file of the model folder (config, tokenizer) is not the one that the run began with."""
    from data import file_digest

    contents = record.get("contents")
    known = contents.get("model") if isinstance(contents, dict) else None
    for name, digest in known.items() if isinstance(known, dict) else ():
        if not isinstance(digest, str) or name == provider.INDEX:  # weights are recorded by size, and not read here
            continue
        if file_digest(folder / Path(name).name) != digest:
            raise ValueError(f"{folder / name}: not the file that the run began with")


def native_tensors(root: Path, config: provider.NanbeigeConfig, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(native name, full tensor as stored), in the order of `provider.tensor_shapes`, of one network's stored folder.

    The layout is that of `provider._places`: query, key and value of a layer are one stored tensor [groups * rows, hidden],
    interleaved by query group, gate and up another. prefix: MAIN for the FP32 main parameters. ValueError: not stored.
    """
    d = config.head_dim
    q = config.num_attention_heads // config.num_key_value_heads * d  # rows of queries per group

    def read(key: str) -> torch.Tensor:
        return audit.read_stored(root, prefix + key)

    yield "model.embed_tokens.weight", read("embedding.weight")
    for n in range(config.num_hidden_layers):
        here, there = f"model.layers.{n}", f"layers.{n}"
        yield f"{here}.input_layernorm.weight", read(f"{there}.self_attention.linear_qkv.layer_norm_weight")
        qkv = read(f"{there}.self_attention.linear_qkv.weight").view(-1, q + 2 * d, config.hidden_size)
        for part, rows in (("q", qkv[:, :q]), ("k", qkv[:, q : q + d]), ("v", qkv[:, q + d :])):
            yield f"{here}.self_attn.{part}_proj.weight", rows.flatten(0, 1)
        yield f"{here}.self_attn.o_proj.weight", read(f"{there}.self_attention.linear_proj.weight")
        yield f"{here}.post_attention_layernorm.weight", read(f"{there}.mlp.linear_fc1.layer_norm_weight")
        gate, up = read(f"{there}.mlp.linear_fc1.weight").chunk(2)
        yield f"{here}.mlp.gate_proj.weight", gate
        yield f"{here}.mlp.up_proj.weight", up
        yield f"{here}.mlp.down_proj.weight", read(f"{there}.mlp.linear_fc2.weight")
    yield "model.norm.weight", read("final_norm.weight")
    yield "lm_head.weight", read("output_layer.weight")


def policy_tensors(policy: Policy, precision: str) -> Iterator[tuple[str, torch.Tensor]]:
    """(native name, full tensor in `precision`), one at a time. Once the last is taken they are known to be the policy's.

    GuardError after the last tensor: cast to the precision of the run, they have not the checkpoint's digest.
    """
    import torch

    trained, wanted = (getattr(torch, DTYPES[p]) for p in (policy.precision, precision))
    main = policy.precision != "fp32" and precision != policy.precision
    root, entries = checkpoint.checkpoint_path(policy.run, policy.updates) / "actor", {}
    for name, tensor in native_tensors(root, policy.config, MAIN if main else ""):
        entries[name] = checkpoint.tensor_digest(tensor.to(trained))
        yield name, tensor.to(wanted)
    digest, stated = checkpoint.policy_digest(entries), policy.state["policy_digest"]
    if digest != stated:
        raise checkpoint.GuardError(f"{root}: the weights have digest {digest}, the checkpoint states {stated}")


# --- the folder ------------------------------------------------------------------------------------------------------


def check_free(out: Path) -> None:
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out}: exists and is not an empty directory")


def export(policy: Policy, out: Path | str, precision: str, shard_bytes: int, say: Callable[[str], None]) -> str:
    """Write `policy` to the folder `out` in `precision`, at most `shard_bytes` a file (or one tensor, if larger).

    Returns the digest of what was written. ValueError: `out` is taken. GuardError: a digest differs. Whatever goes
    wrong, `out` is as it was.
    """
    out = Path(os.path.abspath(out))
    check_free(out)
    if (policy.run / "checkpoints").resolve() in out.resolve().parents:
        raise ValueError(f"{out}: lies within the run's checkpoints, which then would not verify any more")
    out.parent.mkdir(parents=True, exist_ok=True)
    hidden = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        hidden.mkdir()
        copy_files(policy.model, hidden)
        written = write_weights(policy, hidden, precision, shard_bytes, say)
        write_config(policy.model, hidden, precision)
        entries = checkpoint.tensor_digests(provider.read_checkpoint(hidden, provider.read_config(hidden)))
        if (held := checkpoint.policy_digest(entries)) != written:
            raise checkpoint.GuardError(f"{out}: the files hold digest {held}, {written} was written")
        for path in hidden.iterdir():
            shutil.copymode(hidden / provider.CONFIG, path)  # safetensors 0.8 lets only the owner read
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        checkpoint.fsync_dir(hidden)
        os.rename(hidden, out)  # takes the place of an empty directory, and of nothing else
        checkpoint.fsync_dir(out.parent)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    return written


def copy_files(model: Path, out: Path) -> None:
    """What COPIED lists, without config and weights; files that are links are copied as what they point to."""
    for path in sorted({path for pattern in COPIED for path in model.glob(pattern)}):
        if path.is_file() and not path.name.startswith(".") and path.name not in (provider.CONFIG, provider.INDEX):
            shutil.copyfile(path, out / path.name)


def write_weights(policy: Policy, out: Path, precision: str, shard_bytes: int, say: Callable[[str], None]) -> str:
    """Shards (and their index, where there are several). Returns the policy digest of what was handed to the files."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    groups, sizes = [[]], [0]
    for name, shape in provider.tensor_shapes(policy.config).items():
        size = math.prod(shape) * (4 if precision == "fp32" else 2)
        if groups[-1] and sizes[-1] + size > shard_bytes:
            groups.append([])
            sizes.append(0)
        groups[-1].append(name)
        sizes[-1] += size
    files = [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    files = [provider.SINGLE] if len(groups) == 1 else files
    stream, entries = policy_tensors(policy, precision), {}
    for file, group, size in zip(files, groups, sizes, strict=True):
        held = {name: tensor.contiguous() for _, (name, tensor) in zip(group, stream, strict=False)}
        entries |= checkpoint.tensor_digests(held.items())
        try:
            save_file(held, out / file, metadata={"format": "pt"})
            checkpoint.give_users_mode(out / file)
        except SafetensorError as error:  # a full disk, for one
            raise OSError(errno.EIO, f"cannot be written: {error}", str(out / file)) from None
        say(f"{file}: {len(held)} tensors, {size / 1e9:.3g} GB")
        del held  # before the next shard is read: one is in memory, not two
    for name, _ in stream:  # lets the stream compare its digest
        raise ValueError(f"{policy.run}: tensor {name} does not belong to the model")
    if len(files) > 1:
        weight_map = {name: file for file, group in zip(files, groups, strict=True) for name in group}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (out / provider.INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return checkpoint.policy_digest(entries)


def write_config(model: Path, out: Path, precision: str) -> None:
    """The model's config.json with the written type: under `dtype` where the file uses Transformers' newer name for it,
    under `torch_dtype` (which every version reads) otherwise or as well."""
    config = json.loads((model / provider.CONFIG).read_text(encoding="utf-8"))
    for key in ("torch_dtype", "dtype"):
        if key in config or (key == "torch_dtype" and "dtype" not in config):
            config[key] = DTYPES[precision]
    (out / provider.CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --- the command -----------------------------------------------------------------------------------------------------


def exit_code(program: str, main: Callable[[list[str]], int], argv: list[str]) -> int:
    """`main` with the exit codes of the head of this file, and one line for what a user can mend."""

    def complain(error: object, code: int) -> int:
        text = " ".join(str(error).split())
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
        print(f"{program}: error: {shown}", file=sys.stderr, flush=True)
        return code

    try:
        return main(argv)
    except checkpoint.GuardError as error:
        return complain(error, 3)
    except ValueError as error:
        return complain(error, 2)
    except OSError as error:
        fault = error.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM, errno.EMFILE)
        named = f"{error.filename}: {error.strerror}" if error.filename else error
        return complain(named, 1 if fault else 2)  # otherwise it is about a path that the user gave
    except KeyboardInterrupt:
        return complain("interrupted", 130)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="export.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("run", metavar="RUN", help="run directory (the --output of run.py)")
    parser.add_argument("out", metavar="OUT", help="folder to make; must not exist, or be empty")
    parser.add_argument("--updates", type=int, metavar="N", help="the checkpoint after N updates (default: the newest whole one)")
    parser.add_argument(
        "--dtype", choices=("as-trained", "fp32", "bf16"), default="as-trained", help="type of the written weights"
    )
    parser.add_argument("--shard-size-gb", type=float, default=5.0, metavar="X", help="largest file, 1e9 bytes (default: 5)")
    parser.add_argument("--model", metavar="DIR", help="the run's model folder, where it has moved")
    asked = parser.parse_args(argv)
    if not (math.isfinite(asked.shard_size_gb) and asked.shard_size_gb > 0):
        raise ValueError(f"--shard-size-gb must be a finite number above 0, not {asked.shard_size_gb}")
    check_free(Path(asked.out))
    policy = find_policy(asked.run, asked.updates, asked.model, lambda text: print(text, file=sys.stderr, flush=True))
    precision = policy.precision if asked.dtype == "as-trained" else asked.dtype
    version, digest = policy.state["policy_version"], policy.state["policy_digest"]
    print(f"checkpoint {policy.updates:06d}: version {version}, trained in {policy.precision}", flush=True)
    written = export(policy, asked.out, precision, int(asked.shard_size_gb * 1e9), lambda text: print(text, flush=True))
    where = "as committed" if policy.committed else "as the checkpoint states; this version was not committed yet"
    print(f"policy digest {digest}: {where}")
    if written != digest:
        print(f"written as {STORED[precision]}: digest {written}")
    print(f"exported to {asked.out}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("export.py", main, sys.argv[1:]))
