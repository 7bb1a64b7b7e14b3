"""Qwen3, dense: the text of a decoder-only transformer here. The other families are small differences from it.

Owns: the order of the layers and the names of their parameters, which are the checkpoint's but for merged projections
(q, k, v; gate, up). Invariant: every token is one row, of whatever sequence; what belongs to what stands in the
metadata alone. It deliberately keeps no state between calls, so one function serves prompts, decodes and graph
capture.

Of a prompt, a step needs the hidden state of its last token at most, and of the others what later tokens attend to. In
the last layer that is K and V alone: the rest of it is computed for the tokens that the metadata says are wanted.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from nanovllm.attention import AttentionBackend, AttentionMetadata
from nanovllm.kernels.decode_linear import LinearWorkspace, ResidualStream, is_fused
from nanovllm.kernels.decode_linear_config import Kind, fused_rows
from nanovllm.kernels.device import device_of
from nanovllm.layers.attention import Attention
from nanovllm.layers.embedding import Embedding, LMHead
from nanovllm.layers.mlp import MLP
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.parallel import SINGLE, TensorParallel, local_heads
from nanovllm.layers.rotary import build_cos_sin
from nanovllm.model_config import ModelConfig


class Qwen3DecoderLayer(nn.Module):
    """Pre-norm attention and MLP. The residual travels beside `hidden`, so that each addition joins the product before
    it or the norm behind it."""

    def __init__(
        self,
        config: ModelConfig,
        window: int | None,
        cos_sin: Tensor,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        hidden_size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(
            hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            qk_norm_eps=eps if config.qk_norm else None,
            window=window,
            cos_sin=cos_sin,
            backend=backend,
            dtype=dtype,
            device=device,
            tp=tp,
        )
        self.mlp = MLP(hidden_size, config.intermediate_size, config.mlp_bias, dtype, device, tp)
        self.input_layernorm = RMSNorm(hidden_size, eps, dtype, device)
        self.post_attention_layernorm = RMSNorm(hidden_size, eps, dtype, device)

    def forward(
        self,
        positions: Tensor,
        hidden: Tensor | None,
        residual: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """[T, hidden] each -> [T, hidden] each, or [S, hidden] of the wanted tokens, int64 [S]. `hidden` is what is
        still to be added to the residual, or None."""
        normed, residual = self.input_layernorm.add(hidden, residual)
        hidden, residual = self.self_attn(positions, normed, residual, kv_cache, metadata, wanted)
        normed, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(normed, residual)

    def decode(
        self,
        positions: Tensor,
        stream: ResidualStream,
        next_norm: RMSNorm,
        kv_cache: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
    ) -> None:
        """The same for a step of few decodes on a GPU, with norms and additions joined to the products."""
        after = self.post_attention_layernorm
        self.self_attn.decode(positions, stream, self.input_layernorm, after, kv_cache, metadata)
        self.mlp.decode(stream, after, next_norm)


class Qwen3Model(nn.Module):
    """Embedding, layers, final norm."""

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype, device, tp)
        cos_sin = build_cos_sin(config.rope, config.head_dim, config.max_model_len, device)
        self.layers = nn.ModuleList(
            Qwen3DecoderLayer(config, window, cos_sin, backend, dtype, device, tp) for window in config.layer_windows
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, device)
        self.workspace = LinearWorkspace.allocate(device) if device.type == "cuda" else None
        heads, kv_heads = local_heads(config.num_heads, config.num_kv_heads, tp.size)
        hidden, head_dim, inner = config.hidden_size, config.head_dim, config.intermediate_size // tp.size
        products: list[tuple[Kind, int, int]] = [
            ("norm", (heads + 2 * kv_heads) * head_dim, hidden),
            ("residual", hidden, heads * head_dim),
            ("norm_silu", 2 * inner, hidden),
            ("residual", hidden, inner),
        ]
        self.max_fused_rows = fused_rows(products, device_of(device))
        if tp.size > 1:  # the sum over ranks stands in between: only one row, whose products gain most, is worth it
            self.max_fused_rows = min(self.max_fused_rows, 1)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
    ) -> Tensor:
        hidden = self.embed_tokens(input_ids)  # [T, hidden]
        is_decode = metadata.num_seqs == metadata.num_decode_tokens
        if self.workspace is not None and is_decode and len(hidden) <= self.max_fused_rows and is_fused(hidden):
            return self._decode(ResidualStream(hidden, self.workspace), positions, kv_caches, metadata)
        residual, pending = hidden, None  # of the residual, what the next norm adds to it
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            wanted = metadata.wanted if layer is self.layers[-1] else None
            pending, residual = layer(positions, pending, residual, kv_cache, metadata, wanted)
        return self.norm.add(pending, residual)[0]

    def _decode(
        self,
        stream: ResidualStream,
        positions: Tensor,
        kv_caches: list[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
    ) -> Tensor:
        layers = cast(list[Qwen3DecoderLayer], list(self.layers))
        norms = [*(layer.input_layernorm for layer in layers[1:]), self.norm]
        for layer, next_norm, kv_cache in zip(layers, norms, kv_caches, strict=True):
            layer.decode(positions, stream, next_norm, kv_cache, metadata)
        return self.norm(stream.residual)


class Qwen3ForCausalLM(nn.Module):
    """The model and its output layer.

    Args:
        config: its max_model_len is the number of positions the rope table has.
        backend: attention over the paged cache.
        dtype, device: of all parameters, which stay uninitialised until the loader fills them.
        tp: the ranks that the model is cut over, and which of them this is.
    """

    def __init__(
        self,
        config: ModelConfig,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        self.model = Qwen3Model(config, backend, dtype, device, tp)
        tied_to = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, dtype, device, tp, tied_to)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[tuple[Tensor, Tensor]],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Hidden states behind the final norm, [T, hidden], of `input_ids` and `positions`, int32 [T] each; of the
        tokens `metadata.wanted` alone, [S, hidden], where it names some.

        `kv_caches` holds (K, V) of each layer, [num_blocks, block_size, KH, D] each; this step's keys are written
        there.
        """
        return self.model(input_ids, positions, kv_caches, metadata)

    def compute_logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[S, hidden] -> [S, this rank's rows of the vocabulary], in the model's dtype, into `out` where given."""
        return self.lm_head(hidden, out)
