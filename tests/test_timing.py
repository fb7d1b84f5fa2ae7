"""timing.py: amounts of work worked out by hand, and parts that move as the code that they describe does."""

import dataclasses
import json
import sys

import job
import pytest
import torch

import layout
import matmul
import plan
import provider
import run as command
import timing

sys.path.insert(0, str(job.ROOT / "examples"))
from make_checkpoint import OFFICIAL

CONFIG = provider.parse_config(OFFICIAL, "official")
H200 = timing.H200


def recipe(**settings) -> command.Recipe:
    return command.Recipe(**{"model": "m", "data": "d", "output": "o", "n_samples_per_prompt": 4} | settings)


def test_the_work_of_a_token_is_what_the_official_shape_says():
    # 22 layers × 3072 × (q and o 2 · 48 · 128, k and v 2 · 8 · 128, three matrices of 10752)
    assert timing.layer_weights(CONFIG) == 22 * 3072 * (12288 + 2048 + 32256) == 3_148_873_728
    # with embedding, LM head and 45 norms that is every parameter there is
    assert 3_148_873_728 + 2 * 166144 * 3072 + 45 * 3072 == plan.weights(CONFIG) == 4_169_800_704
    assert timing.token_flops(CONFIG) == 12_595_494_912
    assert timing.head_flops(CONFIG, 1) == 1_020_788_736
    # scores and values: 2 products × 2 FLOP × 6144 × 1000² / 2 under the mask, in 44 layer visits
    assert timing.attention_flops(CONFIG, 1000**2) == 44 * 2 * 6144 * 10**6


def test_the_bytes_of_a_decode_step_are_weights_once_a_loop_and_keys_and_values_of_all_loops():
    weights = 2 * (2 * 3_148_873_728 + 510_394_368)
    assert timing.kv_bytes(CONFIG, 2) == 2 * 44 * 8 * 128 * 2 == 180_224
    assert timing.step_bytes(CONFIG, 2, 16, 152) == weights + 16 * 152 * 180_224
    assert timing.step_bytes(CONFIG, 2, 16, 152, ranks=2) == (weights + 16 * 152 * 180_224) / 2
    shared = timing.step_bytes(CONFIG, 2, 16, 152, ranks=16)  # eight key-value heads: two ranks hold the same one
    assert shared == weights / 16 + 16 * 152 * 180_224 / 8


def test_a_ring_sends_what_a_ring_sends():
    assert timing.ring(H200, 1e9, 1) == 0
    assert timing.ring(H200, 8e9, 8) == pytest.approx(14 * 1e9 / (450e9 * 0.8) + 14 * 10e-6)
    # Two nodes: eight network cards of each carry it; half of it is a reduce-scatter.
    assert timing.ring(H200, 16e9, 16, both=False) == pytest.approx(15 * 1e9 / (400e9 * 0.8) + 15 * 10e-6)
    # Tensor-parallel groups of eight: one data-parallel rank a node, an eighth of the bytes, a card for each.
    assert timing.ring(H200, 2e9, 16, stride=8, both=False) == pytest.approx(timing.ring(H200, 16e9, 16, both=False))


def test_padding_and_division_are_those_of_the_code_that_is_described():
    lengths = [60, 100, 30, 100, 40]
    assert timing.padded_area(lengths) == 3 * 100**2 + 2 * 40**2
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    batches = provider.Packing(bounds, sum(lengths), torch.device("cpu")).batches
    assert timing.padded_area(lengths) == sum(count * longest**2 for count, longest in batches)
    sizes = timing.spread(100, 1000, 0.4)
    assert sizes[0] == 1000 and sum(sizes) / 100 == pytest.approx(400, rel=0.02)
    sizes = sizes[::3] + sizes[1::3] + sizes[2::3]
    assert timing.loads(sizes, 7) == [[sizes[i] for i in part] for part in layout.divide(sizes, list(range(100)), 7)]


def test_a_rollout_takes_as_many_steps_as_its_longest_completion_and_more_where_some_wait():
    r = recipe(precision="bf16", max_response_len=1024)
    step = timing.rollout(r, CONFIG, 1.0, H200)["decode"] / 1023
    bytes_read = timing.step_bytes(CONFIG, 2, 16, 128 + (1 + 1024) / 2)
    assert step == pytest.approx(bytes_read / (4.1e12 * 0.43))
    half = timing.rollout(dataclasses.replace(r, max_num_seqs=8), CONFIG, 1.0, H200)["decode"]
    assert 1.8 * step < half / 1023 < 2 * step  # two rounds, of steps that read fewer keys and values
    uneven = timing.rollout(r, CONFIG, 0.5, H200)
    assert uneven["decode, engine half empty"] == pytest.approx(uneven["decode"], rel=0.2)


def test_a_decode_step_of_split_products_is_faster_up_to_as_many_rows_as_they_take():
    assert timing.FEW_ROWS == matmul.FEW_ROWS
    for rows, faster in ((1, True), (64, True), (65, False)):
        r = recipe(rollout_batch_size=rows, n_samples_per_prompt=1, algorithm="ppo")
        split, plain = (
            timing.rollout(dataclasses.replace(r, split_matmul=on), CONFIG, 1.0, H200)["decode"] for on in (True, False)
        )
        assert split < plain if faster else split == plain, rows
    for other in ({"precision": "bf16"}, {"matmul_precision": "high"}, {"device": "cpu"}):
        assert plan.split_matmul(recipe()) and not plan.split_matmul(recipe(**other))


