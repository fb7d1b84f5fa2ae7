"""The trainer: scores completions, takes the optimizer steps, and hands out its state; one process a GPU.

Data flow of one update (DESIGN §4): completions → packed micro-batches → forward → the replay guard → losses from
`algorithms.py` on chunks of rows → backward → clip → optimizer step. Everything called *old* (π_old, π_prox, V_old) is
this process's own and belongs to the policy that sampled. A completion of the first optimizer step gets its old
log-probabilities from that step's own forward, before anything is optimized; only flow-dppo, which steps twice, scores
the second half separately. Plain class: `run.py` makes a Ray actor of it, the tests call it directly.

With several processes (layout.py) each method is called on all of them at once, with the same arguments, and all return or
raise together. Every rank is handed all completions, packs its own, and learns of the others' what the whole batch decides.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import random
import threading
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch

import algorithms
import checkpoint
import hostmemory
import layout
import megatron_cpu
import provider

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP16_LOSS_SCALE = 128.0  # fixed: a dynamic scale would make a resumed run depend on skipped steps
LOGIT_ELEMENTS = 2**25  # rows × vocabulary of one chunk: 128 MiB of float32, about six such tensors alive in backward


@dataclasses.dataclass(frozen=True)
class TrainerSettings:
    """What the trainer needs of the recipe; one line of `run.py --help` explains each."""

    model: str
    algorithm: str
    precision: str = "fp32"
    device: str = "cpu"
    recompute: bool = False
    offload_train: bool = False
    optimizer: str = "sgd"
    lr: float = 1e-5
    critic_lr: float = 1e-5
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    temperature: float = 0.8
    clip: float = 0.2
    value_clip: float = 0.2
    gamma: float = 1.0
    lam: float = 0.95
    correction_low: float = 0.5
    correction_high: float = 2.0
    kl_budget: float = 0.01
    n_samples_per_prompt: int = 4
    max_logprob_error: float = 1e-3
    micro_batch_tokens: int = 16384
    matmul_precision: str = "highest"
    split_matmul: bool = False
    seed: int = 42
    memory_cap_gib: float = 0.0
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False

    @property
    def has_critic(self) -> bool:
        return self.algorithm != "grpo"

    @property
    def steps(self) -> int:
        return 2 if self.algorithm == "flow-dppo" else 1


# --- packing ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pack:
    """Completions laid end to end without padding. A completion is fed without its last token: nothing follows it."""

    samples: list[int]  # positions in the batch
    tokens: torch.Tensor  # [T] int64
    cu_seqlens: torch.Tensor  # [B+1] int64, on the host, where the attention's indices are made
    rows: torch.Tensor  # [R] int64: the positions whose outputs predict the response tokens
    targets: torch.Tensor  # [R] int64: those response tokens
    lengths: list[int]  # response tokens of each completion


def make_packs(completions: list[dict], samples: list[int], budget: int, device: str, multiple: int = 1) -> list[Pack]:
    """Split `samples` in order into packs of at most `budget` tokens (one completion at least); no samples, no packs.

    `multiple`: what the tokens of a pack must be a multiple of. What lacks is a sequence of its own at the pack's end, of
    which no row is read.
    """
    if not samples:
        return []
    groups: list[list[int]] = [[]]
    used = 0
    for i in samples:
        size = len(completions[i]["prompt_tokens"]) + len(completions[i]["response_tokens"])
        if groups[-1] and used + size > budget:
            groups.append([])
            used = 0
        groups[-1].append(i)
        used += size
    packs = []
    for group in groups:
        tokens, ends, rows, targets, lengths = [], [0], [], [], []
        for i in group:
            prompt, response = completions[i]["prompt_tokens"], completions[i]["response_tokens"]
            start = len(tokens) + len(prompt) - 1
            tokens += [*prompt, *response[:-1]]
            rows += range(start, start + len(response))
            targets += response
            lengths.append(len(response))
            ends.append(len(tokens))
        if lacking := -len(tokens) % multiple:
            tokens += [0] * lacking
            ends.append(len(tokens))
        packs.append(
            Pack(
                group,
                torch.tensor(tokens, dtype=torch.int64).to(device, non_blocking=True),
                torch.tensor(ends, dtype=torch.int64),
                torch.tensor(rows, dtype=torch.int64).to(device, non_blocking=True),
                torch.tensor(targets, dtype=torch.int64).to(device, non_blocking=True),
                lengths,
            )
        )
    return packs


def per_completion(values: torch.Tensor, packs: list[Pack]) -> dict[int, torch.Tensor]:
    """Cut [sum of lengths] values, laid out as `packs`, into {sample: [length]}."""
    samples = [i for pack in packs for i in pack.samples]
    lengths = [n for pack in packs for n in pack.lengths]
    return dict(zip(samples, values.split(lengths) if lengths else (), strict=True))


def token_weights(lengths: list[int], device: str) -> torch.Tensor:
    """d sample_mean(x) / dx: the weight of every token, so that a chunk of rows can be summed on its own. [sum lengths]."""
    zeros = torch.zeros(sum(lengths), device=device, requires_grad=True)
    return torch.autograd.grad(algorithms.sample_mean(zeros, lengths, None), zeros)[0]


# --- one network -----------------------------------------------------------------------------------------------------


class Network:
    """A looped model with what trains it: Megatron's DDP, optimizer and scheduler. One rank's share of it."""

    def __init__(self, config: provider.NanbeigeConfig, settings: TrainerSettings, ranks: layout.Ranks, critic: bool):
        self.settings, self.ranks = settings, ranks
        self.name = "critic" if critic else "actor"
        lr = settings.critic_lr if critic else settings.lr
        dtype = DTYPES[settings.precision]
        self.model = provider.build_model(
            config,
            critic=critic,
            dtype=dtype,
            recompute=settings.recompute,
            device=settings.device,
            sequence_parallel=settings.sequence_parallel,
            split_matmul=settings.split_matmul,
        )
        provider.load_native(self.model, provider.read_checkpoint(settings.model, config))
        with megatron_cpu.enable():
            self._wrap(lr, dtype)
        self.loss_scale = FP16_LOSS_SCALE if dtype == torch.float16 else 1.0
        self._away: list[torch.Tensor] | None = None  # the tensors that are on the host, while they are
        self._pinned: torch.Tensor | None = None

    def _wrap(self, lr: float, dtype: torch.dtype) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        settings = self.settings
        # Gradients are summed in FP32, whatever the weights are stored in; one bucket, reduced once a step. Nothing overlaps:
        # a rank may have fewer micro-batches than another, or none.
        self.ddp = DistributedDataParallel(
            self.model.config,
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                overlap_grad_reduce=False,
                use_distributed_optimizer=settings.distributed_optimizer,
            ),
            self.model,
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer=settings.optimizer,
                lr=lr,
                min_lr=lr,
                weight_decay=settings.weight_decay,
                adam_beta1=0.9,
                adam_beta2=0.95,
                adam_eps=1e-8,
                sgd_momentum=0.0,
                clip_grad=0.0,  # clipped below: Megatron's clip asserts a CUDA tensor type, and CPU and GPU share one path
                fp16=dtype == torch.float16,
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
                loss_scale=FP16_LOSS_SCALE if dtype == torch.float16 else None,
                use_distributed_optimizer=settings.distributed_optimizer,
            ),
            [self.ddp],
        )
        for one in self._optimizers():
            if one.init_state_fn is None:  # SGD without momentum has no state to prepare before a load
                one.init_state_fn = lambda *_: None
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=lr,
            max_lr=lr,
            min_lr=lr,
            lr_warmup_steps=0,
            lr_decay_steps=1,
            lr_decay_style="constant",
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=1,
            wd_incr_style="constant",
        )

    def _optimizers(self) -> list:
        return getattr(self.optimizer, "chained_optimizers", [self.optimizer])

    @megatron_cpu.enable()
    def step(self, update: int) -> float:
        """Sum, clip and check the gradients and take one optimizer step of `update`; collective. Returns the norm of the whole
        model's gradient before clipping.

        GuardError, on every rank, names the update and the tensor: a gradient that is not finite, before the step; a parameter
        or a number of the optimizer's own that the step made so, before anyone publishes or saves it.
        """
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([self.ddp])  # over data-parallel ranks, and the norms' parts with sequence parallelism
        overflow = self.optimizer.prepare_grads()
        params = [p for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]
        norm = self._norm(params)
        if self.ranks.any(overflow or not np.isfinite(norm)):
            named = [what for what in self.ranks.gather(self._bad_gradient()) if what]
            what = named[0] if named else f"the norm of all gradients ({norm:g})"
            raise checkpoint.GuardError(f"update {update}: {self.name}: {what} is not finite; the {self.name} took no step")
        grads = [p.grad for p in params]
        if self.settings.clip_grad > 0 and norm > self.settings.clip_grad:
            torch._foreach_mul_(grads, self.settings.clip_grad / (norm + 1e-6))
        self.optimizer.step_with_ready_grads()
        self.scheduler.step(increment=1)
        bad = self._bad_state()
        if self.ranks.any(bad is not None):
            bad = next(what for what in self.ranks.gather(bad) if what)
            raise checkpoint.GuardError(
                f"update {update}: {self.name}: the optimizer step left {bad} not finite (learning rate"
                f" {self.optimizer.param_groups[0]['lr']:g}); the last checkpoint is as it was"
            )
        return norm

    def _norm(self, params: list) -> float:
        """The 2-norm of the whole model's gradient, each number of it counted once: what tensor-parallel ranks hold alike
        counts on the first of them, and data-parallel ranks share it only with the distributed optimizer."""
        from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

        norms = [torch.linalg.vector_norm(p.grad) for p in params if param_is_not_tensor_parallel_duplicate(p)]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=self.settings.device)
        group = None if self.settings.distributed_optimizer else self.ranks.tp_group  # None: all ranks
        if (self.ranks.size if group is None else self.ranks.tp_size) == 1:
            return float(norm)
        square = norm.double().square()
        torch.distributed.all_reduce(square, group=group)
        return float(square.sqrt())

    def _bad_gradient(self) -> str | None:
        for name, p in self.model.named_parameters():
            if not torch.isfinite(p.main_grad).all():
                return f"gradient of {name}"
        return None

    def _bad_state(self) -> str | None:
        """Which tensor of the weights, their FP32 main copies or the optimizer's state holds a number that is not finite.

        One pass over what the step has just written; its extremes are NaN or infinite where an element is. On CPU torch's
        infinity norm takes ten times as long as they (torch 2.13).
        """
        held, names = {}, {}
        for name, p in self.model.named_parameters():
            main = p if getattr(p, "main_param", None) is None else p.main_param
            held |= {name: p.data} if main is p else {name: p.data, f"the FP32 main copy of {name}": main.data}
            names[id(main)] = name
        for number, (key, state) in enumerate(self.optimizer.state.items()):
            # Megatron's chained optimizers key the state by (number of the optimizer, parameter), the distributed one by pieces.
            name = names.get(id(key[1] if isinstance(key, tuple) else key), f"piece {number} of the optimizer's state")
            held |= {f"{what} of {name}": t for what, t in state.items() if torch.is_tensor(t)}
        device = self.settings.device
        held = {name: t for name, t in held.items() if t.is_floating_point() and t.numel() and t.device.type == device}
        if device == "cpu":
            extremes = [torch.stack(torch.aminmax(t)) for t in held.values()]
        else:
            extremes = torch._foreach_norm(list(held.values()), float("inf"))
        fine = torch.isfinite(torch.stack([x.float() for x in extremes])).view(len(held), -1).all(-1).tolist()
        return next((name for name, good in zip(held, fine, strict=True) if not good), None)

    @megatron_cpu.enable()
    def start_step(self) -> None:
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    # -- where it lives --

    def _resident(self) -> list[torch.Tensor]:
        held = {id(p): p for p in self.model.parameters()}
        for group in self.optimizer.param_groups:
            held.update((id(p), p) for p in group["params"])
        for _, state in self.optimizer.state.items():
            held.update((id(t), t) for t in state.values() if torch.is_tensor(t) and t.is_cuda)
        return [t.data for t in held.values()]

    def to_host(self) -> None:
        """Move weights and optimizer state to pinned host memory and drop the gradients, which a step begins by zeroing."""
        if self.settings.device != "cuda" or not self.settings.offload_train or self._away is not None:
            return
        self._away = self._resident()
        size = sum(t.numel() * t.element_size() for t in self._away)
        if self._pinned is None or self._pinned.nbytes < size:
            self._pinned = None  # before the larger one is made
            self._pinned = hostmemory.pinned(size)
        for t, host in self._places_on_host():
            host.copy_(t, non_blocking=True)
        torch.cuda.synchronize()
        for t in self._away:
            t.untyped_storage().resize_(0)
        for buffer in self.ddp.buffers:
            buffer.offload_to_cpu(move_params=False)
        torch.cuda.empty_cache()  # the other network's tensors have other sizes

    def to_device(self) -> None:
        """Undo `to_host`; the values come back bit for bit."""
        if self._away is None:
            return
        for t, host in self._places_on_host():
            t.untyped_storage().resize_(host.numel() * host.element_size())
            t.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        for buffer in self.ddp.buffers:
            buffer.reload_from_cpu(move_params=False)
        self._away = None

    def _places_on_host(self):
        start = 0
        for t in self._away:
            end = start + t.numel() * t.element_size()
            yield t, self._pinned[start:end].view(t.dtype).view(t.shape)
            start = end

    # -- what is durable --

    @megatron_cpu.enable()
    def sharded_state(self) -> dict:
        """What a checkpoint holds of this network, of this rank; with the distributed optimizer collective."""
        model = self.model.sharded_state_dict()
        state = {"model": model, "scheduler": self.scheduler.state_dict()}
        if self.settings.distributed_optimizer:
            return {**state, "moments": self._moments_to_save(model), "step": self._step()}
        return {**state, "optimizer": self.optimizer.sharded_state_dict(dict(model), is_loading=False)}

    @megatron_cpu.enable()
    def wanted_state(self, was_distributed: bool) -> dict:
        """The form of `sharded_state` that a load fills. was_distributed: whether the distributed optimizer saved it."""
        model = self.model.sharded_state_dict()
        state = {"model": model, "scheduler": self.scheduler.state_dict()}
        if self.settings.distributed_optimizer or was_distributed:
            return {**state, "moments": self._moments_to_load(model)}
        return {**state, "optimizer": self.optimizer.sharded_state_dict(dict(model), is_loading=True)}

    @megatron_cpu.enable()
    def load(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        if "moments" in state:
            self._load_moments(state["moments"], _stored_step(state))
        else:
            self.optimizer.load_state_dict(state["optimizer"])
        # Megatron may restore one `step` tensor into every parameter's state; torch's Adam then counts it once a
        # parameter. Each gets its own (megatron-core 0.16.1, torch 2.13).
        for _, one in self.optimizer.state.items():
            if torch.is_tensor(one.get("step")):
                one["step"] = one["step"].clone()
        self.scheduler.load_state_dict(state["scheduler"])

    # The optimizer's tensors by parameter: FP32 main parameters (half precision only) and Adam's moments. They are stored
    # whole, each cut as its parameter is, under the names that Megatron's ordinary optimizer gives them; so any layout reads
    # what any other wrote. Of the distributed optimizer, each data-parallel rank holds a flat piece of some of them. Megatron
    # 0.16.1 has two formats for those: one cannot change T, the other gathers the whole state on one rank.

    def _mains(self) -> dict:
        """{model parameter: (what the optimizer steps on, where its flat piece begins)}; without those of which this rank
        holds nothing."""
        found = {}
        for one in self._optimizers():
            if self.settings.distributed_optimizer:
                for param, (group, order) in one.model_param_group_index_map.items():
                    start = one._get_model_param_range_map(param)["param"].start
                    found[param] = one.optimizer.param_groups[group]["params"][order], start
            else:
                found |= {p: (getattr(p, "main_param", p), 0) for p in self.model.parameters()}
        return found

    def _kinds(self) -> list[str]:
        """Names of the tensors that the optimizer keeps for each parameter."""
        moments = ["exp_avg", "exp_avg_sq"] if self.settings.optimizer == "adam" else []
        return moments + (["fp32_param"] if self.settings.precision != "fp32" else [])

    def _held(self, main, kind: str) -> torch.Tensor:
        return main if kind == "fp32_param" else self._torch_state(main)[kind]

    def _torch_state(self, main) -> dict:
        """torch's own dict of what the optimizer keeps for a parameter that it steps on."""
        owner = (one for one in self._optimizers() if any(main is p for g in one.optimizer.param_groups for p in g["params"]))
        return next(owner).optimizer.state[main]

    def _by_parameter(self, model: dict):
        """(number, sharded model parameter, kind, TP-local tensor in the parameter's shape) of every optimizer tensor;
        collective with the distributed optimizer, and then the tensor is a copy."""
        mains = self._mains()
        kinds = [kind for kind in self._kinds() if kind == "fp32_param" or self.scheduler.num_steps]  # moments come with steps
        for number, sharded in enumerate(model.values()):
            param = sharded.data
            main, start = mains.get(param, (None, 0))
            for kind in kinds:
                held = None if main is None else self._held(main, kind).detach()
                if self.settings.distributed_optimizer:
                    held = self.ranks.unflattened(held, start, param)
                yield number, sharded, kind, held

    def optimizer_tensors(self):
        """(stored name, full tensor) of every tensor that the optimizer keeps, one at a time; collective."""
        model = {name: sharded for name, sharded in self.model.sharded_state_dict().items() if _has_tensor(sharded)}
        for _, sharded, kind, local in self._by_parameter(model):
            yield f"optimizer.state.{kind}.{sharded.key}", self.ranks.full(sharded.data, local)

    def _moments_to_save(self, model: dict) -> dict:
        """Host copies of the optimizer's tensors; the data-parallel ranks take turns, so that each holds its share of them."""
        from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

        found = {}
        model = {name: sharded for name, sharded in model.items() if _has_tensor(sharded)}
        for number, sharded, kind, local in self._by_parameter(model):
            if number % self.ranks.dp_size == self.ranks.dp:
                prefix = f"optimizer.state.{kind}"
                one = make_sharded_optimizer_tensor(sharded, copy_to_host(local), prefix)
                found[f"{prefix}.{sharded.key}"] = dataclasses.replace(one, replica_id=(*sharded.replica_id[:2], 0))
        return found

    def _moments_to_load(self, model: dict) -> dict:
        from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor

        mains, found = self._mains(), {}
        for sharded in model.values():
            if _has_tensor(sharded) and sharded.data in mains:
                for kind in self._kinds():
                    prefix = f"optimizer.state.{kind}"
                    empty = torch.empty(sharded.data.shape, dtype=torch.float32)
                    found[f"{prefix}.{sharded.key}"] = make_sharded_optimizer_tensor(sharded, empty, prefix)
        return found

    def _load_moments(self, moments: dict, step: int) -> None:
        mains = self._mains()
        for sharded in self.model.sharded_state_dict().values():
            if not _has_tensor(sharded) or sharded.data not in mains:
                continue
            main, start = mains[sharded.data]
            state = self._torch_state(main)
            for kind in self._kinds():
                flat = moments[f"optimizer.state.{kind}.{sharded.key}"].reshape(-1)[start : start + main.numel()]
                if kind == "fp32_param":
                    main.data.copy_(flat.view(main.shape))
                else:
                    state[kind] = flat.view(main.shape).to(main.device, copy=True)
            if self.settings.optimizer == "adam":
                state["step"] = torch.tensor(float(step))

    def _step(self) -> int:
        """How often Adam has stepped; 0 for SGD, which does not count."""
        steps = {int(s["step"]) for one in self._optimizers() for s in one.optimizer.state.values() if "step" in s}
        return max(steps, default=0)


