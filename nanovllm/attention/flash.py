"""The flash_attn backend: an optional flash-attn package for prompts, this library's own kernel for decodes.

Owns: the calls of flash-attn 3 (`flash_attn_interface`), 4 (`flash_attn.cute`) and 2 (`flash_attn`), tried in that
order. Invariant: none of them is needed; one that is missing, broken or wrong is passed over with its reason. It
deliberately decodes with its own kernel where that works: flash-attn's tiles of 64 or 128 query rows are nearly all
padding there.

All three: Dao et al., FlashAttention (2022), -2 (2023), -3 (2024).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.attention import AttentionSpec, BackendUnavailable, choose_block_size
from nanovllm.attention.composed import (
    ComposedBackend,
    DecodeKernel,
    PagedPromptKernel,
    PromptBatch,
    RaggedPromptKernel,
)
from nanovllm.attention.probe import attempt, probe_decode, probe_paged, probe_ragged
from nanovllm.attention.triton import require_triton, triton_decode, triton_paged
from nanovllm.kernels.paged_decode import DecodeBatch
from nanovllm.kernels.rope import Rope


class _Package(NamedTuple):
    label: str
    load: Callable[[], tuple[RaggedPromptKernel, PagedPromptKernel]]
    default_block_size: int
    block_size_multiple: int


def build_flash(spec: AttentionSpec) -> ComposedBackend:
    """The backend named "flash_attn", on the first package that works.

    Raises:
        BackendUnavailable: no package works for this device, dtype, head_dim, windows and block_size; with the reasons.
    """
    if spec.device.type != "cuda":
        raise BackendUnavailable(f"it needs a CUDA device, not {spec.device.type}")
    if spec.dtype not in (torch.float16, torch.bfloat16):
        raise BackendUnavailable(f"it has float16 and bfloat16 kernels, not {spec.dtype}")
    reasons = []
    for package in _PACKAGES:
        try:
            return _build_on(package, spec)
        except BackendUnavailable as error:
            reasons.append(str(error))
    raise BackendUnavailable("; ".join(reasons))


def _build_on(package: _Package, spec: AttentionSpec) -> ComposedBackend:
    ragged, paged = attempt(package.label, package.load)
    block_size = choose_block_size(spec, package.default_block_size, package.block_size_multiple, package.label)
    probe_ragged(package.label, ragged, spec, block_size)
    parts = [package.label]
    try:
        probe_paged(package.label, paged, spec, block_size)
    except BackendUnavailable:  # a build without paged KV
        require_triton(spec)
        paged = triton_paged
        probe_paged("triton prompt kernel", paged, spec, block_size)
        parts.append("triton for cached prefixes")
    decode = _decode_with(paged)
    rotates_decodes: Callable[[int], bool] = _never
    try:
        require_triton(spec)
        own_decode, own_rotates = triton_decode(spec)
        probe_decode("triton decode kernel", own_decode, spec, block_size)
        decode, rotates_decodes = own_decode, own_rotates
        parts.append("triton for decodes")
    except BackendUnavailable:
        probe_decode(package.label, decode, spec, block_size, has_rope=False)
    description = ", ".join(parts)
    return ComposedBackend(
        "flash_attn", description, block_size, decode, paged, rotates_decodes, ragged, spec.windows
    )  # fmt: skip


def _never(num_decodes: int) -> bool:
    return False


def _decode_with(paged: PagedPromptKernel) -> DecodeKernel:
    """Decodes as prompt chunks of one token, for where Triton does not run."""

    def decode(
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
    ) -> None:
        assert rope is None
        num_seqs = len(batch.seq_lens)
        prompts = PromptBatch(
            cu_seqlens_q=torch.arange(num_seqs + 1, dtype=torch.int32, device=q.device),
            cu_seqlens_k=torch.nn.functional.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            seq_lens=batch.seq_lens,
            block_table=batch.block_table,
            max_seqlen_q=1,
            max_seqlen_k=batch.block_table.shape[1] * k_cache.shape[1],
            first_token=0,
        )
        out[:num_seqs] = paged(q[:num_seqs], k_cache, v_cache, prompts, scale, window)

    return decode


def _window_size(window: int | None) -> tuple[int, int]:
    """flash-attn's (left, right) bounds: a window of w tokens holds the query itself and w - 1 before it."""
    return (-1, -1) if window is None else (window - 1, 0)


