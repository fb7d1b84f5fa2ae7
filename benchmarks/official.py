"""The official shape on one GPU: does each algorithm run, and does interrupted + resumed equal uninterrupted, bit for bit?

    python benchmarks/official.py --model DIR --work DIR --out results/official --algorithms grpo,ppo

For each algorithm: `run.py` uninterrupted; its checkpoint's tensor files are then deleted (their digests stay in
state.json); `run.py --stop-after 2`; `run.py --resume` in a fresh process; `audit.py` on both. Writes one JSON a line of
evidence: metrics, seconds by phase, peaks, digests, audit table. `--model` comes from examples/make_checkpoint.py.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_prompts(path: Path, tokens: int, vocabulary: int, rows: int = 32) -> None:
    """Prompts of exactly `tokens` numbered words (make_checkpoint.py's tokenizer), drawn from a seed."""
    draw = random.Random(7)
    with path.open("w") as file:
        for _ in range(rows):
            words = " ".join(f"t{draw.randrange(3, vocabulary - 100)}" for _ in range(tokens))
            file.write(json.dumps({"prompt": words, "label": "0"}) + "\n")


class Memory:
    """Peak of the host memory in use and of the GPU memory in use, sampled once a second while a command runs."""

    def __init__(self):
        self.host = self.gpu = 0.0
        self.over = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self):
        while not self.over.wait(1.0):
            info = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
            used = int(info["MemTotal"].split()[0]) - int(info["MemAvailable"].split()[0])
            self.host = max(self.host, used / 2**20)
            query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            done = subprocess.run(query, capture_output=True, text=True)
            if done.returncode == 0:
                self.gpu = max(self.gpu, int(done.stdout.split()[0]) / 1024)


def run(*args: str) -> dict:
    memory, began = Memory(), time.perf_counter()
    done = subprocess.run([sys.executable, "run.py", *args], cwd=ROOT, capture_output=True, text=True)
    memory.over.set()
    print(done.stdout[-2500:], done.stderr[-2500:], f"[{done.returncode}, {time.perf_counter() - began:.0f} s]", flush=True)
    return {
        "exit": done.returncode,
        "seconds": round(time.perf_counter() - began, 1),
        "host_peak_gib": round(memory.host, 1),
        "gpu_peak_gib": round(memory.gpu, 1),
        "said": (done.stdout + done.stderr)[-1500:] if done.returncode else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="random-weight checkpoint with the numbered tokenizer")
    parser.add_argument("--work", type=Path, required=True, help="scratch directory for runs")
    parser.add_argument("--out", type=Path, required=True, help="where the JSON evidence goes")
    parser.add_argument("--algorithms", default="grpo,ppo,dppo,flow-dppo", help="comma-separated")
    parser.add_argument("--extra", default="", help="more options of run.py, one string, for all algorithms")
    parser.add_argument("--name", default="", help="suffix of the evidence file")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="tokens of every prompt")
    parser.add_argument("--only-whole", action="store_true", help="no interrupted run: measure only")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    shape = json.loads((Path(options.model) / "config.json").read_text())
    data = options.work / "prompts.jsonl"
    write_prompts(data, options.prompt_tokens, shape["vocab_size"])
    for algorithm in options.algorithms.split(","):
        common = ["--algorithm", algorithm, "--model", options.model, "--data", str(data), "--updates", "3", "--colocate",
                  "--reward", "benchmarks/varied_reward.py:reward", "--keep-checkpoints", "1",
                  *(["--n-samples-per-prompt", "4"] if algorithm != "grpo" else []), *options.extra.split()]  # fmt: skip
        whole, broken = options.work / f"{algorithm}-whole", options.work / f"{algorithm}-broken"
        for path in (whole, broken):
            shutil.rmtree(path, ignore_errors=True)
        evidence = {"algorithm": algorithm, "command": ["python", "run.py", *common], "shape": shape}

        def keep(part: str, value, evidence=evidence, algorithm=algorithm) -> None:
            """Evidence is written as it comes: a machine may be taken away half way."""
            evidence[part] = value
            path = options.out / f"{algorithm}{options.name}.json"
            text = json.dumps(evidence, indent=1).replace(f"{options.work}/", "WORK/").replace(options.model, "MODEL")
            path.write_text(text + "\n")

        keep("whole", run(*common, "--output", str(whole)))
        if evidence["whole"]["exit"] == 0:
            keep("record", {k: v for k, v in json.loads((whole / "run.json").read_text()).items() if k != "contents"})
            keep("metrics", [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()])
            keep("commits", [json.loads(x) for x in (whole / "publications" / "commits.jsonl").read_text().splitlines()])
            checkpoint = whole / "checkpoints" / "000003"
            keep("checkpoint_gb", round(sum(p.stat().st_size for p in checkpoint.rglob("*") if p.is_file()) / 1e9, 2))
            for network in ("actor", "critic"):
                shutil.rmtree(checkpoint / network, ignore_errors=True)
        if evidence["whole"]["exit"] == 0 and not options.only_whole:
            keep("stopped", run(*common, "--output", str(broken), "--stop-after", "2"))
            keep("resumed", run("--resume", "--output", str(broken)))
            audit = subprocess.run(
                [sys.executable, "audit.py", str(whole), str(broken)], cwd=ROOT, capture_output=True, text=True
            )
            keep("audit", {"exit": audit.returncode, "table": audit.stdout.splitlines()[2:]})
            print(audit.stdout, audit.stderr, flush=True)
        for path in (whole, broken):
            shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    main()
