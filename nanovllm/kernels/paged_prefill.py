"""Causal attention of prompt chunks over the paged KV cache: a Triton kernel and its torch reference.

Owns: attention of many query tokens per sequence. Invariant: a chunk may start anywhere, so whole prompts, later chunks
and prompts behind a cached prefix are one case, and K and V come from the cache only. It deliberately does no work for
CUDA graphs: steps with prompts run eagerly.

A tile packs the query heads of one KV head: row r is token r // GROUP, head r % GROUP. Short chunks then still fill it.
Softmax is online and in base 2 (FlashAttention-2, Dao, 2023); blocks that every row sees in full carry no mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels._triton import tl, triton
from nanovllm.kernels.device import device_of
from nanovllm.kernels.paged_decode import LOG2_E


@triton.jit
def _find_sequence(tile, cu_seqlens_ptr, num_seqs, TILE_TOKENS: tl.constexpr):
    """The sequence that owns this tile and the number of its first tile.

    Sequence i's tiles start at (tokens before it) // TILE_TOKENS + i: with one spare tile a sequence no prefix sum over
    rounded lengths is needed. Spare tiles find themselves behind the end of their sequence.
    """
    base = tl.load(cu_seqlens_ptr)
    offs = tl.arange(0, 128)
    seq = -1
    for start in tl.range(0, num_seqs, 128):
        index = start + offs
        before = tl.load(cu_seqlens_ptr + index, mask=index < num_seqs, other=0) - base
        starts_before = (before // TILE_TOKENS + index <= tile) & (index < num_seqs)
        seq += tl.sum(starts_before.to(tl.int32), 0)
    return seq, (tl.load(cu_seqlens_ptr + seq) - base) // TILE_TOKENS + seq


@triton.jit
def _attend_blocks(
    acc,
    row_sum,
    row_max,
    q,  # [BLOCK_M, D]
    positions,  # [BLOCK_M], of each row's token in its sequence
    k_desc,
    v_desc,
    kv_column,  # where this KV head's values start in a row of the descriptors
    k_ptr,
    v_ptr,
    table_ptr,
    first,  # blocks of BLOCK_N keys: [first, end)
    end,
    num_keys,  # keys behind these are no row's business
    scale_log2,
    window,
    stride_k_page,
    stride_k_token,
    stride_v_page,
    stride_v_token,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr,  # only blocks within one page, all of whose slots hold keys of the sequence
    NUM_STAGES: tl.constexpr = None,
):
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM_PAD)
    is_dim = offs_d < HEAD_DIM
    if USE_TMA:
        page = tl.load(table_ptr + first * BLOCK_N // PAGE, mask=first < end, other=0)
    for block in tl.range(first, end, num_stages=NUM_STAGES):
        keys = block * BLOCK_N + offs_n
        if USE_TMA:
            row = page * PAGE + block * BLOCK_N % PAGE
            # A step ahead: a look-up in the step of its use would cost the pipeline a stage.
            page = tl.load(table_ptr + tl.minimum(block + 1, end - 1) * BLOCK_N // PAGE)
            k = k_desc.load([row, kv_column])  # [BLOCK_N, D]
            v = v_desc.load([row, kv_column])
        elif PAGE % BLOCK_N == 0:
            page = tl.load(table_ptr + block * BLOCK_N // PAGE).to(tl.int64)
            slots = block * BLOCK_N % PAGE + offs_n
            k_tile_ptr = k_ptr + page * stride_k_page + slots[:, None] * stride_k_token + offs_d[None, :]
            v_tile_ptr = v_ptr + page * stride_v_page + slots[:, None] * stride_v_token + offs_d[None, :]
        else:
            pages = tl.load(table_ptr + keys // PAGE, mask=keys < num_keys, other=0).to(tl.int64)
            slots = keys % PAGE
            k_tile_ptr = k_ptr + (pages * stride_k_page + slots * stride_k_token)[:, None] + offs_d[None, :]
            v_tile_ptr = v_ptr + (pages * stride_v_page + slots * stride_v_token)[:, None] + offs_d[None, :]
        if USE_TMA:
            pass
        elif MASKED:
            tile_mask = (keys < num_keys)[:, None] & is_dim[None, :]
            k = tl.load(k_tile_ptr, mask=tile_mask, other=0.0)  # [BLOCK_N, D]
            v = tl.load(v_tile_ptr, mask=tile_mask, other=0.0)
        elif HEAD_DIM == HEAD_DIM_PAD:
            k = tl.load(k_tile_ptr)
            v = tl.load(v_tile_ptr)
        else:
            k = tl.load(k_tile_ptr, mask=is_dim[None, :], other=0.0)
            v = tl.load(v_tile_ptr, mask=is_dim[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [BLOCK_M, BLOCK_N]
        if MASKED:
            visible = keys[None, :] <= positions[:, None]
            if HAS_WINDOW:
                visible = visible & (keys[None, :] > positions[:, None] - window)
            # Finite: a row that sees nothing of this block takes probabilities of 1 here and drops them, by a rescaling
            # of exactly zero, at the first block that it does see.
            scores = tl.where(visible, scores * scale_log2, -1e30)
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            probs = tl.exp2(scores - new_max[:, None])
        else:
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
            probs = tl.exp2(scores * scale_log2 - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        acc = tl.dot(probs.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        row_max = new_max
    return acc, row_sum, row_max


# Behind a step's decodes these three start anywhere: one compilation must serve whatever their alignment.
@triton.jit(
    do_not_specialize=["num_seqs", "window", "stride_table"],
    do_not_specialize_on_alignment=["cu_seqlens_ptr", "seq_lens_ptr", "block_table_ptr"],
)
def _paged_prefill_kernel(
    out_ptr,  # [T, H, D]
    q_ptr,  # [T, H, D]
    k_ptr,  # [num_blocks, PAGE, KH, D]
    v_ptr,
    k_desc,  # with USE_TMA, of k and v as [num_blocks * PAGE, KH * D], in boxes of [BLOCK_N, D]
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
    stride_k_page,
    stride_k_token,
    stride_k_head,
    stride_v_page,
    stride_v_token,
    stride_v_head,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # last tiles first: within a sequence they see the most keys
    seq, first_tile = _find_sequence(tile, cu_seqlens_ptr, num_seqs, TILE_TOKENS)
    start = tl.load(cu_seqlens_ptr + seq)
    query_len = tl.load(cu_seqlens_ptr + seq + 1) - start
    first_token = (tile - first_tile) * TILE_TOKENS
    if first_token >= query_len:
        return

    seq_len = tl.load(seq_lens_ptr + seq)
    first_position = seq_len - query_len + first_token
    num_keys = tl.minimum(first_position + TILE_TOKENS, seq_len)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM_PAD)
    tokens = first_token + offs_m // GROUP
    heads = kv_head * GROUP + offs_m % GROUP
    is_row = (tokens < query_len) & (offs_m < TILE_TOKENS * GROUP)
    row_mask = is_row[:, None] & (offs_d < HEAD_DIM)[None, :]
    rows = (start + tokens).to(tl.int64)
    q = tl.load(
        q_ptr + (rows * stride_q_token + heads * stride_q_head)[:, None] + offs_d[None, :], mask=row_mask, other=0.0
    )
    positions = first_position + offs_m // GROUP

    row_max = tl.full([BLOCK_M], -1e30, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PAD], tl.float32)
    first_block = 0
    full_end = (first_position + 1) // BLOCK_N  # blocks before this one are seen in full by every row
    if HAS_WINDOW:
        first_block = tl.maximum(first_position - window + 1, 0) // BLOCK_N
        full_end = first_block
    end_block = (num_keys + BLOCK_N - 1) // BLOCK_N
    k_ptr += kv_head * stride_k_head
    v_ptr += kv_head * stride_v_head
    table_ptr = block_table_ptr + seq.to(tl.int64) * stride_table
    kv_column = kv_head * HEAD_DIM
    if not HAS_WINDOW:
        acc, row_sum, row_max = _attend_blocks(
            acc, row_sum, row_max, q, positions, k_desc, v_desc, kv_column, k_ptr, v_ptr, table_ptr, first_block,
            full_end, num_keys, scale_log2, window, stride_k_page, stride_k_token, stride_v_page, stride_v_token,
            HEAD_DIM, HEAD_DIM_PAD, PAGE, BLOCK_N, HAS_WINDOW, False, PRECISION, USE_TMA,
        )  # fmt: skip
    if USE_TMA:
        # A descriptor knows no sequence's end: what a page holds behind it (NaN, maybe) must not meet a probability
        # of zero. Only the last block of a sequence can have such slots, and it goes by pointers, with masks.
        clean_end = tl.minimum(seq_len // BLOCK_N, end_block)
        acc, row_sum, row_max = _attend_blocks(
            acc, row_sum, row_max, q, positions, k_desc, v_desc, kv_column, k_ptr, v_ptr, table_ptr, full_end,
            clean_end, num_keys, scale_log2, window, stride_k_page, stride_k_token, stride_v_page, stride_v_token,
            HEAD_DIM, HEAD_DIM_PAD, PAGE, BLOCK_N, HAS_WINDOW, True, PRECISION, True,
        )  # fmt: skip
        full_end = tl.maximum(full_end, clean_end)
    acc, row_sum, row_max = _attend_blocks(
        acc, row_sum, row_max, q, positions, k_desc, v_desc, kv_column, k_ptr, v_ptr, table_ptr, full_end, end_block,
        num_keys, scale_log2, window, stride_k_page, stride_k_token, stride_v_page, stride_v_token, HEAD_DIM,
        HEAD_DIM_PAD, PAGE, BLOCK_N, HAS_WINDOW, True, PRECISION, False, 1 if USE_TMA else None,
    )  # fmt: skip
    out = acc / row_sum[:, None]
    out_offsets = (rows * stride_out_token + heads * HEAD_DIM)[:, None] + offs_d[None, :]
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=row_mask)


def prefill_launch_options(
    head_dim_pad: int, group: int, dtype: torch.dtype, shared_memory: int = 99 << 10
) -> dict[str, Any]:
    """Query rows and keys a tile, warps and pipeline depth, by the bytes of shared memory that a program may have.

    At head_dim 128 an H200 (227 KiB) does 490-550 TFLOP/s with 128 x 128 tiles three deep by TMA, which frees the
    registers that addresses took, and 400-425 with the same tiles by pointers. The smaller tiles are for cards with
    less (A100 163, L4 and 4090 99). Only chips that have TMA have so much.
    """
    if dtype == torch.float32:  # exact dots run on the plain cores: small tiles, or the accumulators spill
        return {"BLOCK_M": max(16, triton.next_power_of_2(group)), "BLOCK_N": 32, "num_warps": 4, "num_stages": 1}
    block_m = max(128, triton.next_power_of_2(group))
    if head_dim_pad <= 64:
        return {"BLOCK_M": block_m, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3 if shared_memory > 120 << 10 else 2}
    if head_dim_pad <= 128:
        if shared_memory >= 224 << 10:
            return {"BLOCK_M": block_m, "BLOCK_N": 128, "num_warps": 8, "num_stages": 3, "USE_TMA": True}
        if shared_memory >= 160 << 10:
            return {"BLOCK_M": block_m, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
        return {"BLOCK_M": max(64, block_m // 2), "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
    if shared_memory >= 224 << 10:
        return {"BLOCK_M": block_m, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
    return {
        "BLOCK_M": max(64, block_m // 2),
        "BLOCK_N": 32,
        "num_warps": 4,
        "num_stages": 2 if shared_memory > 120 << 10 else 1,
    }


def cache_descriptors(k_cache: Tensor, v_cache: Tensor, block_n: int) -> tuple[Any, Any] | None:
    """Tensor descriptors of the caches as [num_blocks * block_size, KH * D] in boxes of [block_n, D], for TMA.

    None where there can be none: a box has to lie in one block, D to be a power of two of 16 bytes or more, and slots
    to follow each other evenly. Made anew for each launch: a few microseconds, and nothing is kept alive.
    """
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    if block_size % block_n != 0 or head_dim & (head_dim - 1) != 0 or head_dim * k_cache.element_size() < 16:
        return None
    for cache in (k_cache, v_cache):
        page, token, head, dim = cache.stride()
        is_even = page == block_size * token and (head, dim) == (head_dim, 1)
        if not is_even or cache.data_ptr() % 16 != 0 or token * cache.element_size() % 16 != 0:
            return None
    from triton.tools.tensor_descriptor import TensorDescriptor

    shape, box = [num_blocks * block_size, num_kv_heads * head_dim], [block_n, head_dim]
    return (
        TensorDescriptor(k_cache, shape, [k_cache.stride(1), 1], box),
        TensorDescriptor(v_cache, shape, [v_cache.stride(1), 1], box),
    )


def paged_prefill_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    window: int | None,
    out: Tensor,
    first_token: int = 0,
    options: dict[str, Any] | None = None,
) -> None:
    """Launch on B sequences: cu_seqlens_q int32 [B + 1], seq_lens int32 [B], block_table int32 [B, max_blocks].

    q and out are [T, H, D] (heads of out contiguous), k_cache and v_cache [num_blocks, block_size, KH, D]. cu_seqlens_q
    counts in rows of q; `first_token` is its first entry, which sizes the grid without a look at the device.

    `options` stands in for `prefill_launch_options`; with USE_TMA, whole blocks of keys come through descriptors where
    the caches allow it (`cache_descriptors`), and by pointers elsewhere.
    """
    num_seqs = seq_lens.shape[0]
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    head_dim_pad = triton.next_power_of_2(head_dim)
    options = dict(options or prefill_launch_options(head_dim_pad, group, q.dtype, device_of(q.device).shared_memory))
    k_desc = v_desc = None
    if options.pop("USE_TMA", False):
        k_desc, v_desc = cache_descriptors(k_cache, v_cache, options["BLOCK_N"]) or (None, None)
    num_tiles = (q.shape[0] - first_token) // (options["BLOCK_M"] // group) + num_seqs
    _paged_prefill_kernel[(num_kv_heads, num_tiles)](
        out,
        q,
        k_cache,
        v_cache,
        k_desc,
        v_desc,
        cu_seqlens_q,
        seq_lens,
        block_table,
        scale * LOG2_E,
        num_seqs,
        window if window is not None else 0,
        out.stride(0),
        q.stride(0),
        q.stride(1),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=head_dim_pad,
        PAGE=block_size,
        HAS_WINDOW=window is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        USE_TMA=k_desc is not None,
        **options,
    )


def paged_prefill_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    window: int | None,
    out: Tensor,
) -> None:
    """The specification, one sequence at a time; query i of a chunk sits at position seq_len - query_len + i."""
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = q.shape[1] // num_kv_heads
    bounds = cu_seqlens_q.tolist()
    for b, seq_len in enumerate(seq_lens.tolist()):
        start, end = bounds[b], bounds[b + 1]
        blocks = block_table[b, : -(-seq_len // block_size)].long()
        keys = k_cache[blocks].flatten(0, 1)[:seq_len].float()  # [L, KH, D]
        values = v_cache[blocks].flatten(0, 1)[:seq_len].float()
        positions = torch.arange(seq_len - (end - start), seq_len, device=q.device)[:, None]  # [query_len, 1]
        indices = torch.arange(seq_len, device=q.device)[None, :]  # [1, L]
        visible = indices <= positions
        if window is not None:
            visible &= indices > positions - window
        grouped = q[start:end].float().unflatten(1, (num_kv_heads, group))  # [query_len, KH, G, D]
        scores = torch.einsum("qhgd,lhd->hgql", grouped, keys) * scale
        probs = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out[start:end] = torch.einsum("hgql,lhd->qhgd", probs, values).flatten(1, 2).to(out.dtype)
