"""An independent float64 forward of the looped model in plain torch: what trainer and engine are held against.

Written from the description of the model alone (one sequence at a time, no packing, no cache, explicit softmax); it
shares no code with provider.py or vllm_nanbeige.py. Differentiable.
"""

import math

import torch


def rms_norm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotate(x, theta):
    """Half-split RoPE of x [T, heads, d] at positions 0 to T-1."""
    T, _, d = x.shape
    angle = torch.arange(T, dtype=x.dtype)[:, None] / theta ** (torch.arange(d // 2, dtype=x.dtype) * 2 / d)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    left, right = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)


def hidden_states(weights, config, tokens, disturb=None):
    """Hidden states [T, hidden] of one sequence after the last norm.

    Args:
        weights: native name -> float64 tensor.
        config: provider.NanbeigeConfig, or anything with its fields.
        tokens: [T] int64.
        disturb: None, or f(loop, layer, x [T, hidden]) -> x, applied to the input of every layer visit.
    """
    H, G, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    T = len(tokens)
    future = torch.ones(T, T, dtype=torch.bool).triu(1)
    x = weights["model.embed_tokens.weight"][tokens]
    for loop in range(config.num_loops):
        for n in range(config.num_hidden_layers):
            def w(name, n=n):
                return weights[f"model.layers.{n}.{name}.weight"]

            if disturb:
                x = disturb(loop, n, x)
            y = rms_norm(x, w("input_layernorm"), config.rms_norm_eps)
            q = rotate((y @ w("self_attn.q_proj").T).view(T, H, d), config.rope_theta)
            k = rotate((y @ w("self_attn.k_proj").T).view(T, G, d), config.rope_theta)
            v = (y @ w("self_attn.v_proj").T).view(T, G, d)
            heads = []
            for h in range(H):
                g = h // (H // G)
                scores = (q[:, h] @ k[:, g].T / math.sqrt(d)).masked_fill(future, -math.inf)
                heads.append(scores.softmax(-1) @ v[:, g])
            x = x + torch.cat(heads, -1) @ w("self_attn.o_proj").T
            y = rms_norm(x, w("post_attention_layernorm"), config.rms_norm_eps)
            gate, up = y @ w("mlp.gate_proj").T, y @ w("mlp.up_proj").T
            x = x + (gate * torch.sigmoid(gate) * up) @ w("mlp.down_proj").T
        if loop == config.num_loops - 1 or not config.skip_loop_final_norm:
            x = rms_norm(x, weights["model.norm.weight"], config.rms_norm_eps)
    return x


def logits(weights, config, tokens, disturb=None):
    """Logits [T, vocab] of one sequence, float64 where the weights are."""
    return hidden_states(weights, config, tokens, disturb) @ weights["lm_head.weight"].T
