"""The Triton backend: this library's own paged kernels, and for fresh prompts torch's flash attention where it has one.

Owns: the composition, and the decode workspace. Invariant: nothing but torch and Triton is needed. It deliberately
supports no device that a tiny call of the kernels does not run right on: the probe decides, not a list of chips.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.attention import AttentionSpec, BackendUnavailable, choose_block_size
from nanovllm.attention.composed import ComposedBackend, DecodeKernel, PromptBatch, RaggedPromptKernel
from nanovllm.attention.probe import attempt, probe_decode, probe_paged, probe_ragged
from nanovllm.kernels._triton import HAS_TRITON
from nanovllm.kernels.paged_decode import make_decode_workspace, paged_decode_triton
from nanovllm.kernels.paged_prefill import paged_prefill_triton

BLOCK_SIZE = 128  # tokens: one block of the decode kernel, so that it looks a page up once


def build_triton(spec: AttentionSpec) -> ComposedBackend:
    """The backend named "triton".

    Raises:
        BackendUnavailable: no CUDA device, no Triton, or kernels that do not compile or compute right there.
    """
    require_triton(spec)
    block_size = choose_block_size(spec, BLOCK_SIZE, 16, "triton")
    decode = triton_decode(spec)
    probe_decode("decode kernel", decode, spec, block_size)
    probe_paged("prompt kernel", triton_paged, spec, block_size)
    try:
        ragged = torch_varlen(spec, block_size)
    except BackendUnavailable:
        return ComposedBackend("triton", "triton", block_size, decode, triton_paged)
    return ComposedBackend(
        "triton", "triton, torch varlen for fresh prompts", block_size, decode, triton_paged, ragged, frozenset({None})
    )


def require_triton(spec: AttentionSpec) -> None:
    """Raises BackendUnavailable where Triton kernels cannot run at all."""
    if spec.device.type != "cuda":
        raise BackendUnavailable(f"it needs a CUDA device, not {spec.device.type}")
    if not HAS_TRITON:
        raise BackendUnavailable("the package triton is not installed")


def triton_decode(spec: AttentionSpec) -> DecodeKernel:
    """The split-KV decode kernel with a workspace for every batch size of this model."""
    workspace = make_decode_workspace(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.max_model_len, spec.device)

    def decode(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        seq_lens: Tensor,
        block_table: Tensor,
        scale: float,
        window: int | None,
        out: Tensor,
    ) -> None:
        paged_decode_triton(q, k_cache, v_cache, seq_lens, block_table, scale, window, out, workspace)

    return decode


def triton_paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PromptBatch, scale: float, window: int | None
) -> Tensor:
    """The paged prompt kernel as a `PagedPromptKernel`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    paged_prefill_triton(
        q,
        k_cache,
        v_cache,
        batch.cu_seqlens_q,
        batch.seq_lens,
        batch.block_table,
        scale,
        window,
        out,
        batch.first_token,
    )
    return out


def torch_varlen(spec: AttentionSpec, block_size: int) -> RaggedPromptKernel:
    """torch's variable-length flash attention (torch 2.10 and later) for prompts without a window.

    Raises:
        BackendUnavailable: this torch has none, the model has no layer without a window, or it fails its probe.
    """
    if None not in spec.windows or spec.dtype not in (torch.float16, torch.bfloat16):
        raise BackendUnavailable("torch varlen attention is used for half precision without a window")

    def load() -> RaggedPromptKernel:
        from torch.nn.attention.varlen import varlen_attn

        call: Any = varlen_attn  # its parameters differ from version to version
        parameters = inspect.signature(varlen_attn).parameters
        if "scale" not in parameters or "window_size" not in parameters:
            raise BackendUnavailable("this torch's varlen_attn takes no scale")
        # Older versions group query heads without being asked.
        extra: dict[str, Any] = {"enable_gqa": spec.group_size > 1} if "enable_gqa" in parameters else {}

        def ragged(q: Tensor, k: Tensor, v: Tensor, batch: PromptBatch, scale: float, window: int | None) -> Tensor:
            cu_seqlens, max_seqlen = batch.cu_seqlens_q, batch.max_seqlen_q
            return call(
                q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scale, window_size=(-1, 0), **extra
            )

        return ragged

    kernel = attempt("torch varlen attention", load)
    probe_ragged("torch varlen attention", kernel, replace(spec, windows=frozenset({None})), block_size)
    return kernel
