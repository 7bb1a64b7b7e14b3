"""Causal attention of prompt chunks with specialized warps, for Hopper: loads, and twice softmax and products.

Owns: a variant of `paged_prefill.py`'s kernel for half precision and head dims that are powers of two. One warp group
copies K and V by TMA; two others own half of a tile's rows each and wait only for the copies, so that one's softmax
runs beside the other's products (as in FlashAttention-3, Shah et al., 2024). Invariant: the same function, but it may
write zeros behind a sequence's end into the sequence's own last page. It deliberately has no other path: `supports_ws`
says whether it serves, and the other kernel serves everything.

What the specializing pass of Triton 3.6 takes shapes the kernel: four warps, one loop, no early return, and no load
into the first operand of a product that it sees, since it would hand that to the copying warps: q is loaded by inline
assembly. (A descriptor of q made on the host would not do: its box stays whole where the pass halves the tile.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels._triton import tl, triton
from nanovllm.kernels.paged_decode import LOG2_E
from nanovllm.kernels.paged_prefill import _find_sequence, cache_descriptors


@triton.jit
def _zero_tails_kernel(
    v_ptr,  # [num_blocks, PAGE, KH, D]
    seq_lens_ptr,
    block_table_ptr,
    stride_v_page,
    stride_v_token,
    stride_v_head,
    stride_table,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Zero V from a sequence's end to the end of the block: a probability of zero times a stale NaN would be NaN."""
    seq = tl.program_id(0)
    seq_len = tl.load(seq_lens_ptr + seq)
    block_start = seq_len // BLOCK_N * BLOCK_N
    if block_start == seq_len:
        return
    page = tl.load(block_table_ptr + seq.to(tl.int64) * stride_table + block_start // PAGE).to(tl.int64)
    keys = block_start + tl.arange(0, BLOCK_N)
    offsets = (keys % PAGE)[:, None] * stride_v_token + tl.arange(0, HEAD_DIM)[None, :]
    v_ptrs = v_ptr + page * stride_v_page + tl.program_id(1) * stride_v_head + offsets
    tl.store(v_ptrs, tl.zeros([BLOCK_N, HEAD_DIM], v_ptr.dtype.element_ty), mask=(keys >= seq_len)[:, None])


@triton.jit(
    do_not_specialize=["num_seqs", "window", "stride_table"],
    do_not_specialize_on_alignment=["cu_seqlens_ptr", "seq_lens_ptr", "block_table_ptr"],
)
def _paged_prefill_ws_kernel(
    out_ptr,  # [T, H, D]
    q_ptr,  # [T, H, D]
    k_desc,  # of k and v as [num_blocks * PAGE, KH * D], in boxes of [BLOCK_N, D]
    v_desc,
    cu_seqlens_ptr,  # int32 [B + 1]
    seq_lens_ptr,  # int32 [B]
    block_table_ptr,  # int32 [B, max_blocks]
    scale_log2,
    num_seqs,
    window,
    stride_out_token,
    stride_q_token,
    stride_q_head,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # last tiles first: within a sequence they see the most keys
    seq, first_tile = _find_sequence(tile, cu_seqlens_ptr, num_seqs, TILE_TOKENS)
    start = tl.load(cu_seqlens_ptr + seq)
    query_len = tl.load(cu_seqlens_ptr + seq + 1) - start
    first_token = (tile - first_tile) * TILE_TOKENS
    seq_len = tl.load(seq_lens_ptr + seq)
    first_position = seq_len - query_len + first_token
    num_keys = tl.minimum(first_position + TILE_TOKENS, seq_len)
    first_block = 0
    if HAS_WINDOW:
        first_block = tl.maximum(first_position - window + 1, 0) // BLOCK_N
    end_block = (num_keys + BLOCK_N - 1) // BLOCK_N
    end_block = tl.where(first_token < query_len, end_block, first_block)  # a spare tile: no blocks, no rows

    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    tokens = first_token + offs_m // GROUP
    heads = kv_head * GROUP + offs_m % GROUP
    is_row = (tokens < query_len) & (offs_m < TILE_TOKENS * GROUP)
    rows = start + tl.minimum(tokens, query_len - 1).to(tl.int64)
    q_ptrs = q_ptr + (rows * stride_q_token + heads * stride_q_head)[:, None] + offs_d[None, :]
    positions = first_position + offs_m // GROUP
    if INTERPRETED:  # without assembly
        q = tl.load(q_ptrs)
    else:
        q = tl.inline_asm_elementwise(
            "ld.global.b16 $0, [$1];", "=h,l", [q_ptrs.to(tl.int64)], dtype=q_ptr.dtype.element_ty, is_pure=True, pack=1
        )

    row_max = tl.full([BLOCK_M], -1e30, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    table_ptr = block_table_ptr + seq.to(tl.int64) * stride_table
    for block in tl.range(first_block, end_block, warp_specialize=True):
        row = tl.load(table_ptr + block * BLOCK_N // PAGE) * PAGE + block * BLOCK_N % PAGE
        k = k_desc.load([row, kv_head * HEAD_DIM])  # [BLOCK_N, D]
        v = v_desc.load([row, kv_head * HEAD_DIM])
        scores = tl.dot(q, tl.trans(k))  # [BLOCK_M, BLOCK_N]
        keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
        visible = keys[None, :] <= positions[:, None]
        if HAS_WINDOW:
            visible = visible & (keys[None, :] > positions[:, None] - window)
        scores = tl.where(visible, scores, -1e30)  # finite: see paged_prefill.py
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        probs = tl.exp2(scores * scale_log2 - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        acc = tl.dot(probs.to(v.dtype), v, acc * rescale[:, None])
        row_max = new_max
    out = acc / row_sum[:, None]
    out_ptrs = out_ptr + (rows * stride_out_token + heads * HEAD_DIM)[:, None] + offs_d[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None])


def supports_ws(q: Tensor, k_cache: Tensor, v_cache: Tensor, options: dict[str, Any]) -> bool:
    """Whether `paged_prefill_ws` serves these: half precision, caches with descriptors, rows for two warp groups."""
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and options["BLOCK_M"] >= max(128, q.shape[1] // k_cache.shape[2])
        and cache_descriptors(k_cache, v_cache, options["BLOCK_N"]) is not None
    )


def paged_prefill_ws(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    window: int | None,
    out: Tensor,
    first_token: int,
    options: dict[str, Any],
    zero_tails: bool = True,
) -> None:
    """As `paged_prefill_triton`, where `supports_ws`; options are BLOCK_M, BLOCK_N and num_stages.

    With `zero_tails`, V is zeroed behind each sequence's end, up to the next multiple of BLOCK_N tokens.
    """
    descriptors = cache_descriptors(k_cache, v_cache, options["BLOCK_N"])
    assert descriptors is not None
    num_seqs = seq_lens.shape[0]
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    if zero_tails:
        _zero_tails_kernel[(num_seqs, num_kv_heads)](
            v_cache, seq_lens, block_table, *v_cache.stride()[:3], block_table.stride(0), HEAD_DIM=head_dim,
            PAGE=block_size, BLOCK_N=options["BLOCK_N"],
        )  # fmt: skip
    num_tiles = (q.shape[0] - first_token) // (options["BLOCK_M"] // group) + num_seqs
    _paged_prefill_ws_kernel[(num_kv_heads, num_tiles)](
        out,
        q,
        *descriptors,
        cu_seqlens_q,
        seq_lens,
        block_table,
        scale * LOG2_E,
        num_seqs,
        window if window is not None else 0,
        out.stride(0),
        q.stride(0),
        q.stride(1),
        block_table.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE=block_size,
        HAS_WINDOW=window is not None,
        INTERPRETED=not q.is_cuda,
        num_warps=4,  # of each warp group
        **options,
    )
