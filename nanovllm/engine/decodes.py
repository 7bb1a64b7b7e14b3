"""The sequences that decode: one token (and drafts) each, in every step.

Owns: the list of them and the blocks that they grow into. Invariant: after `schedule`, each sequence in the plan has
slots for the upper bound of its length. It deliberately does not preempt: a sequence that finds no block stays out of
the plan, `is_short` says so, and the scheduler sees to it.
"""

from __future__ import annotations

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.messages import SchedulerOutput


class Decodes:
    """Running sequences whose known tokens are all submitted.

    Args:
        blocks: of the pool.
        max_tokens_per_decode: tokens that a decode runs and may add at most: 1 + drafts.
        max_num_batched_tokens: tokens in one step.
    """

    def __init__(self, blocks: BlockManager, max_tokens_per_decode: int, max_num_batched_tokens: int) -> None:
        self.blocks = blocks
        self.num_drafts = max_tokens_per_decode - 1
        self.max_num_seqs = max_num_batched_tokens // max_tokens_per_decode
        self.is_short = False  # a sequence found no block
        self.has_changed = False  # sequences have left or joined since the last plan
        self._joining: list[Sequence] = []
        self._max_seq_len = 0  # keys that the longest attended to in the last plan; 0: not known
        self._set([])

    def __len__(self) -> int:
        return len(self._seqs)

    def join(self, seq: Sequence) -> None:
        """The sequence decodes from the next step on. To leave, it is enough to lose the row and set has_changed."""
        self._joining.append(seq)
        self.has_changed = True

    def schedule(self, plan: SchedulerOutput) -> list[Sequence]:
        """Fill `plan` with every decode that can run, and return their sequences. The host's hot loop.

        As long as nothing changes, plans share the same list objects, which are never changed afterwards.
        """
        if self.has_changed:
            seqs = [seq for seq in (*self._seqs, *self._joining) if seq.row and not _has_reached_length(seq)]
            self._joining = []
            if len(seqs) <= self.max_num_seqs:  # all take part; otherwise the order is whose turn it is
                # the longest first: the last programs of an attention kernel, which run alone, are then short ones
                seqs.sort(key=_length, reverse=True)
            self._set(seqs)
        num_drafts = self.num_drafts
        seqs, left_out = self._seqs[: self.max_num_seqs], self._seqs[self.max_num_seqs :]
        for seq in seqs:
            num_computed = seq.num_computed + 1
            # The one eligibility test: num_slots stands for the blocks that it has and for the length where it ends.
            if num_computed + seq.num_speculative + num_drafts > seq.num_slots and not self._grow(seq, plan):
                left_out.append(seq)
                continue
            seq.num_computed = num_computed
        seqs = self._without(left_out) if left_out else self._seqs
        for seq in seqs if num_drafts else ():
            seq.num_speculative += num_drafts
        if self._max_seq_len and not num_drafts:
            self._max_seq_len += 1
        else:
            self._max_seq_len = max((seq.num_computed + seq.num_speculative for seq in seqs), default=0)
        plan.rows, plan.num_query_tokens = self._rows, self._num_query_tokens
        plan.num_decodes = plan.num_sampled = len(seqs)
        plan.max_seq_len = self._max_seq_len
        return seqs

    def num_blocks_short(self) -> int:
        """Blocks that the next step would need beyond the free ones; nothing is in flight."""
        seqs = [seq for seq in (*self._seqs, *self._joining) if seq.row and not _has_reached_length(seq)]
        return sum(self._num_blocks(seq) - len(seq.block_table) for seq in seqs) - self.blocks.num_free

    def _set(self, seqs: list[Sequence]) -> None:
        self._seqs = seqs
        self._rows = [seq.row for seq in seqs]
        self._num_query_tokens = [1 + self.num_drafts] * len(seqs)
        self._max_seq_len = 0
        self.has_changed = False

    def _without(self, left_out: list[Sequence]) -> list[Sequence]:
        """Go on without some; those that have not reached their length join again."""
        out = set(left_out)
        self._set([seq for seq in self._seqs if seq not in out])
        for seq in left_out:
            if not _has_reached_length(seq):
                self.join(seq)
        return self._seqs

    def _grow(self, seq: Sequence, plan: SchedulerOutput) -> bool:
        """Give a sequence the blocks of one more decode; False if it has reached its length or there is no block."""
        if _has_reached_length(seq):
            return False
        num_now, num_then = len(seq.block_table), self._num_blocks(seq)
        if num_then - num_now > self.blocks.num_free:
            self.is_short = True
            return False
        if num_then > num_now:
            self.blocks.extend(seq, num_then)
            for index in range(num_now, num_then):
                plan.block_appends.append((seq.row, index, seq.block_table[index]))
        return True

    def _num_blocks(self, seq: Sequence) -> int:
        """Blocks that the upper bound of one more decode needs, never beyond the sequence's length."""
        num_slots = seq.num_computed + 1 + seq.num_speculative + self.num_drafts
        return self.blocks.num_blocks_for(min(num_slots, seq.max_total_tokens - 1))


def _length(seq: Sequence) -> int:
    return seq.num_computed


def _has_reached_length(seq: Sequence) -> bool:
    """The lower bound of its length: with what is in flight, it has all the tokens that it may have."""
    return seq.num_computed + 1 >= seq.max_total_tokens
