"""RMSNorm kernels against the references, and the references against the formula in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.norm import (
    add_rms_norm,
    add_rms_norm_reference,
    add_rms_norm_triton,
    rms_norm,
    rms_norm_reference,
    rms_norm_triton,
)

EPS = 1e-6
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Against the exact formula: the normalised value and its product with the weight each round once.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}


def make_rows(num_tokens: int, hidden: int, dtype: torch.dtype, device: str, strided: bool = False) -> Tensor:
    """Values of very different scale from row to row, one row all zero."""
    generator = torch.Generator().manual_seed(num_tokens * hidden)
    x = torch.randn(num_tokens, 2 * hidden if strided else hidden, generator=generator)
    x *= torch.logspace(-2, 2, num_tokens)[:, None]
    x[num_tokens // 2] *= num_tokens > 1
    return x.to(device, dtype)[:, :hidden]


def exact(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype, interpreted: bool = False) -> None:
    """Triton's interpreter truncates to bf16 instead of rounding, which doubles what a rounding may cost."""
    tolerance = TOLERANCE[dtype] * (2 if interpreted and dtype is torch.bfloat16 else 1)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance / 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (3, 80), (33, 200)], ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_reference(shape: tuple[int, int], dtype: torch.dtype, strided: bool) -> None:
    x, weight = make_rows(*shape, dtype, "cpu", strided), torch.randn(shape[1]).to(dtype)
    assert_close(rms_norm(x, weight, EPS), exact(x, weight), dtype)

    residual = make_rows(shape[0], shape[1], dtype, "cpu").flip(0)
    total, before = residual + x, x.clone()
    normed, returned = add_rms_norm(x, residual, weight, EPS)
    assert returned is residual and torch.equal(residual, total) and torch.equal(x, before)
    assert torch.equal(normed, rms_norm_reference(total, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (3, 80), (33, 200), (5, 1024), (3, 2560), (1, 5000)], ids=str)
@pytest.mark.parametrize("strided", [False, True])
def test_kernel(shape: tuple[int, int], dtype: torch.dtype, strided: bool, kernel_device: str) -> None:
    x = make_rows(*shape, dtype, kernel_device, strided)
    weight = torch.randn(shape[1]).to(kernel_device, dtype)
    interpreted = kernel_device == "cpu"
    actual = rms_norm_triton(x, weight, EPS)
    assert actual.is_contiguous()
    assert_close(actual, rms_norm_reference(x, weight, EPS), dtype, interpreted)

    wide = torch.randn(shape[0], shape[1] + 16).to(kernel_device, dtype)  # a strided residual, with a guard behind it
    residual, guard, before = wide[:, : shape[1]], wide[:, shape[1] :].clone(), x.clone()
    expected, expected_residual = add_rms_norm_reference(x, residual.clone(), weight, EPS)
    actual, returned = add_rms_norm_triton(x, residual, weight, EPS)
    assert returned is residual
    if interpreted and dtype is torch.bfloat16:
        assert_close(residual, expected_residual, dtype)
    else:
        assert torch.equal(residual, expected_residual)
    assert torch.equal(x, before) and torch.equal(wide[:, shape[1] :], guard)
    assert_close(actual, expected, dtype, interpreted)


def test_kernel_without_tokens(kernel_device: str) -> None:
    x = torch.empty(0, 64, device=kernel_device)
    assert rms_norm_triton(x, x.new_ones(64), EPS).shape == (0, 64)


def test_rows_that_are_not_contiguous_are_refused(kernel_device: str) -> None:
    x = torch.ones(64, 8, device=kernel_device).T
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm_triton(x, x.new_ones(64), EPS)


@pytest.mark.gpu(seconds=6)
@pytest.mark.parametrize(
    ("hidden", "dtype"), [(1024, torch.bfloat16), (4096, torch.bfloat16), (1024, torch.float16), (4096, torch.float32)],
    ids=str,
)  # fmt: skip
def test_real_shapes(hidden: int, dtype: torch.dtype) -> None:
    for num_tokens in (1, 7, 512, 16384):
        x, residual = torch.randn(2, num_tokens, hidden, device="cuda").to(dtype)
        weight = torch.randn(hidden, device="cuda").to(dtype)
        assert_close(rms_norm(x, weight, EPS), rms_norm_reference(x.float(), weight.float(), EPS), dtype)
        total = x + residual
        normed, _ = add_rms_norm(x, residual, weight, EPS)
        assert torch.equal(residual, total)
        assert_close(normed, rms_norm_reference(total.float(), weight.float(), EPS), dtype)
