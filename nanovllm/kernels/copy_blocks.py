"""Copy KV blocks, in all layers at once: a fork gets its own of a partly filled one.

Owns: nothing but the copying. Invariant: afterwards every target block equals its source in every layer's K and V, and
no other block has changed. It deliberately copies whole blocks: what stands behind the prompt in the source is masked
in the target until the target's own tokens overwrite it. No target may be a source, since copies run in no order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.kernels._triton import tl, triton

BLOCK = 2048


@triton.jit(do_not_specialize_on_alignment=["pairs_ptr"])
def _copy_blocks_kernel(kv_ptr, pairs_ptr, cache_stride, num_words, BLOCK: tl.constexpr):
    pair = tl.program_id(0)
    source = tl.load(pairs_ptr + 2 * pair).to(tl.int64)
    target = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64)
    offsets = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_words
    cache_ptr = kv_ptr + tl.program_id(1).to(tl.int64) * cache_stride
    words = tl.load(cache_ptr + source * num_words + offsets, mask=mask)
    tl.store(cache_ptr + target * num_words + offsets, words, mask=mask)


def copy_blocks_triton(kv: Tensor, pairs: Tensor) -> None:
    words = kv.view(kv.shape[0], kv.shape[1], -1).view(torch.int32)  # [C, num_blocks, num_words]
    num_words = words.shape[2]
    grid = (pairs.shape[0], words.shape[0], -(-num_words // BLOCK))
    _copy_blocks_kernel[grid](words, pairs, words.stride(0), num_words, BLOCK=BLOCK)


def copy_blocks_reference(kv: Tensor, pairs: Tensor) -> None:
    source, target = pairs.long().unbind(1)
    for cache in kv:
        cache[target] = cache[source]


def copy_blocks(kv: Tensor, pairs: Tensor) -> None:
    """Copy blocks of `kv` [num_caches, num_blocks, ...], contiguous, in place: in each cache, for each (source, target)
    of `pairs`, int32 [n, 2], n at least 1. A block is a multiple of four bytes.
    """
    run = copy_blocks_triton if kv.is_cuda else copy_blocks_reference
    run(kv, pairs)
