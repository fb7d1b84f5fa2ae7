"""What a run will need, worked out before it starts: `python run.py --dry-run …` prints it.

Memory is arithmetic on shapes, by the formulas below; what they leave out (kernels, fragmentation, the CUDA context) is a
few GiB. Held against the H200 (RESULTS.md): trainer peaks of 78 GiB (GRPO) and 72 GiB (PPO, --recompute) were measured
where this says 76 and 62.
"""

from __future__ import annotations

GIB = 2**30


def trainer_gib(config, *, critic: bool, precision: str, optimizer: str, recompute: bool, offload: bool, tokens: int) -> dict:
    """GiB on the trainer's device, {what: GiB}; `total` is their sum.

    config: provider.NanbeigeConfig. tokens: of the largest packed micro-batch. State: weights, FP32 gradients, FP32 main
    parameters (half precision only), and Adam's two moments. With `offload` only one network's state is there at a time.
    Activations: what one layer visit keeps for its backward pass, per token: four of hidden size, the fused projection
    twice, keys and values expanded to all heads, the attention's output twice, and four of the MLP's inner size; with
    `recompute` one hidden state a visit, and one visit's worth on top.
    """
    import provider

    element = 4 if precision == "fp32" else 2
    per_weight = element + 4 + (0 if precision == "fp32" else 4) + (8 if optimizer == "adam" else 0)
    count = lambda is_critic: sum(_size(s) for s in provider.tensor_shapes(config, is_critic).values())  # noqa: E731
    networks = [count(False), *([count(True)] if critic else [])]
    state = per_weight * (max(networks) if offload else sum(networks))
    h, q, kv = config.hidden_size, config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    visit = 4 * h + 2 * (q + 2 * kv) + 2 * q + 2 * q + 4 * config.intermediate_size
    visits = config.num_loops * config.num_hidden_layers
    activations = element * tokens * (visits * h + visit if recompute else visits * visit)
    # trainer.LOGIT_ELEMENTS: chunks of rows, about six such tensors alive in the backward pass.
    logits = 6 * 4 * min(2**25, tokens * config.vocab_size)
    parts = {"state": state / GIB, "activations": activations / GIB, "logits": logits / GIB}
    return {**parts, "total": sum(parts.values())}


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
    tokens = min(r.micro_batch_tokens, batch * (r.max_prompt_len + r.max_response_len))
    tokens = max(tokens, r.max_prompt_len + r.max_response_len)
    critic = r.algorithm != "grpo"
    trainer = trainer_gib(
        config, critic=critic, precision=r.precision, optimizer=r.optimizer, recompute=r.recompute, offload=r.offload_train,
        tokens=tokens,
    )  # fmt: skip
    engine = weights * (4 if r.precision == "fp32" else 2) / r.rollout_tensor_parallel_size / GIB
    each = f", in each of {r.rollout_gpus} processes" if r.rollout_gpus > 1 else ""
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
        f"trainer     about {trainer['total']:.3g} GiB (state {trainer['state']:.3g}, activations up to"
        f" {trainer['activations']:.3g}, logits {trainer['logits']:.3g})",
        f"engine      about {engine + kv_cache:.3g} GiB (weights {engine:.3g}, KV cache {kv_cache:.3g}){each}",
        f"checkpoints about {disk:.3g} GB each, {r.keep_checkpoints} kept and one beside them while it is written",
    ]


def _size(shape) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
