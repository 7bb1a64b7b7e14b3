"""Attention of one query token per sequence over the paged KV cache: split-KV Triton kernels and their torch reference.

Owns: decode attention, its split count and its workspace. Invariant: the grid depends on the batch size alone and every
length is read on the device, so a launch captured in a CUDA graph stays right while the sequences grow. It deliberately
does not look at the longest possible length: a split that has no keys exits at once, and short sequences pay nothing.

The query heads of a KV head form one tile of at least 16 rows, so K and V are read once. Reading them is all the cost:
padded rows are free as long as the tile stays that small. With several splits each program leaves a normalised partial
output and its log-sum-exp (base 2), and a second kernel merges them (Flash-Decoding, Dao et al., 2023).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels._triton import tl, triton

LOG2_E = math.log2(math.e)
MAX_SPLITS = 128
MIN_BLOCK_N = 32
PROGRAMS_PER_SM = 4  # from so many (sequence, KV head) pairs an SM on, one program each fills the memory pipes


@triton.jit
def _key_range(seq_len, window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The blocks of BLOCK_N keys that the last token of a sequence sees: [first, end)."""
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(seq_len - window, 0) // BLOCK_N
    return first, (seq_len + BLOCK_N - 1) // BLOCK_N


@triton.jit(do_not_specialize=["num_splits", "window"])
def _paged_decode_kernel(
    out_ptr,  # [B, H, D]; with SPLIT float32 partials [B, num_splits, H, D]
    lse_ptr,  # float32 [B, num_splits, H], with SPLIT only
    q_ptr,  # [B, H, D]
    k_ptr,  # [num_blocks, PAGE, KH, D]
    v_ptr,
    seq_lens_ptr,  # int32 [B]
    block_table_ptr,  # int32 [B, max_blocks]
    scale_log2,
    num_splits,
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
    PRECISION: tl.constexpr,
):
    kv_head = tl.program_id(0)
    seq = tl.program_id(1)
    split = tl.program_id(2)
    num_kv_heads = tl.num_programs(0)
    seq_len = tl.load(seq_lens_ptr + seq)
    first, end = _key_range(seq_len, window, BLOCK_N, HAS_WINDOW)
    if SPLIT:
        per_split = (end - first + num_splits - 1) // num_splits
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
    if SPLIT:
        row = (seq * num_splits + split).to(tl.int64) * num_kv_heads * GROUP + heads
        tl.store(lse_ptr + row, row_max + tl.log2(row_sum), mask=is_head)
        tl.store(out_ptr + row[:, None] * HEAD_DIM + offs_d[None, :], out, mask=out_mask)
    else:
        out_offsets = seq.to(tl.int64) * stride_out_seq + heads[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit(do_not_specialize=["num_splits", "window"])
def _merge_splits_kernel(
    out_ptr,  # [B, H, D]
    partial_ptr,  # float32 [B, num_splits, H, D]
    lse_ptr,  # float32 [B, num_splits, H]
    seq_lens_ptr,  # int32 [B]
    num_splits,
    window,
    stride_out_seq,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    head = tl.program_id(0)
    seq = tl.program_id(1)
    num_heads = tl.num_programs(0)
    first, end = _key_range(tl.load(seq_lens_ptr + seq), window, BLOCK_N, HAS_WINDOW)
    per_split = (end - first + num_splits - 1) // num_splits
    num_used = (end - first + per_split - 1) // per_split  # the splits behind these wrote nothing

    offs_s = tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, HEAD_DIM_PAD)
    is_dim = offs_d < HEAD_DIM
    lse_max = -1e30
    total = 0.0
    acc = tl.zeros([HEAD_DIM_PAD], tl.float32)
    for start in tl.range(0, num_used, BLOCK_S):
        splits = start + offs_s
        used = splits < num_used
        row = (seq * num_splits + splits).to(tl.int64) * num_heads + head
        lse = tl.load(lse_ptr + row, mask=used, other=-1e30)  # [BLOCK_S]
        part = tl.load(
            partial_ptr + row[:, None] * HEAD_DIM + offs_d[None, :], mask=used[:, None] & is_dim[None, :], other=0.0
        )
        new_max = tl.maximum(lse_max, tl.max(lse, 0))
        weights = tl.exp2(lse - new_max)
        rescale = tl.exp2(lse_max - new_max)
        acc = acc * rescale + tl.sum(part * weights[:, None], 0)
        total = total * rescale + tl.sum(weights, 0)
        lse_max = new_max
    out_offsets = seq.to(tl.int64) * stride_out_seq + head * HEAD_DIM + offs_d
    tl.store(out_ptr + out_offsets, (acc / total).to(out_ptr.dtype.element_ty), mask=is_dim)


@dataclass(frozen=True)
class DecodeWorkspace:
    """Where splits leave their partial results: allocated once, for every batch size, so that graphs can hold it."""

    partial_out: Tensor  # float32, flat
    partial_lse: Tensor  # float32, flat
    target_programs: int
    max_splits: int


def make_decode_workspace(
    num_heads: int, num_kv_heads: int, head_dim: int, max_model_len: int, device: torch.device | str
) -> DecodeWorkspace:
    """Workspace for any batch of this model. A split batch has under twice `target_programs` (split, KV head) items."""
    if torch.device(device).type == "cuda":
        target = PROGRAMS_PER_SM * torch.cuda.get_device_properties(device).multi_processor_count
    else:
        target = PROGRAMS_PER_SM
    num_rows = 2 * target * (num_heads // num_kv_heads)
    return DecodeWorkspace(
        partial_out=torch.empty(num_rows * head_dim, dtype=torch.float32, device=device),
        partial_lse=torch.empty(num_rows, dtype=torch.float32, device=device),
        target_programs=target,
        max_splits=min(MAX_SPLITS, -(-max_model_len // MIN_BLOCK_N)),
    )


def choose_num_splits(num_seqs: int, num_kv_heads: int, workspace: DecodeWorkspace) -> int:
    """Splits per (sequence, KV head) for a batch of this size: the host's only decision, frozen at graph capture."""
    num_items = num_seqs * num_kv_heads
    if num_items >= workspace.target_programs:
        return 1
    return min(-(-workspace.target_programs // num_items), workspace.max_splits)


def decode_launch_options(head_dim_pad: int, dtype: torch.dtype, block_size: int, split: bool) -> dict[str, Any]:
    """Tile of keys, warps and pipeline depth: about 64 KiB of K and V in flight a program, three programs an SM."""
    if dtype == torch.float32:
        return {"BLOCK_N": MIN_BLOCK_N, "num_warps": 4, "num_stages": 2}
    block_n = 128 if head_dim_pad <= 128 else 64
    if split or block_size == 64:  # few sequences: smaller tiles give more splits something to do
        block_n = 64
    return {"BLOCK_N": block_n, "num_warps": 4, "num_stages": 3}


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
    split = num_splits > 1
    assert not split or num_seqs * num_splits * num_heads <= workspace.partial_lse.numel()
    head_dim_pad = triton.next_power_of_2(head_dim)
    options = decode_launch_options(head_dim_pad, q.dtype, block_size, split)
    group = num_heads // num_kv_heads
    _paged_decode_kernel[(num_kv_heads, num_seqs, num_splits)](
        workspace.partial_out if split else out,
        workspace.partial_lse,
        q,
        k_cache,
        v_cache,
        seq_lens,
        block_table,
        scale * LOG2_E,
        num_splits,
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
        SPLIT=split,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **options,
    )
    if split:
        _merge_splits(seq_lens, window, out, workspace, num_splits, options["BLOCK_N"])


def _merge_splits(
    seq_lens: Tensor, window: int | None, out: Tensor, workspace: DecodeWorkspace, num_splits: int, block_n: int
) -> None:
    """Launch the kernel that turns the workspace's partial results into out."""
    num_heads, head_dim = out.shape[1:]
    _merge_splits_kernel[(num_heads, seq_lens.shape[0])](
        out,
        workspace.partial_out,
        workspace.partial_lse,
        seq_lens,
        num_splits,
        window if window is not None else 0,
        out.stride(0),
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=triton.next_power_of_2(head_dim),
        BLOCK_N=block_n,
        BLOCK_S=16,
        HAS_WINDOW=window is not None,
        num_warps=4,
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
