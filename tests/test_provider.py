"""The model provider against an independent float64 forward, and every refusal of a bad config or checkpoint."""

import contextlib
import json
import os
import struct
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import reference
import torch

import megatron_cpu
import provider

TINY = {
    "model_type": "nanbeige",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,  # 6 * 8 is not 32
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "num_loops": 2,
    "skip_loop_final_norm": False,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
OFFICIAL = TINY | {
    "vocab_size": 166144,
    "hidden_size": 3072,
    "intermediate_size": 10752,
    "num_hidden_layers": 22,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 7e7,
    "max_position_embeddings": 262144,
    "bos_token_id": 166100,
    "eos_token_id": 166101,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
LENGTHS = (5, 1, 17, 9, 2)
CU_SEQLENS = torch.tensor([0, 5, 6, 23, 32, 34])
TOKENS = torch.randint(0, TINY["vocab_size"], (34,), generator=torch.Generator().manual_seed(7))
SHAPES_OF_LOOPING = [(1, False), (2, False), (2, True), (3, False), (3, True)]


@pytest.fixture(scope="module", autouse=True)
def one_process():
    """A process group of one, and Megatron's parallel state on it."""
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def config_of(**changes):
    return provider.parse_config(TINY | changes, "config.json")


def weights_of(config, dtype=torch.float32, critic=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 0.1 + (len(shape) == 1)).to(dtype)
        for name, shape in provider.tensor_shapes(config, critic).items()
    }


def model_of(config, weights, critic=False, dtype=torch.float32, recompute=False):
    model = provider.build_model(config, critic=critic, dtype=dtype, recompute=recompute, device="cpu")
    provider.load_native(model, weights.items())
    return model


def assert_close(name, found, expected, rtol, atol):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}")


def sequences():
    return TOKENS.split(list(LENGTHS))


def native_gradients(model):
    """Native name -> gradient, by the conversion that the weights take."""
    for parameter in model.parameters():
        parameter.data = parameter.grad
    return dict(provider.export_native(model))


# ---------------------------------------------------------------------------------------------------------- the forward


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("loops,skip", SHAPES_OF_LOOPING)
def test_logits_and_gradients_equal_the_float64_reference(loops, skip, recompute):
    config = config_of(num_loops=loops, skip_loop_final_norm=skip)
    weights = weights_of(config)
    model = model_of(config, weights, recompute=recompute)
    exact = {name: tensor.double().requires_grad_() for name, tensor in weights.items()}
    expected = torch.cat([reference.logits(exact, config, tokens) for tokens in sequences()])
    logits = model.head(model(TOKENS, CU_SEQLENS))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=1e-5)
    log_probs = logits.double().log_softmax(-1)
    torch.testing.assert_close(log_probs, expected.log_softmax(-1), rtol=0, atol=1e-5)

    pull = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)) / len(TOKENS)
    (logits * pull).sum().backward()
    (expected * pull.double()).sum().backward()
    for name, gradient in native_gradients(model).items():
        assert_close(name, gradient.double(), exact[name].grad, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("loops,skip", SHAPES_OF_LOOPING)
def test_recompute_changes_no_bit_of_any_gradient(loops, skip):
    config = config_of(num_loops=loops, skip_loop_final_norm=skip)
    weights = weights_of(config)
    found = []
    for recompute in (False, True):
        model = model_of(config, weights, recompute=recompute)
        loss = model.head(model(TOKENS, CU_SEQLENS)).logsumexp(-1).mean()
        loss.backward()
        found.append((loss.detach(), native_gradients(model)))
    assert torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in weights)


def test_rows_select_what_the_head_sees():
    config = config_of()
    model = model_of(config, weights_of(config))
    rows = torch.tensor([3, 5, 22, 33])
    assert torch.equal(model(TOKENS, CU_SEQLENS, rows), model(TOKENS, CU_SEQLENS)[rows])
    assert model.head(model(TOKENS, CU_SEQLENS, rows)).shape == (4, config.vocab_size)


