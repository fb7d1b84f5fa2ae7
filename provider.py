"""Nanbeige for Megatron-core: the config, the looped model with actor and critic heads, native <-> Megatron weights.

A looped transformer runs its physical decoder layers `num_loops` times with the same weights:

    embed -> for each loop: all layers in order, then the final RMSNorm -> head

(with `skip_loop_final_norm` the norm comes after the last loop only). A layer is pre-norm grouped-query attention with
half-split RoPE, then pre-norm SwiGLU. Every loop computes its own keys and values, so loop 1 of a token attends to
loop 1 of earlier tokens and to nothing else.

What is Megatron's here: `VocabParallelEmbedding`, `TransformerLayer` with its tensor-parallel linears, RMSNorm, and
`ColumnParallelLinear` as output layer. What is ours: the order in which they run, the core attention (Megatron's own
wants a CUDA buffer and no packed sequences), and the names. Sequences come packed, laid end to end without padding;
only the attention itself sees a padded batch.

In three parts: the config and the files of a checkpoint (no torch needed to check them), the model, the weights.
Importing this module imports neither torch nor Megatron. Whatever is wrong with a file is a `ValueError` of one line
that names the file and the field or tensor.
"""

import functools
import json
import math
import os
import stat
import struct
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# ----------------------------------------------------------------------------------------------------------------------
# Config
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NanbeigeConfig:
    """What the model is made of; names and meanings are those of the native config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int  # physical layers; layer visits are num_hidden_layers * num_loops
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # its own number: num_attention_heads * head_dim need not be hidden_size
    rms_norm_eps: float
    rope_theta: float
    num_loops: int
    skip_loop_final_norm: bool  # True: the final norm follows the last loop only
    max_position_embeddings: int
    pad_token_id: int | None
    bos_token_id: int | None
    eos_token_id: int | None


# Features of the family that this recipe does not train. An "off" value (null, false, 0, empty) is accepted.
_REFUSED = {
    "emb_neighbor_num": "n-gram embeddings",
    "enable_hyper_connection": "hyper-connections",
    "enable_mhc": "hyper-connections",
    "enable_double_loop_split": "LoopSplit",
    "enable_depth_attention": "depth attention",
    "qk_layernorm": "normalised queries and keys",
    "tie_word_embeddings": "tied embeddings",
    "attention_bias": "attention biases",
    "mlp_bias": "MLP biases",
    "attention_dropout": "dropout",
    "sliding_window": "sliding-window attention",
    "use_sliding_window": "sliding-window attention",
    "num_experts": "mixtures of experts",
    "quantization_config": "quantised weights",
}
# Keys without mathematics, and those that Transformers adds when it writes a config of its own accord.
_IGNORED = frozenset(
    """architectures auto_map torch_dtype dtype initializer_range use_cache transformers_version
    _name_or_path name_or_path chunk_size_feed_forward id2label label2id is_encoder_decoder output_attentions
    output_hidden_states problem_type return_dict attn_implementation _attn_implementation _commit_hash
    torchscript tokenizer_class""".split()
)
# Far above any model of the family, and low enough that a damaged number cannot exhaust memory or time.
_LARGEST = {"num_hidden_layers": 4096, "num_loops": 256}
_LARGEST_SIZE = 1 << 26


def read_config(model_dir: Path | str) -> NanbeigeConfig:
    """Read MODEL/config.json strictly. ValueError names the file and the field; unknown keys give one warning."""
    path = Path(model_dir) / CONFIG
    return parse_config(_read_json(path, "the model's config"), str(path))


def parse_config(raw: Mapping[str, Any], where: str) -> NanbeigeConfig:
    """The config of a dict such as json.load or a Transformers `to_dict()` gives; `where` begins each error.

    Raises:
        ValueError: a field is missing, has the wrong type or value, contradicts another, or asks for something that
            this recipe does not train.
    """
    if not isinstance(raw, Mapping):
        raise ValueError(f"{where}: needs a JSON object of fields, found {_show(raw)}")
    seen: set[str] = set()

    def get(key: str) -> Any:
        seen.add(key)
        return raw.get(key)

    def integer(key: str, value: Any, low: int = 1, high: int | None = None) -> int:
        high = _LARGEST.get(key, _LARGEST_SIZE) if high is None else high
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            wanted = "is missing" if value is None and raw.get(key) is None else f"is {_show(value)}"
            raise ValueError(f'{where}: "{key}" {wanted}; it needs an integer from {low} to {high}')
        return value

    def positive(key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            wanted = "is missing" if value is None else f"is {_show(value)}"
            raise ValueError(f'{where}: "{key}" {wanted}; it needs a positive number')
        return float(value)

    def only(key: str, *allowed: Any) -> None:
        value = get(key)
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise ValueError(f'{where}: "{key}" is {_show(value)}; this recipe trains {_show(allowed[0])} only')

    only("model_type", "nanbeige")
    only("hidden_act", "silu", None)
    only("pretraining_tp", 1, None, False)
    for key, meaning in _REFUSED.items():
        if not _off(value := get(key)):
            raise ValueError(f'{where}: "{key}" is {_show(value)}: {meaning} cannot be trained here')

    sizes = {
        key: integer(key, get(key))
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    }
    heads = sizes["num_attention_heads"]
    kv_heads = (
        heads if get("num_key_value_heads") is None else integer("num_key_value_heads", raw["num_key_value_heads"])
    )
    if heads % kv_heads:
        raise ValueError(
            f'{where}: "num_key_value_heads" is {kv_heads}; it must divide "num_attention_heads" ({heads})'
        )

    head_dim = get("head_dim")
    if head_dim is None:  # only then, as Transformers does
        if sizes["hidden_size"] % heads:
            raise ValueError(
                f'{where}: "head_dim" is missing, and "hidden_size" ({sizes["hidden_size"]}) is no multiple of '
                f'"num_attention_heads" ({heads}) from which it could follow'
            )
        head_dim = sizes["hidden_size"] // heads
    integer("head_dim", head_dim, 2)
    if head_dim % 2:
        raise ValueError(f'{where}: "head_dim" is {head_dim}; half-split RoPE needs an even number')
    if not _off(channels := get("kv_channels")) and (isinstance(channels, bool) or channels != head_dim):
        raise ValueError(
            f'{where}: "kv_channels" is {_show(channels)} but "head_dim" is {head_dim}; they must be equal'
        )

    skip = get("skip_loop_final_norm")
    if not (_off(skip) or skip is True):
        raise ValueError(f'{where}: "skip_loop_final_norm" is {_show(skip)}; it needs true or false')
    weights = get("loop_loss_weights")
    if _off(weights):
        num_loops = integer("num_loops", get("num_loops"))
    else:
        if not isinstance(weights, list | tuple) or not all(
            isinstance(w, int | float) and not isinstance(w, bool) and abs(w) < 1e30 for w in weights
        ):
            raise ValueError(f'{where}: "loop_loss_weights" is {_show(weights)}; it needs a list of finite numbers')
        get("num_loops")  # the length of the list decides, whatever stands there
        num_loops = integer("num_loops", len(weights) + 1)

    def token_id(key: str) -> int | None:
        value = get(key)
        return None if value is None else integer(key, value, 0, sizes["vocab_size"] - 1)

    config = NanbeigeConfig(
        **sizes,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=positive("rms_norm_eps", get("rms_norm_eps")),
        rope_theta=_rope_theta(get, positive, where),
        num_loops=num_loops,
        skip_loop_final_norm=skip is True,
        max_position_embeddings=integer("max_position_embeddings", get("max_position_embeddings")),
        pad_token_id=token_id("pad_token_id"),
        bos_token_id=token_id("bos_token_id"),
        eos_token_id=token_id("eos_token_id"),
    )
    if unknown := sorted(str(key) for key in raw if key not in seen and key not in _IGNORED):
        warnings.warn(f"{where}: unknown fields ignored: {_show(unknown, 400)}", stacklevel=3)
    return config


def _rope_theta(get: Any, positive: Any, where: str) -> float:
    """The one RoPE base that `rope_theta`, `rope_parameters` and `rope_scaling` agree on; any scaling is refused."""
    found = {}
    if (value := get("rope_theta")) is not None:
        found["rope_theta"] = positive("rope_theta", value)
    for key in ("rope_parameters", "rope_scaling"):
        if _off(part := get(key)):
            continue
        if not isinstance(part, Mapping):
            raise ValueError(f'{where}: "{key}" is {_show(part)}; it needs an object')
        for name, value in part.items():
            if name in ("rope_type", "type") and value in ("default", None):
                continue
            if name == "rope_theta" and value is not None:
                found[f"{key}.rope_theta"] = positive(f"{key}.rope_theta", value)
            elif not (_off(value) or (name == "partial_rotary_factor" and value == 1)):
                raise ValueError(f'{where}: "{key}" has {_show(name)}: {_show(value)}: RoPE scaling cannot be trained here')
    if not (_off(value := get("partial_rotary_factor")) or value == 1):
        raise ValueError(f'{where}: "partial_rotary_factor" is {_show(value)}: partial RoPE cannot be trained here')
    if not found:
        raise ValueError(f'{where}: "rope_theta" is missing; it needs a positive number')
    if len(set(found.values())) > 1:
        raise ValueError(f"{where}: these disagree: " + ", ".join(f'"{k}" is {v!r}' for k, v in found.items()))
    return next(iter(found.values()))


def _off(value: Any) -> bool:
    return (
        value is None or value is False or (isinstance(value, int | float) and value == 0) or value in ("", [], (), {})
    )


def _show(value: Any, limit: int = 80) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = "a deeply nested value"
    return text if len(text) <= limit else text[:limit] + "..."


def _read_json(path: Path, what: str) -> Any:
    """JSON that means one thing: UTF-8, no key twice in an object, no NaN or infinity."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe may keep us waiting, a device never end
            raise ValueError(f"{path}: {what} is no plain file")
        data = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path}: {what} is missing") from None
    except OSError as error:
        raise ValueError(f"{path}: {what} cannot be read: {error.strerror}") from None
    if len(data) > 1 << 26:
        raise ValueError(f"{path}: {len(data)} bytes are too many for {what}")
    return _parse_json(data, str(path))


