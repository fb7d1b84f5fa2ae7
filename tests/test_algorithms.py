"""The losses are the published formulas: shared cases, symmetries, edges, and the sharded vocabulary."""

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import algorithms as A

CASES = Path(__file__).resolve().parents[1] / ".." / "shared" / "cases" / "algorithms.json"
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
some = settings(max_examples=30, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31 - 1)
all_lengths = st.lists(st.integers(1, 6), min_size=1, max_size=5)


def near(got: torch.Tensor, want, tolerance: float) -> None:
    want = torch.as_tensor(want, dtype=torch.float64)
    assert got.shape == want.shape
    worst = ((got.detach().double() - want).abs() / (1 + want.abs())).max().item()
    assert worst <= tolerance, f"off by {worst:.1e} relative to 1 + |value|"


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


class Batch:
    """A random batch in float64: logits of the current, old and behaviour policy, tokens, advantages."""

    def __init__(self, seed: int, tokens: int, vocabulary: int = 7, spread: float = 0.5):
        rng = torch.Generator().manual_seed(seed)
        self.logits = 3 * torch.randn(tokens, vocabulary, generator=rng, dtype=torch.float64)
        self.old, self.behavior = (
            self.logits + spread * torch.randn(self.logits.shape, generator=rng, dtype=torch.float64) for _ in "ab"
        )
        self.tokens = torch.randint(vocabulary, (tokens,), generator=rng)
        self.advantages = torch.randn(tokens, generator=rng, dtype=torch.float64)
        self.values, self.old_values, self.returns = torch.randn(3, tokens, generator=rng, dtype=torch.float64)
        self.mask = torch.rand(tokens, generator=rng) < 0.6

    def losses(self, rows=slice(None), logits=None, temperature: float = 0.8, budget: float = 0.05) -> dict:
        """{algorithm: (loss [T], metrics)} on some rows."""
        logits = self.logits[rows] if logits is None else logits
        tokens, advantages = self.tokens[rows], self.advantages[rows]
        new, old, mu = (
            A.selected_log_probs(x, tokens, temperature) for x in (logits, self.old[rows], self.behavior[rows])
        )
        full, full_old = A.log_softmax(logits, temperature), A.log_softmax(self.old[rows], temperature)
        return {
            "ppo": A.ppo_loss(new, old, advantages, 0.2),
            "dppo": A.dppo_loss(new, old, mu, advantages, 0.2, 0.5, 2.0),
            "flow-dppo": A.flow_dppo_loss(full, full_old, tokens, advantages, budget),
            "value": A.value_loss(self.values[rows], self.old_values[rows], self.returns[rows], 0.2),
        }


# --- the shared cases ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not CASES.is_file(), reason="shared/cases/algorithms.json is not beside this repository")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_public_functions_give_the_shared_cases_in_value_and_gradient(dtype):
    tolerance = TOLERANCE[dtype]
    for case in json.loads(CASES.read_text()):
        raw, out = case["in"], case["out"]
        lengths, temperature, clip = raw["lengths"], raw["temperature"], raw["clip"]
        tokens = torch.tensor(raw["tokens"])
        floats = "old_logits behavior_logits advantages mask values old_values rewards group_rewards".split()
        x = {name: torch.tensor(raw[name], dtype=dtype) for name in floats}
        advantages = x["advantages"]

        old = A.selected_log_probs(x["old_logits"], tokens, temperature)
        mu = A.selected_log_probs(x["behavior_logits"], tokens, temperature)
        near(old, out["old_selected"], tolerance)
        near(mu, out["behavior_selected"], tolerance)
        near(A.group_advantages(x["group_rewards"], raw["group_size"]), out["group_advantages"], tolerance)
        for name, gamma, lam in (("gae_1_095", 1.0, 0.95), ("gae_09_07", 0.9, 0.7)):
            for got, want in zip(A.gae(x["rewards"], x["values"], lengths, gamma, lam), out[name], strict=True):
                near(got, want, tolerance)
        near(A.whiten(advantages, None), out["whiten"], tolerance)
        near(A.whiten(advantages, x["mask"]), out["whiten_masked"], tolerance)
        near(A.sample_mean(advantages, lengths, None), out["sample_mean"], tolerance)
        near(A.sample_mean(advantages, lengths, x["mask"]), out["sample_mean_masked"], tolerance)
        returns = torch.tensor(out["gae_1_095"][1], dtype=dtype)
        near(A.value_loss(x["values"], x["old_values"], returns, clip)[0], out["value"], tolerance)

        for name in ("ppo", "dppo", "flow_dppo"):
            logits = torch.tensor(raw["logits"], dtype=dtype, requires_grad=True)
            selected = A.selected_log_probs(logits, tokens, temperature)
            near(selected, out["selected"], tolerance)
            if name == "ppo":
                loss, metrics = A.ppo_loss(selected, old, advantages, clip)
            elif name == "dppo":
                loss, metrics = A.dppo_loss(selected, old, mu, advantages, clip, *raw["correction"])
            else:
                full, full_old = (A.log_softmax(z, temperature) for z in (logits, x["old_logits"]))
                loss, metrics = A.flow_dppo_loss(full, full_old, tokens, advantages, raw["budget"])
                near(metrics["categorical_kl"], out["flow_dppo_kl"], tolerance)
                near(metrics["blocked_fraction"], out["flow_dppo_blocked"], 0)
            assert all(m.shape == loss.shape and m.dtype == dtype and not m.requires_grad for m in metrics.values())
            A.sample_mean(loss, lengths, x["mask"]).backward()  # the cases state the gradient of the masked mean
            near(loss, out[name], tolerance)
            near(logits.grad, out[f"{name}_grad"], tolerance)