def test_a_sequence_does_not_see_its_neighbours():
    config = config_of()
    model = model_of(config, weights_of(config))
    with torch.no_grad():
        packed = model(TOKENS, CU_SEQLENS).split(list(LENGTHS))
        for tokens, states in zip(sequences(), packed, strict=True):
            alone = model(tokens, torch.tensor([0, len(tokens)]))
            torch.testing.assert_close(alone, states, rtol=0, atol=2e-6)
        other = TOKENS.clone()
        other[6:23] = (other[6:23] + 1) % config.vocab_size  # the third sequence only
        changed = (model(other, CU_SEQLENS) != model(TOKENS, CU_SEQLENS)).any(-1)
    assert not changed[:6].any() and not changed[23:].any() and changed[6:23].all()


@pytest.mark.parametrize("bounds", [[0, 5, 5, 34], [0, 40], [1, 34], [0, 33], [0]])
def test_wrong_sequence_bounds_are_refused(bounds):
    model = model_of(config_of(), weights_of(config_of()))
    with pytest.raises(ValueError, match="cu_seqlens"):
        model(TOKENS, torch.tensor(bounds))


def disturb_visit(model, loop, layer, position, delta):
    """Add `delta` to the input of one layer visit at one packed position, in the provider's model."""
    visits = iter(range(1_000_000))

    def hook(module, args):
        if next(visits) == loop:
            hidden = args[0].clone()
            hidden[position, 0] += delta
            return (hidden, *args[1:])

    return model.layers[layer].register_forward_pre_hook(hook)


@pytest.mark.parametrize("loop,layer", [(0, 0), (0, 2), (1, 0), (1, 2), (2, 1)])
def test_changing_one_loops_history_changes_only_what_depends_on_it(loop, layer):
    config = config_of(num_loops=3)
    weights = weights_of(config)
    model = model_of(config, weights)
    delta = torch.linspace(-1, 1, config.hidden_size)
    third, within = 6, 10  # position 10 of the third sequence, which starts at 6
    with torch.no_grad():
        before = model(TOKENS, CU_SEQLENS)
        with contextlib.closing(Removable(disturb_visit(model, loop, layer, third + within, delta))):
            after = model(TOKENS, CU_SEQLENS)

        def disturb(at_loop, at_layer, x):
            if (at_loop, at_layer) == (loop, layer):
                x = x.clone()
                x[within] += delta
            return x

        exact = {name: tensor.double() for name, tensor in weights.items()}
        expected = reference.hidden_states(exact, config, sequences()[2], disturb)
    changed = (before != after).any(-1)
    assert not changed[: third + within].any() and not changed[23:].any()
    assert changed[third + within : 23].all()
    torch.testing.assert_close(after[6:23].double(), expected, rtol=0, atol=1e-5)


class Removable:
    def __init__(self, handle):
        self.close = handle.remove


def test_two_loops_sharing_one_cache_would_be_seen(monkeypatch):
    """The mutant: from loop 2 on, every layer attends to the keys and values of loop 1."""
    config = config_of()
    weights = weights_of(config)
    model = model_of(config, weights)
    for layer in model.layers:
        attention, kept = layer.self_attention.core_attention, {}

        def shared(query, key, value, *args, attend=attention.forward, kept=kept, **kwargs):
            key, value = kept.setdefault("first loop", (key, value))
            return attend(query, key, value, *args, **kwargs)

        monkeypatch.setattr(attention, "forward", shared)
    exact = {name: tensor.double() for name, tensor in weights.items()}
    expected = torch.cat([reference.logits(exact, config, tokens) for tokens in sequences()])
    assert (model.head(model(TOKENS, CU_SEQLENS)) - expected).abs().max() > 1e-2


def test_critic_values_are_float32_and_begin_at_zero():
    config = config_of()
    policy = weights_of(config, torch.bfloat16)
    model = model_of(config, policy, critic=True, dtype=torch.bfloat16)
    hidden = model(TOKENS, CU_SEQLENS)
    values = model.head(hidden)
    assert values.dtype == torch.float32 and values.shape == (34,) and not values.any()
    head = torch.randn(1, config.hidden_size, dtype=torch.bfloat16)
    provider.load_native(model, [*policy.items(), ("value_head.weight", head)])
    assert torch.equal(model.head(hidden), (hidden.float() @ head.float().T).squeeze(-1))


