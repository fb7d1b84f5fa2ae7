"""How much memory does the loss need at the official vocabulary? Promise: 8,192 response tokens in at most 3 GiB.

    python benchmarks/loss_memory.py                   # CPU, a quarter of an hour; writes results/loss_memory.json
    python benchmarks/loss_memory.py --device cuda --algorithms grpo,ppo,dppo,flow-dppo

The loss of ppo is grpo's, through the same lines of the trainer, so ppo is not among the default.

What is run is the trainer itself: `Trainer.train` on a model with the official vocabulary (166,144) and a body so small
(hidden 64, one layer) that nearly all memory is the loss's. Each optimizer step sees its T response tokens in one pack, and
the peak is taken over the step: forward, loss, backward, clipping, optimizer.

Subtracted is what is held when the step begins, after one step has been taken to warm up: the weights, their gradient
buffer, and the frozen distributions (below). Not subtracted, so counted against the loss: hidden states, their gradient and
all else of the small body, and the product that becomes the LM head's gradient before it joins its buffer (41 MiB at hidden
64). At another hidden size those follow the hidden size and the figure of the loss does not.

flow-dppo compares whole distributions. Those that its second step needs, T × 166,144 float32, are *frozen*: scored before the
first step and held on the host. They are reported on their own, by the size of the tensors. On CPU, where host and device are
one memory, a step finds them there when it begins, so they are in its baseline; from the peak while they are scored their
size is subtracted, and what is left counts as the loss's. A flow-dppo batch here has 2 T tokens, so that a step has T.

Peaks are exact: on CUDA the allocator's, on CPU the kernel's high-water mark of resident memory (Linux), which is reset
before each step. Small blocks are mapped one by one, so that freed memory leaves the process at once.
"""

import argparse
import contextlib
import ctypes
import json
import os
import random
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms ask for it on CUDA

import torch
from machine import machine, versions

import trainer

ROOT = Path(__file__).resolve().parent.parent
ALGORITHMS = ("grpo", "dppo", "flow-dppo")
TOKENS = (1024, 2048, 4096, 8192)  # of one optimizer step
PROMISE_GIB = 3.0
# Over the official shape: the vocabulary, and with it the loss, stays the official one.
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 2, "head_dim": 32}  # fmt: skip
LENGTH, PROMPT = 128, 8  # tokens of each completion and its prompt


class Memory:
    """Bytes held and their peak: of the card, or of this process where there is none."""

    def __init__(self, device: str):
        self.cuda = device == "cuda"
        if not self.cuda:
            ctypes.CDLL(None).mallopt(-3, 64 << 10)  # M_MMAP_THRESHOLD: from here on a block is a mapping of its own

    def held(self) -> int:
        return torch.cuda.memory_allocated() if self.cuda else self._resident("VmRSS")

    def reset_peak(self) -> None:
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")  # 5: only the high-water mark

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.cuda else self._resident("VmHWM")

    @staticmethod
    def _resident(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) << 10


class Watched(trainer.Trainer):
    """The trainer, with the peak of each scoring and each policy step noted: [(what, tokens, bytes)] in `seen`."""

    def __init__(self, settings: trainer.TrainerSettings):
        super().__init__(settings)
        self.memory, self.seen, self.frozen = Memory(settings.device), [], 0

    @contextlib.contextmanager
    def watch(self, what: str, packs: list, frozen: dict):
        kept = size(frozen)
        before = self.memory.held()
        self.memory.reset_peak()
        yield
        rise = self.memory.peak() - before
        if not self.memory.cuda:
            rise -= size(frozen) - kept  # what was frozen meanwhile is host memory and reported as such
        self.frozen = max(self.frozen, size(frozen))
        self.seen.append((what, sum(len(pack.targets) for pack in packs), rise))

    def _score(self, packs, old, frozen):
        with self.watch("score", packs, frozen):
            return super()._score(packs, old, frozen)

    def _policy_step(self, packs, lengths, advantages, old, frozen, *rest):
        with self.watch("step", packs, frozen):
            return super()._policy_step(packs, lengths, advantages, old, frozen, *rest)


