"""The torch backend: attention on the CPU, and the plain fallback on any device.

Owns: gathering keys and calling scaled_dot_product_attention. Invariant: K and V are never multiplied out to the query
heads: the heads of a group become query rows (decode) or share K and V by a stride of zero (prompts). It deliberately
reads lengths on the host, where a CPU's tensors lie anyway, once a step; only its decode on a CUDA device keeps to
tensors, for CUDA graphs capture it.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from nanovllm.attention import AttentionMetadata, AttentionSpec, choose_block_size
from nanovllm.kernels.rope import Rope

BLOCK_SIZE = 32  # tokens: keys are gathered one by one, so any size is as fast; small ones share more of a prefix
GROUP_BYTES = 3 << 20  # decodes of similar length share a call, as long as their K and V stay in a core's cache
MIN_LENGTH_RATIO = 0.75  # of the shortest in a group to its longest: how much padding is worth a call less,
MIN_PADDING = 256  # and the number of padded keys in a group that cost less than a call anyway
QUERY_CHUNK = 512  # query rows that share one mask
MAX_PADDED_KEYS = 1 << 18  # on a CUDA device, keys gathered at once
# On a CUDA device. Not cuDNN's, torch's first choice on Hopper: it plans anew, for some 30 ms, at every new length.
SDPA_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass
class _DecodeGroup:
    """Decodes of similar length, start : end in the order of the plan, padded to the one with most visible keys."""

    start: int
    end: int
    slots: Tensor  # int64 [N * num_keys], where the visible keys lie; padding repeats a sequence's last key
    num_keys: int
    mask: Tensor | None  # additive [N, 1, 1, num_keys]; None where all have num_keys keys


@dataclass
class _Decodes:
    """A step's decodes, longest first."""

    order: Tensor  # int64 [num_decodes], places in the batch
    rank: Tensor  # int64 [num_decodes], the inverse of `order`
    groups: list[_DecodeGroup]


@dataclass
class _Prompt:
    """A prompt chunk: rows start : end of the batch, whose last query sees all num_keys keys."""

    start: int
    end: int
    num_keys: int
    blocks: Tensor  # int64