# ----------------------------------------------------------------------------------------------------------- conversion


@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_native_and_megatron_weights_convert_bit_for_bit(critic, dtype):
    config = config_of()
    weights = weights_of(config, dtype, critic)
    exported = dict(provider.export_native(model_of(config, weights, critic, dtype)))
    assert list(exported) == list(weights)
    assert all(exported[name].dtype == dtype and torch.equal(exported[name], weights[name]) for name in weights)


def test_bfloat16_checkpoint_loads_into_float32(tmp_path):
    config = config_of()
    weights = weights_of(config, torch.bfloat16)
    provider.write_checkpoint(tmp_path, TINY, weights.items())
    model = model_of(config, dict(provider.read_checkpoint(tmp_path, config)))
    exported = dict(provider.export_native(model))
    assert all(exported[name].dtype == torch.float32 for name in weights)
    assert all(torch.equal(exported[name], weights[name].float()) for name in weights)


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda w: w.pop("model.norm.weight"), '"model.norm.weight" is missing'),
        (lambda w: w.update(extra=torch.zeros(1)), "'extra' does not belong"),
        (lambda w: w.update({"model.norm.weight": torch.ones(31)}), r"\[31\]"),
        (lambda w: w.update({"model.norm.weight": torch.ones(32, dtype=torch.int64)}), "int64"),
        (lambda w: w.update({"value_head.weight": torch.ones(1, 32)}), "does not belong"),
    ],
)
def test_load_native_takes_every_tensor_exactly_once(change, message):
    weights = weights_of(config_of())
    change(weights)
    model = provider.build_model(config_of(), critic=False, dtype=torch.float32, recompute=False, device="cpu")
    with pytest.raises(ValueError, match=message):
        provider.load_native(model, weights.items())
    with pytest.raises(ValueError, match="twice"):
        provider.load_native(model, [("lm_head.weight", weights["lm_head.weight"])] * 2)


@pytest.mark.parametrize("critic,count", [(False, 4_169_800_704), (True, 3_659_409_408)])
def test_official_config_has_201_tensors_and_the_official_counts(critic, count):
    config = provider.parse_config(OFFICIAL, "config.json")
    model = provider.build_model(config, critic=critic, dtype=torch.float32, recompute=False, device="meta")
    exported = dict(provider.export_native(model))
    shapes = provider.tensor_shapes(config, critic)
    assert {name: tuple(tensor.shape) for name, tensor in exported.items()} == shapes
    assert len(shapes) == 201 and sum(tensor.numel() for tensor in exported.values()) == count
    assert sum(parameter.numel() for parameter in model.parameters()) == count


# ------------------------------------------------------------------------------------------------------------- Megatron
# Where there is a GPU Megatron wants the model there; tests/test_trainer.py trains, saves and restores on it.

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="Megatron on the CPU, for machines without a GPU")


def distributed(model, optimizer, dtype=torch.float32, clip_grad=0.0):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
    wrapped = DistributedDataParallel(model.config, settings, model)
    return wrapped, get_megatron_optimizer(
        OptimizerConfig(
            optimizer=optimizer,
            lr=1e-2,
            sgd_momentum=0.0,
            weight_decay=0.0,
            clip_grad=clip_grad,
            params_dtype=dtype,
            bf16=dtype is torch.bfloat16,
            fp16=dtype is torch.float16,
            loss_scale=1.0 if dtype is torch.float16 else None,
        ),
        [wrapped],
    )


def step(wrapped, optimizer):
    wrapped.zero_grad_buffer()
    optimizer.zero_grad()
    output = wrapped.module.head(wrapped(TOKENS, CU_SEQLENS))
    output = output.float()
    loss = (output - 1).square().mean()
    loss.backward()
    wrapped.finish_grad_sync()
    with megatron_cpu.enable():
        optimizer.step()
    return loss.item()


