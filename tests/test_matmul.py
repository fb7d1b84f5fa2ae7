"""Float32 products in parts: gradients, and on a GPU the kernel, against float64 and against cuBLAS's float32."""

import pytest
import torch

import matmul

GPU = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not GPU, reason="needs a GPU"))]


def error(out, exact):
    return float((out.detach().double() - exact.detach()).norm() / exact.detach().norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows, k", [(3, 192), (300, 192), (300, 1), (5, 3), (70, 66)])
def test_products_and_gradients_are_those_of_float64(device, rows, k):
    torch.manual_seed(0)
    x = torch.randn(rows, 1, k, device=device, requires_grad=True)
    weight = torch.randn(130, k, device=device, requires_grad=True)
    grad = torch.randn(rows, 1, 130, device=device)
    out = matmul.linear_with_gradients(x, weight)
    out.backward(grad)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = torch.nn.functional.linear(*exact)
    expected.backward(grad.double())
    assert out.shape == expected.shape
    for got, right in ((out, expected), (x.grad, exact[0].grad), (weight.grad, exact[1].grad)):
        assert got.shape == right.shape and error(got, right) < 1e-6
    with torch.no_grad():  # as the trainer rescores
        assert torch.equal(matmul.linear_with_gradients(x, weight), out)


@pytest.mark.skipif(not GPU, reason="cuBLAS needs a GPU")
def test_a_long_sum_in_parts_is_more_exact_than_cublas_has_it():
    torch.manual_seed(0)
    x, weight = torch.randn(2816, 10752, device="cuda"), torch.randn(3072, 10752, device="cuda")
    exact = x.double() @ weight.double().t()
    assert error(matmul.in_parts(x, weight), exact) < 0.7 * error(x @ weight.t(), exact)


@pytest.mark.skipif(not GPU, reason="the kernel needs a GPU")
@pytest.mark.parametrize("k, n", [(64, 1), (128, 384), (192, 130), (3072, 8192), (10752, 3072)])
def test_few_rows_are_no_less_exact_than_cublas_has_them(k, n):
    torch.manual_seed(0)
    x, weight = torch.randn(matmul.FEW_ROWS, k, device="cuda"), torch.randn(n, k, device="cuda")
    exact = x.double() @ weight.double().t()
    assert error(matmul.few_rows(x, weight), exact) <= error(x @ weight.t(), exact) + 2e-7
    for m in (1, 2, 16, 17, 50):
        out = matmul.few_rows(x[:m].contiguous(), weight)
        assert error(out, exact[:m]) <= 1e-6
        assert torch.equal(out, matmul.few_rows(x[:m].contiguous(), weight))
    x[1, 3] = float("nan")
    bad = torch.isnan(matmul.few_rows(x, weight))
    assert bad[1].all() and not bad[0].any() and not bad[2:].any()


@pytest.mark.skipif(not GPU, reason="the kernel needs a GPU")
@pytest.mark.parametrize("rows", [1, 16, 64, 65, 700])
def test_any_number_of_rows_takes_a_way_that_is_right(rows):
    torch.manual_seed(0)
    for k in (128, 96):
        x, weight = torch.randn(rows, k, device="cuda"), torch.randn(200, k, device="cuda")
        assert error(matmul.linear(x, weight), x.double() @ weight.double().t()) < 1e-6
