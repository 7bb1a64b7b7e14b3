"""The matrix products of a layer, merged where several read the same input, and cut over tensor-parallel ranks.

Owns: `Linear`, whose weight may be several checkpoint tensors stacked (q, k, v; gate, up), and which says so in plain
data: `shards`. Invariant: a part's rows are contiguous and in the order of `parts`. It deliberately loads nothing: the
loader reads `shards` and cuts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from nanovllm.kernels.cublaslt import Product
from nanovllm.kernels.decode_linear import ResidualStream, add_residual, linear_partial, linear_residual
from nanovllm.kernels.packed_linear import linear
from nanovllm.layers.parallel import Shard, TensorParallel, cut


@dataclass(frozen=True)
class Part:
    """A checkpoint tensor of `width` rows, cut into `num_shards` equal ones; None: one a rank."""

    width: int
    num_shards: int | None = None


class Linear(nn.Module):
    """y = x @ weight.T + bias; weight [out, in] of this rank, allocated uninitialised.

    Args:
        in_features: width of the input, over all ranks.
        out_features: width of the output over all ranks, or {the checkpoint's name of a part: it} for a merged layer.
        shard: where it is cut: each part along its "output" rows, or the whole along its "input" columns; the outputs
            are then partial sums, which the ranks add up, and the bias is added behind that, once.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, Part],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        shard: Literal["output", "input"],
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.is_summed = shard == "input" and tp.size > 1
        self.joins_residual = shard == "input" and tp.size == 1  # see `add`
        parts = {"": Part(out_features)} if isinstance(out_features, int) else out_features
        self.columns = cut(in_features, tp.size, tp) if shard == "input" else slice(0, in_features)
        self.in_features = in_features
        self.parts: list[tuple[str, int, slice]] = []  # (name, rows over all ranks, those of this rank)
        for name, part in parts.items():
            num_shards = 1 if shard == "input" else min(part.num_shards or tp.size, tp.size)
            self.parts.append((name, part.width, cut(part.width, num_shards, tp)))
        num_rows = sum(rows.stop - rows.start for _, _, rows in self.parts)
        num_columns = self.columns.stop - self.columns.start
        self.weight = empty_parameter((num_rows, num_columns), dtype, device)
        self.bias = empty_parameter((num_rows,), dtype, device) if bias else None
        self.packed: Tensor | None = None  # the weight once more, on a CPU, for `kernels/packed_linear.py`
        self.product: Product | None = None  # how a full step multiplies on a GPU, where that is not torch's way

    def shards(self, kind: str) -> list[Shard]:
        """Where the checkpoint's tensors of `kind` ("weight", "bias") go."""
        shards, start = [], 0
        for name, width, rows in self.parts:
            shape, index = ((width,), (rows,)) if kind == "bias" else ((width, self.in_features), (rows, self.columns))
            end = start + rows.stop - rows.start
            shards.append(Shard(name, slice(start, end), shape, index))
            start = end
        return shards

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_summed:
            return self._multiply(x) if self.bias is None else linear(x, self.weight, self.bias, self.packed)
        out = self.tp.partial_sums(len(x), len(self.weight), x.dtype)
        y = self.tp.all_reduce(self._multiply(x, out))
        return y if self.bias is None else y + self.bias

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor | None, Tensor]:
        """(product of x [T, in], residual [T, out]), which the next norm adds up; (None, their sum) where that is done.

        On a GPU the addition rides in cuBLAS's epilogue for nothing, and the norm moves half as much.
        """
        if not x.is_cuda or not self.joins_residual:
            return self(x), residual
        if self.product is not None and self.product.fits(x, residual):
            self.product(x, self.weight, residual, adds=True)
        else:
            residual.addmm_(x, self.weight.t())
        if self.bias is not None:
            residual += self.bias
        return None, residual

    def _multiply(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """x [T, in] @ weight.T, into `out` [T, out] where it is given."""
        if self.product is not None and len(x) == self.product.num_rows:
            result = x.new_empty((len(x), len(self.weight))) if out is None else out
            if self.product.fits(x, result):
                return self.product(x, self.weight, result)
        return linear(x, self.weight, None, self.packed) if out is None else torch.mm(x, self.weight.t(), out=out)

    def add_to(self, stream: ResidualStream, x: Tensor, next_norm_weight: Tensor) -> None:
        """stream.residual [M, out] += the product of x [M, in], for a step of few decodes on a GPU."""
        if not self.is_summed:
            linear_residual(x, self.weight, self.bias, stream, next_norm_weight)
            return
        out = self.tp.partial_sums(len(x), len(self.weight), x.dtype)
        y = self.tp.all_reduce(linear_partial(x, self.weight, out))
        add_residual(stream, y if self.bias is None else y + self.bias, next_norm_weight)


def empty_parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter that only the loader fills: uninitialised, without gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
