"""Tensor maths of the four algorithms: log-probabilities, advantages, policy losses, value loss, their mean.

A reader holds each function against its formula; nothing here knows Ray, Megatron or vLLM, and the trainer has no
loss of its own. Tensors are one-dimensional over response tokens, completions laid end to end, unless said otherwise.

Rules that hold everywhere:

* half precision (float16, bfloat16) is raised to float32; float32 and float64 stay what they are;
* only the current policy (`logits`, `log_probs`) and the current `values` carry gradients. Old policies, behaviour
  policies, advantages, returns and old values are constants, whatever `requires_grad` says;
* a loss function returns `(loss [T], metrics)`. Every metric is a detached tensor [T] with one number per token
  (a yes/no is 1.0 or 0.0), so the trainer may call the function on chunks of rows, concatenate, and take
  `sample_mean` over the batch: the mean of `clip_fraction` is then the fraction its name promises;
* everything per token depends on its own row alone, so chunks of rows give what the whole batch gives;
* `group`, where a function takes it, is a `torch.distributed` process group over which the vocabulary is split into
  equal contiguous shards in rank order. Each rank passes its [T, V / size] shard and the same tokens, and gets the
  same [T] result; the vocabulary is never gathered. As in Megatron's vocabulary-parallel cross entropy, every rank
  computes the same loss and receives the gradient of its own shard.

Sources: PPO arXiv 1707.06347, GRPO 2402.03300, GAE 1506.02438, decoupled PPO 2110.00641, flow-DPPO 2606.11025.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Metrics = dict[str, Tensor]


def _raised(x: Tensor) -> Tensor:
    """`x` in float64 if it is float64, else in float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _constant(x: Tensor) -> Tensor:
    return _raised(x.detach())


def _same_shape(**tensors: Tensor) -> None:
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError("tensors must have one shape: " + ", ".join(f"{n} {list(s)}" for n, s in shapes.items()))


# ---------------------------------------------------------------------------------------------------------------------
# Log-probabilities of the sampled distribution: softmax(logits / temperature) over the full vocabulary
# ---------------------------------------------------------------------------------------------------------------------


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """A new tensor, raised logits / temperature: the one full-size copy that a forward pass makes."""
    return logits / temperature if logits.dtype in (torch.float32, torch.float64) else logits.float().div_(temperature)


def _all_reduce(x: Tensor, group, op=dist.ReduceOp.SUM) -> Tensor:
    if group is not None:
        dist.all_reduce(x, op=op, group=group)
    return x


def _log_normaliser_(x: Tensor, group) -> Tensor:
    """log sum exp of each row over the whole vocabulary [T]; overwrites `x` with exp(x - row maximum)."""
    top = _all_reduce(x.amax(-1), group, dist.ReduceOp.MAX)
    total = _all_reduce(x.sub_(top.unsqueeze(-1)).exp_().sum(-1), group)
    return top + total.log()


def _own_tokens(tokens: Tensor, width: int, group) -> tuple[Tensor, Tensor | None]:
    """Column of each token in this rank's shard, and which tokens lie in it (None: all)."""
    if group is None:
        return tokens.unsqueeze(-1), None
    local = tokens - dist.get_rank(group) * width
    mine = (local >= 0) & (local < width)
    return local.where(mine, 0).unsqueeze(-1), mine


def _check_logits(logits: Tensor, temperature: float, tokens: Tensor | None = None) -> None:
    if logits.dim() != 2:
        raise ValueError(f"logits must be [T, V], got {list(logits.shape)}")
    if tokens is not None and tuple(tokens.shape) != (logits.shape[0],):
        raise ValueError(f"tokens must be [{logits.shape[0]}] to match the logits, got {list(tokens.shape)}")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be a positive number, got {temperature}")


