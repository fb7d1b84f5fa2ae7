"""Make the shipped tiny model and its data, all of it from one seed.

    python examples/tiny/make.py               # data, tokenizer and model, next to this script; minutes on one core
    python examples/tiny/make.py --data-only   # data and tokenizer; a second
    python examples/tiny/make.py --score DIR   # held-out accuracy of a checkpoint by this script's own sampling

The data is easy arithmetic with checkable answers: sums, differences, products, and the larger of two numbers, each
question in one of three phrasings. No question of heldout.jsonl stands in train.jsonl in any phrasing.

The model is a looped Nanbeige of about 680,000 parameters (3 layers that run twice), trained through the project's own
provider, that is, Megatron's layers on one CPU process. The warm start has two phases. In the first the model learns
the arithmetic from right answers, boxed or bare. In the second it is taught to answer in three styles at random,
whatever the question: boxed and right, bare, and boxed but off by one or two. What is left is a policy that knows the
answers and gives them a quarter to a third of the time. Reinforcement learning from checkable answers mends that within
minutes: it chooses the format and drops the slips.

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
    "head_dim": 32,  # its own number: 8 x 32 is not 128; vLLM has no CPU kernels below 32
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


# ----------------------------------------------------------------------------------------------------------------------
# The model
# ----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WarmStart:
    """How the shipped model was trained: AdamW on the response tokens of `batch` training rows a step."""

    steps: int = 1000
    batch: int = 64
    lr: float = 2e-3  # its highest: 50 steps up, then a cosine down to a twentieth
    weight_decay: float = 0.1  # of matrices and embeddings
    betas: tuple[float, float] = (0.9, 0.98)
    clip_grad: float = 1.0
    z_loss: float = 1e-2  # times log(Z)^2 [2204.02311]: small logits are what keeps engine and trainer alike in float32
    style_from: int = 700  # the step at which the second phase begins
    right: tuple[tuple[str, float], ...] = (("boxed", 3), ("bare", 2))  # relative frequencies in the first phase
    styles: tuple[tuple[str, float], ...] = (("boxed", 5), ("bare", 7), ("slip", 9))  # and in the second

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        down = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.lr * min(1, (step + 1) / 50) * (0.05 + 0.95 * down)


def answer(label: str, style: str, rng: random.Random) -> str:
    r"""A response in one of the three styles: ``\boxed{12}``, ``12``, or ``\boxed{13}`` for 12 (never negative)."""
    number = int(label)
    if style == "bare":
        return str(number)
    if style == "slip":
        number = rng.choice([n for n in (number - 2, number - 1, number + 1, number + 2) if n >= 0])
    return f"{BOXED}{number}}}"


def start_megatron() -> None:
    """Torch on one thread, a process group of one, and Megatron's parallel state on it."""
    import torch
    from megatron.core import parallel_state

    torch.set_num_threads(1)  # also for reproducibility: the order of a sum depends on the number of threads
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()


def new_model(tensors):
    """The provider's actor in FP32 on the CPU, filled with (native name, tensor) pairs."""
    import torch

    import provider

    config = provider.parse_config(CONFIG, "make.py: CONFIG")
    model = provider.build_model(config, critic=False, dtype=torch.float32, recompute=False, device="cpu")
    provider.load_native(model, tensors)
    return model


def first_weights(seed: int):
    """Native name -> tensor: norms one, embeddings of variance 1, every matrix of variance 1 / inputs."""
    import torch

    import provider

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in provider.tensor_shapes(provider.parse_config(CONFIG, "make.py: CONFIG")).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
        else:
            scale = 1.0 if name == "model.embed_tokens.weight" else shape[1] ** -0.5
            weights[name] = torch.randn(shape, generator=generator) * scale
    return weights


def response_logits(model, prompts: list[list[int]], responses: list[list[int]]):
    """Logits [all response tokens, vocabulary] that predict each response token, completions laid end to end."""
    import torch

    tokens, bounds, rows = [], [0], []
    for prompt, response in zip(prompts, responses, strict=True):
        # The last response token predicts nothing that is asked for, so it is not fed.
        rows += range(len(tokens) + len(prompt) - 1, len(tokens) + len(prompt) + len(response) - 1)
        tokens += prompt + response[:-1]
        bounds.append(len(tokens))
    hidden = model(torch.tensor(tokens), torch.tensor(bounds), torch.tensor(rows))
    return model.head(hidden)