def test_training_counts_passes_as_the_trainer_makes_them():
    responses = [48] * 16

    def train(**settings):
        return timing.train(recipe(**settings), CONFIG, responses, H200)["forward and backward"]

    one, again = (train(recompute=on, split_matmul=False) for on in (False, True))
    layers = 16 * 175 * 12_595_494_912
    assert one * H200.matmul["fp32"] == pytest.approx(3 * (layers + 768 * 1_020_788_736), rel=0.01)  # attention is 1% of it
    assert (again - one) * H200.matmul["fp32"] == pytest.approx(layers, rel=0.01)
    assert (train(algorithm="ppo", split_matmul=False) - one) * H200.matmul["fp32"] == pytest.approx(4 * layers, rel=0.01)
    # Sums in parts: forward once, with recompute the layers again but for their last product; a critic's two passes more. Not
    # with tensor parallelism.
    head, again = 768 * 1_020_788_736, 1 - 3072 * 10752 * 22 / 3_148_873_728
    for settings, passes, spared in (({}, 1, 0), ({"recompute": True}, 1 + again, 1 - again), ({"algorithm": "ppo"}, 3, 0)):
        more = train(**settings) - train(**settings, split_matmul=False)
        assert more * H200.matmul["fp32"] == pytest.approx(H200.parts * (passes * layers + head) - spared * layers), settings
    two = {"train_gpus": 2, "tensor_model_parallel_size": 2}
    assert train(**two) == train(**two, split_matmul=False)


def test_with_offload_the_networks_change_places_three_times_a_training_and_once_a_publication():
    r = recipe(algorithm="ppo", offload_train=True)
    both = 4 * (plan.weights(CONFIG) + plan.weights(CONFIG, critic=True)) / H200.pinned
    assert timing.train(r, CONFIG, [48] * 16, H200)["actor for critic"] == pytest.approx(3 * both)
    assert timing.publish(r, CONFIG, H200)["actor for critic"] == pytest.approx(both)


def test_more_trainers_divide_the_work_and_are_sent_the_whole_batch_once():
    responses = [1000] * 64
    few, many = (timing.train(recipe(train_gpus=n), CONFIG, responses, H200) for n in (4, 64))
    assert many["forward and backward"] == pytest.approx(few["forward and backward"] / 16)
    assert many["to the trainers"] == few["to the trainers"]
    assert many["trainers unpickle"] == few["trainers unpickle"]


def test_what_a_token_costs_the_driver_is_what_was_measured():
    seen = json.loads((job.ROOT / "results" / "driver.json").read_text())["seconds_a_token"]
    names = {"receive": "driver_receive", "send": "driver_send", "decode": "driver_decode", "write": "driver_write"}
    for name, field in {**names, "rank": "rank_receive"}.items():
        assert getattr(H200, field) == pytest.approx(seen[name], rel=0.05), field


def test_a_looped_model_holds_the_gradients_of_all_layers_beside_their_buffer():
    r = recipe(algorithm="ppo", recompute=True, split_matmul=False)
    body = 3_148_873_728 + 45 * 3072
    assert plan.trainer_of(r, CONFIG)["gradients in flight"] == pytest.approx(4 * body / 2**30)
    once = dataclasses.replace(CONFIG, num_loops=1)
    assert plan.trainer_of(r, once)["gradients in flight"] == pytest.approx(4 * 166144 * 3072 / 2**30)  # the LM head's


def test_split_products_leave_only_the_embeddings_gradient_beside_the_buffer():
    r = recipe(algorithm="ppo", recompute=True, offload_train=True, micro_batch_tokens=1024)
    found, embedding = plan.trainer_of(r, CONFIG), 4 * 166144 * 3072 / 2**30
    assert (found["gradients in flight"], found["activations"]) == (pytest.approx(embedding), 0)
    more = plan.trainer_of(dataclasses.replace(r, micro_batch_tokens=16384), CONFIG)  # then the activations are the peak
    assert more["gradients in flight"] == 0 < embedding < more["activations"] + more["logits"]
    without = plan.trainer_of(dataclasses.replace(r, split_matmul=False), CONFIG)
    two = dataclasses.replace(r, train_gpus=2, tensor_model_parallel_size=2)
    assert without["total"] - found["total"] > 9
    assert plan.trainer_of(two, CONFIG) == plan.trainer_of(dataclasses.replace(two, split_matmul=False), CONFIG)


def test_each_weights_gradient_of_a_looped_model_arrives_once():
    """Why they are held: autograd adds up a weight's uses before it hands the sum on."""
    weight, arrived = torch.ones(3, requires_grad=True), []
    other = torch.ones(3, requires_grad=True)
    for name, w in (("weight", weight), ("other", other)):
        w.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    hidden = torch.ones(3)
    for _loop in range(2):
        for layer, w in enumerate((weight, other)):
            hidden = hidden * w
            hidden.register_hook(lambda _, layer=layer: arrived.append(layer))
    hidden.sum().backward()
    # Backward goes through layers 1 and 0 of the last loop before any gradient arrives.
    assert arrived[:3] == [1, 0, 1] and arrived.count("weight") == arrived.count("other") == 1


def test_a_dry_run_says_seconds_where_there_may_be_gpus():
    lines = plan.time_lines(recipe(colocate=True, optimizer="sgd"), CONFIG)
    assert lines[0].startswith("time        about 4.0 s an update on H200s") and "train 2.4" in lines[1]
    assert plan.time_lines(recipe(device="cpu"), CONFIG) == []
    assert plan.time_lines(recipe(), provider.read_config(job.TINY / "model")) == []
    many = {"train_gpus": 256, "rollout_gpus": 768, "rollout_batch_size": 2048, "max_response_len": 32768, "precision": "bf16"}
    assert "largest part rollout: decode" in plan.time_lines(recipe(ray_address="10.0.0.1:6379", **many), CONFIG)[1]
