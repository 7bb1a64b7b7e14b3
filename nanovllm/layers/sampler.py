"""The last layer: logits of the rows that sample, to token ids.

Owns: the sampling workspace, made once so that a captured graph replays on it. Invariant: a call on a GPU allocates
nothing and never waits for the device. It deliberately holds no settings and no random state: these are the rows' own.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from nanovllm.kernels.sampling import SamplingWorkspace, sample
from nanovllm.kernels.sampling_slices import (
    best_of_slices_reference,
    best_of_slices_triton,
    candidates_reference,
    candidates_triton,
)


class SamplingState(Protocol):
    """What sampling reads of the persistent rows; each is [R], `seeds` [R, 2]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    num_tokens: Tensor


class Sampler:
    """Samples up to `max_num_seqs` rows of `vocab_size` logits."""

    def __init__(self, vocab_size: int, max_num_seqs: int, device: torch.device | str) -> None:
        on_gpu = torch.device(device).type == "cuda"
        self.workspace = SamplingWorkspace.allocate(max_num_seqs, vocab_size, device) if on_gpu else None

    def __call__(self, logits: Tensor, rows: Tensor, state: SamplingState) -> Tensor:
        """Token ids int32 [S] for `logits` [S, vocab_size] of `rows` int32 [S]; -1 where a row's logits are not finite.

        On a GPU the result lies in the workspace: the next call overwrites it.
        """
        return sample(
            logits,
            rows,
            state.temperature,
            state.top_k,
            state.top_p,
            state.min_p,
            state.seeds,
            state.num_tokens,
            self.workspace,
        )


class SliceSampler:
    """Samples up to `max_num_seqs` unfiltered rows of which this rank holds `num_ids` logits from `first_id` on."""

    def __init__(self, num_ids: int, first_id: int, max_num_seqs: int, device: torch.device) -> None:
        self.first_id = first_id
        self.workspace = SamplingWorkspace.allocate(max_num_seqs, num_ids, device) if device.type == "cuda" else None
        self.buffer = torch.empty(max_num_seqs, 3, device=device)

    def candidates(self, logits: Tensor, rows: Tensor, state: SamplingState) -> Tensor:
        """This rank's, float32 [S, 3], of `logits` [S, num_ids] of `rows` int32 [S]."""
        if self.workspace is None:
            return candidates_reference(logits, rows, state.temperature, state.seeds, state.num_tokens, self.first_id)
        return candidates_triton(
            logits, rows, state.temperature, state.top_k, state.top_p, state.min_p, state.seeds, state.num_tokens,
            self.first_id, self.workspace, self.buffer,
        )  # fmt: skip

    def best(self, candidates: Tensor, rows: Tensor, state: SamplingState) -> Tensor:
        """Ids int32 [S] of all ranks' candidates [ranks, S, 3]; -1 where a row's logits are not finite."""
        if self.workspace is None:
            return best_of_slices_reference(candidates, rows, state.temperature)
        return best_of_slices_triton(candidates, rows, state.temperature, self.workspace.sampled)
