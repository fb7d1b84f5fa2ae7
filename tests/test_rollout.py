"""The rollout engine: log-probabilities against a float64 forward, reproducible completions, publication."""

import errno
import json
import math
import os
import pickle
import subprocess
import sys

import job
import pytest
import reference
import torch

import checkpoint
import provider
import rollout
from checkpoint import GuardError

CONFIG = {
    "architectures": ["NanbeigeForCausalLM"],
    "model_type": "nanbeige",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # not 48 / 4
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "num_loops": 2,
    "skip_loop_final_norm": False,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TEMPERATURE = 0.8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTHS = (5, 33, 64, 70)  # prompts; a cache block on CPU holds 32 tokens


def model_dir(folder, **changes):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return str(folder)


def make_weights(config, seed):
    g = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=g) * 0.1 + (1.0 if len(shape) == 1 else 0.0)
        for name, shape in provider.tensor_shapes(config).items()
    }


def make_engine(folder, run_dir=None, cuda_graphs=False, **changes):
    settings = rollout.EngineSettings(
        device=DEVICE, max_model_len=128, max_num_seqs=16, temperature=TEMPERATURE, cuda_graphs=cuda_graphs
    )
    return rollout.RolloutEngine(model_dir(folder, **changes), run_dir, settings)


def publish(engine, weights, version=None):
    """A complete publication of `weights`, by default as the version after the last committed one."""
    version = version or (engine.committed["version"] if engine.committed else 0) + 1
    engine.pause()
    engine.start(version)
    engine.receive(weights.items())
    return engine.finish(version, checkpoint.digest_of(weights))


