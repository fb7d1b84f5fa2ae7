"""Does the cost of training grow with the real tokens, and with the vocabulary, and with nothing else?

    python benchmarks/scaling.py --device cuda                                    # a minute and a half on an H200
    python benchmarks/scaling.py --shape small.json --multiples 1,4 --vocabularies 512,2048 --repeats 1    # here, on CPU

What is timed is the trainer itself: `Trainer.train` with GRPO and SGD in FP32, one optimizer step, at the official shape with
fewer layers (--layers), packed into micro-batches by the default --micro-batch-tokens. Rows:

    tokens      1×, 4×, 16× and 64× of 16 completions of 128 + 48 tokens. Time per 1,000 tokens shall not grow; it falls from
                1× on by what a step costs whatever its tokens (gradient buffer, norm, optimizer). The peak shall not grow once
                a micro-batch is full: "above held" is the peak less weights and gradient buffers.
    vocabulary  the same at 4× with smaller vocabularies.
    ragged      4× where every other completion, prompt and response, is a quarter as long. Padding to the longest would cost
                1.6 times as much a real token.

Each is the median of --repeats after one that warms up; the largest number of tokens is run once, and the row before it has
warmed up for it. Useful FLOP/s are counted by `model_flops` of budget.py. Writes results/scaling.json, by device.
"""

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as run.py sets it; deterministic algorithms ask for it on CUDA

import torch
from budget import model_flops
from loss_memory import Memory
from machine import machine, versions

import trainer

ROOT = Path(__file__).resolve().parent.parent
SEQUENCES, PROMPT, RESPONSE = 16, 128, 48  # of the official update: 2,816 tokens
AT = 4  # the multiple at which vocabularies and lengths are compared


def batch(multiple: int, vocabulary: int, ragged: bool) -> list[dict]:
    """Completions as the rollout hands them over; `ragged`: every other one is a quarter as long."""
    draw = random.Random(multiple)
    rows = []
    for i in range(SEQUENCES * multiple):
        share = 4 if ragged and i % 2 else 1
        rows.append({
            "prompt_tokens": [draw.randrange(vocabulary) for _ in range(PROMPT // share)],
            "response_tokens": [draw.randrange(vocabulary) for _ in range(RESPONSE // share)],
            "log_probs": [-12.0] * (RESPONSE // share),  # about log(1 / vocabulary), what random weights give
            "reward": float(i % 2),
        })  # fmt: skip
    return rows


def train(network: trainer.Trainer, memory: Memory, multiple: int, repeats: int, ragged: bool = False) -> dict:
    """One row. repeats: how many are timed after one that is not; 0 times the only one."""
    config = network.config
    completions = batch(multiple, config.vocab_size, ragged)
    lengths = [(len(c["prompt_tokens"]), len(c["response_tokens"])) for c in completions]
    tokens, seconds, held = sum(map(sum, lengths)), [], memory.held()
    memory.reset_peak()
    for update in range(repeats + 1):
        began = time.perf_counter()
        network.train(completions, update)  # returns numbers of the host: the device is done
        seconds.append(time.perf_counter() - began)
    seconds = seconds[1:] or seconds
    median = statistics.median(seconds)
    row = {
        "vocabulary": config.vocab_size, "multiple": multiple, "ragged": ragged, "tokens": tokens,
        "seconds": median, "spread": [min(seconds), max(seconds)], "count": len(seconds), "ms_per_1000": 1e6 * median / tokens,
        "tflops": model_flops(config, lengths) / median / 1e12,
        "peak_gib": memory.peak() / 2**30, "above_held_gib": (memory.peak() - held) / 2**30,
    }  # fmt: skip
    print(f"{row['vocabulary']:10,} {multiple:6}× {'ragged' if ragged else '':6} {tokens:8,} {median:9.3f}"
          f" {row['ms_per_1000']:14.2f} {row['tflops']:9.3g} {row['peak_gib']:9.2f}"
          f" {row['above_held_gib']:10.2f}", flush=True)  # fmt: skip
    return row


def make(folder: Path, shape: dict, vocabulary: int) -> Path:
    model, fields = folder / str(vocabulary), folder / "shape.json"
    fields.write_text(json.dumps({**shape, "vocab_size": vocabulary, "bos_token_id": 1, "eos_token_id": 2}))
    command = ["examples/make_checkpoint.py", "--shape", str(fields), "--seed", "0", "--shards", "1", "--out", str(model)]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: sorted(map(int, text.split(",")))  # noqa: E731
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the trainer runs")
    parser.add_argument("--layers", type=int, default=2, help="layers of the official shape that are kept")
    parser.add_argument("--shape", type=Path, help="JSON of config.json fields over the official shape and --layers")
    parser.add_argument("--multiples", type=numbers, default=[1, 4, 16, 64], help="of 2,816 tokens, comma-separated")
    parser.add_argument("--vocabularies", type=numbers, default=[16384, 65536, 166144], help="the largest has all rows")
    parser.add_argument("--repeats", type=int, default=3, help="timed ones a row, after one that warms up")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "scaling.json", help="evidence to write")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="megatron")  # that Apex and Transformer Engine are not there
    evidence = json.loads(options.out.read_text()) if options.out.exists() else {}
    shape = {"num_hidden_layers": options.layers, **(json.loads(options.shape.read_text()) if options.shape else {})}
    here = {"machine": machine(), "versions": versions("torch", "megatron-core"), "shape": shape, "rows": []}
    if options.device == "cuda":
        here["machine"]["card"] = torch.cuda.get_device_name()
    evidence[options.device] = here
    memory = Memory(options.device)

    def keep(row: dict) -> None:
        """Evidence is written as it comes: a machine may be taken away half way."""
        first = here["rows"][0] if here["rows"] else row
        here["rows"].append({**row, "to_first": row["ms_per_1000"] / first["ms_per_1000"]})
        options.out.write_text(json.dumps(evidence, indent=1) + "\n")

    print(f"{'vocabulary':>10} {'':7} {'':6} {'tokens':>8} {'seconds':>9} {'ms per 1,000':>14} {'TFLOP/s':>9} {'peak GiB':>9}"
          f" {'above held':>10}")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        *smaller, largest = options.vocabularies
        for vocabulary in (largest, *smaller):
            model = make(Path(folder), shape, vocabulary)
            network = trainer.Trainer(
                trainer.TrainerSettings(
                    model=str(model), algorithm="grpo", device=options.device,
                    max_logprob_error=1e9,  # there is no rollout to agree with
                )
            )  # fmt: skip
            if vocabulary == largest:
                here["micro_batch_tokens"] = network.settings.micro_batch_tokens
                for multiple in options.multiples:
                    last = multiple == options.multiples[-1] and len(options.multiples) > 1
                    keep(train(network, memory, multiple, 0 if last else options.repeats))
                keep(train(network, memory, AT, options.repeats, ragged=True))
            else:
                keep(train(network, memory, AT, options.repeats))
            del network
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
    rows = [r for r in here["rows"] if r["vocabulary"] == largest]
    print("time per 1,000 tokens, to the first row's: " + ", ".join(
        f"{r['multiple']}×{' ragged' if r['ragged'] else ''} {r['to_first']:.2f}" for r in rows))  # fmt: skip


if __name__ == "__main__":
    main()