# --- log-probabilities -----------------------------------------------------------------------------------------------


def test_gradients_of_logit_functions_agree_with_finite_differences():
    batch = Batch(0, 4)
    logits = batch.logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda z: A.selected_log_probs(z, batch.tokens, 0.7), logits)
    assert torch.autograd.gradcheck(lambda z: A.entropy(z, 0.7), logits)
    assert torch.autograd.gradcheck(lambda z: A.log_softmax(z, 0.7), logits)


@some
@given(seeds, st.floats(0.1, 3))
def test_log_probabilities_are_those_of_torch(seed, temperature):
    batch = Batch(seed, 5)
    want = torch.log_softmax(batch.logits / temperature, -1)
    close(A.log_softmax(batch.logits, temperature), want)
    picked = want.gather(1, batch.tokens[:, None])[:, 0]
    close(A.selected_log_probs(batch.logits, batch.tokens, temperature), picked)
    close(A.entropy(batch.logits, temperature), -(want.exp() * want).sum(-1))


def test_half_precision_is_raised_to_float32_and_its_gradient_comes_back_in_half():
    batch = Batch(1, 5)
    for half in (torch.float16, torch.bfloat16):
        logits = batch.logits.to(half).requires_grad_()
        for function in (A.entropy, A.log_softmax, lambda z, t: A.selected_log_probs(z, batch.tokens, t)):
            got = function(logits, 0.8)
            close(got, function(logits.detach().float(), 0.8), 1e-6)
            assert got.dtype == torch.float32
            assert torch.autograd.grad(got.sum(), logits)[0].dtype == half
        short = batch.advantages.to(half)
        assert A.ppo_loss(short, short, short, 0.2)[0].dtype == torch.float32
        assert A.whiten(short, None).dtype == A.group_advantages(short[:4], 2).dtype == torch.float32
        assert A.sample_mean(short, [2, 3], None).dtype == torch.float32


def test_extreme_and_impossible_logits_stay_finite():
    logits = torch.tensor([[1e30, -1e30, 0.0], [-torch.inf, 0.0, 0.0]], requires_grad=True)
    tokens = torch.tensor([0, 2])
    for result in (A.selected_log_probs(logits, tokens, 1.0), A.entropy(logits, 1.0)):
        assert result.isfinite().all()
        assert torch.autograd.grad(result.sum(), logits)[0].isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_temperature_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature must be a positive number"):
        A.selected_log_probs(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64), temperature)