def _first(result: Any) -> Tensor:
    """Some versions return the log-sum-exp beside the output."""
    return result[0] if isinstance(result, tuple) else result


def _load_flash_attn_2() -> tuple[RaggedPromptKernel, PagedPromptKernel]:
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]

    def ragged(q: Tensor, k: Tensor, v: Tensor, batch: PromptBatch, scale: float, window: int | None) -> Tensor:
        cu_seqlens, max_seqlen = batch.cu_seqlens_q, batch.max_seqlen_q
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
            softmax_scale=scale, causal=True, window_size=_window_size(window),
        )  # fmt: skip

    def paged(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PromptBatch, scale: float, window: int | None
    ) -> Tensor:
        return flash_attn_varlen_func(
            q, k_cache, v_cache, batch.cu_seqlens_q, batch.cu_seqlens_k, batch.max_seqlen_q, batch.max_seqlen_k,
            softmax_scale=scale, causal=True, window_size=_window_size(window), block_table=batch.block_table,
        )  # fmt: skip

    return ragged, paged


def _load_flash_attn_3() -> tuple[RaggedPromptKernel, PagedPromptKernel]:
    from flash_attn_interface import (  # type: ignore[import-not-found, unused-ignore]
        flash_attn_varlen_func,
        flash_attn_with_kvcache,
    )

    def ragged(q: Tensor, k: Tensor, v: Tensor, batch: PromptBatch, scale: float, window: int | None) -> Tensor:
        cu_seqlens, max_seqlen = batch.cu_seqlens_q, batch.max_seqlen_q
        return _first(
            flash_attn_varlen_func(
                q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
                softmax_scale=scale, causal=True, window_size=_window_size(window),
            )
        )  # fmt: skip

    def paged(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PromptBatch, scale: float, window: int | None
    ) -> Tensor:
        return _first(
            flash_attn_with_kvcache(
                q, k_cache, v_cache, cache_seqlens=batch.seq_lens, page_table=batch.block_table,
                cu_seqlens_q=batch.cu_seqlens_q, max_seqlen_q=batch.max_seqlen_q,
                softmax_scale=scale, causal=True, window_size=_window_size(window),
            )
        )  # fmt: skip

    return ragged, paged


def _load_flash_attn_4() -> tuple[RaggedPromptKernel, PagedPromptKernel]:
    from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found, unused-ignore]

    takes_bounds = "max_seqlen_q" in inspect.signature(flash_attn_varlen_func).parameters

    def options(max_seqlen_q: int, max_seqlen_k: int, scale: float, window: int | None) -> dict[str, Any]:
        bounds = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k} if takes_bounds else {}
        window_size = (None, None) if window is None else (window - 1, 0)
        return {"softmax_scale": scale, "causal": window is None, "window_size": window_size, **bounds}

    def ragged(q: Tensor, k: Tensor, v: Tensor, batch: PromptBatch, scale: float, window: int | None) -> Tensor:
        cu_seqlens, max_seqlen = batch.cu_seqlens_q, batch.max_seqlen_q
        kwargs = options(max_seqlen, max_seqlen, scale, window)
        return _first(flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, **kwargs))

    def paged(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PromptBatch, scale: float, window: int | None
    ) -> Tensor:
        kwargs = options(batch.max_seqlen_q, batch.max_seqlen_k, scale, window)
        return _first(
            flash_attn_varlen_func(
                q, k_cache, v_cache, cu_seqlens_q=batch.cu_seqlens_q, seqused_k=batch.seq_lens,
                page_table=batch.block_table, **kwargs,
            )
        )  # fmt: skip

    return ragged, paged


# Fastest first. Pages: flash-attn 2 takes multiples of 256 only, the others read pages of 128 in one bulk copy.
_PACKAGES = (
    _Package("flash-attn 3", _load_flash_attn_3, 128, 16),
    _Package("flash-attn 4", _load_flash_attn_4, 128, 16),
    _Package("flash-attn 2", _load_flash_attn_2, 256, 256),
)
