"""The scheduler's rules, one by one, on the fake device."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from nanovllm.engine import block_manager
from nanovllm.engine import scheduler as scheduler_module
from nanovllm.engine.admission import BlockDemand, Growth
from nanovllm.engine.scheduler import Scheduler
from nanovllm.messages import ModelRunnerOutput
from tests.scheduler_simulation import VOCAB_SIZE, Simulation, check_pool, make_sequence

MAX_MODEL_LEN = 4096


def make_simulation(**options: Any) -> Simulation:
    defaults = dict(
        max_num_seqs=8,
        max_num_batched_tokens=16384,
        max_model_len=MAX_MODEL_LEN,
        num_blocks=1000,
        block_size=16,
        max_in_flight=2,
    )
    return Simulation(Scheduler(**{**defaults, **options}))


def random_prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]


def add(simulation: Simulation, prompt: list[int], max_tokens: int = 4, **options: Any) -> Any:
    seq = make_sequence(len(simulation.live), prompt, max_tokens, max_model_len=MAX_MODEL_LEN, **options)
    simulation.add(seq)
    return seq


@pytest.fixture
def reckless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission that never looks ahead, so that the pool runs out."""
    monkeypatch.setattr(BlockDemand, "admit", lambda self, new, capacity, num_left_behind=0: True)


# ---- prefix cache ---------------------------------------------------------------------------------------------------


def test_a_reused_block_is_not_found_under_its_old_contents() -> None:
    """A25: the fake device checks every key that is read."""
    simulation = make_simulation(num_blocks=7, block_size=4)
    for seed in (0, 1, 2, 0, 3, 3, 0):
        add(simulation, random_prompt(14, seed), max_tokens=8)
        simulation.run()
    assert simulation.scheduler.num_prompt_tokens_cached > 0


@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_a_fully_cached_prompt_computes_its_last_token(length: int) -> None:
    """A26."""
    simulation = make_simulation()
    for _ in range(2):
        seq = add(simulation, random_prompt(length))
        simulation.run()
    assert seq.num_cached_tokens == (length - 1) // 16 * 16
    assert simulation.scheduler.num_prompt_tokens_computed == 2 * length - seq.num_cached_tokens
    seq = add(simulation, random_prompt(length) + [1] * 40)
    simulation.run()
    assert seq.num_cached_tokens >= length // 16 * 16