def warm_start(train: list[dict[str, str]], seed: int, recipe: WarmStart):
    """Train from random weights; returns the model."""
    import torch

    rng = random.Random(seed + 1)
    model = new_model(first_weights(seed).items())
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=recipe.betas,
    )
    prompts = [encode(row["prompt"]) for row in train]
    left: list[int] = []  # rows of this pass over the data that are still to come
    began = time.monotonic()
    for step in range(recipe.steps):
        if len(left) < recipe.batch:
            left = rng.sample(range(len(train)), len(train))
        chosen, left = left[: recipe.batch], left[recipe.batch :]
        styles, weights = zip(*(recipe.right if step < recipe.style_from else recipe.styles), strict=True)
        responses = []
        for i in chosen:
            style = rng.choices(styles, weights)[0]
            responses.append([*encode(answer(train[i]["label"], style, rng)), CONFIG["eos_token_id"]])
        logits = response_logits(model, [prompts[i] for i in chosen], responses)
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor([t for r in responses for t in r]))
        (loss + recipe.z_loss * logits.logsumexp(-1).square().mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_grad)
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}  loss {loss.item():.3f}  {time.monotonic() - began:.0f} s", flush=True)
    return model


def score(model, rows: list[dict[str, str]], temperature: float, samples: int, seed: int = 0) -> dict[str, float]:
    r"""Share of answers that are exactly ``\boxed{label}``: {source: share, ..., "all": share}.

    Sampled at `temperature` (0: greedy), `samples` answers a row, at most 8 tokens each. There is no cache, as the
    answers are short; the figures that the project reports come from its engine and its grader.
    """
    import torch

    asked = [row for row in rows for _ in range(samples)]
    prompts = [encode(row["prompt"]) for row in asked]
    responses: list[list[int]] = [[] for _ in asked]
    going = list(range(len(asked)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _ in range(8):
            # One more token of any kind: response_logits does not feed the last one.
            logits = response_logits(model, [prompts[i] + responses[i] for i in going], [[0]] * len(going))
            if temperature == 0:
                tokens = logits.argmax(-1)
            else:
                tokens = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
            for i, token in zip(going, tokens.tolist(), strict=True):
                responses[i].append(token)
            going = [i for i in going if responses[i][-1] != CONFIG["eos_token_id"]]
            if not going:
                break
    right: dict[str, list[bool]] = {}
    for row, response in zip(asked, responses, strict=True):
        found = response == [*encode(f"{BOXED}{row['label']}}}"), CONFIG["eos_token_id"]]
        right.setdefault(row["source"], []).append(found)
        right.setdefault("all", []).append(found)
    return {source: sum(found) / len(found) for source, found in right.items()}


def print_scores(model, held_out: list[dict[str, str]]) -> None:
    for name, temperature, samples in (("sampled at 0.8", 0.8, 4), ("greedy", 0.0, 1)):
        shares = score(model, held_out, temperature, samples)
        print(f"held-out, {name}: " + "  ".join(f"{source} {share:.1%}" for source, share in sorted(shares.items())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=HERE, help="directory to write to (default: this script's)")
    parser.add_argument("--seed", type=int, default=0, help="of data and weights (default: 0, as shipped)")
    parser.add_argument("--data-only", action="store_true", help="data and tokenizer, no model")
    parser.add_argument("--score", type=Path, metavar="DIR", help="write nothing, score this checkpoint")
    options = parser.parse_args()

    train, held_out = make_rows(options.seed)
    if options.score:
        import provider

        start_megatron()
        config = provider.read_config(options.score)
        print_scores(new_model(provider.read_checkpoint(options.score, config)), held_out)
        return
    directory = options.output / "model"
    directory.mkdir(parents=True, exist_ok=True)
    write_rows(options.output / "train.jsonl", train)
    write_rows(options.output / "heldout.jsonl", held_out)
    write_tokenizer(directory)
    if options.data_only:
        return
    import provider

    start_megatron()
    model = warm_start(train, options.seed, WarmStart())
    provider.write_checkpoint(directory, CONFIG, provider.export_native(model))
    print_scores(model, held_out)


if __name__ == "__main__":
    main()
