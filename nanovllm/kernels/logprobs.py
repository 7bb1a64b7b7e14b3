"""Log probability and rank of given tokens.

Owns: one pass over each row of logits that gives all three numbers a row: the logarithm of its softmax's denominator,
the token's log probability and its rank. Invariant: computed in float32 whatever the logits' dtype, without a second
copy of them. It deliberately does not look for the most probable tokens: few requests ask for these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.kernels._triton import tl, triton

BLOCK = 4096
REFERENCE_ROWS = 64  # rows that the reference converts to float32 at once


@triton.jit
def _token_logprobs_kernel(
    logits_ptr, logits_stride, index_ptr, tokens_ptr, logprobs_ptr, ranks_ptr, log_sums_ptr, vocab_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    logits_ptr += tl.load(index_ptr + i).to(tl.int64) * logits_stride
    token = tl.maximum(tl.load(tokens_ptr + i), 0)
    value = tl.load(logits_ptr + token).to(tl.float32)
    row_max = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    rank = tl.full([], 1, tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        rank += tl.sum(((x > value) | ((x == value) & (ids < token))).to(tl.int32), 0)
        new_max = tl.maximum(row_max, tl.max(x, 0))
        safe_max = tl.where(new_max > float("-inf"), new_max, 0.0)  # a block of nothing but -inf adds nothing
        total = total * tl.exp(row_max - safe_max) + tl.sum(tl.exp(x - safe_max), 0)
        row_max = new_max
    log_sum = row_max + tl.log(total)
    tl.store(logprobs_ptr + i, value - log_sum)
    tl.store(ranks_ptr + i, rank)
    tl.store(log_sums_ptr + i, log_sum)


def token_logprobs(logits: Tensor, index: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of `tokens` int32 [n] under the rows `index` int64 [n] of `logits` [S, V] (bfloat16, float16 or float32).

    Returns log probabilities float32 [n], ranks int32 [n] (1: the most probable; of equals the lower id comes first)
    and the logarithms of the sums of exp(logits), float32 [n]. A token of -1 counts as 0.
    """
    function = token_logprobs_triton if logits.is_cuda else token_logprobs_reference
    return function(logits, index, tokens)


def token_logprobs_triton(logits: Tensor, index: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, vocab_size = index.shape[0], logits.shape[1]
    assert logits.stride(1) == 1 and tokens.is_contiguous() and index.is_contiguous()
    logprobs, log_sums = torch.empty(2, num_rows, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows > 0:
        _token_logprobs_kernel[(num_rows,)](
            logits, logits.stride(0), index, tokens, logprobs, ranks, log_sums, vocab_size, BLOCK=BLOCK, num_warps=8
        )
    return logprobs, ranks, log_sums


def token_logprobs_reference(logits: Tensor, index: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logprobs, log_sums = torch.empty(2, index.shape[0], device=logits.device)
    ranks = torch.empty(index.shape[0], dtype=torch.int32, device=logits.device)
    ids = torch.arange(logits.shape[1], device=logits.device)
    for start in range(0, index.shape[0], REFERENCE_ROWS):
        rows = slice(start, start + REFERENCE_ROWS)
        x = logits[index[rows]].float()  # [n, V]
        token = tokens[rows, None].long().clamp(min=0)
        value = x.gather(1, token)
        log_sums[rows] = x.logsumexp(1)
        logprobs[rows] = value[:, 0] - log_sums[rows]
        ranks[rows] = 1 + ((x > value) | ((x == value) & (ids < token))).sum(1, dtype=torch.int32)
    return logprobs, ranks, log_sums
