"""Float32 matrix products on tensor cores, no less exact than IEEE float32 ones: 3xTF32.

A tensor core multiplies numbers of 11 bits (TF32) and adds in float32. A float32 number of 24 bits is the sum of two such
numbers, hi and lo, so that

    a · b = lo(a) · hi(b) + hi(a) · lo(b) + hi(a) · hi(b)        (what is left out, lo · lo, is below 2^-22 of a · b)

takes three products at six to eight times the speed of one in float32 (Ootomo and Yokota, arXiv 2203.03341; CUTLASS calls it
3xTF32). Sums are shorter chains than cuBLAS's, so the error against float64 is smaller than cuBLAS's own in float32:
`benchmarks/matmul.py` prints both, RESULTS.md has them.

Two shapes of work, two ways:

- few rows (a decode step): the weights are read once and that is the time it takes. A kernel in Triton, `few_rows`.
- many rows (training, prefill): three products of cuBLAS, `product`.

Used where a GPU computes in FP32 with full precision (`--split-matmul`); `linear` and `linear_with_gradients` are the way in.
NaN and infinities give NaN. Every result is reproducible bit for bit; imported only where the model is built.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch without a GPU: `split` and `product` work there too, for the tests
    triton = None

FEW_ROWS = 128  # up to here the weights' bytes are the bound, above it arithmetic is
MANY_ROWS = 256  # from here three products and the splitting of the weights take less time than one in float32
BLOCK_N, BLOCK_K = 64, 64  # of `few_rows`; K must be a multiple
BLOCKS = 330  # thread blocks below which K is divided, too: two and a half for each of an H200's 132 multiprocessors


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed -> [..., N], without gradients. Float32 on a GPU, weight contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) <= FEW_ROWS and weight.shape[1] % BLOCK_K == 0:
        out = few_rows(rows.contiguous(), weight)
    elif len(rows) >= MANY_ROWS:
        out = product(split(rows), transposed(split(weight)))
    else:
        out = rows @ weight.t()
    return out.view(*x.shape[:-1], len(weight))


def linear_with_gradients(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed -> [..., N], for training: with below MANY_ROWS rows in plain float32."""
    return _Linear.apply(x, weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        out = product(split(rows), transposed(split(weight))) if len(rows) >= MANY_ROWS else rows @ weight.t()
        return out.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        if len(rows) < MANY_ROWS:
            return (grad_rows @ weight).view(x.shape), grad_rows.t() @ rows
        parts = split(grad_rows)
        return product(parts, split(weight)).view(x.shape), product(transposed(parts), split(rows))


# --- many rows -------------------------------------------------------------------------------------------------------


def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(hi, lo) with hi + lo == x exactly; hi is x rounded to TF32's 11 bits, lo has the 13 that are left. Float32."""
    x = x.contiguous()
    if x.is_cuda:
        hi, lo = torch.empty_like(x), torch.empty_like(x)
        _split_kernel[(triton.cdiv(x.numel(), 2048),)](x, hi, lo, x.numel(), BLOCK=2048)
        return hi, lo
    hi = ((x.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return hi, x - hi


def transposed(parts: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return parts[0].t(), parts[1].t()


def product(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """[M, K] times [K, N], both as `split` gives them -> [M, N]. The small terms are added first."""
    (a_hi, a_lo), (b_hi, b_lo) = a, b
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True  # the parts are TF32 numbers (lo to 2^-23 of x): nothing is lost
    try:
        return (a_lo @ b_hi).addmm_(a_hi, b_lo).addmm_(a_hi, b_hi)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# --- few rows --------------------------------------------------------------------------------------------------------


def few_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed -> [M, N], M up to FEW_ROWS, K a multiple of BLOCK_K; contiguous float32.

    Where N alone gives too few thread blocks, K is divided among several and their sums are added in order."""
    (m, k), n = x.shape, len(weight)
    parts = 1
    while triton.cdiv(n, BLOCK_N) * parts < BLOCKS and k % (2 * parts * BLOCK_K) == 0:
        parts *= 2
    out = torch.empty((parts, m, n), dtype=x.dtype, device=x.device)
    _few_rows_kernel[(triton.cdiv(n, BLOCK_N), parts)](
        x, weight, out, m, n, k, k // parts,
        BLOCK_M=max(16, triton.next_power_of_2(m)), BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, num_warps=4,
    )  # fmt: skip
    return out.sum(0) if parts > 1 else out[0]


if triton is not None:

    @triton.jit
    def _split_kernel(x, hi, lo, n, BLOCK: tl.constexpr):
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(x + at, mask=at < n)
        high = ((value.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
        tl.store(hi + at, high, mask=at < n)
        tl.store(lo + at, value - high, mask=at < n)

    @triton.jit
    def _few_rows_kernel(
        x, weight, out, m, n, k, share, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
    ):  # fmt: skip
        """One block of BLOCK_N weight rows against all rows of x, over `share` of K. The weights are the left factor, whose
        tile a tensor core takes in 64 rows; the few rows of x are its columns."""
        rows_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        rows_m, columns = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
        part = tl.program_id(1)
        own = weight + rows_n.to(tl.int64)[:, None] * k
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for at in tl.range(part * share, part * share + share, BLOCK_K, num_stages=3):
            w = tl.load(own + (at + columns)[None, :], mask=rows_n[:, None] < n, other=0.0)
            v = tl.load(x + rows_m[None, :] * k + (at + columns)[:, None], mask=rows_m[None, :] < m, other=0.0)
            total = tl.dot(w, v, total, input_precision="tf32x3")
        place = out + part * m * n + rows_m[None, :] * n + rows_n[:, None]
        tl.store(place, total, mask=(rows_m[None, :] < m) & (rows_n[:, None] < n))
