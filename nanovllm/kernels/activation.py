"""SiLU(gate) * up over the packed output of the merged gate/up projection.

Owns: the activation of the gated MLP. Invariant: SiLU is computed in float32 and rounded to the dtype before the
product, as transformers does. It deliberately knows no other activation: the model configuration refuses them by name.

SwiGLU: Shazeer 2020, arXiv:2002.05202.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.kernels._triton import tl, triton

_BLOCK = 1024  # 4 warps of 16-byte loads, from each half


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    # One grid dimension, columns fastest: programs that run together touch neighbouring memory.
    blocks_per_row: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    columns = (tl.program_id(0) % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    dtype = out_ptr.dtype.element_ty
    gate = tl.load(x_ptr + row * x_stride + columns, mask=mask).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + SIZE + columns, mask=mask).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, (silu * up).to(dtype), mask=mask)


def silu_and_mul_triton(x: Tensor) -> Tensor:
    num_tokens, width = x.shape
    if width % 2 or x.stride(1) != 1:
        raise ValueError(f"silu_and_mul: x must be [T, 2 * I] with contiguous rows, got {tuple(x.shape)} {x.stride()}")
    size = width // 2
    out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    grid = (num_tokens * -(-size // _BLOCK),)
    _silu_and_mul_kernel[grid](x, out, x.stride(0), SIZE=size, BLOCK=_BLOCK)
    return out


def silu_and_mul_reference(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


def silu_and_mul(x: Tensor) -> Tensor:
    """x [T, 2 * I], gate then up (rows may be strided): a new [T, I]."""
    return silu_and_mul_triton(x) if x.is_cuda else silu_and_mul_reference(x)