class TorchBackend:
    """See `AttentionBackend`. Serves every device, dtype, head_dim and window."""

    name = "torch"
    needs_rotated_k = False

    def __init__(self, spec: AttentionSpec) -> None:
        self.block_size = choose_block_size(spec, BLOCK_SIZE, 1, "torch")
        self._gathered: tuple[Tensor, Tensor] | None = None

    def rotates_decodes(self, num_decodes: int) -> bool:
        """Never."""
        return False

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
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        with sdpa_kernel(SDPA_KERNELS) if q.is_cuda else nullcontext():
            if metadata.num_decode_tokens > 0:
                decode = _decode_on_device if q.is_cuda else self._decode
                decode(q, k_cache, v_cache, metadata, scale, window, out)
            if metadata.num_seqs > metadata.num_decode_tokens:
                for prompt in _plan_prompts(metadata, k_cache.shape[1]):
                    _prompt_attention(prompt, q, k_cache, v_cache, scale, window, out)
        return out

    def _decode(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        out: Tensor,
    ) -> None:
        num_kv_heads = k_cache.shape[2]
        plan = _plan_decodes(metadata, k_cache, window)
        queries = q[plan.order].unflatten(1, (num_kv_heads, -1))  # [num_decodes, KH, G, D]
        results = torch.empty_like(queries)
        for group in plan.groups:
            keys, values = self._gather(k_cache, v_cache, group.slots)
            keys = keys.unflatten(0, (-1, group.num_keys)).transpose(1, 2)  # [N, KH, num_keys, D]
            values = values.unflatten(0, (-1, group.num_keys)).transpose(1, 2)
            results[group.start : group.end] = scaled_dot_product_attention(
                queries[group.start : group.end], keys, values, attn_mask=group.mask, scale=scale
            )
        torch.index_select(results.flatten(1, 2), 0, plan.rank, out=out[: len(plan.order)])

    def _gather(self, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """K and V at these slots, in buffers that every layer reuses: fresh memory costs more than the copy itself."""
        num_slots = slots.shape[0]
        if self._gathered is None or self._gathered[0].shape[0] < num_slots:
            with torch.inference_mode(False):  # or the buffers could only ever be used in inference mode
                buffers = torch.empty((2, num_slots, *k_cache.shape[2:]), dtype=k_cache.dtype)
            self._gathered = (buffers[0], buffers[1])
        keys, values = (buffer[:num_slots] for buffer in self._gathered)
        torch.index_select(k_cache.flatten(0, 1), 0, slots, out=keys)
        torch.index_select(v_cache.flatten(0, 1), 0, slots, out=values)
        return keys, values


def _plan_decodes(metadata: AttentionMetadata, k_cache: Tensor, window: int | None) -> _Decodes:
    """The step's decodes in groups of similar length, worked out once a step and window."""
    cache_key = f"torch_decodes_{window}"
    if cache_key not in metadata.cache:
        seq_lens, order = metadata.seq_lens[: metadata.num_decode_tokens].sort(descending=True, stable=True)
        block_table = metadata.block_table[order].long()
        lens: list[int] = seq_lens.tolist()
        max_keys = GROUP_BYTES // (2 * k_cache[0, 0].nbytes)  # of a group
        groups: list[_DecodeGroup] = []
        start = padding = 0
        for end in range(1, len(lens) + 1):
            longest = lens[start] if window is None else min(lens[start], window)
            if end < len(lens) and (end - start + 1) * longest <= max_keys:
                padding += lens[start] - lens[end]
                if padding <= MIN_PADDING or lens[end] >= MIN_LENGTH_RATIO * lens[start]:
                    continue
            groups.append(_decode_group(start, end, seq_lens, block_table, k_cache.shape[1], window, k_cache.dtype))
            start, padding = end, 0
        metadata.cache[cache_key] = _Decodes(order, order.argsort(), groups)
    return metadata.cache[cache_key]


def _decode_group(
    start: int,
    end: int,
    seq_lens: Tensor,
    block_table: Tensor,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> _DecodeGroup:
    counts = seq_lens[start:end, None].long()  # [N, 1], visible keys
    first = torch.zeros_like(counts) if window is None else (counts - window).clamp(min=0)  # the first visible key
    counts = counts - first
    num_keys, fewest = int(counts[0]), int(counts[-1])  # longest first
    indices = torch.arange(num_keys)
    # Padding repeats the last key instead of reading on: behind it lies whatever the page held before, NaN perhaps.
    positions = first + torch.minimum(indices, counts - 1)  # [N, num_keys]
    blocks = block_table[start:end].gather(1, positions // block_size)
    slots = blocks * block_size + positions % block_size
    mask = None
    if fewest < num_keys:
        mask = torch.zeros(slots.shape, dtype=dtype).masked_fill_(indices >= counts, float("-inf"))
        mask = mask[:, None, None, :]
    return _DecodeGroup(start, end, slots.flatten(), num_keys, mask)


def _plan_prompts(metadata: AttentionMetadata, block_size: int) -> list[_Prompt]:
    """The step's prompt chunks, worked out once a step."""
    if "torch_prompts" not in metadata.cache:
        bounds, seq_lens = metadata.cu_seqlens_q.tolist(), metadata.seq_lens.tolist()
        metadata.cache["torch_prompts"] = [
            _Prompt(
                start=bounds[b],
                end=bounds[b + 1],
                num_keys=seq_lens[b],
                blocks=metadata.block_table[b, : -(-seq_lens[b] // block_size)].long(),
            )
            for b in range(metadata.num_decode_tokens, metadata.num_seqs)
        ]
    return metadata.cache["torch_prompts"]


def _prompt_attention(
    prompt: _Prompt, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, window: int | None, out: Tensor
) -> None:
    """One chunk: a whole prompt as one causal call, anything else in chunks of query rows under a mask."""
    num_kv_heads = k_cache.shape[2]
    num_queries, num_keys = prompt.end - prompt.start, prompt.num_keys
    # [G, KH, queries or keys, D]: K and V are shared by the heads of a group, which make up the batch. As heads with a
    # stride of zero they would meet a fault of torch's memory-efficient kernel (pytorch pull request 191984): where the
    # last query is alone in its tile, as of 65 or 129, it is given the wrong row of the mask.
    queries = q[prompt.start : prompt.end].unflatten(1, (num_kv_heads, -1)).permute(2, 1, 0, 3)
    result = out[prompt.start : prompt.end].unflatten(1, (num_kv_heads, -1)).permute(2, 1, 0, 3)
    shared = (len(queries), -1, -1, -1)
    keys = k_cache[prompt.blocks].flatten(0, 1)[:num_keys].transpose(0, 1).expand(shared)
    values = v_cache[prompt.blocks].flatten(0, 1)[:num_keys].transpose(0, 1).expand(shared)
    if num_queries == num_keys and (window is None or window >= num_keys):
        result.copy_(scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale))
        return
    for start in range(0, num_queries, QUERY_CHUNK):
        end = min(start + QUERY_CHUNK, num_queries)
        positions = torch.arange(num_keys - num_queries + start, num_keys - num_queries + end, device=q.device)[:, None]
        last_key = num_keys - num_queries + end
        first_key = 0 if window is None else max(0, num_keys - num_queries + start - window + 1)
        indices = torch.arange(first_key, last_key, device=q.device)[None, :]
        visible = indices <= positions
        if window is not None:
            visible &= indices > positions - window
        result[:, :, start:end] = scaled_dot_product_attention(
            queries[:, :, start:end],
            keys[:, :, first_key:last_key],
            values[:, :, first_key:last_key],
            attn_mask=visible,
            scale=scale,
        )


def _decode_on_device(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None,
    out: Tensor,
) -> None:
    """Decodes without a look at a length, padded to max_seqlen_k: slow, but right inside a CUDA graph."""
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    num_blocks = min(-(-metadata.max_seqlen_k // block_size), metadata.block_table.shape[1])
    indices = torch.arange(num_blocks * block_size, device=q.device)
    seqs_at_once = max(1, MAX_PADDED_KEYS // (num_blocks * block_size))
    for start in range(0, metadata.num_decode_tokens, seqs_at_once):
        end = min(start + seqs_at_once, metadata.num_decode_tokens)
        lens = metadata.seq_lens[start:end, None]
        visible = indices < lens  # [N, keys]
        blocks = metadata.block_table[start:end, :num_blocks].long().flatten()
        shape = (end - start, num_blocks * block_size, num_kv_heads, head_dim)
        # A stale page may hold NaN, and neither a score less infinity nor a probability of zero undoes that.
        is_stale = ~visible[:, :, None, None]
        keys = k_cache[blocks].view(shape).masked_fill_(is_stale, 0).transpose(1, 2)  # [N, KH, keys, D]
        values = v_cache[blocks].view(shape).masked_fill_(is_stale, 0).transpose(1, 2)
        if window is not None:
            visible = visible & (indices >= lens - window)
        queries = q[start:end].unflatten(1, (num_kv_heads, -1))  # [N, KH, G, D]
        mask = visible[:, None, None, :]
        out[start:end] = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale).flatten(1, 2)
