"""Attention of one query token per sequence over the paged KV cache: split-KV Triton kernels and their torch reference.

Owns: decode attention, its split count and its workspace. Invariant: the grid depends on the batch size alone and every
length is read on the device, so a launch captured in a CUDA graph stays right while the sequences grow. It deliberately
does not look at the longest possible length: a split that has no keys exits at once, and short sequences pay nothing.

The query heads of a KV head form one tile of at least 16 rows, so K and V are read once. Reading them is the whole
cost: padded rows are free as long as the tile stays that small. With several splits (Flash-Decoding, Dao et al., 2023)
each program leaves a normalised partial output and its log-sum-exp (base 2), and whichever of a sequence's programs
arrives last merges them, in order of the splits: no second kernel, and the same result whoever is last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels._triton import tl, triton
from nanovllm.kernels.device import dependent_launch, device_of

LOG2_E = math.log2(math.e)
MAX_SPLITS = 128
ITEMS_PER_SM = 6  # from so many items ((sequence, KV head) pairs) an SM on, they fill the memory pipes and follow on
PROGRAMS_PER_SM = 5  # fewer items are split into at most so many
MIN_TILES_PER_SPLIT = 4  # where there is an item for every SM: a shorter split costs more in the merge than it gains
MERGE_SPLITS = 16  # partial results that the merge holds at a time


@triton.jit
def _key_range(seq_len, window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The blocks of BLOCK_N keys that the last token of a sequence sees: [first, end)."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(seq_len - window, 0) // BLOCK_N
    return first, (seq_len + BLOCK_N - 1) // BLOCK_N


@triton.jit(do_not_specialize=["num_splits", "min_tiles", "window", "stride_table"])
def _paged_decode_kernel(
    out_ptr,  # [B, H, D]
    partial_ptr,  # float32 [B, KH, num_splits, GROUP, D], with SPLIT only, like the next two
    lse_ptr,  # float32 [B, KH, num_splits, GROUP]
    arrivals_ptr,  # int32 [B, KH], zero before and after
    q_ptr,  # [B, H, D]
    k_ptr,  # [num_blocks, PAGE, KH, D]
    v_ptr,
    seq_lens_ptr,  # int32 [B]
    block_table_ptr,  # int32 [B, max_blocks]
    scale_log2,
    num_splits,
    min_tiles,
    window,
    stride_out_seq,
    stride_q_seq,
    stride_q_head,
    stride_k_page,
    stride_k_token,
    stride_k_head,
    stride_v_page,
    stride_v_token,
    stride_v_head,
    stride_table,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    split = tl.program_id(2)
    num_kv_heads = tl.num_programs(0)
    seq_len = tl.load(seq_lens_ptr + seq)
    first, end = _key_range(seq_len, window, BLOCK_N, HAS_WINDOW)
    num_used = 1
    if SPLIT:
        num_used = tl.minimum(tl.maximum((end - first) // min_tiles, 1), num_splits)
        per_split = (end - first + num_used - 1) // num_used
        num_used = (end - first + per_split - 1) // per_split
        first += split * per_split
        end = tl.minimum(first + per_split, end)
        if first >= end:
            return

    offs_g = tl.arange(0, GROUP_PAD)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM_PAD)
    is_head = offs_g < GROUP
    is_dim = offs_d < HEAD_DIM
    heads = kv_head * GROUP + offs_g
    q_offsets = seq.to(tl.int64) * stride_q_seq + heads[:, None] * stride_q_head + offs_d[None, :]
    q = tl.load(q_ptr + q_offsets, mask=is_head[:, None] & is_dim[None, :], other=0.0)  # [GROUP_PAD, D]

    table_ptr = block_table_ptr + seq.to(tl.int64) * stride_table
    k_ptr += kv_head * stride_k_head
    v_ptr += kv_head * stride_v_head
    row_max = tl.full([GROUP_PAD], -1e30, tl.float32)
    row_sum = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, HEAD_DIM_PAD], tl.float32)
    for block in tl.range(first, end):
        keys = block * BLOCK_N + offs_n
        in_seq = keys < seq_len
        if PAGE % BLOCK_N == 0:
            page = tl.load(table_ptr + block * BLOCK_N // PAGE).to(tl.int64)
            slots = block * BLOCK_N % PAGE + offs_n
            k_tile_ptr = k_ptr + page * stride_k_page + slots[:, None] * stride_k_token + offs_d[None, :]
            v_tile_ptr = v_ptr + page * stride_v_page + slots[:, None] * stride_v_token + offs_d[None, :]
        else:  # the keys of a block lie in several pages; entries behind the last one are not to be trusted
            pages = tl.load(table_ptr + keys // PAGE, mask=in_seq, other=0).to(tl.int64)
            slots = keys % PAGE
            k_tile_ptr = k_ptr + (pages * stride_k_page + slots * stride_k_token)[:, None] + offs_d[None, :]
            v_tile_ptr = v_ptr + (pages * stride_v_page + slots * stride_v_token)[:, None] + offs_d[None, :]
        # Masked, so that the rest of a page costs no traffic and its NaNs, if it has any, meet no zero probability.
        tile_mask = in_seq[:, None] if HEAD_DIM == HEAD_DIM_PAD else in_seq[:, None] & is_dim[None, :]
        k = tl.load(k_tile_ptr, mask=tile_mask, other=0.0)  # [BLOCK_N, D]
        v = tl.load(v_tile_ptr, mask=tile_mask, other=0.0)
        visible = in_seq
        if HAS_WINDOW:
            visible = visible & (keys >= seq_len - window)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2  # [GROUP_PAD, BLOCK_N]
        scores = tl.where(visible[None, :], scores, -1e30)
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        probs = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        acc = tl.dot(probs.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)
        row_max = new_max

    out = acc / row_sum[:, None]
    out_mask = is_head[:, None] & is_dim[None, :]
    out_row_ptr = out_ptr + seq.to(tl.int64) * stride_out_seq + kv_head * GROUP * HEAD_DIM
    if num_used == 1:
        tl.store(out_row_ptr + offs_g[:, None] * HEAD_DIM + offs_d[None, :], out.to(out_ptr.dtype.element_ty), out_mask)
    elif SPLIT:
        item = seq.to(tl.int64) * num_kv_heads + kv_head
        row = (item * num_splits + split) * GROUP + offs_g
        tl.store(lse_ptr + row, row_max + tl.log2(row_sum), mask=is_head)
        tl.store(partial_ptr + row[:, None] * HEAD_DIM + offs_d[None, :], out, mask=out_mask)
        tl.debug_barrier()  # all of this program's stores come before its arrival
        arrived = tl.atomic_add(arrivals_ptr + item, 1, sem="acq_rel")
        if arrived == num_used - 1:
            tl.store(arrivals_ptr + item, 0)
            for head in tl.static_range(GROUP):
                first_row = item * num_splits * GROUP + head
                merged = _merge_partials(
                    partial_ptr, lse_ptr, first_row, num_used, GROUP, HEAD_DIM, HEAD_DIM_PAD, MERGE_SPLITS
                )
                out_head_ptr = out_row_ptr + head * HEAD_DIM + offs_d
                tl.store(out_head_ptr, merged.to(out_ptr.dtype.element_ty), mask=is_dim)


@triton.jit
def _merge_partials(
    partial_ptr,
    lse_ptr,
    first_row,
    num_used,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
):
    """One head's output [D] from its partial results; split s lies in row first_row + s * GROUP.

    Other SMs wrote them: they are read from L2, for L1 may hold these lines from before.
    """
    offs_s = tl.arange(0, MERGE_SPLITS)
    offs_d = tl.arange(0, HEAD_DIM_PAD)
    is_dim = offs_d < HEAD_DIM
    lse_max = -1e30
    total = 0.0
    acc = tl.zeros([HEAD_DIM_PAD], tl.float32)
    for start in tl.range(0, num_used, MERGE_SPLITS):
        used = start + offs_s < num_used
        rows = first_row + (start + offs_s) * GROUP
        lse = tl.load(lse_ptr + rows, mask=used, other=-1e30, cache_modifier=".cg")  # [MERGE_SPLITS]
        part = tl.load(
            partial_ptr + rows[:, None] * HEAD_DIM + offs_d[None, :],
            mask=used[:, None] & is_dim[None, :],
            other=0.0,
            cache_modifier=".cg",
        )  # [MERGE_SPLITS, D]
        new_max = tl.maximum(lse_max, tl.max(lse, 0))
        weights = tl.exp2(lse - new_max)
        rescale = tl.exp2(lse_max - new_max)
        acc = acc * rescale + tl.sum(part * weights[:, None], 0)
        total = total * rescale + tl.sum(weights, 0)
        lse_max = new_max
    return acc / total


@dataclass(frozen=True)
class DecodeWorkspace:
    """Where splits leave their partial results: allocated once, for every batch size, so that graphs can hold it."""

    partial_out: Tensor  # float32, flat
    partial_lse: Tensor  # float32, flat
    arrivals: Tensor  # int32, zero between launches
    num_sms: int
    max_splits: int


def make_decode_workspace(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_model_len: int,
    device: torch.device | str,
    num_programs: int | None = None,
) -> DecodeWorkspace:
    """Workspace for any batch of this model: a batch that is split has at most PROGRAMS_PER_SM programs an SM.

    num_programs: room for so many instead, for a caller that chooses the splits itself.
    """
    num_sms = device_of(torch.device(device)).num_sms
    if num_programs is None:
        num_programs = PROGRAMS_PER_SM * num_sms
    num_rows = num_programs * (num_heads // num_kv_heads)
    return DecodeWorkspace(
        partial_out=torch.empty(num_rows * head_dim, dtype=torch.float32, device=device),
        partial_lse=torch.empty(num_rows, dtype=torch.float32, device=device),
        arrivals=torch.zeros(num_programs, dtype=torch.int32, device=device),
        num_sms=num_sms,
        # programs without keys still cost their launch: no finer than a short context can use
        max_splits=min(MAX_SPLITS, max(32, triton.cdiv(max_model_len, 256))),
    )


def choose_num_splits(num_seqs: int, num_kv_heads: int, workspace: DecodeWorkspace) -> int:
    """Splits per (sequence, KV head) at most: the host's only decision, frozen at graph capture.

    Rounded down: one more wave would cost more than the finer split gains.
    """
    num_items = num_seqs * num_kv_heads
    if num_items >= ITEMS_PER_SM * workspace.num_sms:
        return 1
    return max(1, min(PROGRAMS_PER_SM * workspace.num_sms // num_items, workspace.max_splits))


def decode_launch_options(
    head_dim_pad: int, dtype: torch.dtype, block_size: int, has_few_items: bool
) -> dict[str, Any]:
    """Tile of keys, warps and pipeline depth: at head_dim 128, 38 KiB a program of many and 70 KiB one of few.

    Measured on an H200 (docs/performance.md): many programs want small tiles, so that more of them fit an SM and the
    last ones end together; few want large ones, so that enough bytes are on their way. Deeper pipelines gained nothing.
    """
    if dtype == torch.float32:
        return {"BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    block_n = max(32, min(128, (128 if has_few_items else 64) * 128 // head_dim_pad))
    if block_size < block_n and block_size >= 64 and block_size & (block_size - 1) == 0:
        block_n = block_size
    return {"BLOCK_N": block_n, "num_warps": 4, "num_stages": 2}


def paged_decode_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    window: int | None,
    out: Tensor,
    workspace: DecodeWorkspace,
    num_splits: int | None = None,
) -> None:
    """Launch on the first B = seq_lens.shape[0] rows of q [>=B, H, D] and out [>=B, H, D] (heads of out contiguous).

    k_cache, v_cache [num_blocks, block_size, KH, D]; seq_lens int32 [B]; block_table int32 [B, max_blocks].
    num_splits None takes `choose_num_splits`; another value must fit the workspace.
    """
    num_seqs = seq_lens.shape[0]
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    if num_splits is None:
        num_splits = choose_num_splits(num_seqs, num_kv_heads, workspace)
    num_items = num_seqs * num_kv_heads
    has_few_items = num_items < ITEMS_PER_SM * workspace.num_sms
    assert num_splits == 1 or num_items * num_splits <= workspace.arrivals.numel()
    head_dim_pad = triton.next_power_of_2(head_dim)
    group = num_heads // num_kv_heads
    _paged_decode_kernel[(num_kv_heads, num_seqs, num_splits)](
        out,
        workspace.partial_out,
        workspace.partial_lse,
        workspace.arrivals,
        q,
        k_cache,
        v_cache,
        seq_lens,
        block_table,
        scale * LOG2_E,
        num_splits,
        1 if num_items < workspace.num_sms else MIN_TILES_PER_SPLIT,
        window if window is not None else 0,
        out.stride(0),
        q.stride(0),
        q.stride(1),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        GROUP=group,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=head_dim_pad,
        PAGE=block_size,
        HAS_WINDOW=window is not None,
        SPLIT=has_few_items or num_splits > 1,
        MERGE_SPLITS=MERGE_SPLITS,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **decode_launch_options(head_dim_pad, q.dtype, block_size, has_few_items),
        **dependent_launch(device_of(q.device), num_seqs),
    )


def paged_decode_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    window: int | None,
    out: Tensor,
) -> None:
    """The specification: out[b] = softmax(scale * q[b] K^T) V over sequence b's visible keys."""
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = q.shape[1] // num_kv_heads
    for b, seq_len in enumerate(seq_lens.tolist()):
        blocks = block_table[b, : -(-seq_len // block_size)].long()
        first = 0 if window is None else max(0, seq_len - window)
        keys = k_cache[blocks].flatten(0, 1)[first:seq_len].float()  # [L, KH, D]
        values = v_cache[blocks].flatten(0, 1)[first:seq_len].float()
        grouped = q[b].float().unflatten(0, (num_kv_heads, group))  # [KH, G, D]
        probs = (torch.einsum("hgd,lhd->hgl", grouped, keys) * scale).softmax(-1)
        out[b] = torch.einsum("hgl,lhd->hgd", probs, values).flatten(0, 1).to(out.dtype)


def paged_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    scale: float,
    window: int | None,
    out: Tensor,
    workspace: DecodeWorkspace,
) -> None:
    """`paged_decode_triton` for CUDA tensors, else `paged_decode_reference`."""
    if q.is_cuda:
        paged_decode_triton(q, k_cache, v_cache, seq_lens, block_table, scale, window, out, workspace)
    else:
        paged_decode_reference(q, k_cache, v_cache, seq_lens, block_table, scale, window, out)