def size(tree) -> int:
    """Bytes of all tensors in a tree of dicts and lists."""
    if torch.is_tensor(tree):
        return tree.numel() * tree.element_size()
    return sum(map(size, tree.values() if isinstance(tree, dict) else tree))


def batch(tokens: int, vocabulary: int) -> list[dict]:
    """Completions with `tokens` response tokens in all, as the rollout hands them over."""
    draw = random.Random(tokens)
    return [
        {
            "prompt_tokens": [draw.randrange(vocabulary) for _ in range(PROMPT)],
            "response_tokens": [draw.randrange(vocabulary) for _ in range(LENGTH)],
            "log_probs": [-12.0] * LENGTH,  # about log(1 / vocabulary), what random weights give
            "reward": float(i % 2),
        }
        for i in range(tokens // LENGTH)
    ]


def measure(algorithm: str, model: Path, device: str) -> list[dict]:
    """One row for each of TOKENS."""
    watched = Watched(
        trainer.TrainerSettings(
            model=str(model), algorithm=algorithm, device=device,
            max_logprob_error=1e9,  # there is no rollout to agree with
            micro_batch_tokens=1 << 30,  # one pack a step
            recompute=True,  # of the body nearly nothing is kept while the loss is at work
        )
    )  # fmt: skip
    steps, vocabulary = watched.settings.steps, watched.config.vocab_size
    watched.train(batch(steps * 4 * LENGTH, vocabulary), 0)  # warm-up: thread pools, library workspaces
    rows = []
    for update, tokens in enumerate(TOKENS, start=1):
        watched.seen, watched.frozen = [], 0
        watched.train(batch(steps * tokens, vocabulary), update)
        assert all(seen == tokens for _, seen, _ in watched.seen), "a step did not see its tokens in one call"
        peaks = {what: max(b for w, _, b in watched.seen if w == what) for what, _, _ in watched.seen}
        rows.append({
            "tokens": tokens,
            "loss_gib": max(peaks.values()) / 2**30,
            **{f"{what}_gib": peak / 2**30 for what, peak in peaks.items()},
            "frozen_host_gib": watched.frozen / 2**30,
        })  # fmt: skip
        print(f"{algorithm:10} {tokens:6,} {rows[-1]['loss_gib']:9.2f} {rows[-1]['frozen_host_gib']:12.2f}"
              f" {tokens * vocabulary * 4 / 2**30:14.2f}", flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="comma-separated")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the trainer runs")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "loss_memory.json", help="evidence to write")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="megatron")  # that Apex and Transformer Engine are not there
    evidence = json.loads(options.out.read_text()) if options.out.exists() else {}
    where = {"machine": machine(), "versions": versions("torch", "megatron-core")}
    if options.device == "cuda":
        where["machine"]["card"] = torch.cuda.get_device_name()
    print(f"{'algorithm':10} {'tokens':>6} {'loss, GiB':>9} {'frozen, host':>12} {'logits at once':>14}")
    with tempfile.TemporaryDirectory() as folder:
        shape, model = Path(folder) / "shape.json", Path(folder) / "model"
        shape.write_text(json.dumps(SHAPE))
        make = ["examples/make_checkpoint.py", "--shape", str(shape), "--seed", "0", "--dtype", "fp32", "--device", "cpu"]
        subprocess.run([sys.executable, *make, "--out", str(model)], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        found = {a: measure(a, model, options.device) for a in options.algorithms.split(",")}
    evidence[options.device] = {
        **where, "vocabulary": vocabulary, "shape": SHAPE, "promise_gib": PROMISE_GIB,
        "algorithms": {**evidence.get(options.device, {}).get("algorithms", {}), **found},
    }  # fmt: skip
    options.out.write_text(json.dumps(evidence, indent=1) + "\n")
    worst = max(rows[-1]["loss_gib"] for rows in found.values())
    print(f"largest at {TOKENS[-1]:,} tokens: {worst:.2f} GiB; promised: at most {PROMISE_GIB:.0f} GiB")
    sys.exit(worst > PROMISE_GIB)


if __name__ == "__main__":
    main()
