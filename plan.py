"""What a run will need, worked out before it starts: `python run.py --dry-run …` prints it.

Memory is arithmetic on shapes, by the formulas below; what they leave out (kernels, fragmentation, the CUDA context) is a
few GiB. Held against the H200 (RESULTS.md): trainer peaks of 78 GiB (GRPO) and 72 GiB (PPO, --recompute) were measured
where this says 76 and 62.
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
) -> dict:
    """GiB on each of the trainer's GPUs, {what: GiB}; `total` is their sum.

    config: provider.NanbeigeConfig. tokens: of the largest packed micro-batch. tensor, data: parallel sizes. State: weights,
    FP32 gradients, FP32 main parameters (half precision only), and Adam's two moments; the last two are shared among the
    data-parallel ranks with `distributed_optimizer`. With `offload` only one network's state is there at a time.
    Activations: what one layer visit keeps for its backward pass, per token: four of hidden size, the fused projection
    twice, keys and values expanded to all heads, the attention's output twice, and four of the MLP's inner size; with
    `recompute` one hidden state a visit, and one visit's worth on top. Tensor parallelism cuts all of it but what is of
    hidden size, which `sequence_parallel` cuts, too (at the end all tokens' hidden states come together, with a gradient).
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
    activations = element * tokens * ((visits * kept + visit if recompute else visits * visit) + ends)
    # trainer.LOGIT_ELEMENTS: chunks of rows, about six such tensors alive in the backward pass.
    logits = 6 * 4 * min(2**25, tokens * config.vocab_size // tensor)
    parts = {"state": state / GIB, "activations": activations / GIB, "logits": logits / GIB}
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
    weights = sum(_size(s) for s in shapes.values())
    lengths = [len(p.tokens) for p in prompts]
    batch = r.rollout_batch_size * r.n_samples_per_prompt
    data = r.train_gpus // r.tensor_model_parallel_size
    tokens = min(r.micro_batch_tokens, -(-batch // data) * (r.max_prompt_len + r.max_response_len))
    tokens = max(tokens, r.max_prompt_len + r.max_response_len)
    critic = r.algorithm != "grpo"
    trainer = trainer_gib(
        config, critic=critic, precision=r.precision, optimizer=r.optimizer, recompute=r.recompute, offload=r.offload_train,
        tokens=tokens, tensor=r.tensor_model_parallel_size, data=data, sequence_parallel=r.sequence_parallel,
        distributed_optimizer=r.distributed_optimizer,
    )  # fmt: skip
    layout = f"{r.tensor_model_parallel_size} tensor × {data} data parallel"
    each = f" on each of {r.train_gpus} ({layout})" if r.train_gpus > 1 else ""
    engine = weights * (4 if r.precision == "fp32" else 2) / r.rollout_tensor_parallel_size / GIB
    engines = f", in each of {r.rollout_gpus} processes" if r.rollout_gpus > 1 else ""
    state = 4 + (8 if r.optimizer == "adam" else 0)  # bytes a parameter of a checkpoint: FP32 parameters and moments
    disk = weights * (2 if critic else 1) * state / 1e9
    last = r.stop_after or r.updates
    return [
        f"model       {r.model}: {weights:,} parameters in {len(shapes)} tensors, {config.num_hidden_layers} layers ×"
        f" {config.num_loops} loops, {r.precision}",
        f"data        {r.data}: {len(prompts):,} prompts of {min(lengths)} to {max(lengths)} tokens;"
        f" {last * r.rollout_batch_size / len(prompts):.2g} times through in {last} updates",
        *([f"held-out    {r.eval_data}: {len(held_out):,} rows × {r.eval_samples} samples, and greedy"] if held_out else []),
        f"update      {r.algorithm}: {r.rollout_batch_size} prompts × {r.n_samples_per_prompt} completions, at most"
        f" {batch * r.max_response_len:,} response tokens; {r.optimizer} at {r.lr:g}",
        f"trainer     about {trainer['total']:.3g} GiB{each} (state {trainer['state']:.3g}, activations up to"
        f" {trainer['activations']:.3g}, logits {trainer['logits']:.3g})",
        f"engine      about {engine + kv_cache:.3g} GiB (weights {engine:.3g}, KV cache {kv_cache:.3g}){engines}",
        f"checkpoints about {disk:.3g} GB each, {r.keep_checkpoints} kept and one beside them while it is written",
    ]


def _size(shape) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