def _parse_json(data: bytes, where: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in pairs:
            if key in result:
                raise ValueError(f"the key {_show(key)} stands twice")
            result[key] = value
        return result

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON number")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except UnicodeDecodeError:
        raise ValueError(f"{where}: no UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: no valid JSON: {_show(str(error), 200)}") from None


# ----------------------------------------------------------------------------------------------------------------------
# Checkpoint files
# ----------------------------------------------------------------------------------------------------------------------

_ITEM_SIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # the floating-point types that a checkpoint may hold


def tensor_shapes(config: NanbeigeConfig, critic: bool = False) -> dict[str, tuple[int, ...]]:
    """Native name -> full shape of every tensor, in the order of the forward pass.

    The critic has no `lm_head.weight` and instead `value_head.weight` [1, hidden], which no native checkpoint holds.
    """
    h, i, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, h)}
    for n in range(config.num_hidden_layers):
        shapes |= {
            f"model.layers.{n}.input_layernorm.weight": (h,),
            f"model.layers.{n}.self_attn.q_proj.weight": (q, h),
            f"model.layers.{n}.self_attn.k_proj.weight": (kv, h),
            f"model.layers.{n}.self_attn.v_proj.weight": (kv, h),
            f"model.layers.{n}.self_attn.o_proj.weight": (h, q),
            f"model.layers.{n}.post_attention_layernorm.weight": (h,),
            f"model.layers.{n}.mlp.gate_proj.weight": (i, h),
            f"model.layers.{n}.mlp.up_proj.weight": (i, h),
            f"model.layers.{n}.mlp.down_proj.weight": (h, i),
        }
    shapes["model.norm.weight"] = (h,)
    shapes |= {"value_head.weight": (1, h)} if critic else {"lm_head.weight": (config.vocab_size, h)}
    return shapes


