"""The losses are the published formulas: the shared cases, their symmetries, their edges, and the sharded vocabulary."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import algorithms as A

CASES = Path(__file__).resolve().parents[1] / ".." / "shared" / "cases" / "algorithms.json"
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
some = settings(max_examples=40, deadline=None, derandomize=True)
seeds = st.integers(0, 2**31 - 1)


def load_cases() -> list[dict]:
    found = json.loads(CASES.read_text()) if CASES.is_file() else []
    return found if isinstance(found, list) else next(v for v in found.values() if isinstance(v, list))


def near(got: torch.Tensor, want, tolerance: float) -> None:
    want = torch.as_tensor(want, dtype=torch.float64)
    assert got.shape == want.shape
    worst = ((got.detach().double() - want).abs() / (1 + want.abs())).max().item()
    assert worst <= tolerance, f"off by {worst:.1e} relative to 1 + |value|"


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# --- the shared cases ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not CASES.is_file(), reason="shared/cases/algorithms.json is not beside this repository")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_public_functions_give_the_shared_cases(dtype):
    tolerance = TOLERANCE[dtype]
    cases = load_cases()
    assert len(cases) >= 12
    for case in cases:
        i, out, lengths = case["in"], case["out"], case["in"]["lengths"]

        def tensor(name, i=i):
            return torch.tensor(i[name], dtype=dtype)

        tokens, temperature, clip = torch.tensor(i["tokens"]), i["temperature"], i["clip"]
        advantages, mask = tensor("advantages"), tensor("mask")
        old = A.selected_log_probs(tensor("old_logits"), tokens, temperature)
        behavior = A.selected_log_probs(tensor("behavior_logits"), tokens, temperature)
        near(old, out["old_selected"], tolerance)
        near(behavior, out["behavior_selected"], tolerance)
        near(A.group_advantages(tensor("group_rewards"), i["group_size"]), out["group_advantages"], tolerance)
        for name, gamma, lam in (("gae_1_095", 1.0, 0.95), ("gae_09_07", 0.9, 0.7)):
            for got, want in zip(A.gae(tensor("rewards"), tensor("values"), lengths, gamma, lam), out[name], strict=True):
                near(got, want, tolerance)
        near(A.whiten(advantages, None), out["whiten"], tolerance)
        near(A.whiten(advantages, mask), out["whiten_masked"], tolerance)

        def policy(name, lengths=lengths, advantages=advantages, temperature=temperature, clip=clip, i=i, case=case):
            logits = torch.tensor(i["logits"], dtype=dtype, requires_grad=True)
            tokens, old_logits = torch.tensor(i["tokens"]), torch.tensor(i["old_logits"], dtype=dtype)
            selected = A.selected_log_probs(logits, tokens, temperature)
            near(selected, case["out"]["selected"], tolerance)
            old = A.selected_log_probs(old_logits, tokens, temperature)
            mu = A.selected_log_probs(torch.tensor(i["behavior_logits"], dtype=dtype), tokens, temperature)
            if name == "ppo":
                loss, metrics = A.ppo_loss(selected, old, advantages, clip)
            elif name == "dppo":
                loss, metrics = A.dppo_loss(selected, old, mu, advantages, clip, *i["correction"])
            else:
                full, full_old = A.log_softmax(logits, temperature), A.log_softmax(old_logits, temperature)
                loss, metrics = A.flow_dppo_loss(full, full_old, tokens, advantages, i["budget"])
            A.sample_mean(loss, lengths, None).backward()
            assert all(m.shape == loss.shape and not m.requires_grad for m in metrics.values())
            near(loss, case["out"][name], tolerance)
            near(logits.grad, case["out"][f"{name}_grad"], tolerance)
            return loss, metrics

        policy("ppo")
        policy("dppo")
        loss, metrics = policy("flow_dppo")
        near(metrics["categorical_kl"], out["flow_dppo_kl"], tolerance)
        near(metrics["blocked_fraction"], out["flow_dppo_blocked"], 0)
        value, _ = A.value_loss(tensor("values"), tensor("old_values"), tensor("rewards"), clip)
        if len(out["value"]) == len(value):
            returns = torch.tensor(out["gae_1_095"][1], dtype=dtype)
            candidates = [A.value_loss(tensor("values"), tensor("old_values"), r, clip)[0] for r in (returns,)]
            near(candidates[0], out["value"], tolerance)
    policy_mean = torch.tensor(cases[0]["out"]["ppo"], dtype=dtype)
    assert math.isfinite(A.sample_mean(policy_mean, cases[0]["in"]["lengths"], None))
