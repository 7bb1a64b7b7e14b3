"""A backend put together from kernels: one for decodes, one for prompts in the cache, maybe one for fresh prompts.

Owns: the split of a step into its decodes and its prompt chunks, and which kernel each part takes. Invariant: a kernel
sees only its own sequences, by slices of the metadata whose offsets stay absolute, so nothing is copied or computed
between them. It deliberately knows no package: `triton.py` and `flash.py` say what the parts are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nanovllm.attention import AttentionMetadata
from nanovllm.kernels.paged_decode import DecodeBatch
from nanovllm.kernels.rope import Rope


class DecodeKernel(Protocol):
    """One query token a sequence, see `paged_decode_triton`: with `rope` it rotates q and k and stores k and v.
    Capturable."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: DecodeBatch,
        scale: float,
        window: int | None,
        out: Tensor,
        rope: Rope | None,
    ) -> None: ...


@dataclass(frozen=True)
class PromptBatch:
    """A step's prompt chunks: `AttentionMetadata` without the decodes, offsets still from the batch's start."""

    cu_seqlens_q: Tensor  # int32 [B + 1]
    cu_seqlens_k: Tensor  # int32 [B + 1], running sums of seq_lens
    seq_lens: Tensor  # int32 [B]
    block_table: Tensor  # int32 [B, max_blocks]
    max_seqlen_q: int
    max_seqlen_k: int
    first_token: int  # cu_seqlens_q[0]


class PagedPromptKernel(Protocol):
    """Prompt chunks whose keys lie in the cache; returns [T, H, D], defined behind `first_token`."""

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PromptBatch, scale: float, window: int | None
    ) -> Tensor: ...


class RaggedPromptKernel(Protocol):
    """Prompts that start at token 0, from q, k, v [T, heads, D] themselves; returns [T, H, D] likewise."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, batch: PromptBatch, scale: float, window: int | None
    ) -> Tensor: ...


def prompt_batch(metadata: AttentionMetadata) -> PromptBatch:
    """The step's prompt part, worked out in its first layer and kept for the others."""
    batch = metadata.cache.get("prompt_batch")
    if batch is None:
        first = metadata.num_decode_tokens
        seq_lens = metadata.seq_lens[first:]
        batch = metadata.cache["prompt_batch"] = PromptBatch(
            cu_seqlens_q=metadata.cu_seqlens_q[first:],
            cu_seqlens_k=torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            seq_lens=seq_lens,
            block_table=metadata.block_table[first:],
            max_seqlen_q=metadata.max_seqlen_q,
            max_seqlen_k=metadata.max_seqlen_k,
            first_token=first,
        )
    return batch


def decode_batch(metadata: AttentionMetadata) -> DecodeBatch:
    """The step's decodes."""
    num_decodes = metadata.num_decode_tokens
    seq_lens, block_table = metadata.seq_lens[:num_decodes], metadata.block_table[:num_decodes]
    return DecodeBatch(seq_lens, block_table, metadata.slot_mapping, metadata.max_seqlen_k)


@dataclass(frozen=True)
class ComposedBackend:
    """The `AttentionBackend` that `triton.py` and `flash.py` build. `ragged` serves the windows in `ragged_windows`."""

    name: str
    description: str
    block_size: int
    decode: DecodeKernel
    paged: PagedPromptKernel
    rotates_decodes: Callable[[int], bool]
    ragged: RaggedPromptKernel | None = None
    ragged_windows: frozenset[int | None] = frozenset()

    @property
    def needs_rotated_k(self) -> bool:
        return self.ragged is not None

    def forward(
        self,
        q: Tensor,  # [T, H, D]
        k: Tensor,  # [T, KH, D]
        v: Tensor,  # [T, KH, D]
        k_cache: Tensor,  # [num_blocks, block_size, KH, D]
        v_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        rope: Rope | None = None,
    ) -> Tensor:
        """See `AttentionBackend.forward`."""
        num_decodes = metadata.num_decode_tokens
        if metadata.num_seqs == num_decodes:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        elif self.ragged is not None and not metadata.has_cached_prefix and window in self.ragged_windows:
            out = self.ragged(q, k, v, prompt_batch(metadata), scale, window)
        else:
            out = self.paged(q, k_cache, v_cache, prompt_batch(metadata), scale, window)
        if num_decodes > 0:
            self.decode(q, k, v, k_cache, v_cache, decode_batch(metadata), scale, window, out, rope)
        return out