def check_checkpoint(model_dir: Path | str, config: NanbeigeConfig) -> None:
    """Check names, shapes, types, shards and sizes of a native checkpoint from its headers; no weight is read.

    Raises:
        ValueError: names the file and the tensor.
    """
    _locate(Path(model_dir), config)


def read_checkpoint(model_dir: Path | str, config: NanbeigeConfig) -> "Iterator[tuple[str, torch.Tensor]]":
    """Every tensor of a native checkpoint on the CPU, as stored, one at a time, file by file, and checked to be finite.

    Raises:
        ValueError: what `check_checkpoint` raises, or a tensor that holds NaN or infinity.
    """
    import torch
    from safetensors import SafetensorError, safe_open

    places = _locate(Path(model_dir), config)
    for path in sorted(set(places.values())):
        try:
            with safe_open(path, framework="pt") as file:
                for name in (name for name, place in places.items() if place == path):
                    tensor = file.get_tensor(name)
                    if not torch.isfinite(torch.stack(tensor.aminmax())).all():  # a NaN is its minimum and maximum
                        raise ValueError(f'{path}: tensor "{name}" holds NaN or infinity')
                    yield name, tensor
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: cannot be read as safetensors: {_show(str(error), 200)}") from None


def _locate(model_dir: Path, config: NanbeigeConfig) -> dict[str, Path]:
    """Tensor name -> file, once everything that headers can tell has been checked."""
    expected = tensor_shapes(config)
    single, index = model_dir / SINGLE, model_dir / INDEX
    if index.exists() and single.exists():
        raise ValueError(f"{model_dir}: holds both {SINGLE} and {INDEX}; remove the one that is not meant")
    if index.exists():
        listed = _read_index(index, expected)
        files = sorted(set(listed.values()))
    elif single.exists():
        listed, files = None, [SINGLE]
    else:
        raise ValueError(f"{model_dir}: has neither {SINGLE} nor {INDEX}; only safetensors checkpoints are read")

    places: dict[str, Path] = {}
    for file in files:
        path = model_dir / file
        for name, (dtype, shape) in _read_header(path).items():
            if name not in expected:
                raise ValueError(f"{path}: tensor {_show(name)} does not belong to this model")
            if name in places:
                raise ValueError(f'{path}: tensor "{name}" stands in {places[name].name} as well')
            if listed is not None and listed[name] != file:
                raise ValueError(f'{path}: tensor "{name}" should be in {listed[name]}, says {INDEX}')
            if shape != expected[name]:
                raise ValueError(f'{path}: tensor "{name}" has shape {list(shape)}, expected {list(expected[name])}')
            if dtype not in _ITEM_SIZE:
                raise ValueError(f'{path}: tensor "{name}" is {_show(dtype)}; weights must be one of {", ".join(_ITEM_SIZE)}')
            places[name] = path
    for name in expected:
        if name not in places:
            where = model_dir / (listed[name] if listed else SINGLE)
            raise ValueError(f'{where}: tensor "{name}" is missing')
    return places


def _read_index(path: Path, expected: Mapping[str, Any]) -> dict[str, str]:
    raw = _read_json(path, "the index of the shards")
    listed = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(listed, dict):
        raise ValueError(f'{path}: "weight_map" is missing; it needs an object from tensor name to file name')
    for name, file in listed.items():
        if name not in expected:
            raise ValueError(f'{path}: "weight_map" names {_show(name)}, which does not belong to this model')
        plain = isinstance(file, str) and file.endswith(".safetensors") and not set(file) & set("/\\:\0")
        if not plain or not file.isprintable() or file.startswith("."):
            raise ValueError(
                f'{path}: "weight_map" entry "{name}" is {_show(file)}; it needs a plain .safetensors file name'
            )
    for name in expected:
        if name not in listed:
            raise ValueError(f'{path}: "weight_map" lacks "{name}"')
    return listed


