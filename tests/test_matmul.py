"""3xTF32: the parts, the three products, gradients; on a GPU the kernels, against float64 and against cuBLAS's float32."""

import pytest
import torch

import matmul

GPU = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not GPU, reason="needs a GPU"))]


def tf32(x):
    """x cut to the 11 bits that a tensor core reads."""
    return (x.view(torch.int32) & -0x2000).view(torch.float32)


def error(out, exact):
    return float((out.detach().double() - exact.detach()).norm() / exact.detach().norm())


@pytest.mark.parametrize("device", DEVICES)
def test_the_parts_of_a_number_make_the_number_and_fit_a_tensor_core(device):
    torch.manual_seed(0)
    x = torch.randn(500, 41, device=device) * 10.0 ** torch.randint(-30, 30, (500, 41), device=device)
    x[0, :4] = torch.tensor([0.0, -0.0, 1.0, 1 + 2**-23])
    hi, lo = matmul.split(x)
    assert torch.equal(hi + lo, x)
    assert torch.equal(tf32(hi), hi)
    assert ((lo - tf32(lo)).abs() <= 2.0**-22 * x.abs()).all()
    assert (lo.abs() <= 2.0**-11 * x.abs()).all()
    for bad in (float("nan"), float("inf"), -float("inf")):
        hi, lo = matmul.split(torch.full((1, 1), bad, device=device))
        assert torch.isnan(hi + lo).all() or torch.isinf(hi + lo).all()


@pytest.mark.parametrize("device", DEVICES)
def test_three_products_are_as_exact_as_one_in_float32_and_one_of_tf32_is_not(device):
    torch.manual_seed(0)
    a, b = torch.randn(300, 1024, device=device), torch.randn(256, 1024, device=device)
    exact = a.double() @ b.double().t()
    pieces = [tuple(map(tf32, matmul.split(x))) for x in (a, b)]  # what the card reads of them
    out = matmul.product(pieces[0], matmul.transposed(pieces[1]))
    assert error(out, exact) <= 1.1 * error(a @ b.t(), exact) + 2.0**-23
    assert error(pieces[0][0] @ pieces[1][0].t(), exact) > 1e-4
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [3, 300])
def test_gradients_are_those_of_a_float64_product(device, rows):
    torch.manual_seed(0)
    x = torch.randn(rows, 1, 192, device=device, requires_grad=True)
    weight = torch.randn(130, 192, device=device, requires_grad=True)
    grad = torch.randn(rows, 1, 130, device=device)
    out = matmul.linear_with_gradients(x, weight)
    out.backward(grad)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = torch.nn.functional.linear(*exact)
    expected.backward(grad.double())
    assert out.shape == expected.shape
    for got, right in ((out, expected), (x.grad, exact[0].grad), (weight.grad, exact[1].grad)):
        assert got.shape == right.shape and error(got, right) < 1e-6


@pytest.mark.skipif(not GPU, reason="the kernel needs a GPU")
@pytest.mark.parametrize("k, n", [(64, 1), (128, 384), (192, 130), (3072, 8192), (10752, 3072)])
def test_few_rows_are_no_less_exact_than_cublas_and_do_not_depend_on_the_batch(k, n):
    torch.manual_seed(0)
    x, weight = torch.randn(matmul.FEW_ROWS, k, device="cuda"), torch.randn(n, k, device="cuda")
    exact = x.double() @ weight.double().t()
    whole = matmul.few_rows(x, weight)
    assert error(whole, exact) <= error(x @ weight.t(), exact) + 2e-7
    for m in (1, 2, 16, 17, 100):
        out = matmul.few_rows(x[:m].contiguous(), weight)
        assert error(out, exact[:m]) <= 1e-6
        assert torch.equal(out, matmul.few_rows(x[:m].contiguous(), weight))
    x[1, 3] = float("nan")
    bad = torch.isnan(matmul.few_rows(x, weight))
    assert bad[1].all() and not bad[0].any() and not bad[2:].any()


@pytest.mark.skipif(not GPU, reason="the kernels need a GPU")
@pytest.mark.parametrize("rows", [1, 16, 128, 129, 255, 256, 700])
def test_every_number_of_rows_takes_a_way_that_is_right(rows):
    torch.manual_seed(0)
    for k in (128, 96):
        x, weight = torch.randn(rows, k, device="cuda"), torch.randn(200, k, device="cuda")
        assert error(matmul.linear(x, weight), x.double() @ weight.double().t()) < 1e-6
