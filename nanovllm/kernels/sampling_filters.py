"""Min-p, top-k and top-p of one row as one threshold: the least logit that all of them let through.

Owns: the search for that threshold, by one program, on keys (floats as ordered integers), four ways at a time.
Invariant: a threshold is a value, so tokens that tie stay or go together, and every sum is made in an order that only
the row's own logits decide. It deliberately knows of no noise, and of no other row.

A span is a run of neighbouring tokens whose maximum is known. Only spans whose maximum reaches the lower end of what is
still searched are ever read; `list_ptr` names them, in ascending order. The k-th largest span maximum bounds the k-th
largest logit from below, so top-k reads about k spans.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.kernels._triton import tl, triton

# Low bits that all floats of a dtype have in common once they are float32: dropped, they are not searched.
KEY_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@triton.jit
def ordered_key(x, SHIFT: tl.constexpr):
    """int32 that orders as the float32 does; +0 and -0 are one; `SHIFT` drops low bits that the logits' dtype lacks."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _key_at_least(x, SHIFT: tl.constexpr):
    """The least key of a logit >= x, for a scalar x that the logits' dtype may not have."""
    key = ordered_key(x, 0)
    # Among positive keys the logits' dtype has those with low bits 0, among negative ones those with low bits 1.
    return tl.where(key >= 0, (key + ((1 << SHIFT) - 1)) >> SHIFT, key >> SHIFT)


@triton.jit
def list_spans(list_ptr, span_keys, spans, low):
    """Write which spans have a key >= low, in ascending order; returns how many."""
    is_listed = (span_keys >= low).to(tl.int32)
    tl.debug_barrier()  # the list before may still be read
    tl.store(list_ptr + tl.cumsum(is_listed, 0) - 1, spans, mask=is_listed > 0)
    tl.debug_barrier()
    return tl.sum(is_listed, 0)


@triton.jit
def load_listed(logits_ptr, list_ptr, num_listed, tile, vocab_size, SPAN: tl.constexpr, SPANS: tl.constexpr):
    slots = tile * SPANS + tl.arange(0, SPANS)
    spans = tl.load(list_ptr + slots, mask=slots < num_listed, other=0)
    ids = spans[:, None] * SPAN + tl.arange(0, SPAN)[None, :]  # [SPANS, SPAN]
    mask = (slots < num_listed)[:, None] & (ids < vocab_size)
    return ids, tl.load(logits_ptr + ids, mask=mask, other=float("-inf")).to(tl.float32)


