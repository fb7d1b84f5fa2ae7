"""Make the shipped tiny model and its data, all of it from one seed.

    python examples/tiny/make.py               # data, tokenizer and model, next to this script; minutes on one core
    python examples/tiny/make.py --data-only   # data and tokenizer; a second
    python examples/tiny/make.py --score DIR   # held-out accuracy of a checkpoint by this script's own sampling

The data is easy arithmetic with checkable answers: sums, differences, products, and the larger of two numbers, each
question in one of three phrasings. No question of heldout.jsonl stands in train.jsonl in any phrasing.

The model is a looped Nanbeige of about 680,000 parameters (3 layers that run twice), trained through the project's own
provider, that is, Megatron's layers on one CPU process. The warm start has two phases. In the first the model learns
the arithmetic from right answers. In the second it is taught to answer in three styles at random, whatever the
question: boxed and right, bare, and boxed but off by one or two. What is left is then a policy that knows the answers
and gives them a quarter to a third of the time, which reinforcement learning from checkable answers can mend within
minutes: choose the format, and drop the slips.

The data and the tokenizer are the same bytes on every machine. The weights are the same wherever torch computes the
same sums; elsewhere they differ in the last bits and reach the same accuracy.
"""

import argparse
import json
import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the repository root: the project's modules are flat files there


# ----------------------------------------------------------------------------------------------------------------------
# Questions
# ----------------------------------------------------------------------------------------------------------------------

PHRASINGS = {
    "sum": ("{a} + {b} =", "Add {a} and {b}.", "What is {a} plus {b}?"),
    "difference": ("{a} - {b} =", "Take {b} from {a}.", "What is {a} minus {b}?"),
    "product": ("{a} * {b} =", "Multiply {a} by {b}.", "What is {a} times {b}?"),
    "comparison": ("max({a}, {b}) =", "Larger of {a} and {b}?", "Which is more, {a} or {b}?"),
}
HELD_OUT = {"sum": 90, "difference": 60, "product": 20, "comparison": 80}  # questions of each kind, 250 in all


def questions() -> dict[str, list[tuple[int, int, int]]]:
    """Every question: kind -> list of (a, b, answer). Operands to 24, factors to 9; no answer is negative."""
    numbers, digits = range(25), range(10)
    return {
        "sum": [(a, b, a + b) for a in numbers for b in numbers],
        "difference": [(a, b, a - b) for a in numbers for b in numbers if b <= a],
        "product": [(a, b, a * b) for a in digits for b in digits],
        "comparison": [(a, b, max(a, b)) for a in numbers for b in numbers if a != b],
    }


def make_rows(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows {prompt, label, source} for training and held out, shuffled.

    A held-out question takes one phrasing, and its other phrasings are left out of the training rows.
    """
    rng = random.Random(seed)
    train, held_out = [], []
    for kind, asked in questions().items():
        chosen = set(rng.sample(range(len(asked)), HELD_OUT[kind]))
        for i, (a, b, answer) in enumerate(asked):
            rows = [
                {"prompt": phrase.format(a=a, b=b), "label": str(answer), "source": kind} for phrase in PHRASINGS[kind]
            ]
            if i in chosen:
                held_out.append(rng.choice(rows))
            else:
                train.extend(rows)
    rng.shuffle(train)
    rng.shuffle(held_out)
    return train, held_out


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """One JSON object a line, LF, UTF-8."""
    path.write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode())


# ----------------------------------------------------------------------------------------------------------------------
# Tokenizer and configuration
# ----------------------------------------------------------------------------------------------------------------------

PAD, BOS, EOS, UNK, BOXED = "<pad>", "<bos>", "<eos>", "<unk>", r"\boxed{"
SPECIAL = (PAD, BOS, EOS, UNK)
CHARACTERS = ["\t", "\n", *map(chr, range(32, 127)), "×", "÷"]
TOKENS = [*SPECIAL, BOXED, *CHARACTERS]  # a token's place is its id; 104 of them

CONFIG = {
    "architectures": ["NanbeigeForCausalLM"],
    "model_type": "nanbeige",
    "vocab_size": len(TOKENS),
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,  # its own number, as in the official model: 8 x 32 = 256, not 128; the least vLLM's CPU kernels take
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "num_loops": 2,
    "skip_loop_final_norm": False,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": 2048,
    "pad_token_id": TOKENS.index(PAD),
    "bos_token_id": TOKENS.index(BOS),
    "eos_token_id": TOKENS.index(EOS),
    "torch_dtype": "float32",
    "use_cache": True,
}


def write_tokenizer(directory: Path) -> None:
    r"""Write tokenizer.json and tokenizer_config.json: one token a character, and one for ``\boxed{``."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    # BPE without merges is a character tokenizer; Fuse joins the characters again without spaces.
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=[], unk_token=UNK))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(BOXED, special=False, normalized=False)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": UNK,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def encode(text: str) -> list[int]:
    """The token ids that the written tokenizer gives (tests hold the two against each other)."""
    ids = []
    for i, part in enumerate(text.split(BOXED)):
        ids += [TOKENS.index(BOXED)] * (i > 0) + [TOKENS.index(character) for character in part]
    return ids
