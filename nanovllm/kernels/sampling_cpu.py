"""Sampling on the CPU: the tokens of `sample_reference`, found by looking closely at few of them.

Owns: the order of the work. Invariant: what decides, thresholds and scores, is computed by the reference's own
arithmetic, so the tokens are the same. It deliberately defines nothing: that is `sampling.py`'s.

As in the kernels, a cheap upper bound of a token's perturbed score comes from a lower bound of log2(E): E >= v, and a
float's exponent plus its mantissa's fraction is at most its log2 (J. N. Mitchell, 1962). Only tokens whose bound
reaches the score of the one with the highest bound get a score, a handful of a vocabulary. A few rows are worked on at
once, so that what lies between the operations stays in a core's cache.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanovllm.kernels.noise import log2_exponential_reference, noise_bits_reference
from nanovllm.kernels.sampling_filters import filter_threshold_reference, is_filtered_reference

GREEDY_UP_TO = 1e-5  # temperatures up to this, in float32, are greedy
LOG2_E = 1.4426950408889634
TILE = 1 << 19  # logits at once, or one row
SPAN = 128  # tokens that share a bound, if their number divides the vocabulary
SLACK = 1e-3  # more than the rounding of a bound
FEW = 512  # of the largest logits, mostly all that the filters let through


def sample_cpu(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    num_tokens: Tensor,
) -> Tensor:
    """See `sampling.sample`."""
    rows = rows.long()
    is_finite = logits.amax(dim=1).isfinite()  # a NaN is the largest
    is_drawn = temperature[rows] > GREEDY_UP_TO
    sampled = torch.full(rows.shape, -1) if is_drawn.all() else torch.where(is_finite, logits.argmax(dim=1), -1)
    for part in (is_finite & is_drawn).nonzero()[:, 0].split(max(1, TILE // logits.shape[1])):
        at = rows[part]
        bits = noise_bits_reference(seeds[at], num_tokens[at], logits.shape[1])
        sampled[part] = _draw(logits[part].float(), bits, temperature[at], top_k[at], top_p[at], min_p[at])
    return sampled.to(torch.int32)


def _draw(x: Tensor, bits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Token ids [N] for `x` float32 [N, V], its noise `bits` int32 [N, V] and settings [N]; no greedy rows."""
    num_rows, vocab_size = x.shape
    score = (x - x.amax(dim=1, keepdim=True)).mul_(LOG2_E / temperature[:, None])  # without noise
    is_filtered = is_filtered_reference(top_k, top_p, min_p, vocab_size)
    if is_filtered.any():
        threshold = torch.full((num_rows, 1), float("-inf"))
        settings = (setting[is_filtered] for setting in (temperature, top_k, top_p, min_p))
        threshold[is_filtered] = _filter_threshold(x[is_filtered], *settings)[:, None]
        score.masked_fill_(x < threshold, float("-inf"))
    span_size = math.gcd(vocab_size, SPAN)
    score, bits = score.unflatten(1, (-1, span_size)), bits.unflatten(1, (-1, span_size))  # [N, spans, span_size]
    bound = _span_bounds(score, bits)  # [N, spans]
    row = torch.arange(num_rows)
    best, _ = _race(score, bits, row, bound.argmax(dim=1))
    row, span = (bound >= best[:, None]).nonzero(as_tuple=True)
    top, place = _race(score, bits, row, span)
    best.scatter_reduce_(0, row, top, "amax")
    ids = torch.where(top == best[row], span * span_size + place, vocab_size)  # of equals the lowest
    return torch.full((num_rows,), vocab_size).scatter_reduce_(0, row, ids, "amin")


def _span_bounds(score: Tensor, bits: Tensor) -> Tensor:
    """At least the best perturbed score of each span, [N, spans], for [N, spans, span_size]."""
    v = (bits >> 1).bitwise_and_(0x7FFFFFFF).float()  # times 2^31
    exponent_and_mantissa = v.view(torch.int32).float()  # as one number: 2^23 * (log2(v) + 31 + 127), or a little less
    return torch.add(score, exponent_and_mantissa, alpha=-(2.0**-23)).amax(dim=2).add_(31.0 + 127.0 + SLACK)


def _race(score: Tensor, bits: Tensor, row: Tensor, span: Tensor) -> tuple[Tensor, Tensor]:
    """The best perturbed score in each of the given spans of [N, spans, span_size], and its first place there."""
    best, place = (score[row, span] - log2_exponential_reference(bits[row, span])).max(dim=1)
    return best, place


def _filter_threshold(x: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """`filter_threshold_reference`, [N], without sorting a vocabulary of which the largest logits decide."""
    vocab_size = x.shape[1]
    settings = (temperature, top_k, top_p, min_p)
    if vocab_size <= FEW:
        return filter_threshold_reference(x, *settings)
    temperature, k, top_p, min_p = (setting[:, None] for setting in settings)
    has_k, has_p = (k > 0) & (k < vocab_size), top_p < 1
    largest = x.topk(FEW, dim=1).values  # descending
    kth = largest.gather(1, torch.where(has_k, k - 1, 0).clamp(max=FEW - 1).long())
    threshold = torch.where(min_p > 0, largest[:, :1] + temperature * min_p.log(), float("-inf"))
    threshold = torch.where(has_k, torch.maximum(threshold, kth), threshold)
    weight = torch.where(largest >= threshold, ((largest - largest[:, :1]) / temperature).double().exp(), 0.0)
    mass = weight.cumsum(1)
    total = mass[:, -1:].clone()
    for row in (has_p & (threshold <= largest[:, -1:]))[:, 0].nonzero()[:, 0].tolist():  # some lies behind
        weight = ((x[row] - largest[row, 0]) / temperature[row]).double().exp_()
        total[row] = weight.masked_fill_(x[row] < threshold[row], 0.0).sum()
    crossing = (mass < top_p * total).sum(1, keepdim=True)
    nucleus = largest.gather(1, crossing.clamp(max=FEW - 1))
    threshold = torch.where(has_p, torch.maximum(threshold, nucleus), threshold)[:, 0]
    is_open = ((has_k & (k > FEW)) | (has_p & (crossing == FEW)))[:, 0]
    if is_open.any():
        threshold[is_open] = filter_threshold_reference(x[is_open], *(setting[is_open] for setting in settings))
    return threshold