@triton.jit
def _tails(
    logits_ptr, list_ptr, num_listed, vocab_size, key_1, key_2, key_3, row_max, scale,
    COUNT: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """What lies at or above three keys in the listed spans: the number of logits, or their mass over exp(max)."""
    tail_1 = tl.zeros([SPANS, SPAN], tl.float32)
    tail_2 = tl.zeros([SPANS, SPAN], tl.float32)
    tail_3 = tl.zeros([SPANS, SPAN], tl.float32)
    for tile in range(0, tl.cdiv(num_listed, SPANS)):
        _, x = load_listed(logits_ptr, list_ptr, num_listed, tile, vocab_size, SPAN, SPANS)
        key = ordered_key(x, SHIFT)
        weight = tl.full([SPANS, SPAN], 1.0, tl.float32) if COUNT else tl.exp2((x - row_max) * scale)
        tail_1 += tl.where(key >= key_1, weight, 0.0)
        tail_2 += tl.where(key >= key_2, weight, 0.0)
        tail_3 += tl.where(key >= key_3, weight, 0.0)
    return tl.sum(tl.sum(tail_1, 1), 0), tl.sum(tl.sum(tail_2, 1), 0), tl.sum(tl.sum(tail_3, 1), 0)


@triton.jit
def _search(
    logits_ptr, list_ptr, span_keys, spans, vocab_size, low, end, target, row_max, scale,
    COUNT: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The largest key in [low, end) whose tail reaches the target (that of `low` is taken to), four ways at a time."""
    num_listed = list_spans(list_ptr, span_keys, spans, low)
    while low + 1 < end:
        key_2 = (low & end) + ((low ^ end) >> 1)  # the mean, without overflow
        key_1 = (low & key_2) + ((low ^ key_2) >> 1)
        key_3 = (key_2 & end) + ((key_2 ^ end) >> 1)
        tail_1, tail_2, tail_3 = _tails(
            logits_ptr, list_ptr, num_listed, vocab_size, key_1, key_2, key_3, row_max, scale, COUNT, SPAN, SPANS, SHIFT
        )
        if tail_2 >= target:
            low = tl.where(tail_3 >= target, key_3, key_2)
            end = tl.where(tail_3 >= target, end, key_3)
        else:
            low = tl.where(tail_1 >= target, key_1, low)
            end = tl.where(tail_1 >= target, key_2, key_1)
        if num_listed > SPANS:  # what fell below the bracket is never looked at again
            num_listed = list_spans(list_ptr, span_keys, spans, low)
    return low


@triton.jit
def _kth_span(span_keys, low, end, top_k):
    """The largest key in [low, end) that at least `top_k` span maxima reach, or `low`."""
    while low + 1 < end:
        key = (low & end) + ((low ^ end) >> 1)
        is_reached = tl.sum((span_keys >= key).to(tl.int32), 0) >= top_k
        low = tl.where(is_reached, key, low)
        end = tl.where(is_reached, end, key)
    return low


@triton.jit
def filter_threshold(
    logits_ptr, list_ptr, span_keys, spans, vocab_size, row_max, scale, top_k, top_p, min_p,
    SPAN: tl.constexpr, SPANS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The least key that the row's filters let through."""
    top = ordered_key(row_max, SHIFT)
    end = top + 1
    # The least finite one: what is masked with -inf is never let through.
    low = ordered_key(row_max * 0.0 + float("-inf"), SHIFT) + 1
    if min_p > 0.0:
        low = tl.minimum(tl.maximum(low, _key_at_least(row_max + tl.log2(min_p) / scale, SHIFT)), top)
    if top_k > 0:
        low = _kth_span(span_keys, low, end, top_k)
        low = _search(
            logits_ptr, list_ptr, span_keys, spans, vocab_size, low, end, top_k.to(tl.float32), row_max, scale,
            True, SPAN, SPANS, SHIFT,
        )  # fmt: skip
    if top_p < 1.0:
        # The whole mass, but for tokens that weigh less than 2^-26 of it together.
        log2_vocab = tl.log2(vocab_size.to(tl.float32))
        floor = tl.maximum(low, ordered_key(row_max - (log2_vocab + 26.0) / scale, SHIFT))
        num_listed = list_spans(list_ptr, span_keys, spans, floor)
        mass, _, _ = _tails(
            logits_ptr, list_ptr, num_listed, vocab_size, floor, end, end, row_max, scale, False, SPAN, SPANS, SHIFT
        )
        # Tokens that weigh less than half of 1 - top_p together cannot hold the one that crosses.
        floor = ordered_key(row_max - (log2_vocab + 1.0 - tl.log2(1.0 - top_p)) / scale, SHIFT)
        low = _search(
            logits_ptr, list_ptr, span_keys, spans, vocab_size, tl.maximum(low, floor), end, top_p * mass, row_max,
            scale, False, SPAN, SPANS, SHIFT,
        )  # fmt: skip
    return low


def is_filtered_reference(top_k: Tensor, top_p: Tensor, min_p: Tensor, vocab_size: int) -> Tensor:
    """Which rows have a filter that is on, bool [N], for settings [N]."""
    return ((top_k > 0) & (top_k < vocab_size)) | (top_p < 1) | (min_p > 0)


def filter_threshold_reference(x: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The least logit that each row's filters let through, [N], for `x` float32 [N, V] and settings [N].

    Sorts the whole vocabulary, unless every row has a top_k.
    """
    vocab_size = x.shape[1]
    temperature, top_p, min_p = temperature[:, None], top_p[:, None], min_p[:, None]
    k = torch.where((top_k > 0) & (top_k < vocab_size), top_k, vocab_size).long()[:, None]
    width = int(k.max())
    if width < vocab_size:
        kth = x.topk(width, dim=1).values.gather(1, k - 1)
        width = int((x >= kth).sum(dim=1).max())  # ties with the k-th stay
    descending = x.topk(width, dim=1).values if width < vocab_size else x.sort(dim=1, descending=True).values
    row_max, kth = descending[:, :1], descending.gather(1, k - 1)
    threshold = torch.where(min_p > 0, row_max + temperature * min_p.log(), float("-inf"))
    threshold = torch.maximum(threshold, kth)
    weight = torch.where(descending >= threshold, ((descending - row_max) / temperature).double().exp(), 0.0)
    mass = weight.cumsum(1)
    crossing = (mass < top_p * mass[:, -1:]).sum(1, keepdim=True).clamp_(max=width - 1)
    threshold = torch.where(top_p < 1, torch.maximum(threshold, descending.gather(1, crossing)), threshold)
    return threshold[:, 0]
