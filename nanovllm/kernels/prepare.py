"""Make a step's model inputs and attention metadata on the device, from the persistent rows.

Owns: the way from (rows, cu_seqlens_q) to input ids, positions, slots, lengths and block tables. Invariant: the host is
never asked for a token id or a length, so steps in flight chain without a round trip. It deliberately does not advance
the rows: that is the last act of a step, not its first.

Row 0 is reserved for the padding of CUDA graphs: whatever its state holds, it acts as an empty sequence
(num_computed = 0) of zero ids, so that it cannot grow from replay to replay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.kernels._triton import tl, triton

_BLOCK_QUERY = 1024  # tokens of a prompt chunk that one program prepares
_BLOCK_QUERY_SMALL = 16  # decode, drafts
_MAX_BLOCK_TABLE = 1024  # block table entries that one program copies at once


@triton.jit(do_not_specialize_on_alignment=["rows_ptr", "cu_seqlens_q_ptr"])
def _prepare_inputs_kernel(
    rows_ptr,
    cu_seqlens_q_ptr,
    token_ids_ptr,
    num_computed_ptr,
    block_tables_ptr,
    out_input_ids_ptr,
    out_positions_ptr,
    out_slot_mapping_ptr,
    out_seq_lens_ptr,
    out_block_table_ptr,
    token_ids_stride,
    block_tables_stride,
    out_block_table_stride,
    MAX_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_QUERY: tl.constexpr,
    BLOCK_TABLE: tl.constexpr,
):
    index = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.load(rows_ptr + index).to(tl.int64)  # 64-bit: row * stride may pass 2^31
    query_start = tl.load(cu_seqlens_q_ptr + index)
    query_len = tl.load(cu_seqlens_q_ptr + index + 1) - query_start
    num_computed = tl.where(row == 0, 0, tl.load(num_computed_ptr + row))
    seq_len = num_computed + query_len

    offsets = part * BLOCK_QUERY + tl.arange(0, BLOCK_QUERY)
    mask = offsets < query_len
    positions = num_computed + offsets
    num_ids = tl.where(row == 0, 0, query_len)
    ids = tl.load(token_ids_ptr + row * token_ids_stride + positions, mask=offsets < num_ids, other=0)
    # The bound holds for row 0 only, which a profiling run may make longer than its table.
    block_index = positions // BLOCK_SIZE
    blocks = tl.load(
        block_tables_ptr + row * block_tables_stride + block_index, mask=mask & (block_index < MAX_BLOCKS), other=0
    )
    out = query_start + offsets
    tl.store(out_input_ids_ptr + out, tl.maximum(ids, 0), mask=mask)  # -1 says that logits were not finite
    tl.store(out_positions_ptr + out, positions, mask=mask)
    tl.store(out_slot_mapping_ptr + out, blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE, mask=mask)

    if part == 0:
        tl.store(out_seq_lens_ptr + index, seq_len)
    num_blocks = tl.minimum((seq_len + BLOCK_SIZE - 1) // BLOCK_SIZE, MAX_BLOCKS)
    table = block_tables_ptr + row * block_tables_stride
    out_table = out_block_table_ptr + index.to(tl.int64) * out_block_table_stride
    for start in range(part * BLOCK_TABLE, num_blocks, BLOCK_TABLE * tl.num_programs(1)):
        columns = start + tl.arange(0, BLOCK_TABLE)
        used = columns < num_blocks
        tl.store(out_table + columns, tl.load(table + columns, mask=used), mask=used)


def prepare_inputs_triton(
    rows: Tensor,
    cu_seqlens_q: Tensor,
    token_ids: Tensor,
    num_computed: Tensor,
    block_tables: Tensor,
    block_size: int,
    max_query_len: int,
    out_input_ids: Tensor,
    out_positions: Tensor,
    out_slot_mapping: Tensor,
    out_seq_lens: Tensor,
    out_block_table: Tensor,
) -> None:
    max_blocks = min(block_tables.shape[1], out_block_table.shape[1])
    block_query = _BLOCK_QUERY_SMALL if max_query_len <= _BLOCK_QUERY_SMALL else _BLOCK_QUERY
    grid = (cu_seqlens_q.shape[0] - 1, max(-(-max_query_len // block_query), 1))
    _prepare_inputs_kernel[grid](
        rows,
        cu_seqlens_q,
        token_ids,
        num_computed,
        block_tables,
        out_input_ids,
        out_positions,
        out_slot_mapping,
        out_seq_lens,
        out_block_table,
        token_ids.stride(0),
        block_tables.stride(0),
        out_block_table.stride(0),
        MAX_BLOCKS=max_blocks,
        BLOCK_SIZE=block_size,
        BLOCK_QUERY=block_query,
        BLOCK_TABLE=min(1 << (max_blocks - 1).bit_length(), _MAX_BLOCK_TABLE),
    )


def prepare_inputs_reference(
    rows: Tensor,
    cu_seqlens_q: Tensor,
    token_ids: Tensor,
    num_computed: Tensor,
    block_tables: Tensor,
    block_size: int,
    max_query_len: int,
    out_input_ids: Tensor,
    out_positions: Tensor,
    out_slot_mapping: Tensor,
    out_seq_lens: Tensor,
    out_block_table: Tensor,
) -> None:
    batch = cu_seqlens_q.shape[0] - 1
    max_blocks = min(block_tables.shape[1], out_block_table.shape[1])
    rows = rows[:batch].long()  # [B]
    query_lens = cu_seqlens_q[1:] - cu_seqlens_q[:-1]  # [B]
    computed = torch.where(rows == 0, 0, num_computed[rows])  # [B]
    seq_lens = computed + query_lens  # [B]

    index = torch.repeat_interleave(torch.arange(batch, device=rows.device), query_lens)  # [T]
    num_tokens = index.shape[0]
    token_rows = rows[index]  # [T]
    positions = (computed - cu_seqlens_q[:-1])[index] + torch.arange(num_tokens, device=rows.device)  # [T]
    real = token_rows != 0
    ids = token_ids[token_rows, torch.where(real, positions, 0)].clamp(min=0)
    block_index = positions // block_size
    in_table = block_index < max_blocks
    blocks = torch.where(in_table, block_tables[token_rows, torch.where(in_table, block_index, 0)], 0)
    out_input_ids[:num_tokens] = torch.where(real, ids, 0)
    out_positions[:num_tokens] = positions
    out_slot_mapping[:num_tokens] = blocks.long() * block_size + positions % block_size

    out_seq_lens[:batch] = seq_lens
    used = torch.arange(max_blocks, device=rows.device) < (seq_lens[:, None] + block_size - 1) // block_size
    out = out_block_table[:batch, :max_blocks]
    out.copy_(torch.where(used, block_tables[rows, :max_blocks], out))


def prepare_inputs(
    rows: Tensor,
    cu_seqlens_q: Tensor,
    token_ids: Tensor,
    num_computed: Tensor,
    block_tables: Tensor,
    block_size: int,
    max_query_len: int,
    out_input_ids: Tensor,
    out_positions: Tensor,
    out_slot_mapping: Tensor,
    out_seq_lens: Tensor,
    out_block_table: Tensor,
) -> None:
    """Fill the `out_*` buffers with what the model reads in this step.

    `rows` int32 [>= B] and `cu_seqlens_q` int32 [B + 1] (its shape says B) are the batch; `token_ids` int32
    [R, max_model_len], `num_computed` int32 [R] and `block_tables` int32 [R, M] are the rows. Written: input ids and
    positions int32 [>= T], slots int64 [>= T], lengths int32 [>= B], block table int32 [>= B, M]: each sequence's first
    cdiv(length, block_size) entries, the others keep what they held. `max_query_len` is at least the longest chunk: it
    sizes the launch only.
    """
    run = prepare_inputs_triton if rows.is_cuda else prepare_inputs_reference
    run(
        rows,
        cu_seqlens_q,
        token_ids,
        num_computed,
        block_tables,
        block_size,
        max_query_len,
        out_input_ids,
        out_positions,
        out_slot_mapping,
        out_seq_lens,
        out_block_table,
    )
