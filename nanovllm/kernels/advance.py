"""The end of a step: rows take up their sampled tokens and move on.

Owns: how `num_computed` and `num_tokens` grow on the device. Invariant: every row of the batch but row 0 has its query
tokens counted as computed, and every row that sampled has one token more; row 0 never changes, however often a graph
replays it. It deliberately does not stop anything: end ids and lengths are the host's business, a step or two later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.kernels._triton import tl, triton

BLOCK = 128


@triton.jit(do_not_specialize=["num_rows", "num_sampled"])
def _advance_kernel(
    rows_ptr,
    cu_seqlens_q_ptr,
    num_rows,
    num_sampled,
    sampled_ptr,
    token_ids_ptr,
    token_ids_stride,
    max_model_len,
    num_tokens_ptr,
    num_computed_ptr,
    BLOCK: tl.constexpr,
):
    batch = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + batch, mask=batch < num_rows, other=0)
    live = row != 0  # what is past the batch reads as row 0, too
    start = tl.load(cu_seqlens_q_ptr + batch, mask=live, other=0)
    end = tl.load(cu_seqlens_q_ptr + batch + 1, mask=live, other=0)
    num_computed = tl.load(num_computed_ptr + row, mask=live, other=0)
    tl.store(num_computed_ptr + row, num_computed + end - start, mask=live)

    samples = live & (batch < num_sampled)
    token = tl.load(sampled_ptr + batch, mask=samples, other=0)
    num_tokens = tl.load(num_tokens_ptr + row, mask=samples, other=0)
    place = token_ids_ptr + row.to(tl.int64) * token_ids_stride + num_tokens
    tl.store(place, token, mask=samples & (num_tokens < max_model_len))
    tl.store(num_tokens_ptr + row, num_tokens + 1, mask=samples)


def advance(
    rows: Tensor,
    cu_seqlens_q: Tensor,
    num_sampled: int,
    sampled: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed: Tensor,
) -> None:
    """Count this step's tokens as computed and append the sampled ones, in place.

    `rows` int32 [B] (no row but 0 twice), `cu_seqlens_q` int32 [B + 1], `sampled` int32 [at least num_sampled] for the
    first `num_sampled` of the batch, `token_ids` int32 [R, max_model_len], `num_tokens` and `num_computed` int32 [R]. A
    token that has no room in its row is counted but not written.
    """
    args = (rows, cu_seqlens_q, num_sampled, sampled, token_ids, num_tokens, num_computed)
    if rows.is_cuda:
        advance_triton(*args)
    else:
        advance_reference(*args)


def advance_triton(
    rows: Tensor,
    cu_seqlens_q: Tensor,
    num_sampled: int,
    sampled: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed: Tensor,
) -> None:
    num_rows = rows.shape[0]
    if num_rows == 0:
        return
    _advance_kernel[(triton.cdiv(num_rows, BLOCK),)](
        rows,
        cu_seqlens_q,
        num_rows,
        num_sampled,
        sampled,
        token_ids,
        token_ids.stride(0),
        token_ids.shape[1],
        num_tokens,
        num_computed,
        BLOCK=BLOCK,
        num_warps=4,
    )


def advance_reference(
    rows: Tensor,
    cu_seqlens_q: Tensor,
    num_sampled: int,
    sampled: Tensor,
    token_ids: Tensor,
    num_tokens: Tensor,
    num_computed: Tensor,
) -> None:
    live = rows != 0
    lengths = cu_seqlens_q[1 : rows.shape[0] + 1] - cu_seqlens_q[: rows.shape[0]]
    num_computed[rows[live]] += lengths[live]

    live = live[:num_sampled]
    row = rows[:num_sampled][live].long()
    tokens = sampled[:num_sampled][live].to(torch.int32)
    position = num_tokens[row].long()
    fits = position < token_ids.shape[1]
    token_ids[row[fits], position[fits]] = tokens[fits]
    num_tokens[row] += 1
