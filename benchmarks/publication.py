"""What does a publication cost, part by part, by each way that the weights can take?

    python benchmarks/publication.py --model DIR                      # one GPU, or two: then the engine's end has the second
    python benchmarks/publication.py --model DIR --device cpu

Sender: the trainer of `run.py`. Receiver: a process with tensors of the policy's shapes in place of vLLM's parameters, which
fills them by `rollout.received` and makes the digest of what they hold. For each transport `--times` publications: the first
makes what is kept (pinned memory, mappings), the others count. Only sender and receiver, so without Ray, vLLM and the commit
record; a run's own `publish` seconds hold those too. The link: copies of 1 GiB between pinned host memory and each GPU, and
between two GPUs where there are two. Writes results/publication.json.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from machine import machine, versions
from update import spread

import checkpoint
import rollout
import trainer

ROOT = Path(__file__).resolve().parent.parent


def receive(pipe, device: str) -> None:
    """The receiver: manifest → seconds of both halves, until None comes."""
    if device == "cuda":
        torch.cuda.set_device(torch.cuda.device_count() - 1)
    torch.ones(1, device=device)  # CUDA starts
    pipe.send("ready")
    held = {}
    while (manifest := pipe.recv()) is not None:
        began = time.perf_counter()
        for name, tensor in rollout.received(manifest, device):
            if name not in held:
                held[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            held[name].copy_(tensor)
        if device == "cuda":
            torch.cuda.synchronize()
        loaded = time.perf_counter()
        digest = checkpoint.policy_digest(checkpoint.tensor_digests(held.items()))
        pipe.send((digest, {"load": loaded - began, "engine's digest": time.perf_counter() - loaded}))


def publications(sender: trainer.Trainer, pipe, transport: str, times: int, folder: str) -> dict:
    """{"first": {part: seconds}, "later": {part: spread}}"""
    found = []
    for number in range(times):
        sender._digest_cache = None  # as a step leaves it
        began = time.perf_counter()
        manifest = sender.publish(number + 1, transport, f"{folder}/policy.safetensors")
        sent = time.perf_counter() - began
        pipe.send(manifest)
        digest, parts = pipe.recv()
        assert digest == manifest["digest"], "the receiver holds another policy"
        found.append({"trainer": sent, **parts, "sum": time.perf_counter() - began})
    return {"first": found[0], "later": {part: spread([row[part] for row in found[1:]]) for part in found[0]}}


def link() -> dict[str, float]:
    """bytes/s of copies of 1 GiB."""
    host, found = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True), {}
    cards = [torch.empty(1 << 30, dtype=torch.uint8, device=f"cuda:{n}") for n in range(torch.cuda.device_count())]
    pairs = {f"host to GPU {n}": (host, card) for n, card in enumerate(cards)}
    pairs |= {f"GPU {n} to host": (card, host) for n, card in enumerate(cards)}
    if len(cards) > 1:
        pairs["GPU 0 to GPU 1"] = cards[0], cards[1]
    for name, (source, target) in pairs.items():
        seconds = []
        for _ in range(6):
            began = time.perf_counter()
            target.copy_(source)
            for card in range(len(cards)):
                torch.cuda.synchronize(card)
            seconds.append(time.perf_counter() - began)
        found[name] = host.nbytes / statistics.median(seconds[1:])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="native checkpoint")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--transports", help="comma-separated; default: all that the device has")
    parser.add_argument("--times", type=int, default=6, help="publications by each")
    parser.add_argument("--folder", help="where 'disk' writes; default: the temporary folder")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "publication.json", help="evidence to write")
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms ask for it on CUDA
    gpu = options.device == "cuda"
    sender = trainer.Trainer(trainer.TrainerSettings(options.model, "grpo", device=options.device, split_matmul=gpu))
    size = sum(p.nbytes for p in sender.actor.model.parameters())
    cards = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())] if gpu else []
    evidence = {"machine": {**machine(), "cards": cards}, "versions": versions("torch", "blake3"), "bytes": size, "ways": {}}
    if gpu:
        evidence["link"] = link()
        print("; ".join(f"{name} {rate / 1e9:.1f} GB/s" for name, rate in evidence["link"].items()), flush=True)
    spawn = multiprocessing.get_context("spawn")
    for transport in (options.transports or ("ipc,shm,disk" if gpu else "shm,disk")).split(","):
        pipe, far = spawn.Pipe()
        receiver = spawn.Process(target=receive, args=(far, options.device), daemon=True)
        receiver.start()
        far.close()  # a receiver that dies is then an end of file here
        pipe.recv()
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            row = evidence["ways"][transport] = publications(sender, pipe, transport, options.times, folder)
        pipe.send(None)
        receiver.join()
        options.out.write_text(json.dumps(evidence, indent=1) + "\n")
        said = ", ".join(f"{part} {v['median']:.3f}" for part, v in row["later"].items())
        print(f"{transport:5} {size / 1e9:.2f} GB: {said} s; the first {row['first']['sum']:.2f} s", flush=True)


if __name__ == "__main__":
    main()
