"""Whether the KV pool will hold one more sequence, not only now but until the running ones end.

Owns: the estimate of output lengths and the look-ahead over block demand. Invariant: where lengths are known
(ignore_eos, no stop ids) the forecast does not lie below the real demand, so what it lets in is not preempted. It
deliberately has no say in what a token is: a wrong estimate costs a preemption or an idle block, nothing else.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection
from typing import NamedTuple

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

LEARNING_RATE = 1 / 64  # of the output ratio, for each finished sequence
PREEMPTION_PENALTY = 1.25  # a preemption says that the ratio was too low: raise it by so much
UNLIMITED = 2**62


class Growth(NamedTuple):
    """A sequence that fills one KV slot a step: (last_slot + t) // block_size + 1 - num_shared blocks at step t."""

    num_steps: int  # until its blocks are free again
    last_slot: int  # index of the last slot filled now
    num_shared: int  # leading blocks that its end would not set free


class BlockDemand:
    """Blocks in use whenever a running sequence ends: demand peaks only there, since in between it grows.

    The idea of looking ahead over known lengths is tokasaurus'. Building costs O(n log n), admitting O(n).

    Args:
        growths: the running sequences.
        num_fixed: blocks in use that no single sequence's end sets free.
        block_size: tokens in a block.
    """

    def __init__(self, growths: list[Growth], num_fixed: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_fixed = num_fixed
        self.growths = sorted(growths)
        self.ends = [growth.num_steps for growth in self.growths]
        self.demands: list[int] = []  # parallel to growths: at its end, itself included
        offsets: list[int] = []  # last_slot % block_size of those alive, sorted
        demand_now = num_fixed
        for growth in reversed(self.growths):  # the last to end first: alive are those seen so far
            num_blocks, offset = divmod(growth.last_slot, block_size)
            insort(offsets, offset)
            demand_now += num_blocks + 1 - growth.num_shared
            num_full, rest = divmod(growth.num_steps, block_size)
            num_carried = len(offsets) - bisect_left(offsets, block_size - rest)
            self.demands.append(demand_now + len(offsets) * num_full + num_carried)
        self.demands.reverse()

    def admit(self, new: Growth, capacity: int, num_left_behind: int = 0) -> bool:
        """Add `new` if demand never passes `capacity` blocks with it; otherwise change nothing.

        num_left_behind: blocks of it, beside the shared ones, that its end will not set free.
        """
        size, ends, demands = self.block_size, self.ends, self.demands
        step, last_slot, extra = new.num_steps, new.last_slot, 1 - new.num_shared
        num_before = bisect_right(ends, step)
        for index in range(num_before):
            if demands[index] + (last_slot + ends[index]) // size + extra > capacity:
                return False
        if num_left_behind and max(demands[num_before:], default=0) + num_left_behind > capacity:
            return False
        position = bisect_left(ends, step)
        demand = self.num_fixed + (last_slot + step) // size + extra
        for growth in self.growths[position:]:
            demand += (growth.last_slot + step) // size + 1 - growth.num_shared
        if demand > capacity:
            return False
        for index in range(num_before):
            demands[index] += (last_slot + ends[index]) // size + extra
        if num_left_behind:
            demands[num_before:] = [demand + num_left_behind for demand in demands[num_before:]]
            self.num_fixed += num_left_behind
            new = new._replace(num_shared=new.num_shared + num_left_behind)
        self.growths.insert(position, new)
        ends.insert(position, step)
        demands.insert(position, demand)
        return True


class Admission:
    """Finds room for waiting sequences.

    Args:
        blocks: of the pool.
        max_num_batched_tokens: tokens in one step.
        max_in_flight: steps that may be submitted and not yet known.
    """

    def __init__(self, blocks: BlockManager, max_num_batched_tokens: int, max_in_flight: int) -> None:
        self.blocks = blocks
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_in_flight = max_in_flight
        self.output_ratio = 1.0  # learned share of the allowed output that sequences use
        self._running: Collection[Sequence] = ()
        self._num_decodes = 0
        self._demand: BlockDemand | None = None

    def observe_end(self, seq: Sequence) -> None:
        """Learn from a sequence that ended by itself; one of known length says nothing."""
        if not seq.has_exact_length:
            used = seq.num_output_tokens / (seq.max_total_tokens - seq.num_prompt_tokens)
            self.output_ratio += LEARNING_RATE * (used - self.output_ratio)

    def observe_preemption(self) -> None:
        """Learn that lengths were underestimated: the pool ran out."""
        self.output_ratio = min(1.0, self.output_ratio * PREEMPTION_PENALTY)

    def begin(self, running: Collection[Sequence], num_decodes: int) -> None:
        """Start a round of find_room; `running` may grow by those that were admitted in it."""
        self._running, self._num_decodes, self._demand = running, num_decodes, None

    def find_room(self, seq: Sequence, budget: int) -> list[int] | None:
        """Blocks with the beginning of a sequence that can start now and is expected to run to its end: cached ones, or
        those that a fork holds; None: it has to wait.

        Whoever gets an answer starts the sequence, with a first chunk of at most `budget` tokens.
        """
        blocks = self.blocks
        if seq.prompt_blocks:
            hits = seq.prompt_blocks[: (seq.num_prompt_tokens - 1) // blocks.block_size]
        else:
            hits = blocks.match_prefix(seq)
        num_held = blocks.num_held(hits)
        num_tokens = len(seq.token_ids)
        if blocks.num_blocks_for(num_tokens) - num_held > blocks.num_free:
            return None
        if not self._running:
            return hits  # alone it fits: that was checked before it came here
        is_safe = blocks.num_blocks_at_most(seq) - num_held + blocks.num_to_come <= blocks.num_free
        if is_safe and self._demand is None:
            return hits  # even if all run to their limit: no need to look ahead
        if self._demand is None:
            self._demand = self._forecast()
        num_left = num_tokens - len(hits) * blocks.block_size - budget
        growth = Growth(self._num_steps(seq, num_tokens, num_left), num_tokens - 1, num_held)
        num_left_behind = max(0, self._num_for_forks(seq) - num_held)
        capacity = UNLIMITED if is_safe else blocks.num_usable
        return hits if self._demand.admit(growth, capacity, num_left_behind) else None

    def _num_for_forks(self, seq: Sequence) -> int:
        """Blocks of the prompt that forks will hold when this sequence has computed it, also beyond its end."""
        return self.blocks.num_blocks_for(seq.num_prompt_tokens - 1) if seq.forks else 0

    def _forecast(self) -> BlockDemand:
        """The running sequences' demand for blocks from here to their ends."""
        blocks, growths = self.blocks, []
        num_fixed = blocks.num_usable - blocks.num_free
        for seq in self._running:
            num_slots = min(max(len(seq.token_ids), seq.num_computed) + seq.num_speculative, seq.max_total_tokens - 1)
            num_left = len(seq.token_ids) - seq.num_computed
            num_shared = max(blocks.num_shared_blocks(seq), self._num_for_forks(seq))
            growths.append(Growth(self._num_steps(seq, num_slots, num_left), num_slots - 1, num_shared))
            num_fixed -= len(seq.block_table) - num_shared
        return BlockDemand(growths, num_fixed, blocks.block_size)

    def _num_steps(self, seq: Sequence, num_slots: int, num_left: int) -> int:
        """Steps until a sequence with num_slots slots filled frees them: an end is seen late, and prompts delay it.

        num_left: known tokens that are still to be computed after this step.
        """
        num_steps = seq.max_total_tokens - 1 - num_slots
        if not seq.has_exact_length:
            num_steps = -int(-num_steps * self.output_ratio // 1)
        if num_left > 0:
            num_steps += -(-num_left // max(1, self.max_num_batched_tokens - self._num_decodes))
        return num_steps + self.max_in_flight - 1
