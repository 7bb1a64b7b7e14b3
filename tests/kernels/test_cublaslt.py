"""Products by cuBLASLt's algorithms: torch's bits, and the way that a layer takes to them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanovllm.kernels import cublaslt
from nanovllm.kernels.cublaslt import fastest_product
from nanovllm.layers.linear import Linear
from nanovllm.layers.parallel import SINGLE


def normal(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(sum(shape)), device=device).to(dtype)


def make_linear(weight: Tensor, bias: bool = False) -> Linear:
    layer = Linear(weight.shape[1], weight.shape[0], bias, weight.dtype, weight.device, "output", SINGLE)
    layer.weight.data.copy_(weight)
    if layer.bias is not None:
        layer.bias.data.fill_(0.5)
    return layer


class FakeProduct:
    """Of 6 rows; counts its calls."""

    num_rows, num_calls = 6, 0

    def fits(self, x: Tensor, out: Tensor) -> bool:
        return len(x) == self.num_rows and x.is_contiguous() and out.is_contiguous()

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor, adds: bool = False) -> Tensor:
        self.num_calls += 1
        return out.copy_(x @ weight.t() + (out if adds else 0))


def test_there_is_none_on_a_cpu() -> None:
    assert fastest_product(4096, normal(512, 4096, dtype=torch.bfloat16)) is None


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_takes_its_product_for_that_many_rows(bias: bool) -> None:
    layer, product = make_linear(normal(12, 16), bias), FakeProduct()
    layer.product = product
    for num_rows in (1, 5, 6, 7):
        x = normal(num_rows, 16)
        torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert product.num_calls == (0 if bias else 1)
    strided = normal(6, 32)[:, ::2]
    torch.testing.assert_close(layer(strided), torch.nn.functional.linear(strided, layer.weight, layer.bias))
    assert product.num_calls == (0 if bias else 1)


@pytest.mark.gpu(seconds=4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4096, 3072, 1024), (1111, 1024, 5120), (8192, 1024, 2048)])
def test_every_algorithm_is_right_on_gpu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """And some have torch's bits; all but those are passed over."""
    num_rows, n, k = shape
    x, weight = normal(num_rows, k, dtype=dtype, device="cuda"), normal(n, k, dtype=dtype, device="cuda") / k**0.5
    products = cublaslt._products(num_rows, weight)
    assert len(products) >= 2
    expected, residual = torch.mm(x, weight.t()), normal(num_rows, n, dtype=dtype, device="cuda")
    results = [product(x, weight, torch.empty_like(expected)) for product in products]
    for result in results:
        torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)
    assert any(torch.equal(result, expected) for result in results) or num_rows % 8
    exact = residual.double() + x.double() @ weight.double().t()
    for product in products:
        added = product(x, weight, residual.clone(), adds=True)
        torch.testing.assert_close(added.double(), exact, rtol=2e-2, atol=2e-2)
    assert not products[0].fits(x[1:], expected) and not products[0].fits(x.t().contiguous().t(), expected)


@pytest.mark.gpu(seconds=3)
@pytest.mark.parametrize("adds", [False, True])
def test_the_fastest_product_of_a_layer_on_gpu(adds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublaslt, "MIN_GAIN", -10.0)  # whatever torch's time is
    layer = make_linear(normal(4096, 2048, dtype=torch.bfloat16, device="cuda"))
    layer.joins_residual = adds
    x, residual = (normal(4096, size, dtype=torch.bfloat16, device="cuda") for size in (2048, 4096))
    state = torch.cuda.get_rng_state()
    product = fastest_product(4096, layer.weight, adds)
    assert torch.equal(state, torch.cuda.get_rng_state())
    if product is None:
        pytest.skip("no algorithm has torch's bits here")
    results = []
    for layer.product in (product, None):
        results.append(layer.add(x, residual.clone())[1] if adds else layer(x))
    assert torch.equal(*results)
    monkeypatch.setattr(cublaslt, "_library", lambda device: cublaslt._Library.__new__(cublaslt._Library))
    assert fastest_product(4096, layer.weight) is None  # a library without what is called
