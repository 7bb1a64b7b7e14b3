"""RMSNorm over the hidden dimension, alone or fused with the residual addition before it.

Owns: the rounding, which is that of transformers. The sum x + residual is rounded to the dtype first; mean and scale
are float32 of that rounded sum; the normalised value is rounded to the dtype, then multiplied by the weight.
Invariant: kernel and reference round at the same places in every dtype. It deliberately has no backward and no bias.

RMSNorm: Zhang and Sennrich 2019, arXiv:1910.07467.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.kernels._triton import tl, triton

_ELEMENTS = 1024  # a program's tile, at least: 4 warps of 16-byte loads
_ELEMENTS_LARGE = 4096  # the same where there are programs enough to fill any card many times over
LARGE_BATCH_ELEMENTS = 4_000_000


@triton.jit(do_not_specialize=["num_tokens", "eps"])
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    num_tokens,
    eps,
    x_stride,
    residual_stride,
    HIDDEN: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]  # [ROWS, 1]
    columns = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    mask = (rows < num_tokens) & (columns < HIDDEN)
    dtype = out_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + columns, mask=columns < HIDDEN, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + rows * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        residual_ptrs = residual_ptr + rows * residual_stride + columns
        x = (x + tl.load(residual_ptrs, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(residual_ptrs, x, mask=mask)
        x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / HIDDEN + eps)
    normed = (x * scale).to(dtype).to(tl.float32) * weight
    tl.store(out_ptr + rows * HIDDEN + columns, normed.to(dtype), mask=mask)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    num_tokens, hidden = x.shape
    if x.stride(1) != 1 or (residual is not None and (residual.shape != x.shape or residual.stride(1) != 1)):
        raise ValueError(f"rms_norm: rows must be contiguous and shapes equal, got x {tuple(x.shape)} {x.stride()}")
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = 1 << (hidden - 1).bit_length()
    rows = max((_ELEMENTS_LARGE if num_tokens * hidden >= LARGE_BATCH_ELEMENTS else _ELEMENTS) // block, 1)
    _rms_norm_kernel[(-(-num_tokens // rows),)](
        x,
        x if residual is None else residual,
        weight,
        out,
        num_tokens,
        eps,
        x.stride(0),
        hidden if residual is None else residual.stride(0),
        HIDDEN=hidden,
        HAS_RESIDUAL=residual is not None,
        ROWS=rows,
        BLOCK=block,
        num_warps=4 if block < 4096 else 8 if block < 16384 else 16,
    )
    return out


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, None, weight, eps)


def add_rms_norm_triton(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _launch(x, residual, weight, eps), residual


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype).mul_(weight)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    residual += x
    return rms_norm_reference(residual, weight, eps), residual


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [T, H] (rows may be strided) with weight [H] of x's dtype: a new [T, H]."""
    return rms_norm_triton(x, weight, eps) if x.is_cuda else rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`residual` [T, H] becomes x + residual in place, x stays; returns (RMSNorm of the sum [T, H], residual)."""
    run = add_rms_norm_triton if x.is_cuda else add_rms_norm_reference
    return run(x, residual, weight, eps)