def _has_tensor(sharded) -> bool:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    return isinstance(sharded, ShardedTensor | ShardedTensorFactory) and torch.is_tensor(sharded.data)


def _stored_step(state: dict) -> int:
    """Adam's step count in a loaded state, whichever optimizer saved it."""
    if "step" in state:
        return int(state["step"])
    saved = state["optimizer"]
    return int(saved.get("optimizer", saved)["state"].get("common_step", 0))


# --- the trainer -----------------------------------------------------------------------------------------------------


class Trainer:
    """Holds actor and, where the algorithm has one, critic: one rank's share of them. One method runs at a time.

    Alone it is ready when it is made. Of several, rank 0 first opens the rendezvous, then all `start` with its address.
    """

    def __init__(self, settings: TrainerSettings, rank: int = 0, size: int = 1):
        self.settings, self.rank, self.size = settings, rank, size
        self.started = time.perf_counter()
        self._store = None
        if size == 1:
            self.start(None)

    def rendezvous(self, host: str) -> str:
        """Open the meeting point of all ranks at this node's address `host`; for rank 0. Returns what `start` takes."""
        self._store, address = layout.open_store(host, self.size)
        return address

    def start(self, address: str | None) -> None:
        """Join the other ranks at `address` (None: there are none) and load the weights."""
        settings = self.settings
        if self.size == 1:
            # One process needs no rendezvous port: the store is its own memory.
            self._store = torch.distributed.HashStore()
        elif self._store is None:
            self._store = layout.join_store(address, self.size)
        _start_process(settings, self._store, self.rank, self.size)
        self.ranks = layout.Ranks()
        self.config = provider.read_config(settings.model)
        self.actor = Network(self.config, settings, self.ranks, critic=False)
        self.critic = None
        if settings.has_critic:
            self.actor.to_host()
            self.critic = Network(self.config, settings, self.ranks, critic=True)
        self._snapshot: dict | None = None
        self._writer: threading.Thread | None = None
        self._writer_error: BaseException | None = None
        self._digest_cache: dict | None = None
        self._memory: hostmemory.PolicyFile | None = None  # what a publication by shared memory lies in

    def hold(self, run: str, owner: str) -> None:
        """Hold the run's lock in this process until it dies, so that a resume waits for it (DESIGN §6). From here on
        what this process prints stands in RUN/logs."""
        self._lock = checkpoint.hold_run(run, owner)
        checkpoint.log_output(run, "trainer" if self.rank == 0 else f"trainer-{self.rank}")

    def _only(self, network: Network) -> Network:
        """Bring `network` to the device and, with --offload-train, send the other away first."""
        other = self.critic if network is self.actor else self.actor
        if other is not None:
            other.to_host()
        network.to_device()
        return network

    # -- one update --

    def train(self, completions: list[dict], update: int) -> dict:
        """Take the optimizer steps of one update.

        completions: in sample order, each with `prompt_tokens`, `response_tokens`, `log_probs` (of the rollout policy,
        one a response token) and `reward`. Returns the metrics of DESIGN §6. Raises checkpoint.GuardError, before any
        optimizer step, when a replayed log-probability differs from the rollout's by more than `max_logprob_error` or a
        number is not finite.
        """
        s = self.settings
        n = len(completions)
        if not any(c["response_tokens"] for c in completions):
            raise checkpoint.GuardError(f"update {update}: every completion is empty; the step was not taken")
        share = n // s.steps
        parts = [list(range(k * share, (k + 1) * share)) for k in range(s.steps)]
        packs = [self._packs(completions, part) for part in parts]
        lengths = {i: len(c["response_tokens"]) for i, c in enumerate(completions)}
        self._digest_cache = None
        self._behaviour = [
            torch.tensor(c["log_probs"], dtype=torch.float32).to(s.device, non_blocking=True) for c in completions
        ]
        frozen: dict[int, list[torch.Tensor]] = {}
        old: dict[int, torch.Tensor] = {}
        metrics: dict[str, float | list] = {}

        values: dict[int, torch.Tensor] = {}
        if self.critic is not None:
            self._only(self.critic)
            with torch.no_grad():
                for part in packs:
                    for pack in part:
                        values.update(per_completion(self._values(pack), [pack]))
            values = self.ranks.whole(values, lengths, s.device)
        advantages, returns = self._advantages(completions, values, metrics, update)

        self._only(self.actor)
        for part in packs[1:]:  # what the first step's own forward does not see
            self._score(part, old, frozen)
        history = []
        for k, part in enumerate(packs):
            first = k == 0
            guard = (lambda: self._guard(completions, old, update, metrics)) if first else None
            own = {i: lengths[i] for i in parts[k]}
            history.append(self._policy_step(part, own, advantages, old, frozen, guard, update))
        critic_history = []
        if self.critic is not None:
            self._only(self.critic)
            for k, part in enumerate(packs):
                critic_history.append(self._critic_step(part, {i: lengths[i] for i in parts[k]}, values, returns, update))

        if s.device == "cuda":  # of the rank with the most; allocated, since the start
            peaks = self.ranks.gather((torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
            metrics["trainer_peak_gib"] = max(peak for peak, _ in peaks) / 2**30
            metrics["trainer_reserved_gib"] = max(reserved for _, reserved in peaks) / 2**30
        for rows in (history, critic_history):
            for name in rows[0] if rows else ():
                per_step = [row[name] for row in rows]
                metrics[name] = float(np.mean(per_step))
                if len(rows) > 1:
                    metrics[f"{name}_steps"] = per_step
        return metrics

    def _packs(self, completions: list[dict], part: list[int]) -> list[Pack]:
        """This rank's micro-batches of the samples `part` of one optimizer step."""
        s = self.settings
        sizes = [len(c["prompt_tokens"]) + len(c["response_tokens"]) for c in completions]
        mine = layout.divide(sizes, part, self.ranks.dp_size)[self.ranks.dp]
        multiple = self.ranks.tp_size if s.sequence_parallel else 1
        return make_packs(completions, mine, s.micro_batch_tokens, s.device, multiple)

    def _whole(self, values: list[torch.Tensor], packs: list[Pack], lengths: dict[int, int]) -> torch.Tensor:
        """What every rank's packs of a step gave, a number a token, in the order of `lengths`: [sum of lengths]."""
        own = per_completion(torch.cat(values), packs) if values else {}
        return torch.cat(list(self.ranks.whole(own, lengths, self.settings.device).values()))

    def _check_finite(self, what: str, values: torch.Tensor, samples: list[int], lengths: list[int] | None, update: int) -> None:
        """GuardError, on every rank, names the first value that is not finite, by sample and response token.

        values: [sum of lengths], laid out as `samples` with their `lengths`; or [samples], where `lengths` is None.
        """
        bad = None
        if not torch.isfinite(values).all():
            at = int((~torch.isfinite(values)).nonzero()[0])
            ends = np.cumsum(lengths or [1] * len(samples))
            k = int(np.searchsorted(ends, at, side="right"))
            token = "" if lengths is None else f", response token {at - int(ends[k]) + lengths[k]}"
            bad = f"update {update}: {what} of sample {samples[k]}{token} is {float(values[at])}; the step was not taken"
        if self.ranks.any(bad is not None):
            raise checkpoint.GuardError(next(said for said in self.ranks.gather(bad) if said))

    def _weights(self, lengths: dict[int, int]) -> dict[int, torch.Tensor]:
        """What each token of the step's samples weighs in its loss, which is the mean over all ranks' completions."""
        sizes = list(lengths.values())
        return dict(zip(lengths, token_weights(sizes, self.settings.device).split(sizes), strict=True))

    def _advantages(self, completions: list[dict], values: dict, metrics: dict, update: int) -> tuple[dict, dict]:
        """Advantages and returns per completion, once over the whole batch. {sample: [length]} each. GuardError where a
        reward (in FP32), a value, a return or an advantage is not finite."""
        s = self.settings
        lengths, order = [len(c["response_tokens"]) for c in completions], list(range(len(completions)))
        rewards = torch.tensor([c["reward"] for c in completions], dtype=torch.float32, device=s.device)
        self._check_finite("the reward", rewards, order, None, update)
        if self.critic is None:
            grouped = algorithms.group_advantages(rewards, s.n_samples_per_prompt)
            self._check_finite("the advantage", grouped, order, None, update)
            return {i: a.expand(n) for i, (a, n) in enumerate(zip(grouped, lengths, strict=True))}, {}
        flat = torch.zeros(sum(lengths), device=s.device)
        ends = torch.tensor(lengths).cumsum(0) - 1
        present = torch.tensor([n > 0 for n in lengths])
        flat[ends[present].to(s.device)] = rewards[present.to(s.device)]
        flat_values = torch.cat([values[i] for i in range(len(lengths))])
        self._check_finite("the critic's value", flat_values, order, lengths, update)
        raw, returns = algorithms.gae(flat, flat_values, lengths, s.gamma, s.lam)
        metrics["value_mean"] = float(flat_values.mean())
        metrics["return_mean"] = float(returns.mean())
        metrics["explained_variance"] = float(algorithms.explained_variance(flat_values, returns))
        whitened = algorithms.whiten(raw, None)
        self._check_finite("the return", returns, order, lengths, update)
        self._check_finite("the advantage", whitened, order, lengths, update)
        return dict(enumerate(whitened.split(lengths))), dict(enumerate(returns.split(lengths)))

    def _chunk_rows(self) -> int:
        return max(1, LOGIT_ELEMENTS // (self.config.vocab_size // self.ranks.tp_size))

    @torch.no_grad()
    def _score(self, packs: list[Pack], old: dict, frozen: dict) -> None:
        """π_old of `packs` before the first step: selected log-probabilities, and the frozen distributions on the host."""
        s = self.settings
        for pack in packs:
            hidden = self.actor.model(pack.tokens, pack.cu_seqlens, pack.rows)
            selected, rows = [], self._chunk_rows()
            chunks = []
            for h, t in zip(hidden.split(rows), pack.targets.split(rows), strict=True):
                logits = self.actor.model.head(h)
                selected.append(algorithms.selected_log_probs(logits, t, s.temperature, self.ranks.vocabulary))
                chunks.append(algorithms.log_softmax(logits, s.temperature, self.ranks.vocabulary).to("cpu"))
            frozen[pack.samples[0]] = chunks
            old.update(per_completion(torch.cat(selected), [pack]))

    def _policy_step(self, packs: list[Pack], lengths: dict, advantages, old, frozen, guard, update: int) -> dict:
        """Forward, backward and one optimizer step of the actor on `packs`; the guard runs between backward and step.

        lengths: {sample: response tokens} of the whole step, of which `packs` are this rank's.
        """
        s, actor, vocabulary = self.settings, self.actor, self.ranks.vocabulary
        actor.start_step()
        weights = self._weights(lengths)
        sums: dict[str, list[torch.Tensor]] = defaultdict(list)
        new: dict[int, torch.Tensor] = {}
        for pack in packs:
            if not len(pack.targets):  # completions without a token: nothing to learn from, and they count in the mean
                new.update(per_completion(torch.zeros(0, device=s.device), [pack]))
                continue
            hidden = actor.model(pack.tokens, pack.cu_seqlens, pack.rows)
            leaf = hidden.detach().requires_grad_()
            rows = self._chunk_rows()
            flat = [torch.cat([d[i] for i in pack.samples]) for d in (advantages, weights)]
            flat.append(torch.cat([self._behaviour[i] for i in pack.samples]))
            known = torch.cat([old[i] for i in pack.samples]) if pack.samples[0] in old else None
            selected = []
            for j, start in enumerate(range(0, len(pack.targets), rows)):
                cut = slice(start, start + rows)
                logits = actor.model.head(leaf[cut])
                a, w, behaviour = (x[cut] for x in flat)
                log_probs = algorithms.selected_log_probs(logits, pack.targets[cut], s.temperature, vocabulary)
                # Before the first step the policy is the one that sampled: its own forward is π_old and π_prox.
                proximal = log_probs.detach() if known is None else known[cut]
                if s.algorithm in ("ppo", "grpo"):
                    loss, seen = algorithms.ppo_loss(log_probs, behaviour, a, s.clip)
                elif s.algorithm == "dppo":
                    loss, seen = algorithms.dppo_loss(
                        log_probs, proximal, behaviour, a, s.clip, s.correction_low, s.correction_high
                    )
                else:
                    full = algorithms.log_softmax(logits, s.temperature, vocabulary)
                    before = frozen[pack.samples[0]][j].to(s.device) if pack.samples[0] in frozen else full.detach()
                    loss, seen = algorithms.flow_dppo_loss(full, before, pack.targets[cut], a, s.kl_budget, vocabulary)
                ((loss * w).sum() * actor.loss_scale).backward()
                selected.append(log_probs.detach())
                seen = {
                    **seen,
                    "loss": loss.detach(),
                    "entropy": algorithms.entropy(logits.detach(), s.temperature, vocabulary),
                    "kl_rollout": algorithms.kl_to(log_probs.detach(), behaviour),
                }
                for name, value in seen.items():
                    sums[name].append(value.detach().expand(len(a)) if value.dim() == 0 else value.detach())
            hidden.backward(leaf.grad)
            new.update(per_completion(torch.cat(selected), [pack]))
        if guard is not None:
            old.update(new)
            guard()
        order, sizes = list(lengths), list(lengths.values())
        names = max(self.ranks.gather(list(sums)), key=len) or ["loss"]  # a rank without tokens knows none
        whole = {name: self._whole(sums[name], packs, lengths) for name in names}
        self._check_finite("the policy loss", whole["loss"], order, sizes, update)
        # sample_mean as the loss has it, not a mean over tokens: then `loss` is the number that was differentiated.
        result = {name: float(algorithms.sample_mean(values, sizes, None)) for name, values in whole.items()}
        if self.ranks.any(not np.isfinite(result["loss"])):
            raise checkpoint.GuardError(f"update {update}: the policy loss is {result['loss']}; no optimizer step was taken")
        result["grad_norm"] = actor.step(update)
        return result

    def _guard(self, completions: list[dict], old: dict, update: int, metrics: dict) -> None:
        """The replay guard of DESIGN §5: the trainer's own log-probabilities against the rollout's, on every rank alike."""
        worst, total, count, place = 0.0, 0.0, 0, None
        old = self.ranks.whole(old, {i: len(c["response_tokens"]) for i, c in enumerate(completions)}, self.settings.device)
        ours = torch.cat([old[i] for i in range(len(completions))])
        theirs = torch.cat(self._behaviour)
        gap = (ours - theirs).abs().cpu()
        if len(gap):
            # NaN compares false with everything: it is the worst there is.
            at = int(torch.where(torch.isnan(gap), torch.inf, gap).argmax())
            worst, total, count = float(gap[at]), float(gap.double().sum()), len(gap)
            sample = 0
            while at >= len(completions[sample]["response_tokens"]):
                at -= len(completions[sample]["response_tokens"])
                sample += 1
            place = (sample, at, completions[sample]["response_tokens"][at], float(old[sample][at]))
        metrics["max_logprob_error"] = worst
        metrics["mean_logprob_error"] = total / max(count, 1)
        if self.ranks.any(not worst <= self.settings.max_logprob_error):
            sample, at, token, mine = place
            raise checkpoint.GuardError(
                f"update {update}: replay guard: sample {sample}, response token {at} (id {token}): the trainer has"
                f" log-probability {mine:.7g}, the rollout {completions[sample]['log_probs'][at]:.7g}, difference"
                f" {worst:.3g} > --max-logprob-error {self.settings.max_logprob_error:g}; nothing was optimized"
            )

    def _values(self, pack: Pack) -> torch.Tensor:
        return self.critic.model.head(self.critic.model(pack.tokens, pack.cu_seqlens, pack.rows))

    def _critic_step(self, packs: list[Pack], lengths: dict, old_values: dict, returns: dict, update: int) -> dict:
        s, critic = self.settings, self.critic
        critic.start_step()
        weights = self._weights(lengths)
        losses, clipped = [], []
        for pack in packs:
            before, target, w = (torch.cat([d[i] for i in pack.samples]) for d in (old_values, returns, weights))
            loss, seen = algorithms.value_loss(self._values(pack), before, target, s.value_clip)
            ((loss * w).sum() * critic.loss_scale).backward()
            losses.append(loss.detach())
            clipped.append(seen["value_clip_fraction"])
        order, sizes = list(lengths), list(lengths.values())
        every, every_clipped = (self._whole(values, packs, lengths) for values in (losses, clipped))
        self._check_finite("the value loss", every, order, sizes, update)
        value_loss = float(algorithms.sample_mean(every, sizes, None))
        if self.ranks.any(not np.isfinite(value_loss)):
            raise checkpoint.GuardError(f"update {update}: the value loss is {value_loss}; the critic took no step")
        return {
            "value_loss": value_loss,
            "value_clip_fraction": float(algorithms.sample_mean(every_clipped, sizes, None)),
            "critic_grad_norm": critic.step(update),
        }

    # -- publication (the sending end) --

    def policy(self, into: dict[str, torch.Tensor] | None = None) -> dict:
        """{"digest": hex, "tensors": {name: [dtype, [shape]]}} of the policy as it stands, for its publication.

        `into`: name → pinned host tensor that the policy is copied to on the way."""
        if self._digest_cache is None or into is not None:
            self._only(self.actor)
            entries = self.ranks.digests(provider.export_native(self.actor.model), into)
            self._digest_cache = {
                "digest": checkpoint.policy_digest(entries),
                "tensors": {n: [dtype, list(shape)] for n, (dtype, shape, _) in entries.items()},
            }
        return self._digest_cache

    def publish(self, version: int, transport: str, location: str) -> dict | None:
        """Write the policy where the engine finds it. Returns the manifest, which states the digest of the full tensors.

        'disk' writes a safetensors file at `location`. 'shm' overwrites the same file in this process's memory each time, so
        what a manifest names holds until the next publication. 'ipc' leaves the weights where they are, on the GPU.

        Of several ranks, those of the first data-parallel rank send, each its own share under a name of its own: no rank
        holds the whole model. `parts` of the manifest lists them: `location`, and `slices` {name: [dimension, start]}, the
        piece of the full tensor that lies there under that name. The other ranks send nothing and return None.
        """
        self._only(self.actor)
        if self.ranks.dp:
            return None
        own = {name: (view, dim, start) for name, view, dim, start in provider.native_slices(self.actor.model)}
        whole = self.ranks.tp_size == 1
        views = {name: view.detach() for name, (view, _, _) in own.items()}
        if transport == "shm":
            self.ranks.together(lambda: self._make_memory(views), self.ranks.tp_group)
        at_once = transport == "shm" and whole and self._memory.pinned  # copied and hashed in one pass
        policy = self.policy(self._memory.tensors if at_once else None)
        manifest = {"version": version, "digest": policy["digest"], "transport": transport, "tensors": policy["tensors"]}
        if transport == "ipc":
            place = ipc_handles(views.items())
        elif transport == "shm":
            if not at_once:
                self.ranks.together(lambda: self._write_memory(views), self.ranks.tp_group)
            place = self._memory.path
        else:
            path = Path(location)
            if not whole:
                path = path.with_name(f"{path.stem}-{self.ranks.tp + 1:05d}-of-{self.ranks.tp_size:05d}{path.suffix}")
            self.ranks.together(lambda: self._write_file(path, views), self.ranks.tp_group)
            place = str(path)
        if whole:
            return {**manifest, "location": place}
        slices = {name: [dim, start] for name, (_, dim, start) in own.items()}
        return {**manifest, "parts": self.ranks.gather({"location": place, "slices": slices}, self.ranks.tp_group)}

    def _make_memory(self, views: dict[str, torch.Tensor]) -> None:
        if self._memory is None:
            like = {name: unfused(view.to("meta")) for name, view in views.items()}
            self._memory = hostmemory.make_policy_file(like, gpu=self.settings.device == "cuda")

    def _write_memory(self, views: dict[str, torch.Tensor]) -> None:
        for name, view in views.items():
            copy_to_host(unfused(view), self._memory.tensors[name])

    def _write_file(self, path: Path, views: dict[str, torch.Tensor]) -> None:
        from safetensors.torch import save_file

        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: copy_to_host(unfused(v)) if v.is_cuda else unfused(v).contiguous() for name, v in views.items()}
        with checkpoint.writing(path, sum(t.nbytes for t in tensors.values())):
            save_file(tensors, path)
            checkpoint.give_users_mode(path)

    # -- checkpoints --

    def _networks(self):
        """Actor, then critic; each on the device while it is looked at."""
        for network in (self.actor, self.critic):
            if network is not None:
                yield self._only(network)

    def _rng(self):
        """RNG of every process: of the one, or a list by rank."""
        states = self.ranks.gather(_rng_state(self.settings.device))
        return states[0] if len(states) == 1 else states

    def _state(self, network: Network) -> dict:
        return {**network.sharded_state(), "rng": self._rng()}

    def _facts(self) -> dict:
        """What state.json says of the state held now. Optimizer tensors go by Megatron's keys, under the network's name.

        Digests are of full tensors, so they do not depend on the layout. Every data-parallel rank makes them of its own
        copy; GuardError where they differ, which no step of ours can bring about: that is a fault of the machine.
        """
        tensors, schedulers = {"optimizer": {}}, {}
        for network in self._networks():
            entries = self.ranks.digests(provider.export_native(network.model))
            tensors[network.name] = {name: digest for name, (_, _, digest) in entries.items()}
            if network is self.actor:
                policy = checkpoint.policy_digest(entries)
            entries = self.ranks.digests((f"{network.name}.{key}", tensor) for key, tensor in network.optimizer_tensors())
            tensors["optimizer"] |= {name: digest for name, (_, _, digest) in entries.items()}
            schedulers[network.name] = network.scheduler.state_dict()
        copies = self.ranks.gather(checkpoint.tree_digest(tensors))
        if odd := [rank for rank, digest in enumerate(copies) if digest != copies[0]]:
            raise checkpoint.GuardError(f"trainer rank {odd[0]} holds other weights or optimizer state than rank 0")
        s = self.settings
        return {
            "policy_digest": policy,
            "tensors": tensors,
            "scheduler": checkpoint.tree_digest(schedulers),
            "rng": checkpoint.tree_digest(self._rng()),
            "layout": {
                "train_gpus": self.ranks.size,
                "tensor_model_parallel_size": self.ranks.tp_size,
                "sequence_parallel": s.sequence_parallel,
                "distributed_optimizer": s.distributed_optimizer,
            },
        }

    def snapshot(self, run: str, updates: int) -> None:
        """Copy all durable state to host memory, after waiting for the previous writer; the next update may then run.

        With --offload-train host memory is what is short, as it holds the network that is away: each network is written
        at once, one after the other, and only hashing and the rename are left to the background. So it is with several
        ranks, which agree on every file while it is written: their messages must not mix with those of the next update.
        """
        self.wait_for_checkpoint()
        self._snapshot = self._facts(), {}
        staging = self.ranks.first(lambda: checkpoint.staging(run, updates))
        for network in self._networks():
            state = self._state(network)
            if self.ranks.size > 1:
                write_state(staging, network.name, state, self.ranks)
                continue
            _detach(state)
            if self.settings.offload_train:
                write_state(staging, network.name, state)
            else:
                self._snapshot[1][network.name] = state

    def write_checkpoint(self, run: str, updates: int, cursor: int, keep: int) -> None:
        """Write the snapshot and make it the checkpoint, in the background; `wait_for_checkpoint` reports how it went.

        Of several ranks, all have written and fsynced their files by now, and rank 0 makes them the checkpoint."""
        (facts, states), self._snapshot = self._snapshot, None
        if self.rank:
            return
        staging = checkpoint.staging_dir(run, updates)

        def write():
            began = time.perf_counter()
            try:
                for name, state in states.items():
                    write_state(staging, name, state)
                state = {"updates": updates, "policy_version": updates + 1, "cursor": cursor, **facts}
                checkpoint.publish_checkpoint(run, updates, state, keep)
                # For whoever chooses --save-interval: as long as updates take longer than this, nothing waits for the disk.
                print(f"checkpoint {updates}: {time.perf_counter() - began:.2f} s in the background", flush=True)
            except BaseException as error:  # carried to the loop, which waits for the writer
                self._writer_error = error

        self._writer = threading.Thread(target=write, name="checkpoint-writer")
        self._writer.start()

    def wait_for_checkpoint(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._writer_error is not None:
            error, self._writer_error = self._writer_error, None
            raise error

    def load(self, run: str, updates: int) -> None:
        """Take the state of checkpoint `updates`, whatever layout wrote it. Raises GuardError when a tensor is not the one
        that was saved. Another number of processes takes the RNG states that there are; the rest keep those of the seed."""
        from megatron.core import dist_checkpointing

        saved = checkpoint.read_state(run, updates)
        was = saved.get("layout", {"train_gpus": 1, "distributed_optimizer": False})
        for network in self._networks():
            wanted = {**network.wanted_state(was["distributed_optimizer"]), "rng": None}
            path = checkpoint.checkpoint_path(run, updates) / network.name
            with megatron_cpu.enable():
                # Moments are read by whoever holds a piece of them, which the check of one reader a part would refuse; the
                # digests below say more.
                state = dist_checkpointing.load(wanted, str(path), validate_access_integrity="moments" not in wanted)
            network.load(state)
            if network is self.actor:
                rng = state["rng"]
        states = rng if isinstance(rng, list) else [rng]
        if self.rank < len(states):
            _set_rng_state(states[self.rank], self.settings.device)
        self._digest_cache = None
        held = self._facts()
        for kind, digests in saved["tensors"].items():
            for name, digest in digests.items():
                if held["tensors"].get(kind, {}).get(name) != digest:
                    raise checkpoint.GuardError(f"checkpoint {updates}: {kind} tensor {name} was not restored as it was saved")
        for what in ("scheduler", "rng") if was["train_gpus"] == self.size else ("scheduler",):
            if held[what] != saved[what]:
                raise checkpoint.GuardError(f"checkpoint {updates}: {what} was not restored as it was saved")

    # -- facts --

    def facts(self) -> dict:
        """What a run records of its trainer: process, parameters, versions of what computes."""
        card = torch.cuda.get_device_name() if self.settings.device == "cuda" else None
        return {
            "pid": os.getpid(),
            "parameters": sum(p.numel() for p in self.actor.model.parameters()),
            "torch": torch.__version__,
            "card": card,
            "start_s": round(time.perf_counter() - self.started, 2),
        }


def ipc_handles(tensors) -> dict:
    """CUDA IPC handles of (name, tensor) on one GPU, for a process of the same host: {"device": UUID, "handles": {…}}.

    A tensor may be a strided slice of a fused parameter: the receiver gives it its native shape. It is read where it lies,
    so it must stay unchanged until the engine has committed; the loop waits for that before it trains.
    """
    from torch.multiprocessing.reductions import reduce_tensor

    # rebuild_cuda_tensor's arguments; the function itself is the receiver's own
    handles = {name: reduce_tensor(tensor.detach())[1] for name, tensor in tensors}
    torch.cuda.synchronize()  # the receiver reads outside this process's streams
    return {"device": str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid), "handles": handles}


def unfused(view: torch.Tensor) -> torch.Tensor:
    """A piece of a fused weight, [groups, rows, hidden], as the native tensor that it is; others as they are."""
    return view.flatten(0, 1) if view.dim() == 3 else view


def copy_to_host(tensor: torch.Tensor, host: torch.Tensor | None = None) -> torch.Tensor:
    """A host copy of `tensor`: in `host`, or new."""
    if host is None:
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
    if not tensor.is_cuda:
        return host.copy_(tensor.detach())
    checkpoint.copy_pinned(tensor.detach().contiguous(), host)
    return host


def write_state(staging: Path, name: str, state: dict, ranks: layout.Ranks | None = None) -> None:
    """Write one network's state with Megatron's dist_checkpointing into the folder `name` of a staged checkpoint.

    With `ranks` every rank writes the parts it holds, and all of them lie there, durable, when it returns. OSError where
    the ranks do not see each other's files.
    """
    import queue

    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    # Megatron 0.16.1 passes the writers' results through a manager process of its own, which would re-import this
    # program and outlive a kill. A synchronous save reads them in this very process: a plain queue does.
    filesystem_async._results_queue = queue.Queue()
    size = sum(x.data.nbytes for x in _sharded(state) if torch.is_tensor(x.data))
    folder = staging / name
    first = ranks is None or ranks.rank == 0
    with checkpoint.writing(staging, size), megatron_cpu.enable():
        if ranks is None:
            folder.mkdir()
        else:
            ranks.first(folder.mkdir)
        strategy = None
        if ranks is not None and ranks.dp_size > 1:  # of what data-parallel ranks hold alike, each writes its share
            strategy = FullyParallelSaveStrategyWrapper(
                dist_checkpointing.serialization.get_default_save_sharded_strategy(), ranks.dp_group
            )
        dist_checkpointing.save(state, str(folder), strategy)
        # torch notes in its index where it wrote. A run directory may be moved, so nothing in it says where it lies.
        if first:
            index = folder / ".metadata"
            facts = pickle.loads(index.read_bytes())
            facts.storage_meta = None
            index.write_bytes(pickle.dumps(facts))
        if ranks is None:
            return
        # On a shared file system rank 0's fsync does not make durable what another node wrote.
        own = sorted(path.name for path in folder.glob(f"__{ranks.rank}_*.distcp"))
        ranks.together(lambda: checkpoint.sync_files(folder, own))
        missing = [file for files in ranks.gather(own) for file in files if not (folder / file).exists()]
        if ranks.any(bool(missing)):
            raise OSError(f"{folder}: trainer ranks do not see each other's files; --output must lie where all nodes share it")


def _sharded(tree):
    """Yield every sharded leaf of a state dict: Megatron's tensors, objects and (gate/up) factories, which hold `data`."""
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    for value in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (list, tuple)) else ():
        if isinstance(value, ShardedBase):
            yield value
        else:
            yield from _sharded(value)


def _detach(tree) -> None:
    """Replace, in place, every tensor of a state dict by a host copy, so that nothing the next update does reaches it."""
    from megatron.core.dist_checkpointing.mapping import ShardedBase

    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, ShardedBase):
            value.data = copy_to_host(value.data) if torch.is_tensor(value.data) else copy.deepcopy(value.data)
        elif torch.is_tensor(value):
            tree[key] = copy_to_host(value)
        elif isinstance(value, (dict, list)):
            _detach(value)


def _rng_state(device: str) -> dict:
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
    if device == "cuda":
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict, device: str) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if device == "cuda":
        torch.cuda.set_rng_state(state["cuda"])


def _start_process(settings: TrainerSettings, store, rank: int, size: int) -> None:
    """Determinism, precision, and Megatron's process groups."""
    from megatron.core import parallel_state

    if settings.device == "cuda":
        torch.cuda.set_device(0)
        if settings.memory_cap_gib:
            total = torch.cuda.get_device_properties(0).total_memory / 2**30
            torch.cuda.set_per_process_memory_fraction(min(1.0, settings.memory_cap_gib / total))
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a check for our bugs, paid on every allocation
    torch.set_float32_matmul_precision(settings.matmul_precision)
    torch.manual_seed(settings.seed)
    np.random.seed(settings.seed)
    random.seed(settings.seed)
    if not torch.distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo"
        torch.distributed.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=layout.TIMEOUT if size > 1 else None
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(settings.tensor_model_parallel_size)
    if settings.sequence_parallel:
        megatron_cpu.for_good()
