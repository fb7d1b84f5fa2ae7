"""Old weights never train silently: each way of keeping them stops at the digest or at the replay guard.

One engine and one trainer of a small random model in this process. The step between the two versions is what `run.py`
takes by default: GRPO with advantages of both signs, SGD, learning rate 1e-5.
"""

import job
import pytest
import test_rollout
import torch

import checkpoint
import provider
import rollout
import trainer
from checkpoint import GuardError

DEVICE = test_rollout.DEVICE


@pytest.fixture(scope="module", autouse=True)
def environment():
    """Engine and trainer share this process and its process group, which the engine's end destroys."""
    from megatron.core import parallel_state

    with job.kept_environment():
        yield
    torch.use_deterministic_algorithms(False)
    parallel_state.destroy_model_parallel()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    config = provider.parse_config(test_rollout.CONFIG, "test")
    folder = tmp_path_factory.mktemp("model")
    provider.write_checkpoint(folder, test_rollout.CONFIG, test_rollout.make_weights(config, 0).items())
    return str(folder)


@pytest.fixture(scope="module")
def engine(model):
    engine = rollout.RolloutEngine(model, None, rollout.EngineSettings(device=DEVICE, max_model_len=128, max_num_seqs=16))
    yield engine
    engine.close()


@pytest.fixture
def actor(model, engine):
    """A trainer as `run.py` makes one, with the default learning rate and bound."""
    engine._committed = None  # each test is a run of its own
    return trainer.Trainer(trainer.TrainerSettings(model=model, algorithm="grpo", n_samples_per_prompt=2, device=DEVICE))


def roll_out(engine, update: int) -> list[dict]:
    requests = [{**q, "seed": rollout.completion_seed(1, update, i)} for i, q in enumerate(test_rollout.make_requests())]
    answers = engine.generate(requests)
    return [{**q, **a, "reward": float(i % 2)} for i, (q, a) in enumerate(zip(requests, answers, strict=True))]


def publish(actor, engine, version: int, folder) -> dict:
    return engine.publish(actor.publish(version, "disk", str(folder / f"{version}.safetensors")))


def first_update(actor, engine, folder) -> None:
    publish(actor, engine, 1, folder)
    assert actor.train(roll_out(engine, 0), 0)["max_logprob_error"] < 1e-4


def test_fresh_weights_pass_digest_and_guard(actor, engine, tmp_path):
    first_update(actor, engine, tmp_path)
    publish(actor, engine, 2, tmp_path)
    assert actor.train(roll_out(engine, 1), 1)["max_logprob_error"] < 1e-4


def test_a_load_that_does_nothing_stops_at_the_digest(actor, engine, tmp_path, monkeypatch):
    """One step at 1e-5 moves log-probabilities far less than the replay bound: only the digest can see it."""
    first_update(actor, engine, tmp_path)
    monkeypatch.setattr(engine._model, "load_weights", lambda pairs: {name for name, _ in pairs})
    with pytest.raises(GuardError, match="the engine holds a policy with digest"):
        publish(actor, engine, 2, tmp_path)
    with pytest.raises(GuardError, match="does not generate"):
        roll_out(engine, 1)


def test_an_old_publication_sent_again_as_the_new_one_stops_at_the_digest(actor, engine, tmp_path):
    first_update(actor, engine, tmp_path)
    stale = actor.publish(2, "disk", str(tmp_path / "2.safetensors")) | {"location": str(tmp_path / "1.safetensors")}
    with pytest.raises(GuardError, match="the engine holds a policy with digest"):
        engine.publish(stale)


@pytest.mark.parametrize("kept", ["model.layers.0", "model.norm", "lm_head"])
def test_half_a_publication_stops_at_the_digest(actor, engine, tmp_path, monkeypatch, kept):
    first_update(actor, engine, tmp_path)
    load = engine._model.load_weights
    monkeypatch.setattr(engine._model, "load_weights", lambda pairs: load(p for p in pairs if not p[0].startswith(kept)))
    with pytest.raises(GuardError, match="the engine holds a policy with digest"):
        publish(actor, engine, 2, tmp_path)


def test_a_publication_that_ends_early_stops_before_the_digest(actor, engine, tmp_path, monkeypatch):
    first_update(actor, engine, tmp_path)
    whole = rollout.received
    monkeypatch.setattr(rollout, "received", lambda *a: (p for i, p in enumerate(whole(*a)) if i < 7))
    with pytest.raises(GuardError, match="is missing"):
        publish(actor, engine, 2, tmp_path)


def test_a_version_that_is_never_published_leaves_its_name_in_the_trace(actor, engine, tmp_path):
    """Where the loop itself forgets to publish, the trace tells: what it names is what sampled."""
    first_update(actor, engine, tmp_path)
    assert {c["trace"]["policy_version"] for c in roll_out(engine, 1)} == {1}
    assert actor.policy()["digest"] != engine.committed["digest"]


def test_a_prefix_cache_kept_across_versions_stops_at_the_replay_guard(actor, engine, tmp_path, monkeypatch):
    """Keys and values of another policy behind the right weights: the digest is right, the log-probabilities are not.

    The cache kept here is older than one step at 1e-5, whose trace lies far within the bound (the next test). That
    one is kept out by the engine alone: no version is committed before the caches were reset.
    """
    publish(actor, engine, 1, tmp_path)
    rows = roll_out(engine, 0)
    with torch.no_grad():
        for p in actor.actor.model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(p.device))
    actor._digest_cache = None
    with monkeypatch.context() as patch:
        patch.setattr(engine, "reset_caches", lambda: None)
        publish(actor, engine, 2, tmp_path)
    stale, before = roll_out(engine, 0), checkpoint.policy_digest(engine.held_digests())
    assert before == actor.policy()["digest"] and [r["seed"] for r in rows] == [r["seed"] for r in stale]
    with pytest.raises(GuardError, match="replay guard: sample"):
        actor.train(stale, 1)
    actor._digest_cache = None
    assert actor.policy()["digest"] == before, "something was optimized"
    engine.reset_caches()
    assert actor.train(roll_out(engine, 0), 1)["max_logprob_error"] < 1e-4


def test_a_cache_that_is_one_step_old_is_reset_and_would_show_in_the_log_probs(actor, engine, tmp_path, monkeypatch):
    first_update(actor, engine, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "reset_caches", lambda: None)
        publish(actor, engine, 2, tmp_path)
    stale = roll_out(engine, 0)
    engine.reset_caches()
    fresh = roll_out(engine, 0)
    difference = max(
        abs(x - y) for a, b in zip(stale, fresh, strict=True) for x, y in zip(a["log_probs"], b["log_probs"], strict=False)
    )
    print(f"one step at 1e-5: {difference:.1e}")
    assert [c["log_probs"] for c in stale] != [c["log_probs"] for c in fresh]


def test_a_cache_that_cannot_be_reset_is_no_commit(actor, engine, tmp_path, monkeypatch):
    """So the replay guard need not see a young cache: without the reset there is no version to sample under."""
    first_update(actor, engine, tmp_path)
    monkeypatch.setattr(engine.llm, "reset_prefix_cache", lambda: False)
    with pytest.raises(GuardError, match="could not be committed: vLLM did not reset its prefix cache"):
        publish(actor, engine, 2, tmp_path)
    with pytest.raises(GuardError, match="does not generate"):
        roll_out(engine, 1)
