"""What a run will need, worked out before it starts: `python run.py --dry-run …` prints it. Seconds are in timing.py.

Memory is arithmetic on shapes, by the formulas below; what they leave out (kernels, fragmentation, the CUDA context) is a
few GiB. docs/scaling.md holds it against what was measured on an H200.
"""

from __future__ import annotations

GIB = 2**30


def trainer_gib(
    config,
    *,
    critic: bool,
    precision: str,
    optimizer: str,
    recompute: bool,
    offload: bool,
    tokens: int,
    tensor: int = 1,
    data: int = 1,
    sequence_parallel: bool = False,
    distributed_optimizer: bool = False,
    split: bool = False,
) -> dict:
    """GiB on each of the trainer's GPUs at the peak of a step, {what: GiB}; `total` is their sum.

    config: provider.NanbeigeConfig. tokens: of the largest packed micro-batch. tensor, data: parallel sizes. State: weights,
    FP32 gradients, FP32 main parameters (half precision only), and Adam's two moments; the last two are shared among the
    data-parallel ranks with `distributed_optimizer`. With `offload` only one network's state is there at a time.
    Activations: what one layer visit keeps for its backward pass, per token: four of hidden size, the fused projection
    twice, keys and values expanded to all heads, the attention's output twice, and four of the MLP's inner size; with
    `recompute` one hidden state a visit, and one visit's worth on top. Tensor parallelism cuts all of it but what is of
    hidden size, which `sequence_parallel` cuts, too (at the end all tokens' hidden states come together, with a gradient).
    Gradients: autograd holds a weight's gradient until all its uses are done, and adds it to the FP32 buffer then. That is the
    LM head's when the backward pass begins, with all activations there; and those of all layers when it has passed the last
    loop, with one loop's activations fewer. With `split` (matmul.py; without tensor parallelism) products add them to the buffer
    at once, and only the embedding's is left, when all activations are gone. Whichever is most is the peak.
    """
    element = 4 if precision == "fp32" else 2
    shared = (0 if precision == "fp32" else 4) + (8 if optimizer == "adam" else 0)
    per_weight = element + 4 + shared / (data if distributed_optimizer else 1)
    networks = [_weights(config, is_critic, tensor) for is_critic in ([False, True] if critic else [False])]
    state = per_weight * (max(networks) if offload else sum(networks))
    h, q, kv = config.hidden_size, config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    kept = h / (tensor if sequence_parallel else 1)
    visit = 4 * kept + (2 * (q + 2 * kv) + 2 * q + 2 * q + 4 * config.intermediate_size) / tensor
    visits = config.num_loops * config.num_hidden_layers
    ends = 2 * h if sequence_parallel else 0
    # trainer.LOGIT_ELEMENTS: chunks of rows, about six such tensors alive in the backward pass.
    logits = 6 * 4 * min(2**25, tokens * config.vocab_size // tensor)
    embedding = config.vocab_size * h // tensor
    layers, direct = networks[0] - 2 * embedding, split and tensor == 1

    def moment(visits: int, gradients: int, logits: int, tokens: int = tokens) -> dict:
        activations = element * tokens * ((visits * kept + visit if recompute else visits * visit) + ends)
        parts = {"state": state, "activations": activations, "gradients in flight": element * gradients, "logits": logits}
        return {what: size / GIB for what, size in parts.items()}

    begins = moment(visits, 0 if direct else embedding, logits)  # the LM head is as large as the embedding
    passed = moment(visits - config.num_hidden_layers, 0 if direct or config.num_loops == 1 else layers, 0)
    ended = moment(0, embedding, 0, tokens=0)
    parts = max(begins, passed, ended, key=lambda parts: sum(parts.values()))
    return {**parts, "total": sum(parts.values())}


def _weights(config, critic: bool, tensor: int) -> int:
    """Parameters that one tensor-parallel rank holds: its share of each matrix, norms and value head whole."""
    import provider

    whole = ("norm.weight", "layernorm.weight", "value_head.weight")
    shapes = provider.tensor_shapes(config, critic).items()
    return sum(_size(shape) // (1 if name.endswith(whole) else tensor) for name, shape in shapes)


def kv_cache_gib(config, precision: str, sequences: int, length: int, ranks: int = 1) -> float:
    """GiB on each of `ranks` GPUs for `sequences` of `length` tokens, a quarter to spare, at least 1. One K and one V per
    layer and loop; the key-value heads lie on different ranks."""
    element = 4 if precision == "fp32" else 2
    token = 2 * config.num_loops * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * element
    return max(1.0, 1.25 * sequences * (length + 16) * token / ranks / GIB)


def describe(r, config, prompts: list, held_out: list, kv_cache: float) -> list[str]:
    """The plan of run.Recipe `r` in lines of text."""
    import provider

    shapes = provider.tensor_shapes(config)
    physical = weights(config)
    lengths = [len(p.tokens) for p in prompts]
    batch = r.rollout_batch_size * r.n_samples_per_prompt
    trainer = trainer_of(r, config)
    layout = f"{r.tensor_model_parallel_size} tensor × {r.train_gpus // r.tensor_model_parallel_size} data parallel"
    each = f" on each of {r.train_gpus} ({layout})" if r.train_gpus > 1 else ""
    engine = physical * (4 if r.precision == "fp32" else 2) / r.rollout_tensor_parallel_size / GIB
    engines = f", in each of {r.rollout_gpus} processes" if r.rollout_gpus > 1 else ""
    last = r.stop_after or r.updates
    return [
        f"model       {r.model}: {physical:,} parameters in {len(shapes)} tensors, {config.num_hidden_layers} layers ×"
        f" {config.num_loops} loops, {r.precision}",
        f"data        {r.data}: {len(prompts):,} prompts of {min(lengths)} to {max(lengths)} tokens;"
        f" {last * r.rollout_batch_size / len(prompts):.2g} times through in {last} updates",
        f"device      {_device(r)}",
        *([f"held-out    {r.eval_data}: {len(held_out):,} rows × {r.eval_samples} samples, and greedy"] if held_out else []),
        f"update      {r.algorithm}: {r.rollout_batch_size} prompts × {r.n_samples_per_prompt} completions, at most"
        f" {batch * r.max_response_len:,} response tokens; {r.optimizer} at {r.lr:g}",
        f"trainer     about {trainer['total']:.3g} GiB{each} ("
        + ", ".join(f"{what} {gib:.3g}" for what, gib in trainer.items() if what != "total" and gib)
        + ")",
        f"engine      about {engine + kv_cache:.3g} GiB (weights {engine:.3g}, KV cache {kv_cache:.3g}){engines}",
        f"checkpoints about {checkpoint_bytes(r, config) / 1e9:.3g} GB each, {r.keep_checkpoints} kept and one beside them while"
        " it is written",
        *time_lines(r, config),
    ]


def _device(r) -> str:
    """What `auto` comes to, as Ray will count it, and what this machine lacks."""
    import torch

    if r.ray_address:
        return "auto: GPUs where the cluster has some" if r.device == "auto" else r.device
    there = torch.cuda.device_count()
    needed = r.train_gpus + (0 if r.colocate else r.rollout_gpus)
    here = f"{there or 'no'} GPU{'s' if there > 1 else ''} here"
    if r.device == "cpu" or (r.device == "auto" and not there):
        taken = r.device if r.device == "cpu" else f"auto: {here}, so the CPU"
        return taken + ("; --colocate is about GPUs and changes nothing" if r.colocate else "")
    lacks = f"; this run needs {needed} and cannot start on this machine" if needed > there else ""
    hint = "" if not lacks else " (--device cpu needs none)" if not there else " (--colocate shares one)" if needed == 2 else ""
    return (f"auto: {here}, so cuda" if r.device == "auto" else f"cuda: {here}") + lacks + hint


def time_lines(r, config) -> list[str]:
    """Seconds of an update, where the run may be on GPUs and the model is large enough for them: below, what takes time is what
    timing.py leaves out."""
    import timing

    if r.device == "cpu" or weights(config) < 1e8:
        return []
    found = timing.seconds(r, config)
    phases = ", ".join(f"{phase} {_figures(spent)}" for phase, spent in found["total"].items() if spent >= 0.05)
    part, share = timing.largest(found)
    waits, writes = (sum(found[phase].values()) for phase in ("checkpoint", "writer"))
    every = timing.save_interval(found)
    total = _figures(sum(found["total"].values()))
    return [
        f"time        about {total} s an update on H200s, if all completions take all their tokens",
        f"            ({phases}); largest part {part}, {share:.0%}",
        f"            a checkpoint takes {_figures(waits)} s more, and {_figures(writes)} s beside the next"
        f" {'update' if every == 1 else f'{every} updates'}",
    ]


def _figures(number: float) -> str:
    """Two or more figures, without an exponent."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.1f}"


def trainer_of(r, config) -> dict:
    """`trainer_gib` of run.Recipe `r`: its largest micro-batch is a full one, or its longest completion."""
    data = r.train_gpus // r.tensor_model_parallel_size
    longest = r.max_prompt_len + r.max_response_len
    batch = -(-r.rollout_batch_size * r.n_samples_per_prompt // data) * longest
    return trainer_gib(
        config, critic=r.algorithm != "grpo", precision=r.precision, optimizer=r.optimizer, recompute=r.recompute,
        offload=r.offload_train, tokens=max(longest, min(r.micro_batch_tokens, batch)), tensor=r.tensor_model_parallel_size,
        data=data, sequence_parallel=r.sequence_parallel, distributed_optimizer=r.distributed_optimizer, split=split_matmul(r),
    )  # fmt: skip


def split_matmul(r) -> bool:
    """Whether run.Recipe `r` takes its products as matmul.py does, if what `--device auto` finds is a GPU."""
    return r.split_matmul and r.device != "cpu" and (r.precision, r.matmul_precision) == ("fp32", "highest")


def checkpoint_bytes(r, config) -> int:
    """The weights as they are stored, FP32 main parameters in half precision, and Adam's moments, of every network."""
    each = (4 if r.precision == "fp32" else 2 + 4) + (8 if r.optimizer == "adam" else 0)
    return each * (weights(config) + (weights(config, critic=True) if r.algorithm != "grpo" else 0))


def weights(config, critic: bool = False) -> int:
    """Physical parameters."""
    import provider

    return sum(map(_size, provider.tensor_shapes(config, critic).values()))


def _size(shape) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
