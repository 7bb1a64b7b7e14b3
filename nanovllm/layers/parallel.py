"""How a model is cut over the ranks of a tensor-parallel group.

Owns: what layers know of their group (`TensorParallel`), and the arithmetic of the cut. Invariant: a cut is data, a
`Shard` a checkpoint tensor: which of its rows or columns this rank holds, and where. It deliberately moves nothing
between ranks: `worker/parallel.py` does, and `SINGLE` has nobody to talk to.

Columns of a product are cut where its outputs are independent (q, k, v, gate, up), rows where they are summed (o,
down): one all-reduce a pair (Megatron-LM, arXiv:1909.08053).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class TensorParallel(Protocol):
    """This rank's place in the group. All ranks make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def partial_sums(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """[num_rows, width] to compute what `all_reduce` then sums fastest; None: any memory is as good. The next call
        gives out the same memory again, in which the sum may lie."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, the same bits on each; `x` itself may be overwritten."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """[...] of each rank: [size, ...]."""
        ...


class SingleRank:
    """A group of one: sums and collections are what they are made of."""

    rank = 0
    size = 1

    def partial_sums(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        return None

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x[None]

    def minimum(self, value: int) -> int:
        return value

    def all_succeed(self, succeeds: bool) -> bool:
        return succeeds


SINGLE = SingleRank()


@dataclass(frozen=True)
class Shard:
    """Where a checkpoint's tensor goes on this rank.

    Attributes:
        name: of the checkpoint's module, where it is not the parameter's own (a part of a merged product); else "".
        rows: of the parameter that hold it.
        shape: of the checkpoint's tensor.
        index: what of that tensor this rank holds.
    """

    name: str
    rows: slice
    shape: tuple[int, ...]
    index: tuple[slice, ...]


def cut(width: int, num_shards: int, tp: TensorParallel) -> slice:
    """This rank's part of `width` rows or columns in `num_shards` equal ones; with fewer of them than ranks,
    neighbours share one."""
    assert width % num_shards == 0 and tp.size % num_shards == 0
    size = width // num_shards
    shard = tp.rank * num_shards // tp.size
    return slice(shard * size, (shard + 1) * size)


def local_heads(num_heads: int, num_kv_heads: int, size: int) -> tuple[int, int]:
    """(query heads, KV heads) that each of `size` ranks computes. With fewer KV heads than ranks, ranks share them."""
    return num_heads // size, max(1, num_kv_heads // size)


def local_vocab(vocab_size: int, size: int) -> int:
    """Rows of the vocabulary's tables that a rank holds: all ranks equally many, a multiple of 64 where they are cut,
    so that the last ones may hold fewer ids than rows, or none."""
    return vocab_size if size == 1 else -(-vocab_size // (64 * size)) * 64