def make_requests(count=8, max_tokens=24, **more):
    """Two completions a prompt."""
    return [
        {
            "prompt_tokens": [3 + (7 * (i // 2) + 5 * j) % 94 for j in range(LENGTHS[i // 2 % len(LENGTHS)])],
            "seed": rollout.completion_seed(1, 0, i),
            "max_tokens": max_tokens,
            "temperature": TEMPERATURE,
            **more,
        }
        for i in range(count)
    ]


def worst_error(config, weights, requests, completions):
    """Largest difference of a selected log-probability from the float64 forward of prompt and completion."""
    exact, worst = {name: tensor.double() for name, tensor in weights.items()}, 0.0
    for request, completion in zip(requests, completions, strict=True):
        prompt, response = request["prompt_tokens"], completion["response_tokens"]
        tokens = torch.tensor(prompt + response)
        logits = reference.logits(exact, config, tokens)[len(prompt) - 1 : -1] / request["temperature"]
        wanted = logits.log_softmax(-1).gather(1, tokens[len(prompt) :, None])[:, 0]
        worst = max(worst, (wanted - torch.tensor(completion["log_probs"], dtype=torch.float64)).abs().max().item())
    return worst


def outcome(completions):
    """What must be bitwise the same when a rollout is repeated."""
    return [(c["response_tokens"], c["log_probs"], c["finish_reason"]) for c in completions]


def assert_same_but_for_the_batch(some, others):
    """Bitwise on CPU; on a GPU another batch size moves log-probabilities by about 1e-6."""
    if DEVICE == "cpu":
        assert some == others
    for (tokens, log_probs, reason), (other_tokens, other_log_probs, other_reason) in zip(some, others, strict=True):
        assert (tokens, reason) == (other_tokens, other_reason)
        assert log_probs == pytest.approx(other_log_probs, abs=1e-5)


@pytest.fixture(scope="module", autouse=True)
def environment():
    """An engine sets the environment of its process; other test modules get theirs back."""
    with job.kept_environment():
        yield


@pytest.fixture(scope="module")
def config():
    return provider.parse_config(CONFIG, "test")


@pytest.fixture(scope="module")
def weights(config):
    return make_weights(config, 0)


@pytest.fixture(scope="module")
def other_weights(config):
    return make_weights(config, 1)


@pytest.fixture(scope="module")
def from_fresh(tmp_path_factory, other_weights):
    """What an engine that never held anything else generates under `other_weights`."""
    engine = make_engine(tmp_path_factory.mktemp("fresh"))
    with pytest.raises(GuardError, match="no policy has been published"):
        engine.generate(make_requests())
    assert engine.committed is None
    publish(engine, other_weights)
    completions = engine.generate(make_requests())
    engine.close()
    return completions


@pytest.fixture(scope="module")
def engine(tmp_path_factory, from_fresh):
    engine = make_engine(tmp_path_factory.mktemp("model"), str(tmp_path_factory.mktemp("run")))
    yield engine
    engine.close()


# --- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("loops", "skip"), [(1, False), (2, True), (3, False), (3, True)])
def test_log_probs_agree_with_a_float64_forward_for_any_loops(tmp_path, loops, skip):
    changes = {"num_loops": loops, "skip_loop_final_norm": skip}
    engine = make_engine(tmp_path / "model", **changes)
    try:
        weights = make_weights(engine.config, 5)
        publish(engine, weights)
        requests = make_requests()
        completions = engine.generate(requests)
        error = worst_error(engine.config, weights, requests, completions)
        print(f"loops {loops}, skip {skip}: {error:.1e}")
        assert error < 1e-5
        assert {c["trace"]["loops"] for c in completions} == {loops}
    finally:
        engine.close()


def test_log_probs_agree_with_a_float64_forward(engine, config, weights):
    publish(engine, weights)
    requests = make_requests()
    for request, temperature in zip(requests, (0.3, 0.5, 0.8, 1.0, 1.0, 1.3, 0.8, 0.8), strict=True):
        request["temperature"] = temperature
    completions = engine.generate(requests)
    assert worst_error(config, weights, requests, completions) < 1e-5
    assert all(value == float(torch.tensor(value)) for c in completions for value in c["log_probs"])  # not rounded


def test_loops_that_share_one_cache_would_be_seen(engine, config, weights):
    publish(engine, weights)
    requests, layers = make_requests(), engine._model.model.layers
    kept = [layer.attn[1] for layer in layers]
    try:
        for layer in layers:
            layer.attn[1] = layer.attn[0]
        assert worst_error(config, weights, requests, engine.generate(requests)) > 1e-3
    finally:
        for layer, attention in zip(layers, kept, strict=True):
            layer.attn[1] = attention
        engine.reset_caches()
    assert worst_error(config, weights, requests, engine.generate(requests)) < 1e-5


def test_every_loop_has_a_cache_of_its_own(engine):
    caches = [a.kv_cache[0] if isinstance(a.kv_cache, list) else a.kv_cache for layer in engine._model.model.layers
              for a in layer.attn]  # fmt: skip
    assert len({cache.data_ptr() for cache in caches}) == 6


def test_physical_parameters_exist_once(engine, config):
    held = sum(p.numel() for p in engine._model.parameters())
    padding = 2 * (128 - config.vocab_size) * config.hidden_size  # vLLM pads the vocabulary to a multiple of 64
    assert held == sum(math.prod(shape) for shape in provider.tensor_shapes(config).values()) + padding


def test_the_model_refuses_a_name_or_shape_that_is_not_its_own(engine):
    with pytest.raises(ValueError, match="model.layers.9.mlp.up_proj.weight is no tensor of this model"):
        engine._model.load_weights([("model.layers.9.mlp.up_proj.weight", torch.ones(80, 48))])
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \[3\], the model needs \[48\]"):
        engine._model.load_weights([("model.norm.weight", torch.ones(3))])


def test_register_may_be_called_again():
    import vllm_nanbeige

    vllm_nanbeige.register()
    vllm_nanbeige.register()


@pytest.mark.skipif(DEVICE == "cuda", reason="a limit of vLLM's CPU attention")
def test_a_head_size_that_cpu_attention_lacks_is_named_before_the_engine_starts(tmp_path):
    with pytest.raises(ValueError, match='"head_dim" is 24'):
        make_engine(tmp_path / "model", head_dim=24)


# --- completions -----------------------------------------------------------------------------------------------------


def test_a_completion_does_not_depend_on_its_batch(engine, weights):
    publish(engine, weights)
    requests = make_requests()
    whole = outcome(engine.generate(requests))
    assert outcome(engine.generate(requests)) == whole  # with a warm prefix cache
    engine.reset_caches()
    assert outcome(engine.generate(requests)) == whole
    assert_same_but_for_the_batch(outcome(engine.generate(requests[::-1]))[::-1], whole)
    assert_same_but_for_the_batch(outcome(engine.generate(requests[2:5])), whole[2:5])
    engine.reset_caches()
    assert_same_but_for_the_batch([outcome(engine.generate([request]))[0] for request in requests], whole)


def test_completions_of_one_prompt_differ_by_their_seed(engine, weights):
    publish(engine, weights)
    first, second = engine.generate(make_requests(2))
    assert first["response_tokens"] != second["response_tokens"]
    same = make_requests(2)
    same[1]["seed"] = same[0]["seed"]
    first, second = engine.generate(same)
    assert first["response_tokens"] == second["response_tokens"]


def test_seeds_come_from_run_seed_update_sample_and_purpose_alone():
    seeds = {
        rollout.completion_seed(run, update, sample, purpose)
        for run in range(3) for update in range(5) for sample in range(16) for purpose in ("train", "eval")
    }  # fmt: skip
    assert len(seeds) == 3 * 5 * 16 * 2
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert rollout.completion_seed(42, 0, 0) == 4216224528958784422  # fixed: a resume must find the same ones


def test_the_end_of_text_token_ends_a_completion_and_belongs_to_it(engine, config, weights):
    publish(engine, weights)
    completions = engine.generate(make_requests(16, max_tokens=56))
    ended = [c for c in completions if c["finish_reason"] == "stop"]
    assert ended and len(ended) < len(completions)
    for c in completions:
        assert len(c["log_probs"]) == len(c["response_tokens"])
        if c["finish_reason"] == "stop":
            assert c["response_tokens"].index(config.eos_token_id) == len(c["response_tokens"]) - 1
        else:
            assert c["finish_reason"] == "length" and len(c["response_tokens"]) == 56
            assert config.eos_token_id not in c["response_tokens"]


def test_temperature_zero_is_greedy(engine, config, weights):
    publish(engine, weights)
    requests = make_requests(2, max_tokens=6, temperature=0.0)
    first, second = engine.generate(requests)
    assert first["response_tokens"] == second["response_tokens"]
    tokens, exact = list(requests[0]["prompt_tokens"]), {n: t.double() for n, t in weights.items()}
    for token in first["response_tokens"]:
        assert reference.logits(exact, config, torch.tensor(tokens))[-1].argmax() == token
        tokens.append(token)


def test_every_completion_carries_its_trace(engine, weights):
    record = publish(engine, weights)
    request = make_requests(1)[0]
    assert engine.generate([request])[0]["trace"] == {
        "policy_version": record["version"],
        "digest": checkpoint.digest_of(weights),
        "model_revision": "unverified",
        "engine_revision": engine.facts()["engine_revision"],
        "epoch": 0,
        "seed": request["seed"],
        "loops": 2,
        "temperature": TEMPERATURE,
    }


def test_a_request_that_cannot_be_served_is_named(engine, weights):
    publish(engine, weights)
    good = make_requests(1)[0]
    for change, message in (
        ({"prompt_tokens": []}, "request 1: needs at least one prompt token"),
        ({"max_tokens": 0}, "one token to generate"),
        ({"max_tokens": 124}, "5 prompt tokens and 124 to generate are more than the 128"),
        ({"prompt_tokens": [97]}, "a prompt token is not in 0..96"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate([good, {**good, **change}])
    assert engine.generate([]) == []


# --- publication -----------------------------------------------------------------------------------------------------


def test_what_the_model_holds_is_read_back_bit_for_bit(engine, weights):
    publish(engine, weights)
    for name, tensor in engine._model.held_tensors():
        assert torch.equal(tensor.cpu(), weights[name])
    assert checkpoint.policy_digest(engine.held_digests()) == checkpoint.digest_of(weights)


def test_new_weights_give_what_a_fresh_engine_gives(engine, weights, other_weights, from_fresh):
    publish(engine, weights)
    assert outcome(engine.generate(make_requests())) != outcome(from_fresh)
    publish(engine, other_weights)
    assert outcome(engine.generate(make_requests())) == outcome(from_fresh)


def test_a_prefix_cache_kept_across_a_publication_would_be_seen(
    engine, config, weights, other_weights, from_fresh, monkeypatch
):
    publish(engine, weights)
    requests = make_requests()
    engine.generate(requests)
    with monkeypatch.context() as patch:
        patch.setattr(engine, "reset_caches", lambda: None)
        publish(engine, other_weights)
    assert worst_error(config, other_weights, requests, engine.generate(requests)) > 1e-3
    engine.reset_caches()
    assert outcome(engine.generate(requests)) == outcome(from_fresh)


def test_versions_grow_within_an_epoch_and_commits_are_recorded(engine, weights, other_weights):
    record = publish(engine, weights)
    assert engine.committed == {"version": record["version"], "digest": checkpoint.digest_of(weights), "epoch": 0}
    publish(engine, other_weights, record["version"] + 3)  # a gap is growth
    records = checkpoint.read_commits(engine.run_dir)
    assert [(r["version"], r["digest"], r["epoch"], r["tensors"]) for r in records[-2:]] == [
        (record["version"], checkpoint.digest_of(weights), 0, 30),
        (record["version"] + 3, checkpoint.digest_of(other_weights), 0, 30),
    ]


def altered(weights, how):
    """`weights` as a list of pairs, broken in one way."""
    pairs, name = list(weights.items()), "model.layers.1.self_attn.k_proj.weight"
    place = [n for n, _ in pairs].index(name)
    tensor = pairs[place][1]
    if how == "missing":
        del pairs[place]
    elif how == "extra":
        pairs.append(("model.layers.3.self_attn.k_proj.weight", tensor))
    elif how == "twice":
        pairs.append(pairs[place])
    elif how == "shape":
        pairs[place] = (name, tensor.T.contiguous())
    elif how == "dtype":
        pairs[place] = (name, tensor.bfloat16())
    elif how == "byte":
        tensor = tensor.clone()
        tensor.view(torch.uint8)[7, 11] ^= 1
        pairs[place] = (name, tensor)
    return pairs


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "model.layers.1.self_attn.k_proj.weight is missing"),
        ("extra", "model.layers.3.self_attn.k_proj.weight is no tensor of this model"),
        ("twice", "model.layers.1.self_attn.k_proj.weight came twice"),
        ("shape", r"k_proj.weight has shape \[48, 64\], the model needs \[64, 48\]"),
        ("dtype", "k_proj.weight is bfloat16, the engine runs float32"),
        ("byte", "the engine holds a policy with digest [0-9a-f]{64}, the sender states"),
    ],
)
def test_a_publication_that_is_not_as_stated_is_refused_until_a_whole_one_commits(
    engine, weights, other_weights, from_fresh, how, message
):
    publish(engine, weights)
    before, records = engine.committed, checkpoint.read_commits(engine.run_dir)
    with pytest.raises(GuardError, match=message):
        engine.start(before["version"] + 1)
        engine.receive(altered(other_weights, how))
        engine.finish(before["version"] + 1, checkpoint.digest_of(other_weights))
    with pytest.raises(GuardError, match="does not generate: the last publication failed"):
        engine.generate(make_requests())
    assert engine.committed == before and checkpoint.read_commits(engine.run_dir) == records
    publish(engine, other_weights)
    assert outcome(engine.generate(make_requests())) == outcome(from_fresh)


def test_a_commit_is_of_the_policy_that_was_verified(engine, weights, other_weights, from_fresh):
    version, digest = publish(engine, weights)["version"] + 1, checkpoint.digest_of(other_weights)
    record = rollout.commit_record(version, digest, 0, 30)

    def received():
        engine.start(version)
        engine.receive(other_weights.items())

    received()
    with pytest.raises(GuardError, match=f"commit of version {version}, which this engine has not verified"):
        engine.commit(record)
    for wrong in ({"digest": "0" * 64}, {"version": version + 1}):
        received()
        engine.verify(version, digest)
        with pytest.raises(GuardError, match="a publication is under way"):
            engine.generate(make_requests())
        with pytest.raises(GuardError, match="which this engine has not verified"):
            engine.commit({**record, **wrong})
    received()
    engine.verify(version, digest)
    engine.commit(record)
    engine.commit(record)  # once more is nothing
    assert outcome(engine.generate(make_requests())) == outcome(from_fresh)
    engine.refuse("another engine refused it")
    with pytest.raises(GuardError, match="another engine refused it"):
        engine.generate(make_requests())


def test_the_same_version_after_a_failed_one_is_loaded_again(engine, weights, other_weights, from_fresh):
    """A repeat is a no-op only while the committed policy is what the model holds."""
    version = publish(engine, other_weights)["version"]
    with pytest.raises(GuardError):
        engine.start(version + 1)
        engine.receive(altered(weights, "shape"))
    publish(engine, other_weights, version)
    assert outcome(engine.generate(make_requests())) == outcome(from_fresh)


def test_an_older_version_is_out_of_order(engine, weights):
    version = publish(engine, weights)["version"]
    with pytest.raises(GuardError, match=f"version {version - 1} is out of order: version {version} is committed"):
        engine.start(version - 1)
    with pytest.raises(GuardError, match="does not generate"):
        engine.generate(make_requests())


@pytest.mark.parametrize("version", [0, -1, 1.5, True, None])
def test_a_version_is_a_whole_number_from_one(engine, version):
    with pytest.raises(GuardError, match="is not a whole number from 1"):
        engine.start(version)


def test_steps_out_of_order_are_refused(engine, weights):
    version = publish(engine, weights)["version"]
    with pytest.raises(GuardError, match="without a start"):
        engine.receive(weights.items())
    with pytest.raises(GuardError, match="without a start"):
        engine.finish(version + 1, checkpoint.digest_of(weights))
    engine.start(version + 1)
    with pytest.raises(GuardError, match=f"version {version + 2}, but version {version + 1} was started"):
        engine.finish(version + 2, checkpoint.digest_of(weights))


def test_nothing_is_generated_while_a_publication_is_under_way(engine, weights):
    version = publish(engine, weights)["version"] + 1
    engine.pause()
    with pytest.raises(GuardError, match="a publication is under way"):
        engine.generate(make_requests())
    engine.start(version)
    engine.receive(weights.items())
    with pytest.raises(GuardError, match="a publication is under way"):
        engine.generate(make_requests())
    engine.finish(version, checkpoint.digest_of(weights))
    assert len(engine.generate(make_requests(2))) == 2


def test_tensors_may_come_in_parts_and_in_any_order(engine, other_weights, from_fresh):
    pairs = list(other_weights.items())[::-1]
    version = (engine.committed or {"version": 0})["version"] + 1
    engine.start(version)
    engine.receive(pairs[:7])
    engine.receive(iter(pairs[7:]))
    engine.finish(version, checkpoint.digest_of(other_weights))
    assert outcome(engine.generate(make_requests())) == outcome(from_fresh)


def test_a_transfer_that_breaks_off_leaves_the_engine_refusing(engine, weights):
    version = publish(engine, weights)["version"]

    def broken():
        yield from list(weights.items())[:5]
        raise OSError("the peer went away")

    with pytest.raises(GuardError, match="the transfer broke off: OSError: the peer went away"):
        engine.start(version + 1)
        engine.receive(broken())
    with pytest.raises(GuardError, match="does not generate"):
        engine.generate(make_requests())
    assert engine.committed["version"] == version


def test_weights_that_do_not_reach_the_model_are_caught_by_the_digest(engine, weights, monkeypatch):
    """The staleness that the replay bound alone would miss at a small learning rate."""
    version = publish(engine, weights)["version"]
    nudged = {name: tensor + 1e-7 for name, tensor in weights.items()}
    monkeypatch.setattr(engine._model, "load_weights", lambda pairs: {name for name, _ in pairs})
    with pytest.raises(GuardError, match="the engine holds a policy with digest"):
        publish(engine, nudged)
    assert engine.committed["version"] == version


def test_half_a_publication_is_caught_by_the_digest(engine, weights, other_weights, monkeypatch):
    publish(engine, weights)
    load = engine._model.load_weights
    monkeypatch.setattr(engine._model, "load_weights", lambda pairs: load(p for p in pairs if "layers.2" not in p[0]))
    with pytest.raises(GuardError, match="the engine holds a policy with digest"):
        publish(engine, other_weights)


def test_a_commit_that_does_not_become_durable_is_no_commit(engine, weights, other_weights, monkeypatch):
    before = publish(engine, weights)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "append_commit", full)
        with pytest.raises(GuardError, match="could not be committed.*No space left"):
            publish(engine, other_weights)
    assert engine.committed["version"] == before["version"]
    with pytest.raises(GuardError, match="does not generate"):
        engine.generate(make_requests())
    assert publish(engine, other_weights)["version"] == before["version"] + 1


def test_a_version_committed_before_with_another_digest_is_refused_by_the_record(engine, weights, other_weights):
    """As after a resume, whose engine starts without a committed version but must reproduce the digest."""
    version = publish(engine, weights)["version"]
    kept, engine._committed = engine._committed, None
    try:
        with pytest.raises(GuardError, match="was committed with digest"):
            publish(engine, other_weights, version)
    finally:
        engine._committed = kept


# --- manifests and transports ----------------------------------------------------------------------------------------


def manifest(path, weights, version, transport="disk", **changes):
    from safetensors.torch import save_file

    save_file(weights, path)
    tensors = {n: [checkpoint.tensor_digest(t)[0], list(t.shape)] for n, t in weights.items()}
    made = {"version": version, "digest": checkpoint.digest_of(weights), "transport": transport}
    return {**made, "location": str(path), "tensors": tensors, **changes}


@pytest.mark.parametrize("transport", ["disk", "shm"])
def test_a_manifest_is_published_through_its_file(engine, other_weights, from_fresh, tmp_path, transport):
    version = (engine.committed or {"version": 0})["version"] + 1
    record = engine.publish(manifest(tmp_path / "w.safetensors", other_weights, version, transport))
    assert (record["version"], record["tensors"]) == (version, 30)
    assert set(record["seconds"]) == {"load", "digest", "commit"}
    assert outcome(engine.generate(make_requests())) == outcome(from_fresh)


def test_repeating_a_committed_version_is_a_no_op_and_another_digest_an_error(
    engine, weights, other_weights, tmp_path
):
    version = publish(engine, weights)["version"]
    records = checkpoint.read_commits(engine.run_dir)
    repeat = manifest(tmp_path / "w.safetensors", weights, version)
    assert engine.publish({**repeat, "location": "is not even read"})["version"] == version
    assert len(engine.generate(make_requests(2))) == 2
    with pytest.raises(GuardError, match=f"version {version} is committed with digest"):
        engine.publish(manifest(tmp_path / "w.safetensors", other_weights, version))
    with pytest.raises(GuardError, match="does not generate"):
        engine.generate(make_requests())
    assert checkpoint.read_commits(engine.run_dir) == records
    engine.publish(manifest(tmp_path / "w.safetensors", weights, version))  # whole again, no second record
    assert len(engine.generate(make_requests(2))) == 2
    assert checkpoint.read_commits(engine.run_dir) == records


def test_a_manifest_that_states_another_model_is_refused_before_anything_is_loaded(engine, weights, tmp_path):
    version = publish(engine, weights)["version"]
    good = manifest(tmp_path / "w.safetensors", weights, version + 1)
    name = "lm_head.weight"
    for tensors, message in (
        ({n: t for n, t in good["tensors"].items() if n != name}, "lm_head.weight is missing"),
        ({**good["tensors"], name: ["BF16", [97, 48]]}, r"stated as BF16 \[97, 48\], not F32 \[97, 48\]"),
        ({**good["tensors"], name: ["F32", [96, 48]]}, r"stated as F32 \[96, 48\]"),
        ({**good["tensors"], "value_head.weight": ["F32", [1, 48]]}, "value_head.weight is no tensor of this model"),
    ):
        with pytest.raises(GuardError, match=message):
            engine.publish({**good, "tensors": tensors})
        assert checkpoint.policy_digest(engine.held_digests()) == good["digest"]


def test_a_damaged_or_absent_file_is_a_failed_publication(engine, weights, tmp_path):
    version = publish(engine, weights)["version"] + 1
    path = tmp_path / "w.safetensors"
    made = manifest(path, weights, version)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(GuardError, match="the transfer broke off"):
        engine.publish(made)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(GuardError, match="the engine holds a policy with digest"):
        engine.publish(made)
    path.unlink()
    with pytest.raises(GuardError, match="the transfer broke off"):
        engine.publish(made)
    with pytest.raises(GuardError, match="unknown publication transport 'carrier pigeon'"):
        engine.publish({**made, "transport": "carrier pigeon"})


SENDER = """
import os, pickle, sys
import torch
from torch.multiprocessing.reductions import reduce_tensor
import checkpoint, test_rollout
import provider

config = provider.parse_config(test_rollout.CONFIG, "test")
weights = {n: t.cuda() for n, t in test_rollout.make_weights(config, 1).items()}
heads, groups, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
views = dict(weights)
for n in range(config.num_hidden_layers):  # q, k, v as slices of one weight fused by query group, as in Megatron
    names = [f"model.layers.{n}.self_attn.{x}_proj.weight" for x in "qkv"]
    parts = [weights[name].view(groups, -1, config.hidden_size) for name in names]
    fused = torch.cat(parts, 1)
    views |= zip(names, fused.split([p.shape[1] for p in parts], 1))
entries = checkpoint.tensor_digests(weights.items())
handles = {name: reduce_tensor(view)[1] for name, view in views.items()}
torch.cuda.synchronize()
manifest = {
    "version": int(sys.argv[1]), "transport": "ipc", "digest": checkpoint.policy_digest(entries),
    "tensors": {n: [dtype, list(shape)] for n, (dtype, shape, _) in entries.items()},
    "location": {"device": str(torch.cuda.get_device_properties(0).uuid), "handles": handles},
}
sys.stdout.buffer.write(pickle.dumps(manifest))
sys.stdout.flush()
os.close(1)  # Python's own close leaves it open, and the reader would wait
sys.stdin.read()  # the tensors live until the parent is done
"""


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA IPC needs a GPU")
def test_a_policy_is_read_straight_from_the_senders_gpu_memory(engine, from_fresh):
    version = (engine.committed or {"version": 0})["version"] + 1
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", SENDER, str(version)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as sender:
        made = pickle.loads(sender.stdout.read())
        try:
            engine.publish(made)
            assert outcome(engine.generate(make_requests())) == outcome(from_fresh)
            other = {**made["location"], "device": "another"}
            with pytest.raises(GuardError, match="the sender's GPU is not visible"):
                engine.publish({**made, "version": version + 1, "location": other})
        finally:
            sender.stdin.close()


@pytest.mark.skipif(DEVICE == "cpu", reason="CUDA graphs need a GPU")
def test_cuda_graphs_give_what_eager_gives(tmp_path, other_weights, from_fresh):
    engine = make_engine(tmp_path / "model", cuda_graphs=True)
    try:
        publish(engine, make_weights(engine.config, 7))
        engine.generate(make_requests())
        publish(engine, other_weights)  # the captured graphs read the new weights
        assert_same_but_for_the_batch(outcome(engine.generate(make_requests())), outcome(from_fresh))
    finally:
        engine.close()


def test_every_batch_is_captured_at_its_size_or_a_little_above():
    for most in (1, 2, 3, 16, 17, 128, 129, 256, 1000):
        sizes = rollout.graph_sizes(most)
        assert sizes[-1] == most and sizes == sorted(set(sizes))
        for batch in range(1, most + 1):
            padded = min(size for size in sizes if size >= batch)
            assert padded <= max(2 * batch, batch + 8) and padded - batch < 64


# --- revisions -------------------------------------------------------------------------------------------------------

COMMIT = "b82e54bd609793562a75cbf9337970a93369eab5"


def recorded(folder, model=None, engine=None):
    return rollout.check_revisions(folder, rollout.EngineSettings(model_revision=model, engine_revision=engine))


def test_a_model_revision_is_checked_where_the_directory_can_tell(tmp_path):
    folder = tmp_path / "models--Nanbeige--Nanbeige4.2-3B" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    refs = tmp_path / "models--Nanbeige--Nanbeige4.2-3B" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    (refs / "old").write_text("a" * 40)
    for asked in (None, COMMIT, COMMIT[:8], "main"):
        assert recorded(folder, asked)["model_revision"] == COMMIT
    for asked in ("a" * 40, "old"):
        with pytest.raises(ValueError, match=f"--model-revision asks for {asked}, but {COMMIT} is installed"):
            recorded(folder, asked)
    assert recorded(folder, "a-tag")["model_revision"] == "unverified:a-tag"


def test_a_model_revision_is_checked_in_a_local_download(tmp_path):
    noted = tmp_path / ".cache/huggingface/download/config.json.metadata"
    noted.parent.mkdir(parents=True)
    noted.write_text(f"{COMMIT}\netag\n1.0\n")
    assert recorded(tmp_path, COMMIT)["model_revision"] == COMMIT
    with pytest.raises(ValueError, match="--model-revision asks for"):
        recorded(tmp_path, "a" * 40)


def test_a_revision_that_nothing_can_tell_is_recorded_as_unverified(tmp_path):
    assert recorded(tmp_path)["model_revision"] == "unverified"
    assert recorded(tmp_path, COMMIT)["model_revision"] == f"unverified:{COMMIT}"


def test_an_engine_revision_is_checked_against_the_installed_version(tmp_path):
    installed = recorded(tmp_path)["engine_revision"]
    for asked in (installed, f"v{installed}".split("+")[0]):
        assert recorded(tmp_path, engine=asked)["engine_revision"] == installed
    with pytest.raises(ValueError, match=f"--engine-revision asks for 0.1.0, but {installed} is installed"):
        recorded(tmp_path, engine="0.1.0")


def test_the_commit_of_an_engine_is_checked_where_its_build_noted_it():
    with_commit = rollout._Installed("0.24.0", "ee0da84ab", {"v0.24.0": "0.24.0"}, all_names=True)
    assert rollout._checked("--engine-revision", "ee0da84abcdef", with_commit) == "0.24.0"
    with pytest.raises(ValueError, match="asks for 0123456"):
        rollout._checked("--engine-revision", "0123456", with_commit)
    without = rollout._Installed("0.32.0", None, {}, all_names=True)
    assert rollout._checked("--engine-revision", "ee0da84ab", without) == "unverified:ee0da84ab"


def test_an_unverified_revision_or_an_unsupported_config_needs_no_engine(tmp_path):
    settings = rollout.EngineSettings(engine_revision="0.1.0")
    with pytest.raises(ValueError, match="--engine-revision asks for 0.1.0"):
        rollout.RolloutEngine(model_dir(tmp_path), None, settings)
    with pytest.raises(ValueError, match="hidden_act"):
        rollout.RolloutEngine(model_dir(tmp_path, hidden_act="gelu"), None, rollout.EngineSettings())
