"""The shipped tiny model and data (examples/tiny): what they promise to be, and that make.py's seed gives them."""

import importlib.util
import json
import random
import re
from pathlib import Path

import pytest

import provider

TINY = Path(__file__).resolve().parents[1] / "examples" / "tiny"
MODEL = TINY / "model"


@pytest.fixture(scope="module")
def make():
    spec = importlib.util.spec_from_file_location("tiny_make", TINY / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL, local_files_only=True, trust_remote_code=False)


def rows(name):
    return [json.loads(line) for line in (TINY / name).read_text(encoding="utf-8").splitlines()]


TRAIN, HELD_OUT = rows("train.jsonl"), rows("heldout.jsonl")


def test_config_is_a_looped_nanbeige_with_its_own_head_dim_and_grouped_queries():
    config = provider.read_config(MODEL)
    assert config.num_loops == 2
    assert config.head_dim * config.num_attention_heads != config.hidden_size
    assert config.num_key_value_heads < config.num_attention_heads
    raw = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    assert raw["model_type"] == "nanbeige"
    assert raw["architectures"] == ["NanbeigeForCausalLM"]
    assert "auto_map" not in raw


def test_checkpoint_is_complete_finite_and_small():
    config = provider.read_config(MODEL)
    provider.check_checkpoint(MODEL, config)
    tensors = dict(provider.read_checkpoint(MODEL, config))  # refuses what is not finite
    assert 600_000 <= sum(t.numel() for t in tensors.values()) <= 700_000
    assert sum(p.stat().st_size for p in MODEL.iterdir()) <= 4_000_000
    assert {p.suffix for p in MODEL.iterdir()} == {".json", ".safetensors"}


def test_data_has_thousands_of_rows_of_four_kinds_and_held_out_questions_are_not_trained_on():
    assert len(TRAIN) >= 4000
    assert len(HELD_OUT) == 250
    for data in (TRAIN, HELD_OUT):
        assert {row["source"] for row in data} == {"sum", "difference", "product", "comparison"}
        assert all(row.keys() == {"prompt", "label", "source"} for row in data)
        assert all(isinstance(value, str) for row in data for value in row.values())
        assert len({row["prompt"] for row in data}) == len(data)
    assert not {question(row) for row in TRAIN} & {question(row) for row in HELD_OUT}


def test_labels_are_the_answers():
    compute = {
        "sum": lambda a, b: a + b,
        "difference": lambda a, b: a - b,
        "product": lambda a, b: a * b,
        "comparison": max,
    }
    for row in TRAIN + HELD_OUT:
        kind, a, b = question(row)
        assert row["label"] == str(compute[kind](a, b)), row


def test_labels_are_graded_as_right_when_boxed_and_as_wrong_when_bare_or_off():
    import reward

    some = HELD_OUT[:8]
    answers = [f"\\boxed{{{row['label']}}}" for row in some]
    answers += [row["label"] for row in some] + [f"\\boxed{{{int(row['label']) + 1}}}" for row in some]
    with reward.Grader(None) as grader:
        grades = grader.grade([(row["prompt"], a, row["label"]) for row, a in zip(some * 3, answers, strict=True)])
    assert [g.reward for g in grades] == [1.0] * 8 + [0.0] * 16


def test_tokenizer_round_trips_every_prompt_and_answer_in_few_tokens(tokenizer, make):
    config = provider.read_config(MODEL)
    assert len(tokenizer) == config.vocab_size
    assert tokenizer.pad_token_id == config.pad_token_id
    assert tokenizer.bos_token_id == config.bos_token_id
    assert tokenizer.eos_token_id == config.eos_token_id
    texts = [row["prompt"] for row in TRAIN + HELD_OUT] + [f"\\boxed{{{n}}}" for n in range(100)]
    for text, ids in zip(texts, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True):
        assert ids == make.encode(text)
        assert tokenizer.decode(ids) == text
        assert len(ids) <= 24
    assert len(tokenizer.encode(r"\boxed{12}", add_special_tokens=False)) == 4


def test_tokenizer_leaves_special_tokens_out_of_the_decoded_completion(tokenizer):
    ids = tokenizer.encode(r"\boxed{7}", add_special_tokens=False) + [tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == r"\boxed{7}"


def test_the_seed_gives_the_shipped_data_tokenizer_and_config_byte_for_byte(make, tmp_path):
    train, held_out = make.make_rows(0)
    make.write_rows(tmp_path / "train.jsonl", train)
    make.write_rows(tmp_path / "heldout.jsonl", held_out)
    make.write_tokenizer(tmp_path)
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (MODEL / name).read_bytes()
    assert json.loads((MODEL / "config.json").read_text(encoding="utf-8")) == make.CONFIG


def test_another_seed_gives_other_data(make):
    assert make.make_rows(1) != make.make_rows(0)


def test_the_warm_start_answers_in_three_styles_and_a_slip_is_off_by_one_or_two(make):
    rng = random.Random(0)
    assert make.answer("12", "boxed", rng) == r"\boxed{12}"
    assert make.answer("12", "bare", rng) == "12"
    assert {make.answer("12", "slip", rng) for _ in range(100)} == {rf"\boxed{{{n}}}" for n in (10, 11, 13, 14)}
    assert {make.answer("1", "slip", rng) for _ in range(100)} == {rf"\boxed{{{n}}}" for n in (0, 2, 3)}


def question(row):
    """(kind, a, b) of a row, read back from its prompt: the numbers in the order in which the answer takes them."""
    a, b = map(int, re.findall(r"\d+", row["prompt"]))
    return (row["source"], b, a) if row["prompt"].startswith("Take") else (row["source"], a, b)
