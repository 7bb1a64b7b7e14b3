"""Self-attention of one layer: projections, QK-norm, rotary embedding, KV store, paged attention.

Owns: the projections and the layer's window. Invariant: when the backend runs, this step's K and V are in the cache,
except those of decodes where the backend says that it stores them itself: nobody else reads them in this step. It
deliberately holds no cache and no metadata; both are arguments of `forward`.

Who needs the output of some tokens only (the last layer, in a step with prompts) names them. K and V are stored of all,
and the named ones, which are the last of their sequences, attend as decodes: one query each, in place of all.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanovllm.attention import AttentionBackend, AttentionMetadata
from nanovllm.kernels.decode_linear import ResidualStream, norm_linear
from nanovllm.kernels.rope import Rope, qk_norm_rope_store
from nanovllm.layers.linear import Linear, Part
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.parallel import TensorParallel, local_heads


class Attention(nn.Module):
    """[T, hidden] -> [T, hidden], or [S, hidden] of S wanted tokens, for the residual.

    Args:
        num_heads, num_kv_heads: over all ranks; the attributes of these names are this rank's.
        qk_norm_eps: RMSNorm of each head of q and k (Qwen3) with this epsilon; None: no such norm.
        window: query i sees keys j > i - window; None: all earlier keys.
        cos_sin: float32 [max_model_len, head_dim], shared by all layers (see `rotary.py`).
        backend: computes attention over the paged cache.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        o_bias: bool,
        qk_norm_eps: float | None,
        window: int | None,
        cos_sin: Tensor,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.num_heads, self.num_kv_heads = local_heads(num_heads, num_kv_heads, tp.size)
        self.q_size, self.kv_size = self.num_heads * head_dim, self.num_kv_heads * head_dim
        self.window = window
        self.scale = head_dim**-0.5
        self.cos_sin = cos_sin
        self.backend = backend
        kv = Part(num_kv_heads * head_dim, num_kv_heads)
        parts = {"q_proj": Part(num_heads * head_dim), "k_proj": kv, "v_proj": kv}
        self.qkv_proj = Linear(hidden_size, parts, qkv_bias, dtype, device, "output", tp)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, o_bias, dtype, device, "input", tp)
        self.qk_norm_eps = qk_norm_eps
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(head_dim, qk_norm_eps, dtype, device)
            self.k_norm = RMSNorm(head_dim, qk_norm_eps, dtype, device)

    def forward(
        self,
        positions: Tensor,
        hidden: Tensor,
        residual: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """hidden, residual [T, hidden], wanted int64 [S]; returns what `Linear.add` does, of the wanted tokens."""
        attended = self._attend(positions, self.qkv_proj(hidden), kv_cache, metadata, wanted)
        return self.o_proj.add(attended, residual if wanted is None else residual[wanted])

    def decode(
        self,
        positions: Tensor,
        stream: ResidualStream,
        norm: RMSNorm,
        next_norm: RMSNorm,
        kv_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> None:
        """norm and projections in two launches beside attention's own; adds to the stream."""
        qkv = norm_linear(stream, norm.weight, norm.eps, self.qkv_proj.weight, self.qkv_proj.bias)
        attended = self._attend(positions, qkv, kv_cache, metadata)
        self.o_proj.add_to(stream, attended, next_norm.weight)

    def _attend(
        self,
        positions: Tensor,
        qkv: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """qkv [T, (H + 2 * KH) * D], changed in place -> [T, H * D], or [S, H * D] of the wanted tokens."""
        k_cache, v_cache = kv_cache  # [num_blocks, block_size, KH, D] each
        has_norm = self.qk_norm_eps is not None
        rope = Rope(
            self.q_norm.weight if has_norm else None,
            self.k_norm.weight if has_norm else None,
            self.qk_norm_eps or 0.0,
            self.cos_sin,
        )
        rotates_decodes = wanted is None and self.backend.rotates_decodes(metadata.num_decode_tokens)
        first_token = metadata.num_decode_tokens if rotates_decodes else 0
        if first_token < len(qkv):
            qk_norm_rope_store(
                qkv,
                rope,
                positions,
                metadata.slot_mapping,
                k_cache,
                v_cache,
                self.num_heads,
                self.num_kv_heads,
                self.head_dim,
                self.backend.needs_rotated_k,
                first_token,
            )
        if wanted is not None:
            qkv, metadata = qkv[wanted], metadata.as_decodes(wanted)
        q, k, v = qkv.split((self.q_size, self.kv_size, self.kv_size), dim=1)
        attended = self.backend.forward(
            q.unflatten(1, (self.num_heads, self.head_dim)),  # [T, H, D], a view of qkv like k and v
            k.unflatten(1, (self.num_kv_heads, self.head_dim)),  # [T, KH, D]
            v.unflatten(1, (self.num_kv_heads, self.head_dim)),  # [T, KH, D]
            k_cache,
            v_cache,
            metadata,
            self.scale,
            self.window,
            rope if rotates_decodes else None,
        )  # [T, H, D]
        return attended.flatten(1)
