"""Attention of one query token per sequence over the paged KV cache: a Triton kernel and its torch reference.

Owns: decode attention, how its work is shared out, and its workspace. Invariant: the grid depends on the batch size
alone (a single short row's, on the bound of its length) and every length is read on the device, so a launch captured in
a CUDA graph stays right while the sequences grow, up to that bound. A single row whose context is short has a kernel of
its own (`paged_decode_row_kernel.py`). The other deliberately takes no part in dependent launch: products that start
beside it find an SM's memory given to its tiles, and read their weights more slowly (docs/performance.md).

The query heads of a KV head form one tile of at least 16 rows, so K and V are read once. Reading them is the whole
cost: padded rows are free as long as the tile stays that small. An item, one KV head of one sequence, has a program or,
where there are few items, several that split its keys (Flash-Decoding, Dao et al., 2023). Each of these leaves a
normalised partial output and its log-sum-exp (base 2), and whichever of an item's programs arrives last merges them, in
order of the splits: no second kernel, and the same result whoever is last.

With `rope` the kernel also does what `rope.py` does for other tokens: it normalises and rotates q and the new key, and
stores the new key and value, which it takes from registers. That saves a launch in every layer, and pays where there
are few items: the start of each program is longer by it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels._triton import triton
from nanovllm.kernels.device import Device, dependent_launch, device_of
from nanovllm.kernels.paged_decode_kernel import paged_decode_kernel
from nanovllm.kernels.paged_decode_row_kernel import row_decode_kernel
from nanovllm.kernels.rope import Rope, qk_norm_rope_store_reference

LOG2_E = math.log2(math.e)
MAX_SPLITS = 32  # programs without keys still cost their launch
PROGRAMS_PER_SM = 2  # about what few items are split into: so many of their programs fit an SM at once
MERGE_SPLITS = 16  # partial results that the merge holds at a time
MANY_ITEMS_PER_SM = 6  # from here on small tiles, and a rotation of its own
SHORT_CONTEXT = 1024  # keys: up to here a single row is better off with a kernel of its own


@dataclass(frozen=True)
class DecodeBatch:
    """The sequences of a step that decode: one query token each."""

    seq_lens: Tensor  # int32 [B], the query token included
    block_table: Tensor  # int32 [B, max_blocks]
    slot_mapping: Tensor  # int64 [>= B]: where the query tokens' keys and values go
    max_seq_len: int  # at least the largest of seq_lens, frozen where a graph is captured


@dataclass(frozen=True)
class DecodeWorkspace:
    """Where splits leave their partial results: allocated once, for every batch size, so that graphs can hold it."""

    partial_out: Tensor  # float32, flat
    partial_lse: Tensor  # float32, flat
    arrivals: Tensor  # int32, zero between launches
    num_sms: int


def make_decode_workspace(
    num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device | str, num_programs: int | None = None
) -> DecodeWorkspace:
    """Workspace for any batch of this model: see `choose_num_splits`.

    num_programs: room for so many instead, for a caller that chooses the splits itself.
    """
    num_sms = device_of(torch.device(device)).num_sms
    if num_programs is None:
        num_programs = 2 * PROGRAMS_PER_SM * num_sms
    num_rows = num_programs * (num_heads // num_kv_heads)
    return DecodeWorkspace(
        partial_out=torch.empty(num_rows * head_dim, dtype=torch.float32, device=device),
        partial_lse=torch.empty(num_rows, dtype=torch.float32, device=device),
        arrivals=torch.zeros(num_programs, dtype=torch.int32, device=device),
        num_sms=num_sms,
    )


def choose_num_splits(num_items: int, num_sms: int) -> int:
    """Programs an item at most, frozen at graph capture.

    Rounded up from 0.3 on: two programs that run one after the other on some SMs cost less than one on each.
    """
    return max(1, min(int(PROGRAMS_PER_SM * num_sms / num_items + 0.7), MAX_SPLITS))


def has_many_items(num_items: int, num_sms: int) -> bool:
    """Whether q and the new keys had better come rotated: many programs would each do a part of that first."""
    return num_items >= many_items(num_sms)


def many_items(num_sms: int) -> int:
    return MANY_ITEMS_PER_SM * num_sms


def decode_launch_options(
    head_dim_pad: int, dtype: torch.dtype, block_size: int, num_items: int, device: Device
) -> dict[str, Any]:
    """Tile of keys, warps and pipeline depth, measured on an H200 (docs/performance.md).

    Many programs want small tiles (38 KiB at head_dim 128), so that more of them fit an SM and the last ones end
    together. Few want much on its way (70 KiB): in large tiles or, where about two rounds of programs fill the chip, in
    small ones with a deeper pipeline. Where shared memory is too small for two such programs, small tiles serve all.
    """
    if dtype == torch.float32:
        return {"BLOCK_N": 32, "num_warps": 4, "num_stages": 2}
    is_few = not has_many_items(num_items, device.num_sms) and device.shared_memory >= 2 * 72 * 1024
    is_deep = is_few and num_items > 4 * device.num_sms
    block_n = max(32, min(128, (128 if is_few and not is_deep else 64) * 128 // head_dim_pad))
    if block_size < block_n and block_size >= 64 and block_size & (block_size - 1) == 0:
        block_n = block_size
    # The table's entry is a load before the tile's: of five stages, two hold tiles.
    return {"BLOCK_N": block_n, "num_warps": 4, "num_stages": 5 if is_deep else 2}


def decode_variant(
    num_seqs: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, block_size: int, device: Device, has_rope: bool
) -> dict[str, Any]:
    """What the launch of a batch is compiled for, beyond what is the same for all batches of a model.

    Without rope a few decodes take what many do: only the last layer of a step with prompts has such ones, and what a
    launch of their own would gain there is less than its compilation costs at start.
    """
    num_items = num_seqs * num_kv_heads if has_rope else max(num_seqs * num_kv_heads, many_items(device.num_sms))
    return {
        "SPLIT": choose_num_splits(num_items, device.num_sms) > 1,
        **decode_launch_options(1 << (head_dim - 1).bit_length(), dtype, block_size, num_items, device),
    }


def row_block(q: Tensor, batch: DecodeBatch, rope: Rope | None, workspace: DecodeWorkspace) -> int | None:
    """Keys of a program of the kernel for a single row's short context, in 64 registers of a thread; None: not used."""
    if rope is None or len(batch.seq_lens) != 1 or batch.max_seq_len > SHORT_CONTEXT:
        return None
    block_n = max(1, 64 * 128 * 2 // (triton.next_power_of_2(q.shape[2]) * q.element_size()))
    num_heads, num_programs = q.shape[1], q.shape[1] * -(-batch.max_seq_len // block_n)
    has_room = num_heads <= workspace.arrivals.numel() and num_programs <= workspace.partial_lse.numel()
    return block_n if block_n >= 16 and has_room else None


def paged_decode_triton(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: DecodeBatch,
    scale: float,
    window: int | None,
    out: Tensor,
    rope: Rope | None,
    workspace: DecodeWorkspace,
    num_splits: int | None = None,
    options: dict[str, Any] | None = None,
) -> None:
    """out[b] = softmax(scale * q[b] K^T) V over sequence b's visible keys; the first B rows of q and out [>=B, H, D].

    k_cache, v_cache [num_blocks, block_size, KH, D]; the heads of an out row are contiguous. Without `rope` q is
    rotated and all keys are in the cache; k and v may be None. With it q, k, v [>=B, heads, D] come from one
    projection, as views of one tensor, and this call stores sequence b's last key and value at batch.slot_mapping[b].
    A row that pads a graph has seq_len 1 and a slot that nobody reads. `num_splits` and `options` stand in for what
    would be chosen.
    """
    num_seqs, head_dim = batch.seq_lens.shape[0], q.shape[2]
    block_size, num_kv_heads = k_cache.shape[1:3]
    group, head_dim_pad = q.shape[1] // num_kv_heads, triton.next_power_of_2(head_dim)
    device = device_of(q.device)
    strides = (
        out.stride(0), q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
        batch.block_table.stride(0),
    )  # fmt: skip
    constants = {
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PAD": head_dim_pad,
        "PAGE": block_size,
        "HAS_WINDOW": window is not None,
        "HAS_NORM": rope is not None and rope.q_weight is not None,
        "MERGE_SPLITS": MERGE_SPLITS,
    }
    projected = (q, q, q, q, q, batch.seq_lens) if rope is None else _projected(q, k, v, batch, rope)
    args = (
        out, workspace.partial_out, workspace.partial_lse, workspace.arrivals, q, *projected, k_cache, v_cache,
        batch.seq_lens, batch.block_table, scale * LOG2_E, 0.0 if rope is None else rope.eps,
    )  # fmt: skip
    block_n = row_block(q, batch, rope, workspace) if num_splits is None else None
    if block_n is not None:
        num_blocks = -(-batch.max_seq_len // block_n)
        row_decode_kernel[(q.shape[1], 1, num_blocks)](
            *args, num_blocks, window or 0, *strides, BLOCK_N=block_n, **constants, **dependent_launch(device)
        )
        return
    launch = decode_variant(num_seqs, num_kv_heads, head_dim, q.dtype, block_size, device, rope is not None)
    num_items = num_seqs * num_kv_heads
    if num_splits is None:
        num_splits = choose_num_splits(num_items, workspace.num_sms) if launch["SPLIT"] else 1
    assert num_splits == 1 or num_items * num_splits <= workspace.arrivals.numel()
    paged_decode_kernel[(num_kv_heads, num_seqs, num_splits)](
        *args, num_splits, window or 0, *strides,
        GROUP_PAD=max(16, triton.next_power_of_2(group)),
        HAS_ROPE=rope is not None,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **constants,
        **launch | {"SPLIT": num_splits > 1} | (options or {}),
    )  # fmt: skip


def _projected(q: Tensor, k: Tensor | None, v: Tensor | None, batch: DecodeBatch, rope: Rope) -> tuple[Tensor, ...]:
    """new_k, new_v, q_weight, k_weight, cos_sin, slots of the kernel; weights that are not there are never read."""
    assert k is not None and v is not None
    first = 0 if len(q) > 1 else 1  # the stride of one row means nothing
    if {t.stride()[first:2] for t in (q, k, v)} != {q.stride()[first:2]}:
        raise ValueError(f"q, k and v must be views of one tensor, got {q.stride()}, {k.stride()}, {v.stride()}")
    if (rope.q_weight is None) != (rope.k_weight is None) or not rope.cos_sin.is_contiguous():
        raise ValueError("norms of q and k are both there or both not, and cos_sin must be contiguous")
    q_weight, k_weight = (q if weight is None else weight for weight in (rope.q_weight, rope.k_weight))
    return k, v, q_weight, k_weight, rope.cos_sin, batch.slot_mapping


def paged_decode_reference(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: DecodeBatch,
    scale: float,
    window: int | None,
    out: Tensor,
    rope: Rope | None,
) -> None:
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = q.shape[1] // num_kv_heads
    if rope is not None:
        assert k is not None and v is not None
        num_seqs, num_heads, head_dim = len(batch.seq_lens), *q.shape[1:]
        qkv = torch.cat([q[:num_seqs], k[:num_seqs], v[:num_seqs]], dim=1).flatten(1)
        slots = batch.slot_mapping[:num_seqs]
        qk_norm_rope_store_reference(
            qkv, rope, batch.seq_lens - 1, slots, k_cache, v_cache, num_heads, num_kv_heads, head_dim, False
        )
        q = qkv.unflatten(1, (-1, head_dim))[:, :num_heads]
    for b, seq_len in enumerate(batch.seq_lens.tolist()):
        blocks = batch.block_table[b, : -(-seq_len // block_size)].long()
        first = 0 if window is None else max(0, seq_len - window)
        keys = k_cache[blocks].flatten(0, 1)[first:seq_len].float()  # [L, KH, D]
        values = v_cache[blocks].flatten(0, 1)[first:seq_len].float()
        grouped = q[b].float().unflatten(0, (num_kv_heads, group))  # [KH, G, D]
        probs = (torch.einsum("hgd,lhd->hgl", grouped, keys) * scale).softmax(-1)
        out[b] = torch.einsum("hgl,lhd->hgd", probs, values).flatten(0, 1).to(out.dtype)