@no_gpu
@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_megatron_trains_saves_and_restores_the_model(critic, kind, tmp_path):
    from megatron.core import dist_checkpointing

    config = config_of()
    weights = weights_of(config)
    with megatron_cpu.enable():
        model = model_of(config, weights, critic)
        wrapped, optimizer = distributed(model, kind)
    losses = [step(wrapped, optimizer) for _ in range(8)]
    assert losses[-1] < losses[0]
    with megatron_cpu.enable():
        state = model.sharded_state_dict()
        dist_checkpointing.save({"model": state, "optimizer": optimizer.sharded_state_dict(state)}, str(tmp_path))
        other = model_of(config, weights_of(config, seed=1), critic)
        other_wrapped, other_optimizer = distributed(other, kind)
        state = other.sharded_state_dict()
        # SGD without momentum has no state, and 0.16.1 fails when it is asked to make some (`init_state_fn` is None).
        other_state = other_optimizer.sharded_state_dict(state, is_loading=kind == "adam")
        wanted = {"model": state, "optimizer": other_state}
        loaded = dist_checkpointing.load(wanted, str(tmp_path))
        other.load_state_dict(loaded["model"])
        other_optimizer.load_state_dict(loaded["optimizer"])
    trained, restored = dict(provider.export_native(model)), dict(provider.export_native(other))
    assert all(torch.equal(trained[name], restored[name]) for name in trained)
    assert any(not torch.equal(trained[name], weights[name]) for name in trained if name in weights)
    for _ in range(3):
        assert step(wrapped, optimizer) == step(other_wrapped, other_optimizer)
    trained, restored = dict(provider.export_native(model)), dict(provider.export_native(other))
    assert all(torch.equal(trained[name], restored[name]) for name in trained)


@no_gpu
def test_sgd_under_megatron_steps_along_the_reference_gradient():
    """A looped parameter counts once: its gradient is the sum over its visits, its step one step."""
    config = config_of(num_loops=3)
    weights = weights_of(config)
    with megatron_cpu.enable():
        wrapped, optimizer = distributed(model_of(config, weights, recompute=True), "sgd")
    step(wrapped, optimizer)
    exact = {name: tensor.double().requires_grad_() for name, tensor in weights.items()}
    output = torch.cat([reference.logits(exact, config, tokens) for tokens in sequences()])
    (output - 1).square().mean().backward()
    for name, tensor in provider.export_native(wrapped.module):
        assert_close(name, tensor.double(), (exact[name] - 1e-2 * exact[name].grad).detach(), rtol=0, atol=1e-6)


@no_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_moves_float32_main_parameters(dtype):
    config = config_of()
    with megatron_cpu.enable():
        model = model_of(config, weights_of(config, dtype), dtype=dtype)
        wrapped, optimizer = distributed(model, "sgd", dtype)
    before = [parameter.main_param.clone() for parameter in model.parameters()]
    step(wrapped, optimizer)
    after = [parameter.main_param for parameter in model.parameters()]
    assert all(main.dtype == torch.float32 for main in after)
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for parameter, main in zip(model.parameters(), after, strict=True):
        assert torch.equal(parameter, main.to(dtype))


@no_gpu
def test_megatrons_own_gradient_clipping_runs_without_cuda():
    config = config_of()
    weights = weights_of(config)
    with megatron_cpu.enable():
        wrapped, optimizer = distributed(model_of(config, weights), "sgd", clip_grad=1e-3)
    step(wrapped, optimizer)
    changes = [tensor - weights[name] for name, tensor in provider.export_native(wrapped.module)]
    assert torch.cat([change.flatten() for change in changes]).norm().item() == pytest.approx(1e-2 * 1e-3, rel=0.05)


def test_tensor_parallel_two_equals_one_process(tmp_path):
    """Two processes, each with half of the heads, the MLP and the vocabulary: same logits, same native tensors."""
    config = config_of()
    torch.save(weights_of(config), tmp_path / "weights.pt")
    script = Path(__file__).with_name("tensor_parallel_child.py")
    expected = model_of(config, weights_of(config))
    logits = expected.head(expected(TOKENS, CU_SEQLENS))
    logits.logsumexp(-1).mean().backward()
    gradients = native_gradients(expected)
    children = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(rank), str(tmp_path)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(2)
    ]
    assert [child.wait(timeout=240) for child in children] == [0, 0]
    found = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    torch.testing.assert_close(torch.cat([part["logits"] for part in found], -1), logits.detach(), rtol=0, atol=1e-5)
    for part in found:
        assert part["round_trip"]
        for name, gradient in part["gradients"].items():
            assert_close(name, gradient, gradients[name], rtol=1e-4, atol=1e-6)


