"""Float32 matrix products that are faster than cuBLAS's where few rows meet many weights, and more exact everywhere.

Few rows (a decode step). The weights are read once, and that is the time it should take; cuBLAS's float32 kernels take three
times as long. A tensor core multiplies numbers of 11 bits (TF32). A float32 number of 24 bits is the sum of two such numbers,
hi and lo, so that three products,

    a · b = lo(a) · hi(b) + hi(a) · lo(b) + hi(a) · hi(b)        (what is left out, lo · lo, is below 2^-22 of a · b)

make one in float32 (3xTF32: Ootomo and Yokota, arXiv 2203.03341). A tensor core also rounds its sums towards zero, so each
spans BLOCK_K terms only, and these are added in float32 outside: the error against float64 is a quarter of cuBLAS's.

Many rows (training, prefill). cuBLAS adds thousands of terms one after the other. `in_parts` has it add a quarter of them
at a time, which halves the error for a few hundredths of the time. Three TF32 products of cuBLAS were tried there: 1.9 times
as fast, with an error of 2.5e-5 where float32 has 1e-6, for the rounding of long sums. RESULTS.md has the figures of what is
used, from `benchmarks/products.py`.

Used where a GPU computes in FP32 with full precision (`--split-matmul`). Every result is reproducible bit for bit. NaN and
infinities give numbers that are not finite. Imported only where a model is built.
"""

from __future__ import annotations

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # a torch without a GPU: `in_parts` works there too, for the tests
    triton = None

FEW_ROWS = 64  # above, arithmetic is the bound, and cuBLAS's float32 as fast
MANY_ROWS = 1024  # below, a quarter of a sum is too little work for a card
PARTS = 4  # of a long sum
BLOCK_N, BLOCK_K = 64, 64  # of `few_rows`; K must be a multiple
BLOCKS = 330  # thread blocks below which K is divided, too: two and a half for each of an H200's 132 multiprocessors


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [..., K] times weight [N, K] transposed -> [..., N], without gradients. Float32 on a GPU; weight contiguous."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) <= FEW_ROWS and weight.shape[1] % BLOCK_K == 0:
        out = few_rows(rows.contiguous(), weight)
    else:
        out = in_parts(rows, weight) if len(rows) >= MANY_ROWS else rows @ weight.t()
    return out.view(*x.shape[:-1], len(weight))


def linear_with_gradients(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same for training: `in_parts` for any number of rows, so that a recomputation gives the same bits.

    A weight's gradient is added to its `main_grad`, where Megatron gave it one: autograd itself would hold it until the
    weight's use in every loop is passed, a second copy of all gradients of the layers."""
    return _Linear.apply(x, weight, [_Kept.apply(x, weight)])  # in a list: held, but no input of which a gradient is asked


class _Kept(torch.autograd.Function):
    """Saves x for `_Linear`'s backward, and does so before the product is taken.

    Activation checkpointing (torch.utils.checkpoint) ends its recomputation when the last tensor that the backward pass
    asks for is there again. The input of a layer's last product is that tensor: the product itself, a quarter of the
    layer's work, is then not taken a second time. A Function that saved its own input would save it after its product."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        return x.new_empty(0)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, kept):
        ctx.weight, ctx.kept = weight, kept
        return in_parts(x.reshape(-1, x.shape[-1]), weight).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx, grad):
        (x,), weight = ctx.kept[0].grad_fn.saved_tensors, ctx.weight
        ctx.kept = None  # and x with it, as soon as it is used
        rows, grad_rows = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        grad_x = (grad_rows @ weight).view(x.shape)
        if not hasattr(weight, "main_grad"):
            return grad_x, grad_rows.t() @ rows, None
        weight.main_grad.addmm_(grad_rows.t(), rows)
        return grad_x, None, None


def in_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed -> [M, N], the sum over K as that of PARTS sums."""
    first, *others = zip(x.chunk(PARTS, 1), weight.chunk(PARTS, 1), strict=True)
    out = first[0] @ first[1].t()
    for a, b in others:
        out.addmm_(a, b.t())
    return out


def few_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed -> [M, N], M up to FEW_ROWS, K a multiple of BLOCK_K; contiguous float32 on a GPU.

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
