"""A fake device and a host that learns late: what the scheduler's tests run on instead of a GPU.

Owns: a device whose KV slots record of which token, at which place, behind which prefix they are the keys, and which
checks every slot that a query reads. Invariant: it knows plans only, never the host's sequences. It deliberately
imports no torch and no pytest.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from nanovllm.engine import block_manager
from nanovllm.engine.scheduler import Scheduler, Step
from nanovllm.engine.sequence import Sequence
from nanovllm.messages import ModelRunnerOutput, SchedulerOutput
from nanovllm.sampling_params import SamplingParams

VOCAB_SIZE = 23
MAX_SAMPLES = 8
real_hash_block = block_manager.hash_block


def extend_chain(chain: list[int], token_ids: list[int], salt: int) -> None:
    """Append the identity of each token: a hash of the token and everything before it (and of the weights: salt)."""
    last = chain[-1] if chain else salt
    for token_id in token_ids:
        last = hash((last, token_id))
        chain.append(last)


def next_token(identity: int, seed: int) -> int:
    """What the fake model samples behind a prefix; samples of one prompt differ, requests do not."""
    return hash((identity, seed)) % VOCAB_SIZE


def reference(
    prompt: list[int], max_total_tokens: int, end_ids: tuple[int, ...], salt: int, seed: int
) -> tuple[list[int], str]:
    """All tokens of a request that runs alone, and why it ends."""
    token_ids, chain = list(prompt), []
    extend_chain(chain, token_ids, salt)
    while True:
        token_ids.append(next_token(chain[-1], seed))
        if token_ids[-1] in end_ids:
            return token_ids, "stop"
        if len(token_ids) == max_total_tokens:
            return token_ids, "length"
        extend_chain(chain, token_ids[-1:], salt)


@dataclass
class Row:
    """What the device has of one sequence."""

    token_ids: list[int]
    chain: list[int]
    num_computed: int
    block_table: list[int]
    max_total_tokens: int
    seed: int


class FakeDevice:
    """Executes plans in order. The KV stores of a step's prompt chunks come before its reads, as in each layer of a
    model; what a decode stores, nobody else may read in that step."""

    def __init__(self, scheduler: Scheduler, rng: random.Random, salt: int) -> None:
        self.max_num_seqs = scheduler.max_num_seqs
        self.max_model_len = scheduler.max_model_len
        self.num_drafts = scheduler.max_tokens_per_decode - 1
        self.block_size = scheduler.blocks.block_size
        self.num_blocks = scheduler.blocks.num_blocks
        self.rng = rng
        self.salt = salt
        self.rows: dict[int, Row] = {}
        self.kv: list[list[int | None]] = [[None] * self.block_size for _ in range(self.num_blocks)]
        self.stored_by_decodes: dict[int, tuple[int, Row]] = {}  # block: first slot of this step, whose
        self.last_step = -1
        self.num_tokens = 0

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step, checking order, slots and lengths."""
        assert plan.step > self.last_step
        self.last_step = plan.step
        self._apply_updates(plan)
        self.stored_by_decodes.clear()
        assert len(plan.rows) == len(set(plan.rows)) == len(plan.num_query_tokens)
        new_tokens: list[list[int]] = []
        ends: list[int] = []
        max_seq_len, has_cached_prefix = 0, False
        for index, (row_id, num_query) in enumerate(zip(plan.rows, plan.num_query_tokens, strict=True)):
            row = self.rows[row_id]
            is_decode, is_sampled = index < plan.num_decodes, index < plan.num_sampled
            assert num_query >= 1
            if is_decode:
                assert row.num_computed + 1 == len(row.token_ids) and num_query == 1 + self.num_drafts
                sampled, end = self._decode(row)
            else:
                has_cached_prefix |= row.num_computed > 0
                end = row.num_computed + num_query
                sampled = [next_token(row.chain[end - 1], row.seed)] if is_sampled else []
                assert end == len(row.token_ids) if is_sampled else end < len(row.token_ids)
                assert not (is_sampled and num_query == 1 and self.num_drafts == 0)
                self._store(row, row.num_computed, row.chain[row.num_computed : end])
            max_seq_len = max(max_seq_len, end)
            ends.append(end)
            if is_sampled:
                new_tokens.append(sampled)
        assert max_seq_len == plan.max_seq_len or (self.num_drafts and max_seq_len < plan.max_seq_len)
        assert has_cached_prefix == plan.has_cached_prefix
        for row_id, end in zip(plan.rows, ends, strict=True):
            self._check_reads(self.rows[row_id], end)
        for index, (row_id, end) in enumerate(zip(plan.rows, ends, strict=True)):
            row = self.rows[row_id]
            row.num_computed = end
            if index >= plan.num_decodes and index < plan.num_sampled:
                row.token_ids += new_tokens[index]
                extend_chain(row.chain, new_tokens[index], self.salt)
        flat = [token_id for sampled in new_tokens for token_id in sampled]
        return ModelRunnerOutput(flat, [len(sampled) for sampled in new_tokens] if self.num_drafts else None)

    def _apply_updates(self, plan: SchedulerOutput) -> None:
        sources, targets = [a for a, _ in plan.block_copies], [b for _, b in plan.block_copies]
        assert not set(sources) & set(targets) and len(set(targets)) == len(targets), "copies in no order"
        for source, target in plan.block_copies:
            assert 0 < source < self.num_blocks and 0 < target < self.num_blocks
            self.kv[target] = list(self.kv[source])
        for new in plan.new_rows:
            assert 1 <= new.row <= self.max_num_seqs
            assert new.num_computed_tokens < len(new.token_ids)
            if rest := new.num_computed_tokens % self.block_size:
                assert new.block_table[new.num_computed_tokens // self.block_size] in targets, (rest, new)
            max_tokens = new.sampling_params.max_tokens
            limit = self.max_model_len if max_tokens is None else new.num_prompt_tokens + max_tokens
            chain: list[int] = []
            extend_chain(chain, new.token_ids, self.salt)
            self.rows[new.row] = Row(
                list(new.token_ids),
                chain,
                new.num_computed_tokens,
                list(new.block_table),
                min(limit, self.max_model_len),
                new.seed,
            )
        for row_id, index, block in plan.block_appends:
            table = self.rows[row_id].block_table
            assert index == len(table), "blocks are appended in order"
            table.append(block)

    def _decode(self, row: Row) -> tuple[list[int], int]:
        """One token, and as many drafts as luck accepts; what a refused draft stores is rubbish, to be overwritten."""
        room = row.max_total_tokens - len(row.token_ids)
        if self.num_drafts == 0:
            assert room > 0, "a step past the sequence's length"
        num_accepted = min(room, 1 + self.rng.randint(0, self.num_drafts))
        start = row.num_computed
        sampled = []
        for _ in range(num_accepted):
            sampled.append(next_token(row.chain[-1], row.seed))
            row.token_ids.append(sampled[-1])
            extend_chain(row.chain, sampled[-1:], self.salt)
        num_stored = min(1 + self.num_drafts, max(0, row.max_total_tokens - 1 - start))
        stored = row.chain[start : start + min(num_accepted, num_stored)]
        self._store(row, start, stored + [-1] * (num_stored - len(stored)))
        for position in reversed(range(start, start + num_stored)):
            self.stored_by_decodes[row.block_table[position // self.block_size]] = position % self.block_size, row
        return sampled, start + num_accepted

    def _store(self, row: Row, start: int, identities: list[int]) -> None:
        for position, identity in enumerate(identities, start):
            block = row.block_table[position // self.block_size]
            assert 0 < block < self.num_blocks
            self.kv[block][position % self.block_size] = identity
        self.num_tokens += len(identities)

    def _check_reads(self, row: Row, end: int) -> None:
        size = self.block_size
        end = min(end, row.max_total_tokens - 1)
        for index, block in enumerate(row.block_table[: -(-end // size)]):
            slot, writer = self.stored_by_decodes.get(block, (size, row))
            assert writer is row or index * size + slot >= end, "reads what a decode stores in this step"
        for index in range(end // size):
            assert self.kv[row.block_table[index]] == row.chain[index * size : (index + 1) * size], "foreign KV"
        if rest := end % size:
            index = end // size
            assert self.kv[row.block_table[index]][:rest] == row.chain[index * size : index * size + rest], "foreign KV"


def make_sequence(
    request_id: int,
    prompt: list[int],
    max_tokens: int | None,
    *,
    max_model_len: int,
    end_ids: tuple[int, ...] = (),
    ignore_eos: bool = True,
    n: int = 1,
) -> Sequence:
    """A sequence as the engine would make it, with its forks: n samples in all."""
    limit = max_model_len if max_tokens is None else min(len(prompt) + max_tokens, max_model_len)
    first, *forks = (
        Sequence(
            request_id,
            list(prompt),
            SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos),
            max_total_tokens=limit,
            seed=index,
            end_ids=() if ignore_eos else end_ids,
            index=index,
        )
        for index in range(n)
    )
    first.forks = forks
    return first


def resumed(seqs: list[Sequence]) -> Sequence:
    """What is left of a request's samples, made anew from the tokens that are known, as after an exception."""
    first, *forks = (
        Sequence(
            seq.request_id,
            list(seq.token_ids),
            seq.sampling_params,
            num_prompt_tokens=seq.num_prompt_tokens,
            max_total_tokens=seq.max_total_tokens,
            seed=seq.seed,
            end_ids=seq.end_ids,
            index=seq.index,
        )
        for seq in seqs
    )
    first.forks = forks
    return first


def check_pool(scheduler: Scheduler, running: list[Sequence]) -> None:
    """Every block in one place, held as often as tables and waiting forks name it; every row in one place."""
    blocks = scheduler.blocks
    held = Counter(block for seq in running for block in seq.block_table)
    held.update(block for seq in scheduler._waiting for block in seq.prompt_blocks)
    assert not any(seq.prompt_blocks for seq in running)
    assert all(blocks.ref_counts[block] == held[block] for block in range(blocks.num_blocks))
    places = [*blocks._empty, *blocks._cached, *held]
    assert sorted(places) == list(range(1, blocks.num_blocks))
    assert blocks.num_shared == sum(held.values()) - len(held)
    assert all(blocks._content[block] is not None for block in blocks._cached)
    assert all(blocks._content[block] is None for block in blocks._empty)
    registered = {block for block in range(blocks.num_blocks) if blocks._content[block] is not None}
    assert registered == set(blocks._block_of_hash.values())
    rows = [*scheduler._free_rows, *(row for _, row in scheduler._returning_rows), *(seq.row for seq in running)]
    assert sorted(rows) == list(range(1, scheduler.max_num_seqs + 1))
    size, to_come = blocks.block_size, blocks.num_to_come
    assert to_come == sum(-(-(seq.max_total_tokens - 1) // size) - len(seq.block_table) for seq in running)


@dataclass
class Simulation:
    """The engine's loop around a scheduler, with a fake device; every plan and every end is checked."""

    scheduler: Scheduler
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    salt: int = 1

    def __post_init__(self) -> None:
        self.device = FakeDevice(self.scheduler, self.rng, self.salt)
        self.in_flight: deque[Step] = deque()
        self.live: dict[Sequence, list[int]] = {}  # with its prompt
        self.done: list[tuple[Sequence, list[int]]] = []  # with its tokens when it ended
        self.counts: Counter[str] = Counter()
        give_up = self.scheduler._give_up_prompts

        def counted() -> bool:
            given_up = give_up()
            self.counts["prompts_given_up"] += given_up
            return given_up

        self.scheduler._give_up_prompts = counted  # type: ignore[method-assign]

    def add(self, seq: Sequence) -> None:
        for each in (seq, *seq.forks):
            self.live[each] = each.token_ids[: each.num_prompt_tokens]
        self.scheduler.add(seq)

    def run(self) -> None:
        """To the end, then check that nothing leaked."""
        while self.scheduler.has_work() or self.in_flight:
            self.turn()
        self.check_idle()

    def turn(self) -> None:
        """Once around the engine's loop."""
        self.counts["turns"] += 1
        assert self.counts["turns"] < 20_000, "no end in sight"
        step = self.scheduler.schedule()
        if step is not None:
            self._check_step(step)
            self.in_flight.append(step)
        else:
            assert self.in_flight or not self.scheduler.has_work(), self.scheduler.stuck_reason()
        is_full = len(self.in_flight) == self.scheduler.max_in_flight
        if self.in_flight and (step is None or is_full or self.rng.random() < 0.1):
            self.collect()

    def collect(self) -> None:
        """The oldest plan runs only now, so that what the host changed in the meantime would be seen."""
        step = self.in_flight.popleft()
        before = [len(seq.token_ids) for seq in step.seqs]
        self.scheduler.update(step, self.device.execute(step.plan))
        finished = []
        for seq, num_known in zip(step.seqs[: step.plan.num_sampled], before, strict=False):
            if seq.is_finished:
                continue
            assert len(seq.token_ids) <= seq.max_total_tokens
            for position in range(num_known, len(seq.token_ids)):
                if seq.token_ids[position] in seq.end_ids:
                    del seq.token_ids[position + 1 :]  # drafts may run past the end
                    seq.finish_reason = "stop"
                    break
            else:
                if len(seq.token_ids) == seq.max_total_tokens:
                    seq.finish_reason = "length"
            if seq.is_finished:
                finished.append(seq)
        self.scheduler.finish(finished)
        for seq in finished:
            self._check_output(seq)
        if not self.in_flight:
            assert all(seq.num_tokens_bound == len(seq.token_ids) for seq in self.live), "bounds meet when all is known"
            assert all(seq.num_computed < len(seq.token_ids) for seq in self.live)

    def abort(self, seq: Sequence) -> None:
        self.scheduler.abort(seq)
        self._check_output(seq)
        self.counts["aborts"] += 1

    def reset(self, resume: bool = False) -> None:
        """An exception: everything in flight is lost. What the host knows of the requests may go on."""
        self.in_flight.clear()
        dropped = self.scheduler.reset()
        assert set(dropped) == set(self.live) and len(dropped) == len(self.live)
        self.live.clear()
        self.check_idle()
        self.counts["resets"] += 1
        if resume:
            requests: dict[str, list[Sequence]] = {}
            for seq in dropped:
                requests.setdefault(seq.request_id, []).append(seq)
            for seqs in requests.values():
                self.add(resumed(sorted(seqs, key=lambda seq: seq.index)))

    def check_idle(self) -> None:
        assert not self.live and not self.scheduler.has_work()
        check_pool(self.scheduler, [])
        assert self.scheduler.num_free_blocks == self.scheduler.num_total_blocks
        assert self.scheduler.num_seqs_in_flight == 0
        assert all(seq.token_ids == token_ids for seq, token_ids in self.done), "late tokens after the end"

    def _check_output(self, seq: Sequence) -> None:
        prompt = self.live.pop(seq)
        expected, reason = reference(prompt, seq.max_total_tokens, seq.end_ids, self.salt, seq.seed)
        if seq.finish_reason == "abort":
            assert seq.token_ids == expected[: len(seq.token_ids)]
        else:
            assert (seq.token_ids, seq.finish_reason) == (expected, reason)
        self.done.append((seq, list(seq.token_ids)))

    def _check_step(self, step: Step) -> None:
        plan, scheduler = step.plan, self.scheduler
        assert plan.rows == [seq.row for seq in step.seqs] and len(set(step.seqs)) == len(step.seqs)
        assert 0 < plan.num_tokens <= scheduler.max_num_batched_tokens
        assert plan.num_decodes <= plan.num_sampled <= len(plan.rows)
        seq_of_row = dict(zip(plan.rows, step.seqs, strict=True))
        for new in plan.new_rows:
            assert all(new.row not in other.plan.rows for other in self.in_flight), "row still in flight"
            seq = seq_of_row[new.row]
            assert new.token_ids == seq.token_ids and new.block_table == seq.block_table
            assert new.num_prompt_tokens == len(self.live[seq]) and new.seed == seq.seed
        in_flight = {seq for other in self.in_flight for seq in other.seqs}
        assert not any(seq.is_waiting for seq in in_flight), "preempted with a step in flight"
        in_flight.update(seq for seq in self.live if seq.row)
        in_flight.update(step.seqs)
        assert len(in_flight) <= scheduler.num_seqs_in_flight <= scheduler.max_num_seqs
        for seq in step.seqs:
            if seq.last_chunk_step == plan.step:
                continue  # its blocks may be shared from this step on
            last = min(seq.num_computed, seq.max_total_tokens - 1) - 1
            block = seq.block_table[last // scheduler.blocks.block_size]
            num_to_copy = sum(fork.prompt_blocks[-1:] == [block] for fork in scheduler._waiting)
            assert scheduler.blocks.ref_counts[block] == 1 + num_to_copy, "a shared block is written"
        assert scheduler.num_free_blocks >= 0
        self.counts["steps"] += 1
        self.counts["cached_in_step"] += sum(new.num_computed_tokens > 0 for new in plan.new_rows[1:])
        self.counts["chunks"] += len(plan.rows) > plan.num_sampled
        self.counts["resumed"] += sum(len(new.token_ids) > new.num_prompt_tokens for new in plan.new_rows)
        self.counts["block_copies"] += len(plan.block_copies)
        self.counts["forks_waiting"] += any(fork.prompt_blocks for fork in scheduler._waiting)


BAD_HASHES = (
    lambda parent, content: 5,
    lambda parent, content: hash(content),
    lambda parent, content: real_hash_block(parent, content) % 5,
)


def random_scheduler(rng: random.Random) -> Scheduler:
    """A small engine of random shape."""
    num_drafts = rng.choice((0, 0, 0, 1, 2, 4))
    block_size = rng.choice((1, 2, 3, 4, 8, 16))
    max_model_len = rng.randint(6, 48)
    fit = -(-(max_model_len - 1) // block_size)  # blocks of the longest sequence
    return Scheduler(
        max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=rng.choice((1 + num_drafts, rng.randint(1 + num_drafts, 12), 20, 64)),
        max_model_len=max_model_len,
        num_blocks=1 + fit + rng.choice((0, 0, 1, 2, fit, 5 * fit)),
        block_size=block_size,
        enable_prefix_caching=rng.random() < 0.8,
        max_in_flight=rng.randint(1, 3),
        max_tokens_per_decode=1 + num_drafts,
    )


def random_sequence(rng: random.Random, request_id: int, templates: list[list[int]], max_model_len: int) -> Sequence:
    """Prompts that often begin alike, lengths of every kind."""
    length = rng.randint(1, max_model_len - 1)
    prompt = rng.choice(templates)[:length]
    if rng.random() < 0.5:
        cut = rng.randint(0, len(prompt))
        prompt = prompt[:cut] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(cut == 0, len(prompt) - cut))]
    return make_sequence(
        request_id,
        prompt,
        None if rng.random() < 0.1 else rng.randint(1, 20),
        max_model_len=max_model_len,
        end_ids=tuple(rng.sample(range(VOCAB_SIZE), 2)),
        ignore_eos=rng.random() < 0.4,
        n=1 if rng.random() < 0.7 else rng.randint(2, MAX_SAMPLES),
    )


def run_random_workload(seed: int) -> Counter[str]:
    """One workload from its seed: requests come, are dropped, finish; now and then all is lost, or weights change."""
    rng = random.Random(seed)
    scheduler = random_scheduler(rng)
    simulation = Simulation(scheduler, rng)
    templates = [[rng.randrange(VOCAB_SIZE) for _ in range(48)] for _ in range(rng.randint(1, 3))]
    num_requests, num_added = rng.randint(1, 12), 0
    burst, abort_rate = rng.choice((1, 3, 12)), rng.choice((0, 0, 0.02))
    reset_rate, forget_rate = rng.choice((0,) * 9 + (0.02,)), rng.choice((0, 0, 0, 0.02))
    if rng.random() < 0.4:
        scheduler._admission.output_ratio = 0.0  # a forecast that is wrong: admits what it must preempt later
    if rng.random() < 0.2:  # hashes that collide always, for equal blocks behind any prefix, and now and then
        block_manager.hash_block = rng.choice(BAD_HASHES)
    try:
        while num_added < num_requests or scheduler.has_work() or simulation.in_flight:
            if num_added < num_requests and (rng.random() < 0.3 or not simulation.live):
                for _ in range(min(burst, num_requests - num_added)):
                    simulation.add(random_sequence(rng, num_added, templates, scheduler.max_model_len))
                    num_added += 1
            simulation.turn()
            if abort_rate and simulation.live and rng.random() < abort_rate:
                dropped = rng.choice(list(simulation.live))
                whole = rng.random() < 0.5  # a request, or one sample alone
                for seq in list(simulation.live):
                    if seq is dropped or (whole and seq.request_id == dropped.request_id):
                        simulation.abort(seq)
            if reset_rate and rng.random() < reset_rate:
                simulation.reset(resume=rng.random() < 0.5)
            if forget_rate and rng.random() < forget_rate:
                scheduler.reset_prefix_cache()
            if simulation.counts["turns"] % 16 == 0:
                check_pool(scheduler, [seq for seq in simulation.live if seq.row])
            if not simulation.live and not simulation.in_flight and rng.random() < 0.2:
                scheduler.reset_prefix_cache()  # new weights: what was cached is wrong now
                simulation.salt += 1
                simulation.device.salt = simulation.salt
        simulation.check_idle()
    finally:
        block_manager.hash_block = real_hash_block
    counts = simulation.counts
    counts["preemptions"] = scheduler.num_preemptions
    counts["cached"] = scheduler.num_prompt_tokens_cached
    counts["drafts"] = scheduler.max_tokens_per_decode - 1
    return counts
