"""The two tables over the vocabulary: token embedding and output layer.

Owns: their weights, [vocab_size, hidden_size]. Invariant: tied tables are one Parameter, so loading or updating one is
loading both. It deliberately does not check ids: prompts are checked on arrival, and sampled ids lie below vocab_size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanovllm.kernels.packed_linear import linear
from nanovllm.layers.linear import empty_parameter


class Embedding(nn.Module):
    """Rows of `weight` by token id. Tensor parallelism would cut the rows, as in the output layer."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter((vocab_size, hidden_size), dtype, device)

    def forward(self, input_ids: Tensor) -> Tensor:
        return functional.embedding(input_ids, self.weight)  # int32 [T] -> [T, hidden]


class LMHead(nn.Module):
    """Logits in the model's dtype. `tied_to` shares the embedding's Parameter instead of a weight of its own."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        tied_to: Embedding | None = None,
    ) -> None:
        super().__init__()
        self.weight = empty_parameter((vocab_size, hidden_size), dtype, device) if tied_to is None else tied_to.weight
        self.packed: Tensor | None = None  # as in Linear

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[S, hidden] -> [S, vocab]; into `out` where it is given, so that all graphs share one large buffer."""
        if out is None:
            return linear(hidden, self.weight, None, self.packed)
        if self.packed is not None:
            return out.copy_(linear(hidden, self.weight, None, self.packed))
        return torch.mm(hidden, self.weight.t(), out=out)
