"""One step, as the host sees it.

Owns: the order of a batch. Invariant: the sequences that sample come first, and those of one token before all others.
It deliberately does not choose: what runs, and how much of it, is the scheduler's.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.engine.sequence import Sequence
from nanovllm.messages import NewRow, SchedulerOutput


@dataclass(slots=True, eq=False)
class Step:
    """A plan and its sequences: seqs[i] has row plan.rows[i]. Results belong to the sequence, not to the row."""

    plan: SchedulerOutput
    seqs: list[Sequence]


@dataclass(slots=True)
class Chunk:
    """Some of a sequence's known tokens, to be computed in one step."""

    seq: Sequence
    start: int
    num_tokens: int
    is_final: bool  # reaches the end of the known tokens: samples

    def is_decode(self, num_drafts: int) -> bool:
        """Whether it is placed and run as one: a final chunk of one token, but where a decode also runs drafts."""
        return self.is_final and self.num_tokens == 1 and num_drafts == 0


def new_row(seq: Sequence) -> NewRow:
    """All that the device has to know of a sequence that starts."""
    return NewRow(
        row=seq.row,
        token_ids=list(seq.token_ids),
        num_prompt_tokens=seq.num_prompt_tokens,
        num_computed_tokens=seq.num_computed,
        block_table=list(seq.block_table),
        sampling_params=seq.sampling_params,
        seed=seq.seed,
        end_ids=seq.end_ids,
        bad_word_ids=seq.bad_word_ids,
        first_prompt_logprob=seq.first_prompt_logprob,
    )


def place_chunks(
    plan: SchedulerOutput, decodes: list[Sequence], chunks: list[Chunk], num_drafts: int
) -> list[Sequence]:
    """Put chunks behind the decodes that `plan` has, the final ones first; returns the sequences in plan order."""
    singles = [chunk for chunk in chunks if chunk.is_decode(num_drafts)]
    longer = [chunk for chunk in chunks if not chunk.is_decode(num_drafts)]
    finals = [chunk for chunk in longer if chunk.is_final]
    placed = [*singles, *finals, *(chunk for chunk in longer if not chunk.is_final)]
    # New lists: the decodes' own are shared by all plans with the same decodes.
    plan.rows = [*plan.rows, *(chunk.seq.row for chunk in placed)]
    plan.num_query_tokens = [*plan.num_query_tokens, *(chunk.num_tokens for chunk in placed)]
    plan.num_decodes += len(singles)
    plan.num_sampled += len(singles) + len(finals)
    plan.max_seq_len = max(plan.max_seq_len, max(chunk.start + chunk.num_tokens for chunk in placed))
    plan.has_cached_prefix = any(chunk.start > 0 for chunk in longer)
    return [*decodes, *(chunk.seq for chunk in placed)]