class _SelectedLogProbs(torch.autograd.Function):
    """Keeps the logits and [T] log-normalisers only; forward and backward each make one float32 copy of the logits."""

    @staticmethod
    def forward(ctx, logits, tokens, temperature, group):
        scaled = _scaled(logits, temperature)
        columns, mine = _own_tokens(tokens, logits.shape[-1], group)
        selected = scaled.gather(-1, columns).squeeze(-1)
        selected = _all_reduce(selected if mine is None else selected.where(mine, 0), group)
        normaliser = _log_normaliser_(scaled, group)
        ctx.save_for_backward(logits, normaliser, columns, mine)
        ctx.temperature = temperature
        return selected - normaliser

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, normaliser, columns, mine = ctx.saved_tensors
        grad = (grad / ctx.temperature).unsqueeze(-1)
        out = _scaled(logits, ctx.temperature).sub_(normaliser.unsqueeze(-1)).exp_().mul_(-grad)
        out.scatter_add_(-1, columns, grad if mine is None else grad.where(mine.unsqueeze(-1), 0))
        return out.to(logits.dtype), None, None, None


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, temperature, group):
        scaled = _scaled(logits, temperature)
        normaliser = _log_normaliser_(scaled.clone(), group)
        log_probs = scaled.sub_(normaliser.unsqueeze(-1))
        p = log_probs.exp()
        # p log p is 0 where p is 0, also where log p is minus infinity.
        result = -_all_reduce(p.mul_(log_probs.masked_fill_(p == 0, 0)).sum(-1), group)
        ctx.save_for_backward(logits, normaliser, result)
        ctx.temperature = temperature
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, normaliser, entropy_ = ctx.saved_tensors
        log_probs = _scaled(logits, ctx.temperature).sub_(normaliser.unsqueeze(-1))
        p = log_probs.exp()
        out = log_probs.add_(entropy_.unsqueeze(-1)).mul_(p).masked_fill_(p == 0, 0)
        return out.mul_(-(grad / ctx.temperature).unsqueeze(-1)).to(logits.dtype), None, None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, temperature, group):
        scaled = _scaled(logits, temperature)
        out = scaled.sub_(_log_normaliser_(scaled.clone(), group).unsqueeze(-1))
        ctx.save_for_backward(out)
        ctx.temperature, ctx.group, ctx.dtype = temperature, group, logits.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (log_probs,) = ctx.saved_tensors
        total = _all_reduce(grad.sum(-1, keepdim=True), ctx.group)
        return (grad - log_probs.exp().mul_(total)).div_(ctx.temperature).to(ctx.dtype), None, None


class _Select(torch.autograd.Function):
    """Entry `tokens` of each row of vocabulary-sharded log-probabilities; the owning rank takes the gradient."""

    @staticmethod
    def forward(ctx, log_probs, tokens, group):
        columns, mine = _own_tokens(tokens, log_probs.shape[-1], group)
        ctx.save_for_backward(columns, mine)
        ctx.shape = log_probs.shape
        return _all_reduce(log_probs.gather(-1, columns).squeeze(-1).where(mine, 0), group)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        columns, mine = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).scatter_(-1, columns, grad.where(mine, 0).unsqueeze(-1)), None, None


def selected_log_probs(logits: Tensor, tokens: Tensor, temperature: float, group=None) -> Tensor:
    """log π(token) of the sampled distribution: z[token] − log Σ exp z, with z = logits / temperature in float32.

    logits [T, V] ([T, V / size] with `group`), tokens [T] int64 ids of the full vocabulary → [T]. Differentiable in
    the logits, once. Memory beyond the logits: one float32 copy in the forward pass (freed), one in the backward
    pass (the gradient itself). A token outside the vocabulary is an IndexError or RuntimeError of torch without
    `group`, and undefined with it.
    """
    _check_logits(logits, temperature, tokens)
    return _SelectedLogProbs.apply(logits, tokens, float(temperature), group)


def entropy(logits: Tensor, temperature: float, group=None) -> Tensor:
    """Entropy of the sampled distribution in nats, −Σ p log p with p = softmax(logits / temperature).

    logits [T, V] ([T, V / size] with `group`) → [T]. Differentiable in the logits, once.
    """
    _check_logits(logits, temperature)
    return _Entropy.apply(logits, float(temperature), group)


def log_softmax(logits: Tensor, temperature: float, group=None) -> Tensor:
    """log softmax(logits / temperature), float32 (float64 for float64): what `flow_dppo_loss` takes.

    logits [T, V] → [T, V]; with `group` each rank's shard, normalised over the whole vocabulary. Differentiable, once.
    """
    _check_logits(logits, temperature)
    return _LogSoftmax.apply(logits, float(temperature), group)


