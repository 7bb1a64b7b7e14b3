"""The last layer: logits of the rows that sample, to token ids.

Owns: the sampling workspace, made once so that a captured graph replays on it. Invariant: a call on a GPU allocates
nothing and never waits for the device. It deliberately holds no settings and no random state: these are the rows' own.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from nanovllm.kernels.sampling import SamplingWorkspace, sample


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
