"""The two tables over the vocabulary: token embedding and output layer.

Owns: their weights, [vocab_size, hidden_size], of which each tensor-parallel rank holds a run of rows. Invariant: tied
tables are one Parameter, so loading or updating one is loading both. It deliberately does not check ids: prompts are
checked on arrival, and sampled ids lie below vocab_size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from nanovllm.kernels.packed_linear import linear
from nanovllm.layers.linear import empty_parameter
from nanovllm.layers.parallel import Shard, TensorParallel, local_vocab


class VocabTable(nn.Module):
    """This rank's rows, `first_id` and the following `num_ids`, in a weight that may have more: they hold nothing."""

    def __init__(
        self, vocab_size: int, hidden_size: int, weight: nn.Parameter | None, dtype: torch.dtype,
        device: torch.device, tp: TensorParallel,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tp = tp
        self.vocab_size = vocab_size
        num_rows = local_vocab(vocab_size, tp.size)
        self.first_id = min(tp.rank * num_rows, vocab_size)
        self.num_ids = min(num_rows, vocab_size - self.first_id)
        self.weight = empty_parameter((num_rows, hidden_size), dtype, device) if weight is None else weight
        if weight is None:
            self.weight.data[self.num_ids :].zero_()

    def shards(self, kind: str) -> list[Shard]:
        """Where the checkpoint's tensor goes."""
        ids = slice(self.first_id, self.first_id + self.num_ids)
        return [Shard("", slice(0, self.num_ids), (self.vocab_size, self.weight.shape[1]), (ids,))]


class Embedding(VocabTable):
    """Rows of `weight` by token id."""

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device, tp: TensorParallel
    ) -> None:
        super().__init__(vocab_size, hidden_size, None, dtype, device, tp)

    def forward(self, input_ids: Tensor) -> Tensor:
        """int32 [T] -> [T, hidden]; ranks add up theirs, which is zero for an id of another rank."""
        if self.tp.size == 1:
            return functional.embedding(input_ids, self.weight)
        ids = input_ids - self.first_id
        is_here = (ids >= 0) & (ids < self.num_ids)
        found = functional.embedding(torch.where(is_here, ids, 0), self.weight).masked_fill_(~is_here[:, None], 0.0)
        return self.tp.all_reduce(found)  # not in `partial_sums`: the residual stream goes on with it


class LMHead(VocabTable):
    """Logits in the model's dtype. `tied_to` shares the embedding's Parameter instead of a weight of its own."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel,
        tied_to: Embedding | None = None,
    ) -> None:
        super().__init__(vocab_size, hidden_size, None if tied_to is None else tied_to.weight, dtype, device, tp)
        self.packed: Tensor | None = None  # as in Linear

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[S, hidden] -> [S, rows of this rank]; into `out` where it is given, so that all graphs share one large
        buffer. Rows that stand for no id get -inf."""
        if self.packed is not None or out is None:
            logits = linear(hidden, self.weight, None, self.packed)
            logits = logits if out is None else out.copy_(logits)
        else:
            logits = torch.mm(hidden, self.weight.t(), out=out)
        if self.num_ids < logits.shape[1]:
            logits[:, self.num_ids :] = float("-inf")
        return logits