def kl_to(log_probs: Tensor, behavior_log_probs: Tensor) -> Tensor:
    """Estimate of KL(μ‖π) per token sampled from μ: exp(d) − 1 − d, d = logπ − logμ (the k3 estimator; never < 0).

    log_probs [T] of π, behavior_log_probs [T] of μ → [T]. Unbiased over tokens drawn from μ.
    Source: GRPO 2402.03300 eq. 4; J. Schulman, "Approximating KL divergence" (2020).
    """
    _same_shape(log_probs=log_probs, behavior_log_probs=behavior_log_probs)
    log_ratio = _raised(log_probs) - _constant(behavior_log_probs)
    return torch.expm1(log_ratio) - log_ratio


# ---------------------------------------------------------------------------------------------------------------------
# Advantages. No gradients; computed in float64 inside, because a batch holds few numbers and all else hangs on them.
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """A = (R − mean) / (std + 1e-6) within each prompt's group, std unbiased. GRPO, 2402.03300 §4.1.2.

    rewards [N], the `group_size` completions of a prompt side by side → [N]. A group whose rewards are all equal gets
    exactly 0. ValueError: group_size below 2 (no spread to divide by), or N no multiple of it.
    """
    if group_size < 2:
        raise ValueError(f"group_size is {group_size}; the advantage within a group needs at least 2 completions")
    if rewards.dim() != 1 or len(rewards) % group_size:
        raise ValueError(f"rewards {list(rewards.shape)} must be [N] with N a multiple of group_size {group_size}")
    result_type = _raised(rewards).dtype
    r = rewards.double().view(-1, group_size)
    centred = r - r.mean(-1, keepdim=True)
    std = (centred.square().sum(-1, keepdim=True) / (group_size - 1)).sqrt()
    equal = (r == r[:, :1]).all(-1, keepdim=True)
    return (centred / (std + 1e-6)).masked_fill(equal, 0).view(-1).to(result_type)


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, lengths: list[int], gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation. 1506.02438 eq. 16; every completion ends its episode (no bootstrap).

    δ_t = r_t + γ V_{t+1} − V_t,  A_t = δ_t + γ λ A_{t+1},  V and A are 0 past the last token;  returns = A + V.
    rewards [T], values [T], lengths (response tokens of each completion, laid end to end) → (advantages [T],
    returns [T]). ValueError: lengths that do not add up to T.
    """
    _same_shape(rewards=rewards, values=values)
    _check_lengths(rewards, lengths)
    result_type = torch.promote_types(_raised(rewards).dtype, _raised(values).dtype)
    if not sum(lengths):
        return rewards.new_zeros(0, dtype=result_type), rewards.new_zeros(0, dtype=result_type)
    # The scan runs on the host, all completions abreast: one short loop instead of one kernel launch per token.
    sizes = torch.tensor(lengths)
    filled = torch.arange(max(lengths)) < sizes[:, None]
    r, v = torch.zeros(2, *filled.shape, dtype=torch.float64)
    r[filled], v[filled] = rewards.cpu().double(), values.cpu().double()
    advantages, ahead, next_value = torch.zeros_like(r), torch.zeros(len(lengths)).double(), torch.zeros(len(lengths))
    for t in reversed(range(max(lengths))):
        ahead = r[:, t] + gamma * next_value - v[:, t] + gamma * lam * ahead
        ahead = ahead.where(filled[:, t], 0)  # padding stays 0 whatever gamma and lambda are
        advantages[:, t], next_value = ahead, v[:, t]
    advantages, returns = advantages[filled], (advantages + v)[filled]
    return advantages.to(rewards.device, result_type), returns.to(rewards.device, result_type)


@torch.no_grad()
def whiten(advantages: Tensor, mask: Tensor | None = None) -> Tensor:
    """(a − μ) / sqrt(var + 1e-8), μ and unbiased var over the tokens with mask ≠ 0 (None: all of them).

    advantages [T], mask [T] bool or 0/1 → [T]. Masked entries do not count and are transformed like the rest, not
    zeroed. One counted token gives 0 for it; none at all gives all zeros.
    """
    result_type = _raised(advantages).dtype
    a = advantages.double()
    if mask is not None:
        _same_shape(advantages=advantages, mask=mask)
    counted = a if mask is None else a[mask != 0]
    if not len(counted):
        return torch.zeros_like(a, dtype=result_type)
    mean = counted.mean()
    variance = (counted - mean).square().sum() / max(len(counted) - 1, 1)
    return ((a - mean) / (variance + 1e-8).sqrt()).to(result_type)


# ---------------------------------------------------------------------------------------------------------------------
# Losses
# ---------------------------------------------------------------------------------------------------------------------


def _clipped_surrogate(
    log_probs: Tensor, old: Tensor, advantages: Tensor, clip: float
) -> tuple[Tensor, Tensor, Tensor]:
    """max(−rA, −clip(r, 1−ε, 1+ε)A) [T], r [T], and where the clip took the gradient away [T] bool."""
    ratio = (log_probs - old).exp()
    free, clipped = -ratio * advantages, -ratio.clamp(1 - clip, 1 + clip) * advantages
    return torch.maximum(free, clipped), ratio.detach(), (clipped > free).detach()


def ppo_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, clip: float) -> tuple[Tensor, Metrics]:
    """max(−rA, −clip(r, 1−ε, 1+ε)A), r = exp(logπ − logμ). PPO 1707.06347 eq. 7, as a loss; GRPO uses it too.

    log_probs, old_log_probs (of the behaviour policy μ), advantages: [T]; clip = ε → (loss [T], metrics).
    Metrics [T]: `ratio` r; `clip_fraction` 1 where the clipped term won, so that the token has no gradient;
    `kl` estimate of KL(μ‖π), see `kl_to`.
    """
    _same_shape(log_probs=log_probs, old_log_probs=old_log_probs, advantages=advantages)
    log_probs, old, advantages = _raised(log_probs), _constant(old_log_probs), _constant(advantages)
    loss, ratio, clipped = _clipped_surrogate(log_probs, old, advantages, clip)
    return loss, {"ratio": ratio, "clip_fraction": clipped.to(loss.dtype), "kl": kl_to(log_probs.detach(), old)}


def dppo_loss(
    log_probs: Tensor,
    proximal_log_probs: Tensor,
    behavior_log_probs: Tensor,
    advantages: Tensor,
    clip: float,
    correction_low: float,
    correction_high: float,
) -> tuple[Tensor, Metrics]:
    """clip(ρ, low, high) · max(−rA, −clip(r, 1−ε, 1+ε)A). Decoupled PPO 2110.00641 eq. 11, with ρ clipped.

    r = exp(logπ − logπ_prox) is held near 1; ρ = exp(logπ_prox − logμ) corrects for the policy that sampled and
    carries no gradient. All log-probabilities and advantages [T] → (loss [T], metrics). Metrics [T]: `ratio` r and
    `clip_fraction` as in `ppo_loss`; `correction` ρ after its clip; `correction_clip_fraction` 1 where ρ lay outside
    [low, high]; `kl` estimate of KL(μ‖π).
    """
    _same_shape(
        log_probs=log_probs,
        proximal_log_probs=proximal_log_probs,
        behavior_log_probs=behavior_log_probs,
        advantages=advantages,
    )
    log_probs, proximal = _raised(log_probs), _constant(proximal_log_probs)
    behavior, advantages = _constant(behavior_log_probs), _constant(advantages)
    surrogate, ratio, clipped = _clipped_surrogate(log_probs, proximal, advantages, clip)
    rho = (proximal - behavior).exp()
    correction = rho.clamp(correction_low, correction_high)
    loss = correction * surrogate
    return loss, {
        "ratio": ratio,
        "clip_fraction": clipped.to(loss.dtype),
        "correction": correction,
        "correction_clip_fraction": ((rho < correction_low) | (rho > correction_high)).to(loss.dtype),
        "kl": kl_to(log_probs.detach(), behavior),
    }


def flow_dppo_loss(
    log_probs: Tensor, old_log_probs: Tensor, tokens: Tensor, advantages: Tensor, budget: float, group=None
) -> tuple[Tensor, Metrics]:
    """−rA; no gradient where the step moves outward *and* KL(π_old‖π) exceeds the budget. 2606.11025, categorical.

    r = exp(logπ(token) − logπ_old(token)). Outward: A > 0 and r > 1, or A < 0 and r < 1. The KL is exact, over the
    full vocabulary, in nats. log_probs, old_log_probs [T, V], both log-softmaxed (see `log_softmax`; shards with
    `group`); tokens, advantages [T] → (loss [T], metrics). A blocked token keeps the value of its loss and has a
    gradient of exactly zero, also where r overflows. Metrics [T]: `ratio` r; `categorical_kl` KL(π_old‖π);
    `blocked_fraction` 1 where blocked.
    """
    _same_shape(log_probs=log_probs, old_log_probs=old_log_probs)
    _same_shape(tokens=tokens, advantages=advantages)
    if log_probs.dim() != 2 or tokens.dim() != 1 or len(tokens) != len(log_probs):
        raise ValueError(f"log_probs {list(log_probs.shape)} must be [T, V] and tokens {list(tokens.shape)} [T]")
    log_probs, old, advantages = _raised(log_probs), _constant(old_log_probs), _constant(advantages)
    with torch.no_grad():
        p_old = old.exp()
        terms = (old - log_probs).mul_(p_old).masked_fill_(p_old == 0, 0)
        # Equal distributions may sum to a rounding error below zero; a divergence is not negative.
        kl = _all_reduce(terms.sum(-1), group).clamp_(min=0)
        del p_old, terms
    if group is None:
        selected, selected_old = (x.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) for x in (log_probs, old))
    else:
        selected, selected_old = _Select.apply(log_probs, tokens, group), _Select.apply(old, tokens, group)
    log_ratio = selected - selected_old
    moves = log_ratio.detach()
    outward = ((advantages > 0) & (moves > 0)) | ((advantages < 0) & (moves < 0))
    blocked = outward & (kl > budget)
    # The cut lies before exp: behind it, an infinite ratio would turn the zero into 0 · inf = nan.
    ratio = torch.where(blocked, moves, log_ratio).exp()
    loss = -ratio * advantages
    return loss, {"ratio": ratio.detach(), "categorical_kl": kl, "blocked_fraction": blocked.to(loss.dtype)}


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Metrics]:
    """max((V − R)², (V_old + clip(V − V_old, ±c) − R)²), no factor ½. Clipped value loss of PPO's reference code.

    values, old_values, returns [T]; clip = c → (loss [T], metrics). Metrics [T]: `value_clip_fraction` 1 where the
    clipped term won, so that the token has no gradient; `value_error` V − R.
    """
    _same_shape(values=values, old_values=old_values, returns=returns)
    values, old, returns = _raised(values), _constant(old_values), _constant(returns)
    free = (values - returns).square()
    clipped = (old + (values - old).clamp(-clip, clip) - returns).square()
    loss = torch.maximum(free, clipped)
    metrics = {
        # Within the clip the two terms are the same number but for rounding.
        "value_clip_fraction": ((clipped > free) & ((values - old).abs() > clip)).detach().to(loss.dtype),
        "value_error": (values - returns).detach(),
    }
    return loss, metrics


# ---------------------------------------------------------------------------------------------------------------------
# Means over the batch
# ---------------------------------------------------------------------------------------------------------------------


def _check_lengths(values: Tensor, lengths: list[int]) -> None:
    if values.dim() != 1 or any(n < 0 for n in lengths) or sum(lengths) != len(values):
        raise ValueError(f"lengths add up to {sum(lengths)}, the tensor is {list(values.shape)}")


def sample_mean(values: Tensor, lengths: list[int], mask: Tensor | None = None) -> Tensor:
    """Mean over the tokens of each completion, then over completions: 1/N Σ_i Σ_t m_it x_it / Σ_t m_it.

    values [T], completions of `lengths` laid end to end, mask [T] bool or 0/1 (None: all count) → scalar. A masked
    token changes nothing, whatever its value (nan included), and gets no gradient. A completion that is fully
    masked, or empty, contributes 0 and still counts in N. ValueError: no completions, or lengths that do not add up.
    """
    _check_lengths(values, lengths)
    if not lengths:
        raise ValueError("the mean over no completions is not defined")
    values = _raised(values)
    if mask is None:
        means = [part.mean() if len(part) else part.sum() for part in values.split(lengths)]
        return torch.stack(means).mean()
    _same_shape(values=values, mask=mask)
    kept = mask != 0
    values = values.where(kept, 0)
    parts = zip(values.split(lengths), kept.split(lengths), strict=True)
    return torch.stack([part.sum() / counted.sum().clamp(min=1) for part, counted in parts]).mean()


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """1 − Var(R − V) / Var(R): 1 for a perfect critic, 0 for one that knows the mean, below 0 for a worse one.

    values, returns [T] → scalar. Returns that do not vary leave nothing to explain: 0.
    """
    _same_shape(values=values, returns=returns)
    result_type = torch.promote_types(_raised(values).dtype, _raised(returns).dtype)
    v, r = values.double(), returns.double()
    if len(r) < 2 or bool((r == r[0]).all()):
        return torch.zeros((), dtype=result_type, device=values.device)
    return (1 - (r - v).var() / r.var()).to(result_type)
