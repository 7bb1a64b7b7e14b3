"""From logits to token ids: greedy, temperature, min-p, top-k and top-p, each row by its own settings.

Owns: the meaning of a row's sampling settings. Invariant: a row's token depends on its logits, settings, seed and
position alone, never on its batch or on how the work is split. It deliberately never sorts, nor makes probabilities.

Sampling is the Gumbel-max trick as an exponential race: the token with the largest x / T - log(E) wins, E ~ Exp(1) from
`noise`. The vocabulary is cut into spans of 128 tokens, and two launches serve all kinds of rows:

1. `_scan_kernel`, many programs a row, one pass over the logits: the maximum of each span and, for rows without
   filters, an upper bound of its perturbed scores, from a cheap lower bound of log2(E): E = -log(1 - v) >= v, and
   log2(v) is at least v's exponent plus its mantissa's fraction (J. N. Mitchell, 1962).
2. `_pick_kernel`, one program a row. Greedy: the first span with the row's maximum. Unfiltered: branch and bound, exact
   scores in the span with the highest bound until no other bound reaches the best score, mostly one span. Filtered: the
   threshold from `sampling_filters`, then exact scores in the spans that hold what it lets through.

Thresholds are values, so ties stay or go together: all tokens equal to the k-th largest logit stay, as do all that tie
with the token whose probability makes the mass reach top_p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nanovllm.kernels._triton import tl, triton
from nanovllm.kernels.noise import (
    log2_exponential,
    log2_exponential_reference,
    noise_bits,
    noise_bits_of_weyl,
    noise_bits_reference,
    row_keys,
    weyl,
)
from nanovllm.kernels.sampling_cpu import GREEDY_UP_TO, LOG2_E, sample_cpu
from nanovllm.kernels.sampling_filters import (
    KEY_SHIFTS,
    filter_threshold,
    filter_threshold_reference,
    is_filtered_reference,
    list_spans,
    load_listed,
    ordered_key,
)

SPAN = 128  # tokens that share one maximum and one bound
PICK_SPANS = 32  # spans that `_pick_kernel` handles at once
NUM_PICK_WARPS = 8


@triton.jit
def _load_settings(rows_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size):
    row = tl.load(rows_ptr).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_k = tl.where((top_k > 0) & (top_k < vocab_size), top_k, 0)  # 0: off
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    is_greedy = temperature <= 1e-5
    is_filtered = ((top_k > 0) | (top_p < 1.0) | (min_p > 0.0)) & (temperature > 1e-5)
    scale = 1.4426950408889634 / tl.where(is_greedy, 1.0, temperature)  # to temperature, and to powers of 2
    return row, is_greedy, is_filtered, scale, top_k, top_p, min_p


@triton.jit
def _load_row_keys(seeds_ptr, num_tokens_ptr, row):
    return row_keys(tl.load(seeds_ptr + 2 * row), tl.load(seeds_ptr + 2 * row + 1), tl.load(num_tokens_ptr + row))


@triton.jit
def _scan_kernel(
    logits_ptr,
    logits_stride,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    num_tokens_ptr,
    span_max_ptr,
    span_bound_ptr,
    vocab_size,
    num_spans,
    first_id,
    SPAN: tl.constexpr,
    TILE_SPANS: tl.constexpr,
    NUM_TILES: tl.constexpr,
):
    batch = tl.program_id(1)
    logits_ptr += batch.to(tl.int64) * logits_stride
    row, is_greedy, is_filtered, scale, _, _, _ = _load_settings(
        rows_ptr + batch, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size
    )
    key_a, key_b = _load_row_keys(seeds_ptr, num_tokens_ptr, row)
    for tile in tl.static_range(NUM_TILES):
        spans = (tl.program_id(0) * NUM_TILES + tile) * TILE_SPANS + tl.arange(0, TILE_SPANS)
        ids = spans[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
        x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
        out = batch * num_spans + spans
        # Reductions skip NaN; as +inf it condemns the row just as well.
        tl.store(span_max_ptr + out, tl.max(tl.where(x == x, x, float("inf")), axis=1), mask=spans < num_spans)
        if (is_greedy | is_filtered) == 0:
            # Split so that the products of the columns are made once for all tiles.
            h = (weyl(first_id + spans * SPAN) + key_a)[:, None] + weyl(tl.arange(0, SPAN))[None, :]
            v = noise_bits_of_weyl(key_b, h).to(tl.float32)  # times 2^-32
            mantissa_and_exponent = v.to(tl.int32, bitcast=True).to(tl.float32)
            bound = x * scale + (159.0 - mantissa_and_exponent * 1.1920928955078125e-07)  # 159 = 127 + 32
            bound = tl.maximum(tl.max(bound, axis=1), -3e38)  # -inf stands for "visited"
            tl.store(span_bound_ptr + out, bound, mask=spans < num_spans)


@triton.jit
def _race(logits, ids, keep, row_max, scale, key_a, key_b, vocab_size, first_id):
    """The best perturbed score among the kept tokens of a flat block, and the lowest id that has it."""
    score = (logits - row_max) * scale - log2_exponential(noise_bits(key_a, key_b, first_id + ids))
    score = tl.where(keep, score, float("-inf"))
    best = tl.max(score, 0)
    return best, tl.min(tl.where(keep & (score == best), ids, vocab_size), 0)


@triton.jit
def _pick_kernel(
    logits_ptr,
    logits_stride,
    rows_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    num_tokens_ptr,
    span_max_ptr,
    span_bound_ptr,
    span_list_ptr,
    sampled_ptr,
    candidates_ptr,  # float32 [S, 3], with IS_SLICE
    vocab_size,
    num_spans,
    first_id,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
    ALL_SPANS: tl.constexpr,
    SHIFT: tl.constexpr,
    IS_SLICE: tl.constexpr,
):
    batch = tl.program_id(0)
    logits_ptr += batch.to(tl.int64) * logits_stride
    spans = tl.arange(0, ALL_SPANS)
    offsets = batch * num_spans + spans
    span_max = tl.load(span_max_ptr + offsets, mask=spans < num_spans, other=float("-inf"))
    row, is_greedy, is_filtered, scale, top_k, top_p, min_p = _load_settings(
        rows_ptr + batch, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, vocab_size
    )
    key_a, key_b = _load_row_keys(seeds_ptr, num_tokens_ptr, row)
    row_max = tl.max(span_max, 0)
    best = row_max * 0.0 + float("-inf")
    token = tl.full([], -1, tl.int32)
    if tl.abs(row_max) < float("inf"):
        if is_greedy:
            span = tl.min(tl.where(span_max == row_max, spans, num_spans), 0)
            ids = span * SPAN + tl.arange(0, SPAN)
            x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
            token = tl.min(tl.where(x == row_max, ids, vocab_size), 0)
            best = row_max * 0.0
        elif is_filtered:
            list_ptr = span_list_ptr + batch * num_spans
            span_keys = ordered_key(span_max, SHIFT)
            low = filter_threshold(
                logits_ptr, list_ptr, span_keys, spans, vocab_size, row_max, scale, top_k, top_p, min_p,
                SPAN, SPANS, SHIFT,
            )  # fmt: skip
            num_listed = list_spans(list_ptr, span_keys, spans, low)
            for tile in range(0, tl.cdiv(num_listed, SPANS)):
                ids, x = load_listed(logits_ptr, list_ptr, num_listed, tile, vocab_size, SPAN, SPANS)
                ids = tl.reshape(ids, [SPANS * SPAN])
                x = tl.reshape(x, [SPANS * SPAN])
                keep = ordered_key(x, SHIFT) >= low
                score, winner = _race(x, ids, keep, row_max, scale, key_a, key_b, vocab_size, first_id)
                token = tl.where(score > best, winner, token)  # spans ascend: a tie stays with the lower id
                best = tl.maximum(best, score)
        else:
            bound = tl.load(span_bound_ptr + offsets, mask=spans < num_spans, other=float("-inf"))
            # Bounds are of x * scale, scores of (x - max) * scale: the slack covers the rounding of both.
            offset = row_max * scale
            slack = 1e-3 + tl.abs(offset) * 1e-6
            top_bound = tl.max(bound, 0)
            while (top_bound > float("-inf")) & ((best + offset <= top_bound + slack) | (slack > 1e30)):
                span = tl.min(tl.where(bound == top_bound, spans, num_spans), 0)
                ids = span * SPAN + tl.arange(0, SPAN)
                x = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
                keep = x > float("-inf")
                score, winner = _race(x, ids, keep, row_max, scale, key_a, key_b, vocab_size, first_id)
                is_better = (score > best) | ((score == best) & (winner < token))
                token = tl.where(is_better, winner, token)
                best = tl.maximum(best, score)
                bound = tl.where(spans == span, float("-inf"), bound)
                top_bound = tl.max(bound, 0)
    if IS_SLICE:
        candidates_ptr += batch * 3
        tl.store(candidates_ptr, row_max)
        tl.store(candidates_ptr + 1, best)
        tl.store(candidates_ptr + 2, (first_id + token).to(tl.float32, bitcast=True))
    else:
        tl.store(sampled_ptr + batch, token)


@dataclass(frozen=True)
class SamplingWorkspace:
    """Scratch of the two kernels and their result, for up to S rows; nothing outlives a call but `sampled`."""

    span_max: Tensor  # float32 [S, spans]
    span_bound: Tensor  # float32 [S, spans]
    span_list: Tensor  # int32 [S, spans]
    sampled: Tensor  # int32 [S]

    @classmethod
    def allocate(cls, max_num_rows: int, vocab_size: int, device: torch.device | str) -> SamplingWorkspace:
        shape = (max_num_rows, -(-vocab_size // SPAN))
        return cls(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty(max_num_rows, dtype=torch.int32, device=device),
        )


def sample(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    num_tokens: Tensor,
    workspace: SamplingWorkspace | None = None,
) -> Tensor:
    """Token ids int32 [S] for `logits` [S, V] (bfloat16, float16 or float32) of the rows `rows` int32 [S].

    The settings are [R], indexed by row: `temperature`, `top_p`, `min_p` float32, `top_k` int32 (0 or at least V: off),
    `seeds` int32 [R, 2] (low and high word), `num_tokens` int32 (the position that the noise is drawn for). A
    temperature up to 1e-5 is greedy: the lowest id among the largest logits. Otherwise x = logits / temperature, of
    which min_p keeps p >= min_p * the largest p; top_k of these the k largest; top_p of these the fewest, largest
    first, whose renormalised mass reaches top_p; ties at a threshold stay. A row with a NaN, with +inf or with nothing
    but -inf gets -1; a token with -inf is never sampled.

    On a GPU the result is a view into `workspace`, which the next call overwrites; with one nothing is allocated.
    """
    args = (rows, temperature, top_k, top_p, min_p, seeds, num_tokens)
    return sample_triton(logits, *args, workspace) if logits.is_cuda else sample_cpu(logits, *args)


def sample_triton(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    num_tokens: Tensor,
    workspace: SamplingWorkspace | None = None,
    first_id: int = 0,
    candidates: Tensor | None = None,
) -> Tensor:
    num_rows, vocab_size = logits.shape
    if workspace is None:
        workspace = SamplingWorkspace.allocate(num_rows, vocab_size, logits.device)
    num_spans = workspace.span_max.shape[1]
    assert logits.stride(1) == 1 and seeds.is_contiguous() and num_spans == triton.cdiv(vocab_size, SPAN)
    if num_rows == 0:
        return workspace.sampled[:0]
    settings = (rows, temperature, top_k, top_p, min_p, seeds, num_tokens)
    # Few rows: small programs, so that they cover the chip. Many: large ones, which load their row's settings less.
    tile_spans, num_tiles = (8, 1) if num_rows * num_spans < 8 * 1024 else (32, 2)
    _scan_kernel[(triton.cdiv(num_spans, tile_spans * num_tiles), num_rows)](
        logits, logits.stride(0), *settings, workspace.span_max, workspace.span_bound, vocab_size, num_spans, first_id,
        SPAN=SPAN, TILE_SPANS=tile_spans, NUM_TILES=num_tiles, num_warps=4,
    )  # fmt: skip
    _pick_kernel[(num_rows,)](
        logits, logits.stride(0), *settings, workspace.span_max, workspace.span_bound, workspace.span_list,
        workspace.sampled, workspace.sampled if candidates is None else candidates, vocab_size, num_spans, first_id,
        SPAN=SPAN, SPANS=PICK_SPANS, ALL_SPANS=triton.next_power_of_2(num_spans), SHIFT=KEY_SHIFTS[logits.dtype],
        IS_SLICE=candidates is not None, num_warps=NUM_PICK_WARPS,
    )  # fmt: skip
    return workspace.sampled[:num_rows]


def sample_reference(
    logits: Tensor,
    rows: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    num_tokens: Tensor,
) -> Tensor:
    rows = rows.long()
    vocab_size = logits.shape[1]
    row_max, sampled = logits.max(dim=1)
    sampled = torch.where(row_max.isfinite(), sampled, -1)
    is_drawn = (temperature[rows] > GREEDY_UP_TO) & row_max.isfinite()
    if is_drawn.any():
        rows, x = rows[is_drawn], logits[is_drawn].float()
        scale = LOG2_E / temperature[rows, None]
        bits = noise_bits_reference(seeds[rows], num_tokens[rows], vocab_size)
        score = (x - x.amax(dim=1, keepdim=True)) * scale - log2_exponential_reference(bits)
        settings = [setting[rows] for setting in (temperature, top_k, top_p, min_p)]
        _, k, p, m = settings
        is_filtered = is_filtered_reference(k, p, m, vocab_size)
        if is_filtered.any():
            threshold = filter_threshold_reference(x[is_filtered], *(s[is_filtered] for s in settings))
            score[is_filtered] = score[is_filtered].masked_fill(x[is_filtered] < threshold[:, None], float("-inf"))
        sampled[is_drawn] = score.argmax(dim=1)
    return sampled.to(torch.int32)
