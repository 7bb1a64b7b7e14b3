"""The sizes of a step.

Owns: `StepShape`. Invariant: it holds host integers only, known before the step runs. It deliberately holds no rows:
which they are is the plan's, and on the device the batch's.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.messages import SchedulerOutput


@dataclass(slots=True)
class StepShape:
    """What of a step shapes its launches; all that graph capture freezes. Units: rows, tokens."""

    num_rows: int
    num_tokens: int
    num_decodes: int
    num_sampled: int
    max_query_len: int
    max_seq_len: int
    has_cached_prefix: bool = False

    @classmethod
    def of(cls, plan: SchedulerOutput) -> StepShape:
        return cls(
            num_rows=len(plan.rows),
            num_tokens=plan.num_tokens,
            num_decodes=plan.num_decodes,
            num_sampled=plan.num_sampled,
            max_query_len=max(plan.num_query_tokens),
            max_seq_len=plan.max_seq_len,
            has_cached_prefix=plan.has_cached_prefix,
        )

    @classmethod
    def decode(cls, num_rows: int, max_seq_len: int) -> StepShape:
        return cls(num_rows, num_rows, num_rows, num_rows, 1, max_seq_len)