def test_a_hash_collision_does_not_change_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A27."""
    monkeypatch.setattr(block_manager, "hash_block", lambda parent, content: 1)
    simulation = make_simulation(block_size=4)
    for seed in (0, 0, 1, 1, 2, 0):
        add(simulation, random_prompt(40, seed))
    simulation.run()


@pytest.mark.parametrize("budget", [16384, 256, 600, 1000, 33])
def test_copies_of_one_prompt_share_it(budget: int) -> None:
    """A28: about one prompt plus tails, in whatever steps they are computed."""
    simulation = make_simulation(max_num_batched_tokens=budget)
    for _ in range(8):
        add(simulation, random_prompt(1000))
    simulation.run()
    scheduler = simulation.scheduler
    assert scheduler.num_prompt_tokens_computed == 1000 + 7 * (1000 - 999 // 16 * 16)
    assert scheduler.num_prompt_tokens_computed + scheduler.num_prompt_tokens_cached == 8000
    if budget == 16384:
        assert simulation.counts["cached_in_step"] == 7


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8])
def test_a_pool_full_of_old_prefixes(block_size: int) -> None:
    """A52: old and new prompts in turn, free blocks add up."""
    simulation = make_simulation(block_size=block_size, num_blocks=1 + 48 // block_size, max_num_seqs=3)
    for seed in (0, 1, 2, 3, 0, 4, 1, 1, 5, 0, 2):
        add(simulation, random_prompt(12 + seed, seed))
        if seed % 2:
            simulation.run()
    simulation.run()
    assert simulation.scheduler.num_free_blocks == simulation.scheduler.num_total_blocks == 48 // block_size


def test_a_follow_up_finds_the_answer_before_it() -> None:
    simulation = make_simulation(block_size=4)
    seq = add(simulation, random_prompt(10), max_tokens=15)
    simulation.run()
    follow_up = add(simulation, seq.token_ids + random_prompt(5, 1))
    simulation.run()
    assert follow_up.num_cached_tokens == 24  # 25 tokens; the KV of the last was never written


def test_reset_prefix_cache_while_sequences_run() -> None:
    simulation = make_simulation(block_size=4)
    seq = add(simulation, random_prompt(20), max_tokens=30)
    for _ in range(5):
        simulation.turn()
    simulation.scheduler.reset_prefix_cache()
    simulation.run()
    again = add(simulation, seq.token_ids[:40])
    simulation.run()
    assert again.num_cached_tokens == 0


# ---- batches --------------------------------------------------------------------------------------------------------


def test_max_num_seqs_bounds_the_sequences_in_flight() -> None:
    """A31: the simulation counts them at every step."""
    simulation = make_simulation(max_num_seqs=4)
    for index in range(40):
        options = dict(max_tokens=1 + index % 7, end_ids=(3,), ignore_eos=index % 2 == 0)
        add(simulation, random_prompt(5 + index, index), **options)
    simulation.run()
    assert simulation.scheduler.max_seqs_in_flight == 4


@pytest.mark.parametrize("budget", [1, 7, 256, 3000])
def test_a_long_prompt_in_chunks_beside_decodes(budget: int) -> None:
    """A29, A53."""
    simulation = make_simulation(max_num_batched_tokens=budget)
    for index in range(4):
        add(simulation, random_prompt(3 + index, index), max_tokens=30)
    add(simulation, random_prompt(300, 9))
    simulation.run()


@pytest.mark.parametrize("length", [31, 32, 33])
@pytest.mark.parametrize("max_tokens", [1, 15, 16, 17, 33])
def test_ends_at_block_edges(length: int, max_tokens: int) -> None:
    """A32, in a pool that is exactly large enough."""
    needed = Scheduler.can_ever_fit(make_simulation().scheduler, length + max_tokens)[0]
    simulation = make_simulation(num_blocks=1 + needed)
    assert simulation.scheduler.can_ever_fit(length + max_tokens) == (needed, needed)
    seq = add(simulation, random_prompt(length), max_tokens=max_tokens)
    simulation.run()
    assert len(seq.token_ids) == length + max_tokens


def test_a_batch_that_does_not_change_keeps_its_lists() -> None:
    simulation = make_simulation()
    for index in range(3):
        add(simulation, random_prompt(10, index), max_tokens=20 + index)
    simulation.turn()
    plans = []
    while simulation.live:
        simulation.turn()
        plans.append(simulation.in_flight[-1].plan if simulation.in_flight else None)
    plans = [plan for plan in plans[:18] if plan is not None]
    assert len({id(plan.rows) for plan in plans}) == len({id(plan.num_query_tokens) for plan in plans}) == 1
    assert [plan.max_seq_len for plan in plans] == list(range(11, 11 + len(plans)))


def test_a_prompt_whose_last_token_is_left_is_a_decode() -> None:
    simulation = make_simulation()
    add(simulation, random_prompt(33))
    simulation.run()
    add(simulation, random_prompt(33))
    plan = simulation.scheduler.schedule().plan
    assert (plan.num_query_tokens, plan.num_decodes, plan.num_sampled) == ([1], 1, 1)
    assert plan.new_rows[0].num_computed_tokens == 32 and not plan.has_cached_prefix


# ---- admission and preemption ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_preempted_requests_have_full_answers(reckless: None, max_in_flight: int) -> None:
    """A30."""
    simulation = make_simulation(num_blocks=14, block_size=4, max_in_flight=max_in_flight)
    seqs = [add(simulation, random_prompt(9, index), max_tokens=30) for index in range(6)]
    simulation.run()
    assert simulation.scheduler.num_preemptions > 0
    assert all(len(seq.token_ids) == 39 and seq.finish_reason == "length" for seq in seqs)
    assert all(seq.num_prompt_tokens == 9 for seq in seqs)


@pytest.mark.parametrize("seed", range(20))
def test_known_lengths_are_never_preempted(seed: int) -> None:
    rng = random.Random(seed)
    max_in_flight = rng.randint(1, 3)
    simulation = make_simulation(
        num_blocks=rng.randint(20, 60), block_size=rng.choice((2, 4, 8)), max_in_flight=max_in_flight, max_num_seqs=20
    )
    for index in range(60):
        add(simulation, random_prompt(rng.randint(1, 20), index), max_tokens=rng.randint(1, 16))
    simulation.run()
    assert simulation.scheduler.num_preemptions == 0
    assert simulation.scheduler.max_seqs_in_flight > 2


@pytest.mark.parametrize("seed", range(50))
def test_the_forecast_is_the_demand_summed_up(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice((1, 2, 5, 16))
    growths = [Growth(rng.randint(0, 40), rng.randint(0, 50), rng.randint(0, 1)) for _ in range(rng.randint(0, 10))]
    new = Growth(rng.randint(0, 40), rng.randint(0, 50), 0)

    def peak(all_growths: list[Growth]) -> int:
        return max(
            3 + sum((g.last_slot + t) // size + 1 - g.num_shared for g in all_growths if g.num_steps >= t)
            for t in {g.num_steps for g in all_growths}
        )

    needed = peak([*growths, new])
    assert not BlockDemand(growths, 3, size).admit(new, needed - 1) or (growths and peak(growths) == needed)
    demand = BlockDemand(growths, 3, size)
    assert demand.admit(new, needed)
    assert sorted(demand.growths) == sorted([*growths, new]) and demand.ends == sorted(demand.ends)
    assert max(demand.demands) == needed == max(BlockDemand([*growths, new], 3, size).demands)


def test_short_answers_let_more_in() -> None:
    """Lengths are learned: when answers use a small part of max_tokens, more run at once than would fit at the most."""
    simulation = make_simulation(num_blocks=1 + 60, block_size=4, max_num_seqs=50)
    for index in range(300):
        add(simulation, random_prompt(4, index), max_tokens=100, ignore_eos=False, end_ids=(1, 2, 3, 4, 5))
    simulation.run()
    scheduler = simulation.scheduler
    assert scheduler.max_seqs_in_flight > 5  # 26 blocks each would let 2 run
    assert scheduler.num_preemptions < 60


def test_a_big_request_is_overtaken_a_fixed_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "MAX_BYPASSES", 3)
    simulation = make_simulation(num_blocks=11, block_size=4, max_num_seqs=4)
    add(simulation, random_prompt(8), max_tokens=9)  # 4 of 10 blocks
    big = add(simulation, random_prompt(30, 1), max_tokens=8)  # 10 of 10
    small = [add(simulation, random_prompt(4, 2 + index), max_tokens=5) for index in range(10)]
    while not big.row:
        simulation.turn()
        assert sum(bool(seq.row) or seq.is_finished for seq in small) <= 3
    assert big.num_bypassed == 3
    simulation.run()


def test_admission_is_tried_again_only_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = make_simulation(num_blocks=11, block_size=4)
    add(simulation, random_prompt(8), max_tokens=20)
    add(simulation, random_prompt(30, 1), max_tokens=8)
    simulation.turn()
    calls = []
    find_room = simulation.scheduler._admission.find_room
    monkeypatch.setattr(
        simulation.scheduler._admission, "find_room", lambda seq, budget: calls.append(seq) or find_room(seq, budget)
    )
    for _ in range(10):
        simulation.turn()
    assert calls == []
    simulation.run()
    assert len(calls) <= 2


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_blocks_return_at_once_and_rows_after_the_last_plan() -> None:
    simulation = make_simulation(max_num_seqs=1)
    seq = add(simulation, random_prompt(20), max_tokens=50)
    first, second = simulation.scheduler.schedule(), simulation.scheduler.schedule()
    assert simulation.scheduler.schedule() is None  # two in flight
    simulation.abort(seq)
    scheduler = simulation.scheduler
    assert scheduler.num_free_blocks == scheduler.num_total_blocks and scheduler.num_seqs_in_flight == 1
    add(simulation, random_prompt(5, 1))
    assert scheduler.schedule() is None
    scheduler.update(first, simulation.device.execute(first.plan))
    assert scheduler.schedule() is None
    scheduler.update(second, simulation.device.execute(second.plan))
    assert seq.token_ids == random_prompt(20) and seq.finish_reason == "abort"
    simulation.run()


def test_abort_wherever_it_is() -> None:
    simulation = make_simulation(max_num_seqs=2, max_num_batched_tokens=16)
    seqs = [add(simulation, random_prompt(40, index), max_tokens=10) for index in range(4)]
    simulation.turn()  # the first is in its prompt, the others wait
    simulation.abort(seqs[2])
    simulation.abort(seqs[0])
    simulation.abort(seqs[3])
    simulation.scheduler.abort(seqs[0])  # again: nothing
    simulation.run()
    assert [seq.finish_reason for seq in seqs] == ["abort", "length", "abort", "abort"]
    simulation.scheduler.abort(seqs[1])
    assert seqs[1].finish_reason == "length"
    assert len(simulation.scheduler._waiting) == 0


def test_reset_gives_everything_back() -> None:
    simulation = make_simulation(num_blocks=20)
    seqs = [add(simulation, random_prompt(40, index), max_tokens=60) for index in range(6)]
    for _ in range(3):
        simulation.turn()
    assert simulation.scheduler.num_free_blocks < 19
    simulation.reset()
    assert all(seq.row == 0 and seq.block_table == [] and not seq.is_finished for seq in seqs)
    seq = add(simulation, random_prompt(40))
    simulation.run()
    assert seq.num_cached_tokens == 0


def test_finish_names_a_reason_where_there_is_none() -> None:
    simulation = make_simulation()
    seq = make_sequence(0, random_prompt(4), 9, max_model_len=100)
    simulation.scheduler.add(seq)
    step = simulation.scheduler.schedule()
    simulation.scheduler.update(step, simulation.device.execute(step.plan))
    simulation.scheduler.finish([seq])
    assert seq.finish_reason == "stop" and not simulation.scheduler.has_work()
    check_pool(simulation.scheduler, [])


def test_stuck_reason_states_needed_and_free_blocks() -> None:
    scheduler = make_simulation(num_blocks=4).scheduler
    scheduler.add(make_sequence("big", random_prompt(100), 4, max_model_len=MAX_MODEL_LEN))  # was never to be added
    assert scheduler.schedule() is None and scheduler.has_work()
    assert "'big'" in scheduler.stuck_reason() and "7 KV blocks, and 3 of 3 are free" in scheduler.stuck_reason()
    assert scheduler.can_ever_fit(104) == (7, 3)


# ---- cost -----------------------------------------------------------------------------------------------------------


def test_a_steady_step_of_512_costs_the_host_little() -> None:
    """30 to 80 microseconds on the machines at hand; the bound leaves room for a loaded one."""
    num_seqs = 512
    scheduler = make_simulation(max_num_seqs=num_seqs, num_blocks=4000, max_num_batched_tokens=65536).scheduler
    for index in range(num_seqs):
        scheduler.add(make_sequence(index, random_prompt(16 + index % 16, index), 60, max_model_len=MAX_MODEL_LEN))
    best = float("inf")
    for _ in range(50):
        start = time.perf_counter()
        step = scheduler.schedule()
        scheduler.update(step, ModelRunnerOutput([1] * num_seqs))
        best = min(best, time.perf_counter() - start)
    assert best < 500e-6
