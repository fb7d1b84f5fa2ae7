"""The peer of `benchmarks/update.py`: one GRPO update of TRL's `GRPOTrainer`, with Transformers generation, on CPU.

    make bench TRL=1                          # installs TRL in .venv-bench and runs this beside our own update
    .venv-bench/bin/python benchmarks/trl_update.py --model DIR --data FILE --updates 24

`--model` is the folder that ours trains: its tokenizer is used, so the prompts are the same tokens, and its shape. The loops
are unrolled: a Llama of num_hidden_layers × num_loops layers does the same arithmetic, with more parameters. FP32, same
prompts, completions, reward, loss (mean over each completion, then over completions), Adam; every completion has 48 tokens.
TRL's gradient checkpointing, on by default, is off: ours does not recompute either. The last line printed is JSON:
{"update": [seconds of each], "phases": {name: [seconds]}, "tokens": response tokens an update, "threads", "versions"}.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from machine import versions
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from varied_reward import reward

PROMPTS, COMPLETIONS, TOKENS = 4, 4, 48


class Timed(GRPOTrainer):
    """GRPOTrainer that notes seconds by phase; `train` is what neither generation nor scoring took of a step."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seconds = {"rollout": [], "grade": [], "prepare": []}

    def _timed(self, phase, method, *args, **kwargs):
        began = time.perf_counter()
        result = method(*args, **kwargs)
        self.seconds[phase].append(time.perf_counter() - began)
        return result

    def _generate(self, *args, **kwargs):
        return self._timed("rollout", super()._generate, *args, **kwargs)

    def _calculate_rewards(self, *args, **kwargs):
        return self._timed("grade", super()._calculate_rewards, *args, **kwargs)

    def _generate_and_score_completions(self, *args, **kwargs):
        return self._timed("prepare", super()._generate_and_score_completions, *args, **kwargs)


class Clock(TrainerCallback):
    """When the training began and when each step ended: an update is what lies between two such moments."""

    def __init__(self):
        self.times = []

    def on_train_begin(self, *_, **__):
        self.times.append(time.perf_counter())

    def on_step_end(self, *_, **__):
        self.times.append(time.perf_counter())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with config.json and the tokenizer")
    parser.add_argument("--data", type=Path, required=True, help='JSONL with "prompt"')
    parser.add_argument("--updates", type=int, default=24, help="optimizer steps (default 24)")
    options = parser.parse_args()
    shape = json.loads((options.model / "config.json").read_text())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(options.model)
    tokenizer.pad_token, tokenizer.eos_token = "t0", "t2"
    torch.manual_seed(0)
    copied = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
              "max_position_embeddings")  # fmt: skip
    model = LlamaForCausalLM(
        LlamaConfig(
            **{name: shape[name] for name in copied},
            num_hidden_layers=shape["num_hidden_layers"] * shape["num_loops"],
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
        )
    ).float()
    rows = [json.loads(line) for line in options.data.read_text().splitlines()]
    counts = []

    def rewards(prompts, completions, completion_ids, **_):
        counts.append(sum(map(len, completion_ids)))
        return [reward(p, c, "") for p, c in zip(prompts, completions, strict=True)]

    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder, use_cpu=True, bf16=False, max_steps=options.updates, seed=42,
            per_device_train_batch_size=PROMPTS * COMPLETIONS, num_generations=COMPLETIONS, gradient_accumulation_steps=1,
            max_completion_length=TOKENS, generation_kwargs={"min_new_tokens": TOKENS}, temperature=0.8, top_k=0,
            loss_type="grpo", beta=0.0, learning_rate=1e-5, lr_scheduler_type="constant", adam_beta2=0.95,
            gradient_checkpointing=False, dataloader_pin_memory=False,
            save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
        )  # fmt: skip
        clock = Clock()
        timed = Timed(
            model=model, reward_funcs=rewards, args=settings, processing_class=tokenizer, callbacks=[clock],
            train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        )  # fmt: skip
        timed.train()
    if set(counts) != {PROMPTS * COMPLETIONS * TOKENS}:
        sys.exit(f"updates had {sorted(set(counts))} response tokens, not {PROMPTS * COMPLETIONS * TOKENS}")
    update = [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]
    prepare = timed.seconds.pop("prepare")
    phases = {**timed.seconds, "train": [u - p for u, p in zip(update, prepare, strict=True)]}
    result = {"update": update, "phases": phases, "tokens": counts[0], "threads": torch.get_num_threads()}
    print(json.dumps({**result, "versions": versions("trl", "transformers", "torch", "accelerate")}))


if __name__ == "__main__":
    main()