def test_selected_log_probs_keeps_only_the_logits_and_one_number_per_row():
    logits = torch.randn(3, 1000, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        A.selected_log_probs(logits, torch.tensor([1, 2, 3]), 0.8)
    assert [t.data_ptr() == logits.data_ptr() for t in saved if t.numel() > 3] == [True]


@some
@given(seeds)
def test_equal_policies_have_zero_kl_and_others_more(seed):
    batch = Batch(seed, 6)
    new, old = (A.selected_log_probs(z, batch.tokens, 0.8) for z in (batch.logits, batch.old))
    assert A.kl_to(new, new).eq(0).all()
    assert A.kl_to(new, old).ge(0).all()


# --- advantages ------------------------------------------------------------------------------------------------------


@some
@given(st.floats(-1e6, 1e6), st.integers(2, 7), st.integers(1, 4), st.sampled_from([torch.float32, torch.float64]))
def test_equal_rewards_give_exactly_zero(reward, group_size, groups, dtype):
    rewards = torch.full((groups * group_size,), reward, dtype=dtype)
    assert A.group_advantages(rewards, group_size).eq(0).all()
    assert A.group_advantages(rewards.bfloat16(), group_size).eq(0).all()


@some
@given(seeds, st.integers(2, 5), st.integers(2, 5))
def test_permuting_groups_permutes_their_advantages(seed, group_size, groups):
    rng = torch.Generator().manual_seed(seed)
    rewards = torch.randn(groups, group_size, generator=rng)
    order = torch.randperm(groups, generator=rng)
    permuted = A.group_advantages(rewards[order].flatten(), group_size).view(groups, -1)
    assert torch.equal(permuted, A.group_advantages(rewards.flatten(), group_size).view(groups, -1)[order])


@pytest.mark.parametrize("count, group_size", [(4, 1), (5, 2), (4, 0)])
def test_groups_that_do_not_fit_are_refused(count, group_size):
    with pytest.raises(ValueError, match="group_size"):
        A.group_advantages(torch.zeros(count), group_size)


@some
@given(seeds, all_lengths, st.floats(0, 1), st.floats(0, 1))
def test_gae_is_its_recursion_and_does_not_cross_completions(seed, lengths, gamma, lam):
    batch = Batch(seed, sum(lengths))
    got = A.gae(batch.returns, batch.values, lengths, gamma, lam)
    want, start = [], 0
    for n in lengths:
        ahead = next_value = 0.0
        part = []
        for t in reversed(range(start, start + n)):
            delta = batch.returns[t].item() + gamma * next_value - batch.values[t].item()
            ahead, next_value = delta + gamma * lam * ahead, batch.values[t].item()
            part.insert(0, ahead)
        want += part
        start += n
    close(got[0], torch.tensor(want, dtype=torch.float64))
    close(got[1], got[0] + batch.values)


def test_gae_passes_over_empty_completions_and_refuses_wrong_lengths():
    ones = torch.ones(3)
    assert torch.equal(A.gae(ones, ones, [0, 3, 0], 1, 0.95)[0], A.gae(ones, ones, [3], 1, 0.95)[0])
    assert [len(x) for x in A.gae(ones[:0], ones[:0], [0, 0], 1, 0.95)] == [0, 0]
    with pytest.raises(ValueError, match="lengths add up to 4"):
        A.gae(ones, ones, [4], 1, 0.95)


@some
@given(seeds, st.integers(2, 20))
def test_whitened_advantages_have_mean_zero_and_variance_one(seed, count):
    raw = Batch(seed, count).advantages
    white = A.whiten(raw, None)
    close(white.mean(), torch.zeros((), dtype=torch.float64), 1e-9)
    close(white.var(), raw.var() / (raw.var() + 1e-8), 1e-9)


@some
@given(seeds, st.floats(-1e5, 1e5))
def test_masked_tokens_do_not_count_in_whitening_but_are_transformed(seed, value):
    batch = Batch(seed, 8)
    batch.mask[:2] = True
    changed = batch.advantages.where(batch.mask, value)
    white = A.whiten(changed, batch.mask)
    assert torch.equal(white[batch.mask], A.whiten(batch.advantages, batch.mask)[batch.mask])
    close(white[batch.mask], A.whiten(batch.advantages[batch.mask], None))
    scale = (batch.advantages[batch.mask].var() + 1e-8).sqrt()
    close(white, (changed - batch.advantages[batch.mask].mean()) / scale, 1e-9)


def test_whitening_one_equal_or_no_token_gives_zeros():
    for values in ([3.0], [0.1] * 19, []):
        assert A.whiten(torch.tensor(values), None).eq(0).all()
    assert A.whiten(torch.tensor([3.0, 5.0]), torch.tensor([0, 1]))[1] == 0
    assert A.whiten(torch.tensor([3.0, 5.0]), torch.zeros(2)).eq(0).all()


# --- losses ----------------------------------------------------------------------------------------------------------


@some
@given(seeds)
def test_equal_policies_give_ratio_one_no_clip_and_no_block(seed):
    batch = Batch(seed, 6, spread=0.0)
    for name, (loss, metrics) in batch.losses(budget=0.0).items():
        if name != "value":
            close(loss, -batch.advantages)
            assert metrics["ratio"].eq(1).all()
            for key in ("clip_fraction", "correction_clip_fraction", "blocked_fraction", "kl", "categorical_kl"):
                assert metrics.get(key, torch.zeros(1)).eq(0).all(), key


@some
@given(seeds, st.sampled_from([torch.float32, torch.float64]))
def test_blocked_tokens_have_exactly_zero_gradient(seed, dtype):
    batch = Batch(seed, 12, spread=1.0)
    logits = batch.logits.to(dtype).requires_grad_()
    full, full_old = A.log_softmax(logits, 0.8), A.log_softmax(batch.old.to(dtype), 0.8)
    loss, metrics = A.flow_dppo_loss(full, full_old, batch.tokens, batch.advantages.to(dtype), 0.05)
    grad = torch.autograd.grad(loss.sum(), logits)[0]
    blocked = metrics["blocked_fraction"] == 1
    moves = (full - full_old).gather(1, batch.tokens[:, None])[:, 0].detach()
    kl = (full_old.exp() * (full_old - full)).sum(-1)
    assert torch.equal(blocked, (moves * batch.advantages > 0) & (kl > 0.05))
    assert grad[blocked].eq(0).all() and grad[~blocked].ne(0).any(-1).all()
    close(loss, -moves.exp() * batch.advantages.to(dtype), 1e-6)


def test_a_blocked_token_whose_ratio_overflows_has_zero_gradient_and_no_nan():
    log_probs = torch.tensor([[-1e-5, -800.0, -900.0]], requires_grad=True)
    old = torch.tensor([[-800.0, -1e-5, -torch.inf]])
    loss, metrics = A.flow_dppo_loss(log_probs, old, torch.tensor([0]), torch.tensor([1.0]), 0.01)
    loss.sum().backward()
    assert metrics["blocked_fraction"].item() == 1 and metrics["categorical_kl"].isfinite().all()
    assert log_probs.grad.eq(0).all()


@some
@given(seeds, st.integers(1, 5))
def test_chunks_of_rows_give_what_the_whole_batch_gives(seed, cut):
    batch = Batch(seed, 6)
    whole, parts = batch.losses(), [batch.losses(slice(0, cut)), batch.losses(slice(cut, None))]
    for name, (loss, metrics) in whole.items():
        assert torch.equal(loss, torch.cat([p[name][0] for p in parts]))
        for key, values in metrics.items():
            assert torch.equal(values, torch.cat([p[name][1][key] for p in parts])), key


@some
@given(seeds)
def test_only_the_current_policy_has_a_gradient_and_the_correction_has_none(seed):
    batch = Batch(seed, 6)
    tensors = [batch.logits, batch.old, batch.behavior]
    new, proximal, mu = (A.selected_log_probs(x, batch.tokens, 0.8).requires_grad_() for x in tensors)
    advantages = batch.advantages.requires_grad_()
    loss, metrics = A.dppo_loss(new, proximal, mu, advantages, 0.2, 0.5, 2.0)
    grads = torch.autograd.grad(loss.sum(), [new, proximal, mu, advantages], allow_unused=True)
    assert grads[1:] == (None, None, None)
    rho = (proximal - mu).exp().clamp(0.5, 2).detach()
    plain = A.ppo_loss(new, proximal, advantages, 0.2)[0]
    close(loss, rho * plain)
    close(grads[0], rho * torch.autograd.grad(plain.sum(), new)[0])
    assert torch.equal(metrics["correction"], rho)


@some
@given(seeds)
def test_clip_fraction_marks_just_the_tokens_without_gradient(seed):
    batch = Batch(seed, 12, spread=1.0)
    new, old = (A.selected_log_probs(z, batch.tokens, 0.8) for z in (batch.logits, batch.old))
    new.requires_grad_()
    loss, metrics = A.ppo_loss(new, old, batch.advantages, 0.2)
    assert torch.equal(torch.autograd.grad(loss.sum(), new)[0] == 0, metrics["clip_fraction"] == 1)
    values = batch.values.requires_grad_()
    loss, metrics = A.value_loss(values, batch.old_values, batch.returns, 0.2)
    assert torch.equal(torch.autograd.grad(loss.sum(), values)[0] == 0, metrics["value_clip_fraction"] == 1)


def test_tensors_of_different_shapes_are_refused_not_broadcast():
    two, three = torch.zeros(2), torch.zeros(3)
    for call in (
        lambda: A.ppo_loss(three, three, three[:1], 0.2),
        lambda: A.dppo_loss(three, three, two, three, 0.2, 0.5, 2),
        lambda: A.value_loss(three, two, three, 0.2),
        lambda: A.flow_dppo_loss(torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(2).long(), two, 0.01),
        lambda: A.selected_log_probs(torch.zeros(3, 4), torch.zeros(2).long(), 1.0),
        lambda: A.sample_mean(three, [1, 1], None),
    ):
        with pytest.raises(ValueError):
            call()


# --- means -----------------------------------------------------------------------------------------------------------


@some
@given(seeds, all_lengths, st.floats(allow_nan=True, allow_infinity=True, width=32))
def test_a_masked_token_changes_nothing(seed, lengths, value):
    batch = Batch(seed, sum(lengths))
    values = batch.values.clone().requires_grad_()
    changed = batch.values.where(batch.mask, value).requires_grad_()
    a, b = A.sample_mean(values, lengths, batch.mask), A.sample_mean(changed, lengths, batch.mask)
    assert torch.equal(a, b)
    grads = torch.autograd.grad(a, values)[0], torch.autograd.grad(b, changed)[0]
    assert torch.equal(*grads) and grads[0][~batch.mask].eq(0).all()


@some
@given(seeds, all_lengths, st.randoms(use_true_random=False))
def test_order_of_completions_changes_nothing(seed, lengths, random):
    batch = Batch(seed, sum(lengths))
    order = list(range(len(lengths)))
    random.shuffle(order)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    rows = torch.cat([torch.arange(starts[i], starts[i] + lengths[i]) for i in order])
    moved = [lengths[i] for i in order]
    for name, (loss, _) in batch.losses().items():
        assert torch.equal(batch.losses(rows)[name][0], loss[rows])
        for mask in (None, batch.mask):
            moved_mask = None if mask is None else mask[rows]
            close(A.sample_mean(loss[rows], moved, moved_mask), A.sample_mean(loss, lengths, mask))
    for got, want in zip(
        A.gae(batch.returns[rows], batch.values[rows], moved, 1, 0.95),
        A.gae(batch.returns, batch.values, lengths, 1, 0.95),
        strict=True,
    ):
        assert torch.equal(got, want[rows])


def test_a_fully_masked_or_empty_completion_contributes_zero_and_still_counts():
    values = torch.tensor([4.0, 2.0, 9.0])
    assert A.sample_mean(values, [2, 1], torch.tensor([1, 1, 0])) == 1.5
    assert A.sample_mean(values[:2], [2, 0], None) == 1.5
    assert A.sample_mean(values, [2, 1], None) == 6
    assert A.sample_mean(values, [2, 1], torch.zeros(3)) == 0
    with pytest.raises(ValueError, match="no completions"):
        A.sample_mean(values[:0], [], None)


def test_explained_variance_of_a_perfect_a_constant_and_a_wrong_critic():
    returns = torch.tensor([1.0, 2.0, 3.0])
    assert A.explained_variance(returns, returns) == 1
    assert A.explained_variance(torch.full((3,), 7.0), returns) == 0
    assert A.explained_variance(-returns, returns) == -3
    assert A.explained_variance(returns, torch.ones(3)) == 0


# --- a vocabulary sharded over two processes -------------------------------------------------------------------------


def _everything(batch: Batch, logits, old, group=None) -> tuple[dict, torch.Tensor]:
    logits = logits.detach().requires_grad_()
    full = A.log_softmax(logits, 0.8, group)
    flow, metrics = A.flow_dppo_loss(full, A.log_softmax(old, 0.8, group), batch.tokens, batch.advantages, 0.05, group)
    out = {
        "selected": A.selected_log_probs(logits, batch.tokens, 0.8, group),
        "entropy": A.entropy(logits, 0.8, group),
        "flow": flow,
    }
    grads = [torch.autograd.grad((x * batch.values).sum(), logits, retain_graph=True)[0] for x in out.values()]
    return out | metrics | {"full": full}, torch.stack(grads)


def _one_rank(rank: int, meeting: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    batch = Batch(5, 12, vocabulary=8, spread=1.0)
    mine = slice(4 * rank, 4 * rank + 4)
    whole, whole_grads = _everything(batch, batch.logits, batch.old)
    shard, shard_grads = _everything(batch, batch.logits[:, mine], batch.old[:, mine], dist.group.WORLD)
    assert 0 < whole["blocked_fraction"].sum() < 12
    for name, want in whole.items():
        close(shard[name], want[:, mine] if name == "full" else want)
    close(shard_grads, whole_grads[:, :, mine])
    assert shard_grads[2][whole["blocked_fraction"] == 1].eq(0).all()
    dist.destroy_process_group()


def test_a_sharded_vocabulary_gives_the_whole_one_in_value_and_gradient(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(A.__file__).parent), str(Path(__file__).parent)]))
    torch.multiprocessing.spawn(_one_rank, (str(tmp_path / "meeting"),), nprocs=2)
