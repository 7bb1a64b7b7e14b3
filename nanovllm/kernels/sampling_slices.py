"""Sampling of unfiltered rows whose logits lie in slices on several ranks: each rank's best, then the best of all.

Owns: `Candidate`s and how they compare. Invariant: the winner is that of the whole row, up to the rounding of a score
against another maximum: noise depends on a token's id alone, wherever it is drawn. It deliberately knows no filters:
their thresholds need the whole row (`sampling.py`).

A candidate is float32 [3]: the slice's largest logit, the best score relative to it, and the token id's bits. All ranks
get all candidates (`all_gather`), so all pick alike: 12 bytes a row and rank travel instead of the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.kernels._triton import tl, triton
from nanovllm.kernels.noise import log2_exponential_reference, noise_bits_reference
from nanovllm.kernels.sampling import SamplingWorkspace, sample_triton
from nanovllm.kernels.sampling_cpu import GREEDY_UP_TO, LOG2_E


@triton.jit
def _best_kernel(candidates_ptr, rows_ptr, temperature_ptr, sampled_ptr, num_rows, SIZE: tl.constexpr):
    row = tl.program_id(0)
    temperature = tl.load(temperature_ptr + tl.load(rows_ptr + row).to(tl.int64))
    scale = 1.4426950408889634 / tl.where(temperature <= 1e-5, 1.0, temperature)
    row_max = tl.full([], float("-inf"), tl.float32)
    is_finite = tl.full([], 1, tl.int1)
    for rank in tl.static_range(SIZE):
        slice_max = tl.load(candidates_ptr + (rank * num_rows + row) * 3)
        is_finite = is_finite & (slice_max < float("inf"))
        row_max = tl.maximum(row_max, slice_max)
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], -1, tl.int32)
    for rank in tl.static_range(SIZE):
        candidate_ptr = candidates_ptr + (rank * num_rows + row) * 3
        slice_max = tl.load(candidate_ptr)
        score = tl.load(candidate_ptr + 1) + (slice_max - row_max) * scale
        is_better = (slice_max > float("-inf")) & (score > best)  # a tie stays with the lower ids
        token = tl.where(is_better, tl.load(candidate_ptr + 2).to(tl.int32, bitcast=True), token)
        best = tl.where(is_better, score, best)
    tl.store(sampled_ptr + row, tl.where(is_finite & (row_max > float("-inf")), token, -1))


def candidates_triton(
    logits: Tensor, rows: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor,
    num_tokens: Tensor, first_id: int, workspace: SamplingWorkspace, out: Tensor,
) -> Tensor:  # fmt: skip
    sample_triton(logits, rows, temperature, top_k, top_p, min_p, seeds, num_tokens, workspace, first_id, out)
    return out[: len(logits)]


def candidates_reference(
    logits: Tensor, rows: Tensor, temperature: Tensor, seeds: Tensor, num_tokens: Tensor, first_id: int
) -> Tensor:
    """float32 [S, 3] of `logits` [S, V / ranks], the slice of the vocabulary that starts at `first_id`."""
    rows = rows.long()
    x = logits.float()
    row_max = torch.where(x.isnan().any(dim=1), float("inf"), x.amax(dim=1))  # as in the kernel: it condemns the row
    greedy = temperature[rows] <= GREEDY_UP_TO
    scale = LOG2_E / torch.where(greedy, 1.0, temperature[rows])
    bits = noise_bits_reference(seeds[rows], num_tokens[rows], x.shape[1], first_id)
    score = (x - row_max[:, None]) * scale[:, None]
    drawn = torch.where(x > float("-inf"), score - log2_exponential_reference(bits), float("-inf"))
    best, token = torch.where(greedy[:, None], score, drawn).nan_to_num(float("-inf")).max(dim=1)
    return torch.stack([row_max, best, (token.int() + first_id).view(torch.float32)], dim=1)


def best_of_slices_triton(candidates: Tensor, rows: Tensor, temperature: Tensor, out: Tensor) -> Tensor:
    size, num_rows, _ = candidates.shape
    _best_kernel[(num_rows,)](candidates, rows, temperature, out, num_rows, SIZE=size, num_warps=1)
    return out[:num_rows]


def best_of_slices_reference(candidates: Tensor, rows: Tensor, temperature: Tensor) -> Tensor:
    temperature = temperature[rows.long()]
    scale = LOG2_E / torch.where(temperature <= GREEDY_UP_TO, 1.0, temperature)
    slice_max, best = candidates[..., 0], candidates[..., 1]  # [ranks, S]
    row_max = slice_max.amax(dim=0)
    score = torch.where(slice_max > float("-inf"), best + (slice_max - row_max) * scale, float("-inf"))
    winner = score.argmax(dim=0, keepdim=True)  # the first of equals
    token = candidates[..., 2].contiguous().view(torch.int32).gather(0, winner)[0]
    return torch.where(row_max.isfinite(), token, -1).int()
