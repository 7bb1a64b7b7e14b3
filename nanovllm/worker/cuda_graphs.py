"""CUDA graphs of the decode step.

Owns: the captured graphs, two a batch size: embedding to logits, and sampling to advance; one row has another of the
first kind, for short contexts. Invariant: every batch size from 1 to max_num_seqs has a graph of at least that size,
and all of them share one memory pool, so a replay's outputs stand until the next replay. They deliberately cover
decodes only: a step with prompt chunks has a shape of its own and runs eagerly, launched ahead.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanovllm.kernels.paged_decode import SHORT_CONTEXT

# Of a wide model's batch sizes beyond 160, those whose products do not take longer than a larger batch's on an H200:
# cuBLAS is slower at some in between than at the next of these (192 rows of Qwen3-8B: 157 us a layer; 200 rows: 140).
WIDE_HIDDEN_SIZE = 2048
WIDE_SIZES = (184, 200, 216, 248, 256, 264, 304, 320, 336, 368, 384, 432, 464, 480, 496)


def graph_sizes(max_num_seqs: int, hidden_size: int) -> list[int]:
    """Batch sizes to capture, ascending: 1, 2, 4, then every 8 up to 256 and every 16 beyond, and max_num_seqs itself.

    Padding wastes at most 7 rows up to 256 (15 beyond), less than 6 % of a step that large. Sizes half as dense save a
    second at start, and cost a large model some percent of its products, whose time grows with the rows. It does not
    grow evenly, so wide models leave out sizes that are slower than larger ones, for up to 47 rows of padding.
    """
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_num_seqs + 16, 16)]
    if hidden_size >= WIDE_HIDDEN_SIZE:
        sizes = [1, 2, 4, *range(8, 161, 8), *WIDE_SIZES, *range(512, max_num_seqs + 16, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def context_bounds(size: int, max_model_len: int) -> list[int]:
    """The lengths up to which a batch size has a graph each, ascending: attention treats a short row in its own way."""
    return [SHORT_CONTEXT, max_model_len] if size == 1 and max_model_len > SHORT_CONTEXT else [max_model_len]


@dataclass(slots=True)
class DecodeGraph:
    """One batch size, captured. `logits` [size, V] and `sampled` int32 [size] are overwritten by the next replay of
    any graph."""

    models: list[tuple[int, torch.cuda.CUDAGraph]]  # and the longest context that each is for, ascending
    sample: torch.cuda.CUDAGraph
    logits: torch.Tensor
    sampled: torch.Tensor

    def replay_model(self, max_seq_len: int) -> None:
        """Embedding to logits, of rows that attend to at most `max_seq_len` keys."""
        fitting = [model for bound, model in self.models if max_seq_len <= bound]
        fitting[0].replay()


class CudaGraphs:
    """Captures and finds the graphs.

    Args:
        sizes: of batches, ascending, see `graph_sizes`.
        forward: runs a decode of the first `size` step rows, of at most so many keys, up to the logits [size, V].
        sample: samples from logits [size, V] and advances the rows; returns int32 [size].
    """

    def __init__(
        self,
        sizes: list[int],
        max_model_len: int,
        forward: Callable[[int, int], torch.Tensor],
        sample: Callable[[torch.Tensor, int], torch.Tensor],
    ) -> None:
        self.sizes = sizes
        self.max_model_len = max_model_len
        self._forward = forward
        self._sample = sample
        self._graphs: dict[int, DecodeGraph] = {}

    def padded_size(self, num_rows: int) -> int:
        """The smallest captured size that holds `num_rows` rows."""
        return self.sizes[bisect.bisect_left(self.sizes, num_rows)]

    def capture(self, stream: torch.cuda.Stream) -> None:
        """Capture every size, the largest first so that the smaller ones fit into its memory.

        Each size runs once before its capture: Triton compiles, and cuBLAS makes its workspace, outside of it.
        """
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self.sizes):
            models = []
            for bound in context_bounds(size, self.max_model_len):
                logits = self._forward(size, bound)
                stream.synchronize()
                model = torch.cuda.CUDAGraph()
                with torch.cuda.graph(model, pool=pool, stream=stream):
                    logits = self._forward(size, bound)
                models.append((bound, model))
            self._sample(logits, size)
            stream.synchronize()
            sample = torch.cuda.CUDAGraph()
            with torch.cuda.graph(sample, pool=pool, stream=stream):
                sampled = self._sample(logits, size)
            self._graphs[size] = DecodeGraph(models, sample, logits, sampled)

    def __getitem__(self, size: int) -> DecodeGraph:
        return self._graphs[size]

    def clear(self) -> None:
        """Give back every graph and the pool."""
        self._graphs.clear()
