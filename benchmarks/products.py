"""Are float32 products as `matmul.py` takes them as exact as cuBLAS's, and how fast are they?

    python benchmarks/products.py             # one GPU, a minute; writes results/products.json

The four products of an official layer and the LM head. A decode step: M rows (completions), each of the layers' weights in
each loop and the head once; the floor is the bytes of the weights over the bandwidth that a device-to-device copy reaches in
the same run. Training: 2,816 tokens (16 × 176), forward and both gradients; the floor of plain float32 is the card's nominal
67 TFLOP/s. Errors are ‖out − exact‖ / ‖exact‖ against float64. Times are medians of 9, of CUDA graphs that hold one product
with each of three copies of the weights, so that none is found in the cache; training's are of events around the calls.
"""

import argparse
import functools
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from machine import machine, versions
from update import spread

import matmul

ROOT = Path(__file__).resolve().parent.parent
LAYERS, LOOPS = 22, 2
LAYER = {"qkv": (8192, 3072), "attention output": (3072, 6144), "gate and up": (21504, 3072), "down": (3072, 10752)}
HEAD = {"LM head": (166144, 3072)}
TOKENS, SPREAD = 2816, 0.02


def seconds(call, graph: bool, times: int = 9) -> list[float]:
    """Seconds of `call` on the card, `times` over, after a warm-up."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        run = call
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured, stream=stream):
                call()
            run = captured.replay
        found = []
        for _ in range(times):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) / 1e3)
    return found


def each(product, x: torch.Tensor, weights: list[torch.Tensor]) -> None:
    for weight in weights:
        product(x, weight)


def gradients(product, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(product(x, weight), (x, weight), grad)


def error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm())


def decode(rows: int) -> dict:
    """{product: {"cublas"|"split": {median, min, max, error}}} of `rows` rows; "split" is what an engine calls."""
    table = {}
    for name, (n, k) in {**LAYER, **HEAD}.items():
        x = torch.randn(rows, k, device="cuda")
        weights = [torch.randn(n, k, device="cuda") * SPREAD for _ in range(1 if name in HEAD else 3)]
        exact = x.double() @ weights[0][:8192].double().t()
        table[name] = {}
        for way, one in (("cublas", torch.nn.functional.linear), ("split", matmul.linear)):
            found = seconds(functools.partial(each, one, x, weights), graph=True)
            row = spread([s / len(weights) for s in found])
            table[name][way] = {**row, "error": error(one(x, weights[0])[:, :8192], exact)}
    return table


def training(tokens: int) -> dict:
    """{product: {"cublas"|"split": {median, min, max, error, grad_error}}} of forward and both gradients."""
    table = {}
    for name, (n, k) in LAYER.items():
        x = torch.randn(tokens, k, device="cuda").requires_grad_()
        weight = (torch.randn(n, k, device="cuda") * SPREAD).requires_grad_()
        grad = torch.randn(tokens, n, device="cuda")
        exact = x.detach()[:256].double() @ weight.detach().double().t()
        exact_grad = grad[:, :256].t().double() @ x.detach().double()
        table[name] = {}
        for way, one in (("cublas", torch.nn.functional.linear), ("split", matmul.linear_with_gradients)):
            made = one(x, weight).detach(), gradients(one, x, weight, grad)[1]
            errors = {"error": error(made[0][:256], exact), "grad_error": error(made[1][:256], exact_grad)}
            del made
            found = seconds(functools.partial(gradients, one, x, weight, grad), graph=False)
            table[name][way] = {**spread(found), **errors}
    return table


def bandwidth() -> float:
    """Bytes a second that a copy on the card reads and writes."""
    source = torch.empty(2**30, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(seconds(lambda: target.copy_(source), graph=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,64,128,256,512", help="completions of a decode step or tokens of a prefill")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "products.json", help="evidence to write")
    options = parser.parse_args()
    torch.manual_seed(0)
    rate = bandwidth()
    evidence = {
        "machine": {**machine(), "card": torch.cuda.get_device_name()},
        "versions": versions("torch", "triton"),
        "bandwidth": rate,
        "decode": {},
    }
    visits = {name: LAYERS * LOOPS for name in LAYER} | dict.fromkeys(HEAD, 1)
    shapes = {**LAYER, **HEAD}
    floor = sum(4 * n * k * visits[name] for name, (n, k) in shapes.items()) / rate
    for rows in map(int, options.rows.split(",")):
        table = decode(rows)
        steps = {way: sum(table[name][way]["median"] * visits[name] for name in shapes) for way in ("cublas", "split")}
        evidence["decode"][rows] = {"products": table, "step_s": steps, "floor_s": floor}
        worst = {way: max(table[name][way]["error"] for name in shapes) for way in steps}
        said = (f"{way} {steps[way] * 1e3:6.2f} ms, error {worst[way]:.1e}" for way in steps)
        print(f"decode, {rows:4} rows: {'; '.join(said)}; floor {floor * 1e3:.2f} ms", flush=True)
    table = training(TOKENS)
    work = 6 * TOKENS * sum(n * k for n, k in LAYER.values()) * LAYERS * LOOPS
    evidence["training"] = {"tokens": TOKENS, "products": table, "flop": work}
    for way in ("cublas", "split"):
        total = sum(row[way]["median"] for row in table.values()) * LAYERS * LOOPS
        errors = [max(row[way][key] for row in table.values()) for key in ("error", "grad_error")]
        evidence["training"][f"{way}_s"] = total
        rate = f"{total:.3f} s of products, {work / total / 1e12:.1f} TFLOP/s"
        print(f"training, {way}: {rate}, error {errors[0]:.1e}, of the weights' gradient {errors[1]:.1e}", flush=True)
    options.out.write_text(json.dumps(evidence, indent=1) + "\n")


if __name__ == "__main__":
    main()
