"""The Triton backend: this library's own paged kernels, for decodes and prompts.

Owns: the composition, and the decode workspace. Invariant: nothing but torch and Triton is needed. It deliberately
supports no device that a tiny call of the kernels does not run right on: the probe decides, not a list of chips.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nanovllm.attention import AttentionSpec, BackendUnavailable, choose_block_size
from nanovllm.attention.composed import ComposedBackend, DecodeKernel, PromptBatch
from nanovllm.attention.probe import probe_decode, probe_paged
from nanovllm.kernels._triton import HAS_TRITON
from nanovllm.kernels.paged_decode import DecodeBatch, has_many_items, make_decode_workspace, paged_decode_triton
from nanovllm.kernels.paged_prefill import paged_prefill_triton
from nanovllm.kernels.rope import Rope

BLOCK_SIZE = 128  # tokens: one block of the decode kernel, so that it looks a page up once


def build_triton(spec: AttentionSpec) -> ComposedBackend:
    """The backend named "triton".

    Raises:
        BackendUnavailable: no CUDA device, no Triton, or kernels that do not compile or compute right there.
    """
    require_triton(spec)
    block_size = choose_block_size(spec, BLOCK_SIZE, 16, "triton")
    decode, rotates_decodes = triton_decode(spec)
    probe_decode("decode kernel", decode, spec, block_size)
    probe_paged("prompt kernel", triton_paged, spec, block_size)
    return ComposedBackend("triton", "triton", block_size, decode, triton_paged, rotates_decodes)


def require_triton(spec: AttentionSpec) -> None:
    """Raises BackendUnavailable where Triton kernels cannot run at all."""
    if spec.device.type != "cuda":
        raise BackendUnavailable(f"it needs a CUDA device, not {spec.device.type}")
    if not HAS_TRITON:
        raise BackendUnavailable("the package triton is not installed")


def triton_decode(spec: AttentionSpec) -> tuple[DecodeKernel, Callable[[int], bool]]:
    """The decode kernel with a workspace for every batch size of this model, and how many decodes it rotates."""
    workspace = make_decode_workspace(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.device)

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
        paged_decode_triton(q, k, v, k_cache, v_cache, batch, scale, window, out, rope, workspace)

    def rotates_decodes(num_decodes: int) -> bool:
        return not has_many_items(num_decodes * spec.num_kv_heads, workspace.num_sms)

    return decode, rotates_decodes


def triton_paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PromptBatch, scale: float, window: int | None
) -> Tensor:
    """The paged prompt kernel as a `PagedPromptKernel`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    where = (batch.cu_seqlens_q, batch.seq_lens, batch.block_table)
    paged_prefill_triton(q, k_cache, v_cache, *where, scale, window, out, batch.first_token)
    return out
