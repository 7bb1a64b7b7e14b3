"""The matrix products of a layer, merged where several read the same input.

Owns: `Linear`, whose weight may be several checkpoint tensors stacked (q, k, v; gate, up), and which says so in plain
data: `parts`. Invariant: a part's rows are contiguous and in the order of `parts`. It deliberately loads nothing: the
loader reads `parts` and cuts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from nanovllm.kernels.packed_linear import linear


class Linear(nn.Module):
    """y = x @ weight.T + bias; weight [out, in], allocated uninitialised.

    Args:
        in_features: width of the input.
        out_features: width of the output, or {the checkpoint's name of a part: its width} for a merged layer.
        shard: where tensor parallelism would cut: each part along its "output" rows, or the whole along its "input"
            columns (the outputs are then partial sums).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Mapping[str, int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        shard: Literal["output", "input"],
    ) -> None:
        super().__init__()
        self.parts = dict(out_features) if isinstance(out_features, Mapping) else {}
        self.shard = shard
        out = out_features if isinstance(out_features, int) else sum(out_features.values())
        self.weight = empty_parameter((out, in_features), dtype, device)
        self.bias = empty_parameter((out,), dtype, device) if bias else None
        self.packed: Tensor | None = None  # the weight once more, on a CPU, for `kernels/packed_linear.py`

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.packed)  # [T, in] -> [T, out]


def empty_parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter that only the loader fills: uninitialised, without gradient."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
