"""Between the QKV projection and attention: per-head RMSNorm, rotary embedding, and the store into the KV cache.

Owns: the one pass over `qkv` that turns projected values into what attention reads. Invariant: each value is read from
global memory once; q is written back in place, K and V go to the cache. It deliberately does not compute the cosines:
`cos_sin` holds them in float32 for every position, with the model's rope scaling already in them.

Rounding: the norm rounds as transformers does (see `norm.py`). The rotation is float32 and rounds once; transformers
rounds cos, sin and both products to the model's dtype, so in bf16 and fp16 this is the closer of the two to the truth,
and in float32 they are equal.

RoPE: Su et al. 2021, arXiv:2104.09864, in the rotate-half layout of GPT-NeoX. Norm of q and k per head: Qwen3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.kernels._triton import tl, triton
from nanovllm.kernels.norm import rms_norm_reference

_ELEMENTS = 1024  # values in a program's tile of half heads: 4 warps of 16-byte loads


@dataclass(frozen=True)
class Rope:
    """How a layer turns projected q and k into what attention compares.

    q_weight, k_weight [D] are those of the norm over each head, None where the model has none; eps is theirs. cos_sin
    is float32 [max_pos, D], cosines then sines, contiguous.
    """

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    cos_sin: Tensor


@triton.jit
def _norm_rope(
    x1, x2, weight_ptr, eps, cos, sin, columns, in_half, dtype: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr
):
    """The two halves of some heads, [ROWS, BLOCK] each: normalised, rotated, rounded to `dtype`."""
    x1 = x1.to(tl.float32)
    x2 = x2.to(tl.float32)
    if HAS_NORM:
        weight1 = tl.load(weight_ptr + columns, mask=in_half, other=0.0).to(tl.float32)
        weight2 = tl.load(weight_ptr + HALF + columns, mask=in_half, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, axis=1, keep_dims=True) / (2 * HALF) + eps)
        x1 = ((x1 * scale).to(dtype).to(tl.float32) * weight1).to(dtype).to(tl.float32)
        x2 = ((x2 * scale).to(dtype).to(tl.float32) * weight2).to(dtype).to(tl.float32)
    return (x1 * cos - x2 * sin).to(dtype), (x2 * cos + x1 * sin).to(dtype)


@triton.jit(do_not_specialize=["first_token", "num_tokens", "eps"])
def _qk_norm_rope_store_kernel(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    cos_sin_ptr,
    positions_ptr,
    slot_mapping_ptr,
    k_cache_ptr,
    v_cache_ptr,
    first_token,
    num_tokens,  # from first_token on
    eps,
    qkv_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    WRITE_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # A tile's rows are (token, head) pairs, flattened, so no number of heads wastes lanes; a head's two halves are two
    # tiles, so the rotation's partner lies in the same thread. K and V come first: their programs have more to do.
    num_kv_programs = (num_tokens * NUM_KV_HEADS + ROWS - 1) // ROWS
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    in_half = columns < HALF
    dtype = qkv_ptr.dtype.element_ty

    if program < num_kv_programs:
        rows = (program * ROWS + tl.arange(0, ROWS))[:, None]  # [ROWS, 1]
        token = rows // NUM_KV_HEADS
        head = rows % NUM_KV_HEADS
        row_mask = token < num_tokens
        mask = row_mask & in_half
        token += first_token
        position = tl.load(positions_ptr + token, mask=row_mask, other=0).to(tl.int64)
        slot = tl.load(slot_mapping_ptr + token, mask=row_mask, other=-1)
        k_ptrs = qkv_ptr + token.to(tl.int64) * qkv_stride + (NUM_HEADS + head) * (2 * HALF) + columns
        v_ptrs = k_ptrs + NUM_KV_HEADS * 2 * HALF
        k1 = tl.load(k_ptrs, mask=mask, other=0.0)
        k2 = tl.load(k_ptrs + HALF, mask=mask, other=0.0)
        v1 = tl.load(v_ptrs, mask=mask, other=0.0)
        v2 = tl.load(v_ptrs + HALF, mask=mask, other=0.0)
        cos = tl.load(cos_sin_ptr + position * (2 * HALF) + columns, mask=mask, other=0.0)
        sin = tl.load(cos_sin_ptr + position * (2 * HALF) + HALF + columns, mask=mask, other=0.0)
        k1, k2 = _norm_rope(k1, k2, k_weight_ptr, eps, cos, sin, columns, in_half, dtype, HALF, HAS_K_NORM)
        cached = slot * (NUM_KV_HEADS * 2 * HALF) + head * (2 * HALF) + columns  # 64-bit: slots are
        store_mask = mask & (slot >= 0)
        tl.store(k_cache_ptr + cached, k1, mask=store_mask)
        tl.store(k_cache_ptr + cached + HALF, k2, mask=store_mask)
        tl.store(v_cache_ptr + cached, v1, mask=store_mask)
        tl.store(v_cache_ptr + cached + HALF, v2, mask=store_mask)
        if WRITE_K:
            tl.store(k_ptrs, k1, mask=mask)
            tl.store(k_ptrs + HALF, k2, mask=mask)
    else:
        rows = ((program - num_kv_programs) * ROWS + tl.arange(0, ROWS))[:, None]  # [ROWS, 1]
        token = rows // NUM_HEADS
        head = rows % NUM_HEADS
        row_mask = token < num_tokens
        mask = row_mask & in_half
        token += first_token
        position = tl.load(positions_ptr + token, mask=row_mask, other=0).to(tl.int64)
        q_ptrs = qkv_ptr + token.to(tl.int64) * qkv_stride + head * (2 * HALF) + columns
        q1 = tl.load(q_ptrs, mask=mask, other=0.0)
        q2 = tl.load(q_ptrs + HALF, mask=mask, other=0.0)
        cos = tl.load(cos_sin_ptr + position * (2 * HALF) + columns, mask=mask, other=0.0)
        sin = tl.load(cos_sin_ptr + position * (2 * HALF) + HALF + columns, mask=mask, other=0.0)
        q1, q2 = _norm_rope(q1, q2, q_weight_ptr, eps, cos, sin, columns, in_half, dtype, HALF, HAS_Q_NORM)
        tl.store(q_ptrs, q1, mask=mask)
        tl.store(q_ptrs + HALF, q2, mask=mask)


def qk_norm_rope_store_triton(
    qkv: Tensor,
    rope: Rope,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    write_k: bool,
    first_token: int = 0,
) -> None:
    num_tokens, width = qkv.shape
    if width != (num_heads + 2 * num_kv_heads) * head_dim or qkv.stride(1) != 1 or head_dim % 2:
        raise ValueError(
            f"qkv: [T, {(num_heads + 2 * num_kv_heads) * head_dim}] with contiguous rows and even heads needed, "
            f"got {tuple(qkv.shape)} {qkv.stride()}, head_dim {head_dim}"
        )
    if not (k_cache.is_contiguous() and v_cache.is_contiguous() and rope.cos_sin.is_contiguous()):
        raise ValueError("k_cache, v_cache and cos_sin must be contiguous")
    block = 1 << (head_dim // 2 - 1).bit_length()
    rows = max(_ELEMENTS // block, 1)
    num_tokens -= first_token
    num_programs = -(-num_tokens * num_kv_heads // rows) + -(-num_tokens * num_heads // rows)
    _qk_norm_rope_store_kernel[(num_programs,)](
        qkv,
        qkv if rope.q_weight is None else rope.q_weight,
        qkv if rope.k_weight is None else rope.k_weight,
        rope.cos_sin,
        positions,
        slot_mapping,
        k_cache,
        v_cache,
        first_token,
        num_tokens,
        rope.eps,
        qkv.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        HAS_Q_NORM=rope.q_weight is not None,
        HAS_K_NORM=rope.k_weight is not None,
        WRITE_K=write_k,
        ROWS=rows,
        BLOCK=block,
    )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.float().chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).to(x.dtype)


def qk_norm_rope_store_reference(
    qkv: Tensor,
    rope: Rope,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    write_k: bool,
    first_token: int = 0,
) -> None:
    if first_token:
        qkv, positions, slot_mapping = qkv[first_token:], positions[first_token:], slot_mapping[first_token:]
    q_weight, k_weight, eps = rope.q_weight, rope.k_weight, rope.eps
    heads = qkv.unflatten(1, (num_heads + 2 * num_kv_heads, head_dim))  # [T, H + 2 * KH, D], a view
    q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    cos, sin = rope.cos_sin[positions.long()][:, None].chunk(2, dim=-1)  # [T, 1, D / 2] each
    if q_weight is None and k_weight is None:
        normed = heads[:, : num_heads + num_kv_heads]
    else:
        q_normed = q if q_weight is None else rms_norm_reference(q, q_weight, eps)
        k_normed = k if k_weight is None else rms_norm_reference(k, k_weight, eps)
        normed = torch.cat((q_normed, k_normed), dim=1)
    q_rotated, k_rotated = _rotate(normed, cos, sin).split((num_heads, num_kv_heads), dim=1)
    q.copy_(q_rotated)
    if write_k:
        k.copy_(k_rotated)
    if (slot_mapping < 0).any():
        kept = slot_mapping >= 0
        slot_mapping, k_rotated, v = slot_mapping[kept], k_rotated[kept], v[kept]
    for cache, values in ((k_cache, k_rotated), (v_cache, v)):
        cache.view(-1, num_kv_heads, head_dim).index_copy_(0, slot_mapping, values.to(cache.dtype))


def qk_norm_rope_store(
    qkv: Tensor,
    rope: Rope,
    positions: Tensor,
    slot_mapping: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    write_k: bool,
    first_token: int = 0,
) -> None:
    """Normalise and rotate q and k of `qkv` [T, (H + 2 * KH) * D] from `first_token` on; store K and V.

    q is replaced in place, and k too when `write_k` (for a backend that reads a prompt's keys from `qkv`). `positions`
    int32 [T]; `slot_mapping` int64 [T], flat slots of the caches [num_blocks, block_size, KH, D], contiguous; a slot of
    -1 stores nothing.
    """
    run = qk_norm_rope_store_triton if qkv.is_cuda else qk_norm_rope_store_reference
    run(qkv, rope, positions, slot_mapping, k_cache, v_cache, num_heads, num_kv_heads, head_dim, write_k, first_token)