# --------------------------------------------------------------------------------------------------------------- config


def test_official_config_reads_as_published():
    config = provider.parse_config(OFFICIAL, "config.json")
    assert (config.head_dim, config.num_loops, config.rope_theta, config.rms_norm_eps) == (128, 2, 7e7, 1e-5)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 166100, 166101)


@pytest.mark.parametrize(
    "changes",
    [
        {"emb_neighbor_num": None, "enable_mhc": False, "enable_hyper_connection": False, "qk_layernorm": False},
        {"enable_double_loop_split": False, "enable_depth_attention": None, "loop_loss_weights": []},
        {"attention_dropout": 0.0, "pretraining_tp": 1, "kv_channels": 8, "tie_word_embeddings": False},
        {"kv_channels": None, "emb_neighbor_num": 0, "rope_scaling": {}, "partial_rotary_factor": 1.0},
        {"rope_scaling": None},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}},
        {"architectures": ["NanbeigeForCausalLM"], "auto_map": {}, "torch_dtype": "bfloat16", "dtype": "bfloat16"},
        {"initializer_range": 0.02, "use_cache": True, "transformers_version": "5.19.0"},
    ],
)
def test_values_that_are_off_or_without_mathematics_change_nothing(changes):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert provider.parse_config(TINY | changes, "config.json") == config_of()


def test_loop_loss_weights_decide_the_number_of_loops():
    assert config_of(loop_loss_weights=[0.1, 0.2]).num_loops == 3
    assert config_of(loop_loss_weights=None).num_loops == 2
    without = {key: value for key, value in TINY.items() if key != "num_loops"}
    assert provider.parse_config(without | {"loop_loss_weights": [0.5]}, "c").num_loops == 2


def test_head_dim_is_derived_only_when_it_is_not_given():
    assert config_of(head_dim=None, num_attention_heads=4).head_dim == 8
    with pytest.raises(ValueError, match='"head_dim" is missing'):
        config_of(head_dim=None)


def test_unknown_keys_give_one_warning_that_names_them():
    with pytest.warns(UserWarning, match="'hc_mult', 'zebra'") as caught:
        config_of(zebra=1, hc_mult=2)
    assert len(caught) == 1


@pytest.mark.parametrize(
    "field,value",
    [
        ("model_type", "llama"),
        ("model_type", None),
        ("hidden_act", "gelu"),
        ("emb_neighbor_num", 4),
        ("enable_hyper_connection", True),
        ("enable_mhc", True),
        ("enable_double_loop_split", True),
        ("enable_depth_attention", True),
        ("qk_layernorm", True),
        ("tie_word_embeddings", True),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("attention_dropout", 0.1),
        ("pretraining_tp", 2),
        ("kv_channels", 16),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_theta": 1e4, "rope_type": "dynamic"}),
        ("rope_parameters", {"rope_theta": 2e4, "rope_type": "default"}),
        ("rope_parameters", "default"),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"bits": 4}),
        ("sliding_window", 4096),
        ("vocab_size", None),
        ("vocab_size", 0),
        ("vocab_size", True),
        ("vocab_size", "96"),
        ("vocab_size", 96.0),
        ("vocab_size", 10**30),
        ("hidden_size", -32),
        ("num_hidden_layers", 10**9),
        ("num_key_value_heads", 4),
        ("head_dim", 7),
        ("rms_norm_eps", 0),
        ("rms_norm_eps", None),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", None),
        ("rope_theta", float("inf")),
        ("rope_theta", True),
        ("num_loops", 0),
        ("num_loops", None),
        ("num_loops", 2.0),
        ("loop_loss_weights", [0.1, "x"]),
        ("loop_loss_weights", 0.5),
        ("skip_loop_final_norm", "yes"),
        ("max_position_embeddings", 0),
        ("eos_token_id", 96),
        ("eos_token_id", [2, 3]),
        ("pad_token_id", -1),
    ],
)
def test_a_config_that_this_recipe_does_not_train_is_refused_by_field(field, value):
    with pytest.raises(ValueError) as caught:
        config_of(**{field: value})
    message = str(caught.value)
    assert message.startswith("config.json: ") and f'"{field}' in message and "\n" not in message


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"\xff\xfe{}",
        b'{"vocab_size": NaN}',
        b'{"a": 1, "a": 2}',
        b"[" * 100_000,
        b'{"vocab_size": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_config_that_is_no_json_object_is_refused_by_file(text, tmp_path):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(ValueError, match="config.json: ") as caught:
        provider.read_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_config_is_refused_by_file(tmp_path):
    with pytest.raises(ValueError, match="config.json: .* missing"):
        provider.read_config(tmp_path / "nowhere")


