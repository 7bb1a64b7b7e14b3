"""What runs next.

Owns: the queues, the rows (the host's side of them) and the decision which sequences run how many tokens in a step.
Invariant: what it knows of a sequence on the device is a lower and an upper bound, equal when nothing is in flight;
it allocates blocks for the upper one and stops on the lower one. It deliberately never waits for results and never
looks at a token: what ends a sequence is decided elsewhere and told to `finish`.

Plans run strictly in the order in which schedule() returned them. That order is the only fence: a block that is freed
may be given away at once, and a block may be read by any plan from the one that writes it on, that one too, because
each layer stores the keys of a step's prompt chunks before any of its queries reads. Only what a decode stores nobody
else may read in that step: such a block is offered for sharing when its sequence lets go of it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

from nanovllm.config import Config
from nanovllm.engine.admission import Admission
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.decodes import Decodes
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Chunk, Step, new_row, place_chunks
from nanovllm.messages import ModelRunnerOutput, SchedulerOutput

__all__ = ["Scheduler", "Step"]

MAX_BYPASSES = 64  # admissions that may overtake a request at the head that does not fit; then room is kept for it
BYPASS_WINDOW = 8  # requests behind the head that are looked at


class Scheduler:
    """Queues, rows and blocks of one engine. Blocks and rows count from 1; number 0 of both is reserved.

    Args:
        max_num_seqs: sequences in flight, and rows.
        max_num_batched_tokens: tokens in one step.
        max_model_len: longest sequence, in tokens.
        num_blocks: blocks in the KV pool, the reserved one included.
        block_size: tokens in a block.
        enable_prefix_caching: share full blocks among sequences that begin alike.
        max_in_flight: steps that may be submitted and not yet known.
        max_tokens_per_decode: tokens that a decode runs and may add at most: 1 + drafts.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        max_in_flight: int = 2,
        max_tokens_per_decode: int = 1,
    ) -> None:
        assert max_num_seqs >= 1 and max_num_batched_tokens >= max_tokens_per_decode >= 1 and max_in_flight >= 1
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.max_in_flight = max_in_flight
        self.max_tokens_per_decode = max_tokens_per_decode
        self._pool = (num_blocks, block_size, enable_prefix_caching)
        self.num_preemptions = 0
        self.num_prompt_tokens_computed = 0  # computed again after a preemption counts again
        self.num_prompt_tokens_cached = 0
        self.max_seqs_in_flight = 0
        self._num_steps = 0
        self._clear()

    def _clear(self) -> None:
        self.blocks = BlockManager(*self._pool)
        self._waiting: deque[Sequence] = deque()  # aborted ones are left in it until they are met
        self._num_waiting = 0
        self._running: dict[Sequence, None] = {}  # in order of admission
        self._prompts: list[Sequence] = []  # running, known tokens not all submitted
        self._in_flight: deque[Step] = deque()
        self._free_rows = list(range(self.max_num_seqs, 0, -1))
        self._returning_rows: deque[tuple[int, int]] = deque()  # (step after which it is free, row)
        self._may_admit = False  # something changed since admission was last tried in vain
        self._decodes = Decodes(self.blocks, self.max_tokens_per_decode, self.max_num_batched_tokens)
        self._admission = Admission(self.blocks, self.max_num_batched_tokens, self.max_in_flight)

    # ---- the caller's side --------------------------------------------------------------------------------------

    @property
    def num_total_blocks(self) -> int:
        """Blocks that sequences can use."""
        return self.blocks.num_usable

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds, cached ones included."""
        return self.blocks.num_free

    @property
    def num_seqs_in_flight(self) -> int:
        """Rows in use, those included that wait for the last plan that contains them."""
        return self.max_num_seqs - len(self._free_rows)

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. It must fit (`can_ever_fit`) and have room for at least one more token.

        Its `forks`, of which the same holds, come with it: they wait until its prompt is computed.
        """
        for each in (seq, *seq.forks):
            assert 0 < len(each.token_ids) < each.max_total_tokens <= self.max_model_len and not each.is_finished
        self._queue(seq, self._waiting.append)

    def _queue(self, seq: Sequence, put: Callable[[Sequence], None]) -> None:
        seq.is_waiting = True
        put(seq)
        self._num_waiting += 1
        self._may_admit = True

    def has_work(self) -> bool:
        """Some sequence has not ended."""
        return self._num_waiting > 0 or bool(self._running)

    def finish(self, seqs: Iterable[Sequence]) -> None:
        """Sequences that ended: their blocks are free at once, their rows when no plan in flight contains them."""
        for seq in seqs:
            if seq.finish_reason is None:
                seq.finish_reason = "length" if len(seq.token_ids) >= seq.max_total_tokens else "stop"
            if seq.row:
                self._admission.observe_end(seq)
            self._drop(seq)

    def abort(self, seq: Sequence) -> None:
        """End a sequence wherever it is, at any time. One that has ended is left as it is."""
        if seq.finish_reason is None:
            seq.finish_reason = "abort"
        self._drop(seq)

    def reset(self) -> list[Sequence]:
        """After an exception: forget what is in flight, free all rows and blocks, empty prefix cache and queues.

        Returns the sequences that were running or waiting; they hold nothing any more.
        """
        dropped = [*self._running, *(seq for seq in self._waiting if seq.is_waiting)]
        dropped += [fork for seq in dropped for fork in seq.forks if not fork.is_finished]
        for seq in dropped:
            seq.row, seq.block_table, seq.is_waiting = 0, [], False
            seq.forks, seq.prompt_blocks = [], []
            seq.num_computed = seq.num_speculative = 0
        output_ratio = self._admission.output_ratio
        self._clear()
        self._admission.output_ratio = output_ratio
        return dropped

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes (new weights, say). Running sequences keep their blocks and share them no more.

        A sequence that is preempted afterwards computes all its tokens again.
        """
        self.blocks.reset_prefix_cache()

    def can_ever_fit(self, num_total_tokens: int) -> tuple[int, int]:
        """(blocks that a sequence of so many tokens needs, blocks there are). The last token's KV is never needed."""
        return self.blocks.num_blocks_for(num_total_tokens - 1), self.blocks.num_usable

    def stuck_reason(self) -> str:
        """Why nothing can run although work is waiting: for the error that the caller raises."""
        head = next((seq for seq in self._waiting if seq.is_waiting), None)
        if head is None:
            return f"{len(self._running)} sequences wait for results that are not in flight"
        needed = self.blocks.num_blocks_for(len(head.token_ids))
        return (
            f"request {head.request_id!r} cannot start: it needs {needed} KV blocks, and {self.blocks.num_free} of "
            f"{self.blocks.num_usable} are free; {self._num_waiting} requests wait, "
            f"{len(self._free_rows)} rows are free"
        )

    def update(self, step: Step, output: ModelRunnerOutput) -> None:
        """Take the results of the oldest step in flight: append its tokens to the sequences that still live."""
        assert self._in_flight and self._in_flight[0] is step, "results come in the order of the plans"
        self._in_flight.popleft()
        if output.num_new_tokens is None and self.max_tokens_per_decode == 1:
            # zip stops at the tokens: the rows that sample come first
            for seq, token_id in zip(step.seqs, output.token_ids, strict=False):
                if seq.finish_reason is None:
                    seq.token_ids.append(token_id)
        else:
            self._update_with_drafts(step, output)
        while self._returning_rows and self._returning_rows[0][0] <= step.plan.step:
            self._free_rows.append(self._returning_rows.popleft()[1])
            self._may_admit = True

    def _update_with_drafts(self, step: Step, output: ModelRunnerOutput) -> None:
        counts = output.num_new_tokens or [1] * step.plan.num_sampled
        end = 0
        for index, (seq, count) in enumerate(zip(step.seqs, counts, strict=False)):
            start, end = end, end + count
            if seq.finish_reason is not None:
                continue
            tokens = output.token_ids[start : min(end, start + seq.max_total_tokens - len(seq.token_ids))]
            seq.token_ids.extend(tokens)
            if index < step.plan.num_decodes:  # the bounds draw together: what was possible is now known
                seq.num_computed += len(tokens) - 1
                seq.num_speculative -= self.max_tokens_per_decode - 1

    # ---- a step -------------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next plan, or None: nothing can run, or results have to come in first."""
        if len(self._in_flight) >= self.max_in_flight:
            return None
        if self._decodes.is_short:
            if self._in_flight:
                return None  # a sequence with a step in flight is never preempted
            self._preempt()
        plan = SchedulerOutput(self._num_steps, [], [], 0, 0)
        seqs = self._decodes.schedule(plan)
        budget = self.max_num_batched_tokens - len(seqs) * self.max_tokens_per_decode
        chunks: list[Chunk] = []
        if self._prompts:
            budget = self._continue_prompts(chunks, budget)
        if self._may_admit and self._num_waiting and not self._decodes.is_short:
            self._admit(plan, chunks, budget)
        if chunks:
            seqs = place_chunks(plan, seqs, chunks, self.max_tokens_per_decode - 1)
            self._settle_forks(chunks)
        if not seqs:
            if not self._in_flight and (self._decodes.is_short or self._give_up_prompts()):
                return self.schedule()  # no decode found a block: preempt now; or there is more room now
            return None
        self._num_steps += 1
        step = Step(plan, seqs)
        self._in_flight.append(step)
        return step

    def _continue_prompts(self, chunks: list[Chunk], budget: int) -> int:
        """Further chunks of prompts that have begun; returns the budget left."""
        prompts = [seq for seq in self._prompts if seq.row]
        for seq in prompts:
            if budget <= 0:
                break
            chunks.append(self._take_chunk(seq, budget))
            budget -= chunks[-1].num_tokens
        self._prompts = [seq for seq in prompts if seq.num_computed < len(seq.token_ids)]
        return budget

    def _take_chunk(self, seq: Sequence, budget: int) -> Chunk:
        start, end = seq.num_computed, min(len(seq.token_ids), seq.num_computed + budget)
        seq.num_computed = end
        seq.last_chunk_step = self._num_steps
        chunk = Chunk(seq, start, end - start, is_final=end == len(seq.token_ids))
        is_decode = chunk.is_decode(self.max_tokens_per_decode - 1)
        self.blocks.register(seq, start if is_decode else end)  # nothing can take this chunk out of the plan any more
        self.num_prompt_tokens_computed += max(0, min(end, seq.num_prompt_tokens) - start)
        if chunk.is_final:
            self._decodes.join(seq)
        return chunk

    def _settle_forks(self, chunks: list[Chunk]) -> None:
        """Behind this plan: forks that it starts let go of what they held, and prompts that it completes have forks.

        A fork's blocks are copied before anything else of a plan, so no block is given away in the plan that copies
        it, and none is copied in the plan that fills it.
        """
        for chunk in chunks:
            seq = chunk.seq
            if seq.prompt_blocks:
                self.blocks.release_prompt(seq)
            if seq.forks and seq.num_computed >= seq.num_prompt_tokens - 1:
                for fork in reversed(seq.forks):  # to the head of the queue: they hold blocks
                    if not fork.is_finished:
                        self.blocks.share_prompt(seq, fork)
                        self._queue(fork, self._waiting.appendleft)
                seq.forks = []

    def _give_up_prompts(self) -> bool:
        """Take back prompts that only waiting forks hold, where blocks are short; they compute them again."""
        holding = [seq for seq in self._waiting if seq.is_waiting and seq.prompt_blocks]
        counts = Counter(fork.prompt_blocks[-1] for fork in holding)  # whoever holds the last block holds all
        given_up = [
            fork for fork in holding if self.blocks.ref_counts[fork.prompt_blocks[-1]] == counts[fork.prompt_blocks[-1]]
        ]
        for fork in given_up:
            self.blocks.release_prompt(fork)
            self._may_admit = True
        return bool(given_up)

    # ---- admission and preemption -------------------------------------------------------------------------------

    def _admit(self, plan: SchedulerOutput, chunks: list[Chunk], budget: int) -> None:
        """Start waiting sequences while rows, blocks and budget last; tried again only when something has changed."""
        self._admission.begin(self._running, len(self._decodes))
        index = 0
        while budget > 0 and self._free_rows and index <= BYPASS_WINDOW and index < len(self._waiting):
            seq = self._waiting[index]
            if not seq.is_waiting:
                del self._waiting[index]
                continue
            hits = self._admission.find_room(seq, budget)
            if hits is not None:
                del self._waiting[index]
                self._start(seq, hits, plan)
                chunks.append(self._take_chunk(seq, budget))
                budget -= chunks[-1].num_tokens
                if not chunks[-1].is_final:
                    self._prompts.append(seq)
                if index == 0:
                    continue
                self._waiting[0].num_bypassed += 1
            else:
                index += 1
            if self._waiting[0].num_bypassed >= MAX_BYPASSES:
                break
        if self._num_waiting == 0:
            self._waiting.clear()
        self._may_admit = budget <= 0

    def _start(self, seq: Sequence, hits: list[int], plan: SchedulerOutput) -> None:
        blocks = self.blocks
        blocks.allocate(seq, blocks.num_blocks_for(len(seq.token_ids)), hits)
        seq.row = self._free_rows.pop()
        seq.num_computed = len(hits) * blocks.block_size
        if seq.prompt_blocks:
            seq.num_computed = seq.num_prompt_tokens - 1
            if len(seq.prompt_blocks) > len(hits):
                plan.block_copies.append((seq.prompt_blocks[-1], seq.block_table[len(hits)]))
        else:
            self.num_prompt_tokens_cached += min(seq.num_computed, seq.num_prompt_tokens)
        seq.is_waiting = False
        self._num_waiting -= 1
        self._running[seq] = None
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = min(seq.num_computed, seq.num_prompt_tokens)  # queued again, it has output too
        self.max_seqs_in_flight = max(self.max_seqs_in_flight, self.num_seqs_in_flight)
        plan.new_rows.append(new_row(seq))

    def _preempt(self) -> None:
        """Nothing is in flight: send the latest back to the queue until all others can decode."""
        assert not self._in_flight
        self._decodes.is_short = False
        if self._decodes.num_blocks_short() > 0:
            self._give_up_prompts()
        while len(self._running) > 1 and self._decodes.num_blocks_short() > 0:
            seq = next(reversed(self._running))
            self._release(seq)
            seq.num_computed = 0
            seq.num_preemptions += 1
            seq.is_waiting = True
            self._waiting.appendleft(seq)
            self._num_waiting += 1
            self.num_preemptions += 1
            self._admission.observe_preemption()
            self._may_admit = False  # until a sequence ends

    def _drop(self, seq: Sequence) -> None:
        if seq.forks:  # it ends before its prompt is computed: the next one computes it
            heirs = [fork for fork in seq.forks if not fork.is_finished]
            seq.forks = []
            if heirs:
                heirs[0].forks = heirs[1:]
                self._queue(heirs[0], self._waiting.appendleft)
        if seq.is_waiting:
            seq.is_waiting = False
            self.blocks.release_prompt(seq)
            self._num_waiting -= 1
            self._may_admit = True  # it may have been the head that others waited for
            if self._num_waiting == 0:
                self._waiting.clear()
        elif seq.row:
            self._release(seq)
        seq.block_hashes, seq.block_contents = [], []

    def _release(self, seq: Sequence) -> None:
        """Free a running sequence's blocks, offering the full ones for reuse, and its row once no plan contains it."""
        blocks = self.blocks
        # Of the generated tokens only those count that are known here and whose KV is written by a submitted plan.
        blocks.register(seq, min(len(seq.token_ids), seq.num_computed, seq.max_total_tokens - 1))
        blocks.release(seq)
        del self._running[seq]
        if self._in_flight and (seq.steps_in_flight > 0 or seq.last_chunk_step >= self._in_flight[0].plan.step):
            self._returning_rows.append((self._num_steps - 1, seq.row))
        else:
            self._free_rows.append(seq.row)
        seq.row = 0
        self._decodes.has_changed = True
        self._may_admit = True


def new_scheduler(config: Config, num_blocks: int, block_size: int) -> Scheduler:
    """The scheduler of an engine whose pool has so many blocks."""
    return Scheduler(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        num_blocks=num_blocks,
        block_size=block_size,
        enable_prefix_caching=config.enable_prefix_caching,
        max_in_flight=config.max_in_flight or 1,
    )
