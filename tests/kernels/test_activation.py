"""SiLU times up: kernel against reference, reference against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.activation import silu_and_mul, silu_and_mul_reference, silu_and_mul_triton

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}  # SiLU and the product each round once


def make_packed(num_tokens: int, size: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(size)
    x = 4 * torch.randn(num_tokens, 2 * size, generator=generator, device=device)
    x[0, :4] = torch.tensor([0.0, -100.0, 100.0, -20.0], device=device)  # where exp(-gate) overflows or vanishes
    return x.to(dtype)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    wide = torch.promote_types(expected.dtype, torch.float32)
    torch.testing.assert_close(actual.to(wide), expected.to(wide), rtol=tolerance, atol=tolerance / 100)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference(dtype: torch.dtype) -> None:
    x = make_packed(7, 33, dtype, "cpu")
    gate, up = x.double().chunk(2, dim=-1)
    assert_close(silu_and_mul(x), gate * torch.sigmoid(gate) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (33, 48), (2, 1024), (3, 1500)], ids=str)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp"
)  # numpy's, under the interpreter: inf is what is wanted
def test_kernel(shape: tuple[int, int], dtype: torch.dtype, strided: bool, kernel_device: str) -> None:
    x = make_packed(*shape, dtype, kernel_device)
    if strided:
        x = torch.cat((x, x), dim=1)[:, : x.shape[1]]
    actual = silu_and_mul_triton(x)
    assert actual.is_contiguous() and actual.dtype == dtype
    assert_close(actual, silu_and_mul_reference(x), dtype)


def test_kernel_without_tokens(kernel_device: str) -> None:
    assert silu_and_mul_triton(torch.empty(0, 64, device=kernel_device)).shape == (0, 32)


@pytest.mark.gpu(seconds=4)
@pytest.mark.parametrize(
    ("size", "dtype"), [(3072, torch.bfloat16), (12288, torch.float16), (3072, torch.float32)], ids=str
)
def test_real_shapes(size: int, dtype: torch.dtype) -> None:
    for num_tokens in (1, 7, 512, 16384 * 3072 // size):
        x = make_packed(num_tokens, size, dtype, "cuda")
        assert_close(silu_and_mul(x), silu_and_mul_reference(x.float()), dtype)
