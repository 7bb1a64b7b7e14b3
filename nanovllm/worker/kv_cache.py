"""The paged KV cache and how large it may be.

Owns: the K and V tensors of every layer. Invariant: block 0 belongs to no sequence (padded rows of graphs write
there), so a pool of n blocks holds (n - 1) * block_size tokens. It deliberately does not know which block holds what:
that is the block manager's.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from nanovllm.kernels.copy_blocks import copy_blocks

CPU_POOL_BYTES = 1 << 30
CONTEXT_BYTES = 600 << 20  # a CUDA context with this library's kernels loaded; measured, see docs/performance.md


def bytes_per_block(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers, K and V, of this rank's heads."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize * block_size


class KVCache:
    """K and V of all layers, one tensor [2 * num_layers, num_blocks, block_size, num_kv_heads, head_dim].

    Zeroed, since a masked key is multiplied by 0, and 0 times a stale NaN is NaN.

    Attributes:
        layers: (K, V) of each layer, [num_blocks, block_size, num_kv_heads, head_dim] each: views.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        num_caches = 2 * num_layers
        shape = (num_caches, num_blocks, block_size, num_kv_heads, head_dim)
        if device.type == "cpu":  # numpy's zeros take no memory until a page is touched; torch's touch them all
            num_bytes = math.prod(shape) * dtype.itemsize
            self._data = torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
        else:
            self._data = torch.zeros(shape, dtype=dtype, device=device)
        self.layers = [(self._data[i], self._data[i + 1]) for i in range(0, num_caches, 2)]

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in every layer, enqueued; no block is both."""
        on_gpu = self._data.is_cuda
        host = torch.tensor(pairs, dtype=torch.int32, pin_memory=on_gpu)  # [n, 2]
        copy_blocks(self._data, host.to(self._data.device, non_blocking=on_gpu))


def num_blocks_for_cpu(block_bytes: int, max_num_seqs: int, max_blocks_per_seq: int) -> int:
    """What `max_num_seqs` sequences of full length could need, at most 1 GiB, and block 0."""
    wanted = min(max_num_seqs * max_blocks_per_seq, CPU_POOL_BYTES // block_bytes)
    return max(wanted, 1) + 1


class GpuMemory:
    """Accounts for one card's memory from before the engine took any of it.

    Other processes' memory is theirs: it is what was in use before the engine started. This engine may hold
    `total * utilization`, with its weights, workspaces, graphs and (an allowance for) the CUDA context counted.
    """

    def __init__(self, device: torch.device, utilization: float) -> None:
        self.device = device
        self.free_at_start, self.total = torch.cuda.mem_get_info(device)
        self.reserved_at_start = torch.cuda.memory_reserved(device)
        self.allowed = int(self.total * utilization)

    def held(self) -> int:
        """Bytes this engine holds now, the context's allowance included."""
        free, _ = torch.cuda.mem_get_info(self.device)
        # what torch reserved is ours for sure, also where others gave memory back meanwhile
        reserved = torch.cuda.memory_reserved(self.device) - self.reserved_at_start
        return max(self.free_at_start - free, reserved) + CONTEXT_BYTES

    def num_blocks(self, block_bytes: int, graph_bytes: int, min_blocks: int, utilization: float) -> int:
        """Blocks that fit what is left of the allowance, and of the card, once `graph_bytes` are set aside.

        Raises:
            ValueError: fewer than `min_blocks` fit; states the card's total, what is in use and what was asked for.
        """
        free, _ = torch.cuda.mem_get_info(self.device)
        held = self.held()
        room = min(self.allowed - held, free - (256 << 20)) - graph_bytes
        blocks = room // block_bytes
        if blocks < min_blocks:
            gib = 1 << 30
            raise ValueError(
                f"not enough GPU memory for a KV cache: the card has {self.total / gib:.2f} GiB, of which "
                f"{(self.total - self.free_at_start) / gib:.2f} GiB were in use before this engine started and it "
                f"holds {held / gib:.2f} GiB itself (weights, workspaces, context); gpu_memory_utilization="
                f"{utilization} asks for {self.allowed / gib:.2f} GiB in all, which leaves {max(room, 0) / gib:.2f} "
                f"GiB for KV, and {min_blocks * block_bytes / gib:.2f} GiB is the least. Free memory, or lower "
                "max_model_len, max_num_batched_tokens or max_num_seqs, or raise gpu_memory_utilization"
            )
        return int(blocks)