# ----------------------------------------------------------------------------------------------------------- checkpoint


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_written_checkpoint_reads_back_bit_for_bit(shards, dtype, tmp_path):
    from safetensors.torch import load_file

    weights = weights_of(config_of(), dtype)
    provider.write_checkpoint(tmp_path, TINY, weights.items(), shards)
    assert len(list(tmp_path.glob("*.safetensors"))) == shards and not list(tmp_path.glob(".*"))
    config = provider.read_config(tmp_path)
    provider.check_checkpoint(tmp_path, config)
    read = dict(provider.read_checkpoint(tmp_path, config))
    assert read.keys() == weights.keys() and all(torch.equal(read[name], weights[name]) for name in weights)
    upstream = {}
    for file in tmp_path.glob("*.safetensors"):
        upstream |= load_file(file)
    assert all(torch.equal(upstream[name], weights[name]) for name in weights)


def edit_header(path, edit):
    """Rewrite one safetensors header and keep the tensors' bytes."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def edit_index(folder, edit):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def rename(header, old, new):
    header[new] = header.pop(old)


def overlap(header):
    names = [name for name in header if header[name].get("shape") == [32]]
    header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NORM, HEAD, EMBED = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"
DAMAGE = {
    "no weights": (lambda d: [f.unlink() for f in d.glob("model*")], "only safetensors"),
    "shard missing": (lambda d: (d / SECOND).unlink(), SECOND),
    "shard empty": (lambda d: (d / SECOND).write_bytes(b""), SECOND),
    "shard cut short": (lambda d: os.truncate(d / SECOND, (d / SECOND).stat().st_size - 1), SECOND),
    "shard longer": (lambda d: (d / SECOND).open("ab").write(b"x"), SECOND),
    "header length huge": (lambda d: patch(d / FIRST, 0, b"\xff" * 8), FIRST),
    "header length zero": (lambda d: patch(d / FIRST, 0, b"\0" * 8), FIRST),
    "header no JSON": (lambda d: patch(d / FIRST, 8, b"!"), FIRST),
    "header no UTF-8": (lambda d: patch(d / FIRST, 12, b"\xff"), FIRST),
    "header entry no object": (lambda d: edit_header(d / SECOND, lambda h: h.update({NORM: 3})), NORM),
    "header negative offset": (lambda d: edit_header(d / SECOND, lambda h: h[NORM].update(data_offsets=[-4, 0])), NORM),
    "header huge shape": (lambda d: edit_header(d / SECOND, lambda h: h[NORM].update(shape=[2**62, 2**62])), NORM),
    "tensors overlap": (lambda d: edit_header(d / SECOND, overlap), SECOND),
    "wrong shape": (lambda d: edit_header(d / SECOND, lambda h: h[HEAD].update(shape=[32, 96])), HEAD),
    "no floating point": (lambda d: edit_header(d / SECOND, lambda h: h[NORM].update(dtype="I32")), NORM),
    "unknown tensor": (lambda d: edit_header(d / SECOND, lambda h: rename(h, NORM, "model.nose.weight")), "model.nose"),
    "index lacks a tensor": (lambda d: edit_index(d, lambda m: m.pop(NORM)), NORM),
    "index names an unknown tensor": (lambda d: edit_index(d, lambda m: m.update(x=FIRST)), "'x'"),
    "index names another shard": (lambda d: edit_index(d, lambda m: m.update({NORM: FIRST})), NORM),
    "index leaves the directory": (lambda d: edit_index(d, lambda m: m.update({NORM: "../x.safetensors"})), NORM),
    "index names an absolute path": (lambda d: edit_index(d, lambda m: m.update({NORM: "/x.safetensors"})), NORM),
    "index names no file": (lambda d: edit_index(d, lambda m: m.update({NORM: 3})), NORM),
    "index names a pickle": (lambda d: edit_index(d, lambda m: m.update({NORM: "pytorch_model.bin"})), NORM),
    "index without map": (lambda d: (d / "model.safetensors.index.json").write_text("{}"), "weight_map"),
    "index no JSON": (lambda d: (d / "model.safetensors.index.json").write_text("{"), "index.json"),
    "two layouts": (lambda d: (d / "model.safetensors").write_bytes(b""), "holds both"),
}


def patch(path, offset, data):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_file_and_tensor(damage, tmp_path):
    provider.write_checkpoint(tmp_path, TINY, weights_of(config_of()).items(), shards=2)
    break_it, named = DAMAGE[damage]
    break_it(tmp_path)
    for check in (provider.check_checkpoint, lambda *a: list(provider.read_checkpoint(*a))):
        with pytest.raises(ValueError) as caught:
            check(tmp_path, config_of())
        message = str(caught.value)
        assert named in message and str(tmp_path) in message and "\n" not in message


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    weights = weights_of(config_of())
    provider.write_checkpoint(tmp_path, TINY, weights.items(), shards=2)
    (tmp_path / SECOND).write_bytes((tmp_path / FIRST).read_bytes())
    with pytest.raises(ValueError, match=SECOND):
        provider.check_checkpoint(tmp_path, config_of())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_that_is_not_finite_is_refused_by_file_and_tensor(bad, dtype, tmp_path):
    weights = weights_of(config_of(), dtype)
    weights[EMBED][95, 31] = bad
    provider.write_checkpoint(tmp_path, TINY, weights.items(), shards=2)
    provider.check_checkpoint(tmp_path, config_of())  # headers cannot tell
    with pytest.raises(ValueError, match=f'{FIRST}: tensor "{EMBED}"'):
        list(provider.read_checkpoint(tmp_path, config_of()))


@pytest.mark.parametrize(
    "change,message",
    [
        (lambda w: w.pop(HEAD), "missing"),
        (lambda w: w.update(extra=torch.zeros(1)), "unknown"),
        (lambda w: w.update({NORM: torch.ones(3)}), r"\[3\]"),
    ],
)
def test_an_incomplete_checkpoint_is_not_written(change, message, tmp_path):
    weights = weights_of(config_of())
    change(weights)
    with pytest.raises(ValueError, match=message):
        provider.write_checkpoint(tmp_path, TINY, weights.items())
    assert not (tmp_path / "config.json").exists()


def test_importing_the_provider_imports_neither_torch_nor_megatron():
    code = "import provider, sys; sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    root = Path(provider.__file__).parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


# ------------------------------------------------------------------------------------------------ random checkpoint


def test_make_checkpoint_is_reproducible_from_its_seed(tmp_path):
    script = Path(provider.__file__).parent / "examples" / "make_checkpoint.py"
    shape = tmp_path / "shape.json"
    shape.write_text(json.dumps(TINY))
    for out, seed in (("a", "3"), ("b", "3"), ("c", "4")):
        options = ["--shape", str(shape), "--seed", seed, "--out", str(tmp_path / out)]
        subprocess.run([sys.executable, str(script), *options], check=True, capture_output=True)
    config = provider.read_config(tmp_path / "a")
    a, b, c = (dict(provider.read_checkpoint(tmp_path / out, config)) for out in "abc")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) == 2
    assert all(torch.equal(a[name], b[name]) and a[name].dtype == torch.bfloat16 for name in a)
    assert not torch.equal(a[HEAD], c[HEAD]) and a[NORM].eq(1).all()
    assert 0.015 < a[HEAD].float().std() < 0.025
