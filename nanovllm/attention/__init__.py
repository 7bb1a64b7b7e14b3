"""Attention over the paged KV cache: what a backend is told, what it must do, and which one runs.

Owns: `AttentionMetadata` (one step), `AttentionSpec` (one model on one device), the `AttentionBackend` interface and
`choose_backend`. Invariant: the metadata's tensors are the truth and its Python integers only bounds, for CUDA graph
capture freezes the integers. It deliberately does no planning on the host: no backend reads a length back from a GPU.

The submodules are named for what they run on (`torch`, `triton`, `flash`), so this file must not bind those names.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, arange, device, dtype, int32

from nanovllm.kernels.rope import Rope

logger = logging.getLogger("nanovllm")

BACKEND_NAMES = ("auto", "flash_attn", "triton", "torch")


@dataclass
class AttentionMetadata:
    """What one step's attention has to know; the same for every layer and every backend.

    The batch holds B sequences and T query tokens: first `num_decode_tokens` sequences with exactly one query token
    each, then prompt chunks. Sequence b's queries are rows cu_seqlens_q[b] : cu_seqlens_q[b + 1] of q, and its last
    query is the last of its seq_lens[b] keys.

    Where not all of the step's hidden states are needed, `wanted` names the tokens whose are: the last ones of the
    first S sequences. Attention is computed for all the same, but in the model's last layer (`as_decodes`).

    Make a fresh object for every eager step: `cache` lives as long as the step.
    """

    cu_seqlens_q: Tensor  # int32 [B + 1]
    seq_lens: Tensor  # int32 [B], keys including this step's tokens; 1 in the padded rows of a graph
    block_table: Tensor  # int32 [B, max_blocks]; entries behind a sequence's last block may hold anything
    slot_mapping: Tensor  # int64 [T]
    max_seqlen_q: int  # upper bound of the query tokens of a sequence
    max_seqlen_k: int  # upper bound of seq_lens
    num_decode_tokens: int
    has_cached_prefix: bool  # some prompt chunk starts behind token 0
    wanted: Tensor | None = None  # int64 [S], places in the batch; None: all tokens
    cache: dict[str, Any] = field(default_factory=dict)  # what a backend works out once a step

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]

    def as_decodes(self, tokens: Tensor) -> AttentionMetadata:
        """A step of these tokens alone, int64 [S], the last ones of the first S sequences: each sees all keys of its
        sequence, as a decode does."""
        num_tokens = len(tokens)
        return AttentionMetadata(
            cu_seqlens_q=arange(num_tokens + 1, dtype=int32, device=tokens.device),
            seq_lens=self.seq_lens[:num_tokens],
            block_table=self.block_table[:num_tokens],
            slot_mapping=self.slot_mapping[tokens],
            max_seqlen_q=1,
            max_seqlen_k=self.max_seqlen_k,
            num_decode_tokens=num_tokens,
            has_cached_prefix=False,
        )


@dataclass(frozen=True)
class AttentionSpec:
    """What a backend is built for. `windows` holds each layer kind's sliding window in tokens, None for no window."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: dtype
    device: device
    max_num_seqs: int
    max_model_len: int
    block_size: int | None = None  # tokens; None lets the backend choose
    windows: frozenset[int | None] = frozenset({None})


class AttentionBackend(Protocol):
    """One way to compute attention. Layers call `forward` after this step's K and V are in the cache, but for decodes
    where the backend `rotates_decodes`."""

    @property
    def name(self) -> str: ...

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        ...

    @property
    def needs_rotated_k(self) -> bool:
        """The k passed to forward must be rotated too, not only the cached one."""
        ...

    def rotates_decodes(self, num_decodes: int) -> bool:
        """q, k of so many decodes come as they were projected; forward, told how, rotates them and stores K and V."""
        ...

    def forward(
        self,
        q: Tensor,  # [T, H, D]; q, k, v may be strided views into one qkv tensor
        k: Tensor,  # [T, KH, D]
        v: Tensor,  # [T, KH, D]
        k_cache: Tensor,  # [num_blocks, block_size, KH, D]
        v_cache: Tensor,  # [num_blocks, block_size, KH, D]
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        rope: Rope | None,  # given where it rotates_decodes
    ) -> Tensor:  # [T, H, D]
        """Causal attention: query i of a sequence, at position seq_len - q_len + i, sees the keys j up to its own
        position and, under a window, only those with j > position - window. Rows of q behind cu_seqlens_q[-1] come back
        undefined.
        """
        ...


class BackendUnavailable(Exception):
    """Why a backend cannot serve a spec here; `choose_backend` turns it into the next choice or a ValueError."""


def choose_backend(name: str, spec: AttentionSpec) -> AttentionBackend:
    """Build the backend called `name`, or for "auto" the fastest one that works here for this model.

    A backend counts as working when a tiny call of its real functions, for this dtype, head_dim and every window, gave
    what the torch backend gives. "auto" falls through packages that are missing, broken or do not fit.

    Raises:
        ValueError: `name` is unknown, the named backend cannot work here, or block_size does not suit it.
    """
    if name not in BACKEND_NAMES:
        raise ValueError(f"attention_backend={name!r} is not one of {', '.join(BACKEND_NAMES)}")
    if spec.num_heads % spec.num_kv_heads != 0:
        raise ValueError(f"num_heads={spec.num_heads} is not a multiple of num_kv_heads={spec.num_kv_heads}")
    if name != "auto":
        try:
            backend = _build(name, spec)
        except BackendUnavailable as error:
            raise ValueError(f"attention_backend={name!r} cannot be used here: {error}") from error
        logger.info("attention: %s, block_size %d", describe(backend), backend.block_size)
        return backend

    reasons = []
    for candidate in ("flash_attn", "triton", "torch") if spec.device.type == "cuda" else ("torch",):
        try:
            backend = _build(candidate, spec)
        except BackendUnavailable as error:
            reasons.append(f"{candidate}: {error}")
            continue
        skipped = f" (not {'; '.join(reasons)})" if reasons else ""
        logger.info("attention: %s, block_size %d%s", describe(backend), backend.block_size, skipped)
        return backend
    raise ValueError(f"attention_backend='auto' found nothing that works here: {'; '.join(reasons)}")


def describe(backend: AttentionBackend) -> str:
    """The backend's name and, where it is composed of several, its parts."""
    return str(getattr(backend, "description", backend.name))


def _build(name: str, spec: AttentionSpec) -> AttentionBackend:
    # Imported here: the backends import this module.
    if name == "torch":
        from nanovllm.attention.torch import TorchBackend

        return TorchBackend(spec)
    if name == "triton":
        from nanovllm.attention.triton import build_triton

        return build_triton(spec)
    from nanovllm.attention.flash import build_flash

    return build_flash(spec)


def choose_block_size(spec: AttentionSpec, default: int, multiple_of: int, backend: str) -> int:
    """The user's block_size where the backend can take it, else the reason why not.

    Raises:
        BackendUnavailable: the given block_size is no multiple of `multiple_of`.
    """
    if spec.block_size is None:
        return default
    if spec.block_size <= 0 or spec.block_size % multiple_of != 0:
        needed = f"a positive multiple of {multiple_of}"
        raise BackendUnavailable(f"kvcache_block_size={spec.block_size}, but {backend} needs {needed}")
    return spec.block_size
