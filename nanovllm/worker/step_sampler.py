"""From a step's logits to its sampled ids, by whichever way its rows ask for.

Owns: the samplers, the edits of logits, the logprobs, and which rows need their whole distribution. Invariant: all
tensor-parallel ranks sample the same ids: from the whole rows, gathered alike on each, or from all ranks' candidates.
It deliberately does not run the model: logits come in, [S, this rank's rows of the vocabulary].

With one rank every row is whole. With several, rows without filters, edits and logprobs exchange one candidate a rank;
a step with any other row gathers the logits of all its rows.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from nanovllm.layers.embedding import LMHead
from nanovllm.layers.parallel import TensorParallel
from nanovllm.layers.sampler import Sampler, SliceSampler
from nanovllm.messages import NewRow, SchedulerOutput
from nanovllm.worker.logits import LogitsEdits, StepEdits
from nanovllm.worker.logprobs import LogprobsRunner, PendingLogprobs
from nanovllm.worker.persistent_batch import PersistentBatch


def _needs_whole(new: NewRow, vocab_size: int) -> bool:
    params = new.sampling_params
    is_filtered = 0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0
    return (is_filtered and not params.is_greedy) or params.logprobs is not None


class StepSampler:
    """Samples the rows of `batch`.

    Args:
        head: the output layer, which knows the vocabulary and this rank's part of it.
        compute_logits: [n, hidden] -> [n, this rank's part].
    """

    def __init__(
        self,
        batch: PersistentBatch,
        head: LMHead,
        max_num_seqs: int,
        compute_logits: Callable[[Tensor], Tensor],
        tp: TensorParallel,
    ) -> None:
        self.batch, self.tp = batch, tp
        self.vocab_size = head.vocab_size
        self.sampler = Sampler(head.vocab_size, max_num_seqs, batch.device)
        self.slices: SliceSampler | None = None
        if tp.size > 1:
            num_ids = head.weight.shape[0]
            self.slices = SliceSampler(num_ids, tp.rank * num_ids, max_num_seqs, batch.device)
        self.edits = LogitsEdits(batch, head.vocab_size)
        self.logprobs = LogprobsRunner(batch, head.vocab_size, lambda hidden: self._gather(compute_logits(hidden)))
        self._whole_rows: set[int] = set()  # several ranks: rows that need all their logits in one place

    def reset(self) -> None:
        """After a broken step: the next plans bring all rows anew."""
        self.edits.reset()
        self.logprobs.reset()
        self._whole_rows.clear()

    def apply_plan(self, plan: SchedulerOutput) -> None:
        """Take over the rows that a plan brings."""
        self.edits.apply_plan(plan)
        self.logprobs.apply_plan(plan)
        if self.slices is not None and plan.new_rows:
            self._whole_rows -= {new.row for new in plan.new_rows}
            self._whole_rows |= {new.row for new in plan.new_rows if _needs_whole(new, self.vocab_size)}

    def is_plain(self, plan: SchedulerOutput, edits: StepEdits | None) -> bool:
        """Whether `sample` serves all rows of a plan with these edits, as it does in a CUDA graph."""
        if edits is not None:
            return False
        return not self._whole_rows or self._whole_rows.isdisjoint(plan.rows[: plan.num_sampled])

    def sample(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Ids int32 [S] of plain rows `rows` int32 [S]. Graphs capture it."""
        if self.slices is None:
            return self.sampler(logits, rows, self.batch)
        candidates = self.slices.candidates(logits, rows, self.batch)  # [S, 3]
        return self.slices.best(self.tp.all_gather(candidates), rows, self.batch)

    def sample_step(
        self, logits: Tensor, rows: Tensor, plan: SchedulerOutput, edits: StepEdits | None
    ) -> tuple[Tensor, PendingLogprobs | None]:
        """Ids int32 [S] of `rows`, graph padding included, and the logprobs that some of them want."""
        if self.is_plain(plan, edits):
            sampled = self.sample(logits, rows)
        else:
            logits = self._gather(logits)
            if edits is None:
                sampled = self.sampler(logits, rows, self.batch)
            else:
                sampled = edits.sample(logits, rows, self.sampler, self.batch)
        return sampled, self.logprobs.finish(plan, logits, sampled)

    def _gather(self, logits: Tensor) -> Tensor:
        """[n, this rank's part] -> [n, V], on every rank."""
        if self.slices is None:
            return logits
        return self.tp.all_gather(logits).transpose(0, 1).flatten(1)[:, : self.vocab_size]