def _read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor name -> (type, shape) of one safetensors file, checked against the size of the file.

    The format: 8 bytes little-endian length of the header, the header in JSON, then the tensors without gap or overlap.
    """
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError(f"{path}: not a plain file")
        size = facts.st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 2 <= length <= min(size - 8, 100_000_000):
                raise ValueError(
                    f"{path}: no safetensors file, or cut short (header of {length} bytes, file of {size})"
                )
            data = file.read(length)
    except FileNotFoundError:
        raise ValueError(f"{path}: missing") from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    header = _parse_json(data, f"{path}: safetensors header")
    if not isinstance(header, dict):
        raise ValueError(f"{path}: safetensors header is no JSON object")
    header.pop("__metadata__", None)

    def natural(values: Any) -> bool:  # few: the product of a million large ones takes hours
        return isinstance(values, list) and len(values) <= 8 and all(type(v) is int and 0 <= v < 1 << 63 for v in values)

    tensors, spans = {}, []
    for name, entry in header.items():
        entry = entry if isinstance(entry, dict) else {}
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not (isinstance(dtype, str) and natural(shape) and natural(offsets) and len(offsets) == 2):
            raise ValueError(f"{path}: header entry {_show(name)} is damaged: {_show(header[name])}")
        if dtype in _ITEM_SIZE and offsets[1] - offsets[0] != _ITEM_SIZE[dtype] * math.prod(shape):
            raise ValueError(
                f"{path}: tensor {_show(name)} of shape {_show(shape)} and type {dtype} does not fill its bytes"
            )
        tensors[name] = dtype, tuple(shape)
        spans.append((*offsets, name))
    end = 0
    for first, last, name in sorted(spans):
        if first != end or last < first:
            raise ValueError(f"{path}: the bytes of tensor {_show(name)} overlap others or leave a gap")
        end = last
    if end != size - 8 - length:
        raise ValueError(f"{path}: holds {size - 8 - length} bytes of tensors, its header says {end}")
    return tensors


def write_checkpoint(
    model_dir: Path | str,
    config_json: Mapping[str, Any],
    tensors: "Iterable[tuple[str, torch.Tensor]]",
    shards: int = 1,
) -> None:
    """Write a native checkpoint: config.json and one safetensors file, or `shards` files with their index.

    One tensor is held at a time. A file is filled under a name that starts with a dot, and config.json, without which
    nothing is a checkpoint, comes last.

    Args:
        config_json: what config.json shall say, with every key that is to be kept.
        tensors: native names and full tensors of a floating-point type, each exactly once.

    Raises:
        ValueError: a tensor is missing, too many, or misshapen.
    """
    import torch

    model_dir = Path(model_dir)
    expected = tensor_shapes(parse_config(config_json, str(model_dir / CONFIG)))
    if not 1 <= shards <= len(expected):
        raise ValueError(f"{model_dir}: {shards} shards asked for; it takes 1 to {len(expected)}")
    dtypes = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    # The header stands before the data it describes: room is kept for it, and what it does not use is blank.
    room = sum(len(name) + 160 for name in expected) // 8 * 8 + 64
    total = sum(math.prod(shape) for shape in expected.values())
    names = [SINGLE] if shards == 1 else [f"model-{n + 1:05d}-of-{shards:05d}.safetensors" for n in range(shards)]
    if (stale := model_dir / (INDEX if shards == 1 else SINGLE)).exists():
        raise ValueError(f"{stale}: stands where another layout of weights is to be written; remove it first")
    model_dir.mkdir(parents=True, exist_ok=True)

    stream = iter(tensors)
    weight_map: dict[str, str] = {}
    written, size = 0, 0

    def fill(file: Any, enough: float) -> None:
        """One safetensors file, until `enough` numbers are written in all or the stream ends."""
        nonlocal written, size
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        file.seek(8 + room)
        while written < enough:
            name, tensor = next(stream, (None, None))
            if name is None:
                break
            if name not in expected or name in weight_map:
                fault = "comes twice" if name in weight_map else "is unknown"
                raise ValueError(f"{model_dir}: tensor {_show(name)} {fault}")
            if tuple(tensor.shape) != expected[name] or tensor.dtype not in dtypes:
                raise ValueError(
                    f'{model_dir}: tensor "{name}" is {tensor.dtype} {list(tensor.shape)}, '
                    f"expected a floating-point type and {list(expected[name])}"
                )
            data = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy()
            file.write(data)
            weight_map[name] = file_name
            header[name] = {
                "dtype": dtypes[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + len(data)],
            }
            offset += len(data)
            size += len(data)
            written += tensor.numel()
        text = json.dumps(header, separators=(",", ":")).encode()
        file.seek(0)
        file.write(struct.pack("<Q", room) + text.ljust(room))

    for n, file_name in enumerate(names):
        temporary = model_dir / f".{file_name}.tmp"
        try:
            with temporary.open("wb") as file:
                fill(file, math.inf if n == shards - 1 else total * (n + 1) / shards)
            os.replace(temporary, model_dir / file_name)
        finally:
            temporary.unlink(missing_ok=True)
    if missing := [name for name in expected if name not in weight_map]:
        raise ValueError(f'{model_dir}: tensor "{missing[0]}" is missing')
    if shards > 1:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        (model_dir / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (model_dir / CONFIG).write_text(json.dumps(dict(config_json), indent=2) + "\n", encoding="utf-8")


# ----------------------------------------------------------------------------------------------------------------------
# Model
# ----------------------------------------------------------------------------------------------------------------------


def check_tensor_parallel(config: NanbeigeConfig, size: int, where: str) -> None:
    """ValueError where `size` ranks cannot share the model's matrices in equal, whole parts; it names the field.

    Each rank takes whole heads (with their key-value heads), an equal share of the MLP's inner rows, and of the
    vocabulary. The vocabulary is not padded: a padded row would be a token that the loss must exclude everywhere, and the
    official 166144 = 2^8 x 11 x 59 needs none. So the official model takes 1, 2, 4 and 8 (its 8 key-value heads end it).
    """
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if getattr(config, key) % size:
            raise ValueError(f'{where}: "{key}" is {getattr(config, key)}, which tensor parallel size {size} does not divide')


def build_model(
    config: NanbeigeConfig,
    *,
    critic: bool,
    dtype: "torch.dtype",
    recompute: bool,
    device: "torch.device | str",
    sequence_parallel: bool = False,
    split_matmul: bool = False,
) -> Any:
    """A `LoopedModel` with uninitialised weights (norms ones, value head zeros): `load_native` fills them.

    Megatron's parallel state must be initialised; the model takes its share of the tensor-parallel group. It is not
    wrapped in DDP.

    Args:
        critic: a scalar value head in place of the LM head.
        dtype: of parameters and activations.
        recompute: keep only each layer visit's input for the backward pass and compute the rest again. The gradients
            are the same, bit for bit.
        device: "meta" gives a model without memory, for counting.
        sequence_parallel: between the matrices each tensor-parallel rank holds its share of the tokens only (Megatron's
            sequence parallelism, 2205.05198). The packed tokens must then be a multiple of the tensor-parallel size.
        split_matmul: float32 products as `matmul` takes them. Not with tensor parallelism, whose products Megatron weaves
            together with its sums.

    Raises:
        ValueError: the tensor-parallel size does not divide heads, key-value heads, intermediate size and vocabulary.
    """
    from megatron.core import parallel_state

    check_tensor_parallel(config, parallel_state.get_tensor_model_parallel_world_size(), "the model's config")
    model = _looped_model_class()(
        config, critic=critic, dtype=dtype, recompute=recompute, device=device, sequence_parallel=sequence_parallel
    )
    if split_matmul and parallel_state.get_tensor_model_parallel_world_size() == 1:
        import matmul

        for module in model.modules():
            if hasattr(module, "_forward_impl"):  # Megatron's linear layers
                module._forward_impl = lambda input, weight, **_: matmul.linear_with_gradients(input, weight)
    return model


class Packing:
    """Where the tokens of packed sequences go in the padded batches that attention runs on.

    Sequences of similar length share a batch [sequences, longest, ...], padded at the right; lengths that differ by
    more than a factor of two go into batches of their own. `source` [P] names the token of every padded slot (padding
    repeats a token, which is harmless: its result is dropped, and under the causal mask nothing real looks to the
    right), `slot` [T] the padded slot of every token, `padding` [P, 1, 1] which slots are padding. They are made on
    the CPU from lengths known there, so that the forward pass never waits for the device.
    """

    def __init__(self, cu_seqlens: "torch.Tensor", tokens: int, device: "torch.device"):
        import torch

        bounds = cu_seqlens.tolist()
        lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != tokens or min(lengths) < 1:
            raise ValueError(f"cu_seqlens must rise from 0 to the {tokens} tokens, is {_show(bounds)}")
        starts = torch.tensor(bounds[:-1])
        sizes = torch.tensor(lengths)

        self.batches: list[tuple[int, int]] = []  # (sequences, longest)
        source, padding, slot = [], [], torch.empty(tokens, dtype=torch.long)
        order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
        filled = first = 0
        while first < len(order):
            longest = lengths[order[first]]
            last = first
            while last < len(order) and 2 * lengths[order[last]] >= longest:
                last += 1
            members = torch.tensor(order[first:last])
            column = torch.arange(longest)
            real = column < sizes[members, None]
            token = starts[members, None] + torch.minimum(column, sizes[members, None] - 1)
            slot[token[real]] = filled + torch.arange(token.numel())[real.flatten()]
            source.append(token.flatten())
            padding.append(~real.flatten())
            self.batches.append((len(members), longest))
            filled += token.numel()
            first = last

        def to_device(tensor: torch.Tensor) -> torch.Tensor:
            if device.type != "cuda":
                return tensor.to(device)
            return tensor.pin_memory().to(device, non_blocking=True)

        self.position = to_device(torch.arange(tokens) - torch.repeat_interleave(starts, sizes))
        self.source, self.slot = to_device(torch.cat(source)), to_device(slot)
        pad = torch.cat(padding)
        self.padding = to_device(pad[:, None, None]) if pad.any() else None


@functools.cache
def _looped_model_class() -> type:
    """`LoopedModel`, defined on first use because its base class imports Megatron (seconds)."""
    import copy

    import torch
    import torch.nn.functional as F
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        VocabParallelEmbedding,
        gather_from_sequence_parallel_region,
        set_tensor_model_parallel_attributes,
    )
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, sharded_state_dict_default
    from torch.utils.checkpoint import checkpoint

    class Pad(torch.autograd.Function):
        """[T, heads, d] -> [P, heads, d]. Gathers both ways, where autograd's own backward would add atomically."""

        @staticmethod
        def forward(ctx, packed, packing):
            ctx.packing = packing
            return packed.index_select(0, packing.source)

        @staticmethod
        def backward(ctx, grad):
            return grad.index_select(0, ctx.packing.slot), None  # nothing flows back from padding

    class Unpad(torch.autograd.Function):
        """[P, heads, d] -> [T, heads, d]."""

        @staticmethod
        def forward(ctx, padded, packing):
            ctx.packing = packing
            return padded.index_select(0, packing.slot)

        @staticmethod
        def backward(ctx, grad):
            grad = grad.index_select(0, ctx.packing.source)
            return (grad if ctx.packing.padding is None else grad.masked_fill_(ctx.packing.padding, 0)), None

    class Rotate(torch.autograd.Function):
        """Half-split RoPE of [T, 1, heads, d] in float32; cos and sin [T, 1, 1, d/2]. Its backward turns the other way.

        Megatron's own takes cosine and sine anew in every layer, casts them to half precision, and keeps six tensors of
        the size of `x` for the backward pass."""

        @staticmethod
        def forward(ctx, x, cos, sin):
            ctx.cos, ctx.sin = cos, sin
            left, right = x.chunk(2, dim=-1)
            out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, cos.dtype), device=x.device)
            first, second = out.chunk(2, dim=-1)
            torch.mul(left, cos, out=first).addcmul_(right, sin, value=-1)
            torch.mul(right, cos, out=second).addcmul_(left, sin)
            return out.to(x.dtype)

        @staticmethod
        def backward(ctx, grad):
            return Rotate.apply(grad, ctx.cos, -ctx.sin), None, None

    class PackedAttention(MegatronModule):
        """Causal attention within each packed sequence; Megatron hands our `Packing` through as `attention_mask`.

        query [T, 1, heads/tp, d], key and value [T, 1, kv_heads/tp, d] -> [T, 1, heads/tp * d]; scale 1/sqrt(d). Queries
        and keys are rotated here (RoPE).
        """

        def __init__(self, config, layer_number, attn_mask_type, attention_type, **_):
            super().__init__(config=config)

        def forward(self, query, key, value, attention_mask, **_):
            packing: Packing = attention_mask
            heads, groups, d = query.size(2), key.size(2), query.size(3)
            query, key = (Rotate.apply(x, packing.cos, packing.sin) for x in (query, key))
            q, k, v = (Pad.apply(x.squeeze(1), packing) for x in (query, key, value))
            if groups != heads:
                # Keys and values are expanded: the memory-efficient kernel, the only fused one for float32 on CUDA,
                # knows no grouped queries (torch 2.11).
                shape = (-1, groups, heads // groups, d)
                k, v = (x.unsqueeze(2).expand(shape).reshape(-1, heads, d) for x in (k, v))
            slots = [sequences * longest for sequences, longest in packing.batches]
            outputs = []
            for (sequences, longest), *qkv in zip(packing.batches, *(x.split(slots) for x in (q, k, v)), strict=True):
                qkv = (x.view(sequences, longest, heads, d).transpose(1, 2) for x in qkv)
                output = F.scaled_dot_product_attention(*qkv, is_causal=True)
                outputs.append(output.transpose(1, 2).reshape(-1, heads, d))
            output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
            return Unpad.apply(output, packing).flatten(1).unsqueeze(1)

    class Norm:
        """torch's RMSNorm, as Megatron's spec calls for one; Megatron's own wrapper of it refuses sequence parallelism.

        With it a rank sees its share of the tokens, so the weights' gradients are parts of a sum: the mark has Megatron's
        `finalize_model_grads` add them up."""

        def __new__(cls, config, hidden_size, eps):
            norm = torch.nn.RMSNorm(hidden_size, eps)
            norm.weight.sequence_parallel = config.sequence_parallel
            return norm

    class LoopedModel(MegatronModule):
        """The looped transformer over packed sequences, with an LM head (actor) or a value head (critic)."""

        def __init__(
            self, native: NanbeigeConfig, *, critic: bool, dtype: torch.dtype, recompute: bool, device, sequence_parallel: bool
        ):
            super().__init__(
                TransformerConfig(
                    num_layers=native.num_hidden_layers,
                    hidden_size=native.hidden_size,
                    ffn_hidden_size=native.intermediate_size,
                    num_attention_heads=native.num_attention_heads,
                    num_query_groups=native.num_key_value_heads,
                    kv_channels=native.head_dim,  # Megatron's name for head_dim
                    normalization="RMSNorm",
                    layernorm_epsilon=native.rms_norm_eps,
                    gated_linear_unit=True,
                    activation_func=F.silu,
                    add_bias_linear=False,
                    hidden_dropout=0.0,
                    attention_dropout=0.0,
                    params_dtype=dtype,
                    bf16=dtype is torch.bfloat16,
                    fp16=dtype is torch.float16,
                    tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
                    sequence_parallel=sequence_parallel,
                    # Megatron's name for: data-parallel gradients are summed, not averaged. The loss's weights are those
                    # of the whole batch already.
                    calculate_per_token_loss=True,
                    # Weights are allocated where `torch.device` below says and come from load_native: at 4.2 billion
                    # parameters drawing random ones first would take minutes.
                    use_cpu_initialization=True,
                    perform_initialization=False,
                    # On CUDA the embedding's own backward is not reproducible; on CPU it is, and faster.
                    deterministic_mode=torch.device(device).type == "cuda",
                    bias_activation_fusion=False,
                    bias_dropout_fusion=False,
                    masked_softmax_fusion=False,
                    apply_rope_fusion=False,
                    gradient_accumulation_fusion=False,
                    persist_layer_norm=False,
                    cross_entropy_loss_fusion=False,
                )
            )
            self.native, self.critic, self.recompute = native, critic, recompute
            spec = get_gpt_layer_local_spec(normalization="RMSNorm")
            spec.submodules.self_attention.submodules.core_attention = PackedAttention
            spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
            unset = torch.nn.Module()  # stands for the initialisers that are never called
            with torch.device(device):
                self.embedding = VocabParallelEmbedding(
                    native.vocab_size,
                    native.hidden_size,
                    init_method=unset,
                    reduce_scatter_embeddings=sequence_parallel,
                    config=self.config,
                )
                self.layers = torch.nn.ModuleList(
                    build_module(spec, config=self.config, layer_number=n + 1) for n in range(native.num_hidden_layers)
                )
                self.final_norm = Norm(self.config, native.hidden_size, native.rms_norm_eps)
                if critic:
                    self.value_head = torch.nn.Linear(native.hidden_size, 1, bias=False)
                    torch.nn.init.zeros_(self.value_head.weight)
                else:
                    whole = copy.copy(self.config)
                    whole.sequence_parallel = False  # the rows that a head sees are chosen from all tokens
                    self.output_layer = ColumnParallelLinear(
                        native.hidden_size, native.vocab_size, config=whole, init_method=unset, bias=False
                    )
            self.to(dtype)  # torch's RMSNorm and Linear start in float32
            # Megatron marks sharded weights as it initialises them, which was skipped; gradient norms read the marks.
            for name, weight in self.named_parameters():
                module = name.split(".")[-2]
                if module in ("embedding", "linear_qkv", "linear_fc1", "output_layer"):
                    set_tensor_model_parallel_attributes(weight, True, 0, 2 if module == "linear_fc1" else 1)
                elif module in ("linear_proj", "linear_fc2"):
                    set_tensor_model_parallel_attributes(weight, True, 1, 1)

        def forward(self, tokens, cu_seqlens, rows=None):
            """Hidden states after the last final norm.

            Args:
                tokens: [T] int64, sequences laid end to end.
                cu_seqlens: [B+1] int64 on the CPU, where each sequence starts, and T. On the device it costs a wait.
                rows: [R] int64, the tokens whose states are wanted; None means all.

            Returns:
                [R, hidden] in the model's type; the same on every tensor-parallel rank.

            With sequence parallelism T is a multiple of the tensor-parallel size.
            """
            weight = self.embedding.weight
            packing = Packing(cu_seqlens, len(tokens), weight.device)
            # vLLM's formula, in float32: position times inverse frequency. Made here, not kept as a buffer, so that no
            # loading through the meta device can leave it uninitialised.
            d = self.native.head_dim
            power = torch.arange(0, d, 2, dtype=torch.float32, device=weight.device) / d
            angle = packing.position.float()[:, None, None, None] * (1.0 / self.native.rope_theta**power)
            packing.cos, packing.sin = angle.cos(), angle.sin()

            tokens = tokens.to(weight.device, non_blocking=True)
            spread = self.config.sequence_parallel
            # [T, 1, hidden] either way, and [T/tp, 1, hidden] where the tokens are spread: the embedding then wants them
            # batch first, and transposes.
            hidden = self.embedding(tokens[None] if spread else tokens[:, None])
            for loop in range(self.native.num_loops):
                for layer in self.layers:
                    hidden = self._visit(layer, hidden, packing)
                if loop == self.native.num_loops - 1 or not self.native.skip_loop_final_norm:
                    hidden = self.final_norm(hidden)
            if spread:
                # What follows computes the same on every rank, so backward each takes its own rows of the gradient.
                hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
            hidden = hidden.squeeze(1)
            return hidden if rows is None else hidden.index_select(0, rows.to(weight.device, non_blocking=True))

        def _visit(self, layer, hidden, packing):
            def run(hidden):
                return layer(hidden, attention_mask=packing)[0]

            if self.recompute and torch.is_grad_enabled():
                return checkpoint(run, hidden, use_reentrant=False, preserve_rng_state=False)  # there is no dropout
            return run(hidden)

        def head(self, hidden):
            """Actor: [R, hidden] -> logits [R, vocab/tp] in the model's type. Critic: -> values [R] in float32."""
            if self.critic:
                return F.linear(hidden.float(), self.value_head.weight.float()).squeeze(-1)
            return self.output_layer(hidden)[0]

        def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
            """Parameters as Megatron's `dist_checkpointing` takes them. Layer by layer: the default would treat the
            list of layers as one replicated module."""
            metadata = ensure_metadata_has_dp_cp_group(metadata)
            children = {name: child for name, child in self.named_children() if name != "layers"}
            children |= {f"layers.{n}": layer for n, layer in enumerate(self.layers)}
            group = parallel_state.get_tensor_model_parallel_group()
            state = {}
            for name, child in children.items():
                state |= sharded_state_dict_default(
                    child, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=group
                )
            return state

    return LoopedModel


# ----------------------------------------------------------------------------------------------------------------------
# Weights: native <-> Megatron
# ----------------------------------------------------------------------------------------------------------------------


def _places(model: Any) -> "dict[str, tuple[torch.Tensor, int | None]]":
    """Native name -> (view of this rank's parameter that holds it, dimension of the native tensor that is sharded).

    `linear_qkv` holds, for each query group, its queries, its key and its value; a view of one of the three is
    [groups/tp, rows per group, hidden]. `linear_fc1` holds gate, then up.
    """
    config: NanbeigeConfig = model.native
    h, d = config.hidden_size, config.head_dim
    q = config.num_attention_heads // config.num_key_value_heads * d  # rows of queries per group
    places: dict[str, tuple[Any, int | None]] = {"model.embed_tokens.weight": (model.embedding.weight.data, 0)}
    for n, layer in enumerate(model.layers):
        qkv = layer.self_attention.linear_qkv.weight.data.view(-1, q + 2 * d, h)
        gate, up = layer.mlp.linear_fc1.weight.data.chunk(2)
        places |= {
            f"model.layers.{n}.input_layernorm.weight": (layer.input_layernorm.weight.data, None),
            f"model.layers.{n}.self_attn.q_proj.weight": (qkv[:, :q], 0),
            f"model.layers.{n}.self_attn.k_proj.weight": (qkv[:, q : q + d], 0),
            f"model.layers.{n}.self_attn.v_proj.weight": (qkv[:, q + d :], 0),
            f"model.layers.{n}.self_attn.o_proj.weight": (layer.self_attention.linear_proj.weight.data, 1),
            f"model.layers.{n}.post_attention_layernorm.weight": (layer.pre_mlp_layernorm.weight.data, None),
            f"model.layers.{n}.mlp.gate_proj.weight": (gate, 0),
            f"model.layers.{n}.mlp.up_proj.weight": (up, 0),
            f"model.layers.{n}.mlp.down_proj.weight": (layer.mlp.linear_fc2.weight.data, 1),
        }
    places["model.norm.weight"] = (model.final_norm.weight.data, None)
    if model.critic:
        places["value_head.weight"] = (model.value_head.weight.data, None)
    else:
        places["lm_head.weight"] = (model.output_layer.weight.data, 0)
    return places


def load_native(model: Any, tensors: "Iterable[tuple[str, torch.Tensor]]") -> None:
    """Fill a model from full native tensors, one at a time, each cast to the type of its parameter.

    A critic takes a policy's tensors: `lm_head.weight` is passed over, and a missing `value_head.weight` leaves the
    value head as it is. Call it before the optimizer is built, or have the optimizer reload its main parameters.

    Raises:
        ValueError: a tensor is missing, unknown, double, misshapen, or not floating point.
    """
    from megatron.core import parallel_state

    tp, rank = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    shapes, places = tensor_shapes(model.native, model.critic), _places(model)
    loaded = set()
    for name, tensor in tensors:
        if model.critic and name == "lm_head.weight":
            continue
        if name not in shapes:
            raise ValueError(f"tensor {_show(name)} does not belong to this model")
        if name in loaded:
            raise ValueError(f'tensor "{name}" comes twice')
        if tuple(tensor.shape) != shapes[name] or not tensor.is_floating_point():
            raise ValueError(
                f'tensor "{name}" is {tensor.dtype} {list(tensor.shape)}, '
                f"expected a floating-point type and {list(shapes[name])}"
            )
        place, dim = places[name]
        shard = tensor.detach() if dim is None else tensor.detach().chunk(tp, dim)[rank]
        place.copy_(shard.to(place.device).reshape(place.shape))
        loaded.add(name)
    for name in shapes:
        if name not in loaded and name != "value_head.weight":
            raise ValueError(f'tensor "{name}" is missing')


def native_slices(model: Any) -> "Iterator[tuple[str, torch.Tensor, int, int]]":
    """This rank's part of each native tensor: (name, live view, dimension in which tensors are cut, where the part begins).

    Without tensor parallelism, and where a tensor is not cut, the part is the whole and begins at 0 of dimension 0; of
    tensors that all ranks hold alike, rank 0 gives the one part. q, k and v are strided slices of the fused weight,
    [groups, rows, hidden], which `reshape` to two dimensions.
    """
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, (place, dim) in _places(model).items():
        if dim is not None:
            rows = place.shape[0] * place.shape[1] if place.dim() == 3 else place.shape[dim]
            yield name, place, dim, rank * rows
        elif rank == 0:
            yield name, place, 0, 0


def export_native(model: Any) -> "Iterator[tuple[str, torch.Tensor]]":
    """Native names with full tensors, in the order of `tensor_shapes`: the bit-for-bit inverse of `load_native`.

    Without tensor parallelism q, k and v are copies and the rest are views of the live parameters: read them before the
    next optimizer step. With it every rank must iterate in step, and each gets every full tensor, one at a time.
    """
    import torch
    from megatron.core import parallel_state

    tp = parallel_state.get_tensor_model_parallel_world_size()
    group = parallel_state.get_tensor_model_parallel_group()
    for name, (place, dim) in _places(model).items():
        local = place.flatten(0, 1) if place.dim() == 3 else place
        if tp > 1 and dim is not None:
            parts = [torch.empty_like(local, memory_format=torch.contiguous_format) for _ in range(tp)]
            torch.distributed.all_gather(parts, local.contiguous(), group=group)
            if local.is_cuda:
                torch.cuda.current_stream().synchronize()  # whoever reads on another stream must see finished tensors
            local = torch.cat(parts, dim)
        yield name, local
