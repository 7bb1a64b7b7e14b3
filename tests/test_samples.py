"""Samples of one prompt (n > 1): computed once, different, repeatable, whatever else happens around them."""

from __future__ import annotations

import dataclasses
import random

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.scheduler import Scheduler
from tests.reference import reference_greedy
from tests.scheduler_simulation import VOCAB_SIZE, Simulation, make_sequence
from tests.tiny_models import make_tiny_model

BLOCK = 8
SAMPLED = SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=12, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 45)


def prompt_of(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(3, 256) for _ in range(length)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=True)


def engine(folder, **options) -> LLM:
    defaults = dict(dtype="float32", device="cpu", max_model_len=96, kvcache_block_size=BLOCK)
    return LLM(folder, **(defaults | options))


@pytest.fixture(scope="module", params=[True, False], ids=["cached", "uncached"])
def llm(request, folder):
    with engine(folder, enable_prefix_caching=request.param) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_left_behind(request):
    yield
    if "llm" in request.fixturenames:
        stats = request.getfixturevalue("llm").stats()
        assert stats["kv_blocks_free"] == stats["kv_blocks_total"]


def tokens_of(llm: LLM, prompts, params) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert all([c.index for c in output.outputs] == list(range(len(output.outputs))) for output in outputs)
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def test_samples_of_one_seed_differ_and_repeat(llm):
    """A20."""
    (first,) = tokens_of(llm, [prompt_of(45)], SAMPLED)
    assert len(first) == 4 and len({tuple(tokens) for tokens in first}) == 4
    assert tokens_of(llm, [prompt_of(45)], SAMPLED) == [first]
    # the first is what the request alone would give; one sample more changes none of the others
    assert tokens_of(llm, [prompt_of(45)], dataclasses.replace(SAMPLED, n=1)) == [first[:1]]
    assert tokens_of(llm, [prompt_of(45)], dataclasses.replace(SAMPLED, n=5))[0][:4] == first
    other = dataclasses.replace(SAMPLED, seed=2)
    assert not {tuple(tokens) for tokens in tokens_of(llm, [prompt_of(45)], other)[0]} & set(map(tuple, first))
    unseeded = dataclasses.replace(SAMPLED, seed=None)
    assert len({tuple(tokens) for tokens in sum(tokens_of(llm, [prompt_of(45)] * 2, unseeded), [])}) == 8


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_samples_are_equal(llm, folder, length):
    params = dataclasses.replace(GREEDY, n=3)
    assert tokens_of(llm, [prompt_of(length)], params) == [3 * [reference_greedy(folder, prompt_of(length), 12)]]


def test_the_prompt_is_computed_once(llm):
    llm.reset_prefix_cache()
    before = llm.stats()["prompt_tokens_computed"]
    output = llm.generate(prompt_of(90), dataclasses.replace(SAMPLED, n=6, max_tokens=5), use_tqdm=False)[0]
    assert llm.stats()["prompt_tokens_computed"] - before == 90 + 5  # each fork computes the last token again
    assert output.num_cached_tokens == 0 and output["token_ids"] == output.outputs[0].token_ids
    assert output.finished and [completion.finish_reason for completion in output.outputs] == ["length"] * 6
    if llm.config.enable_prefix_caching:
        assert llm.generate(prompt_of(90), dataclasses.replace(SAMPLED, n=2), use_tqdm=False)[0].num_cached_tokens == 88


@pytest.mark.parametrize(
    "options",
    [
        dict(max_num_batched_tokens=7),
        dict(max_num_seqs=1),
        dict(max_num_seqs=3, max_in_flight=3),
        dict(max_in_flight=2, num_kvcache_blocks=14),
        dict(max_in_flight=2, num_kvcache_blocks=14, enable_prefix_caching=False),
        dict(num_kvcache_blocks=9, enable_prefix_caching=False),
    ],
    ids=str,
)
def test_schedules_change_nothing(llm, folder, options):
    prompts = [prompt_of(length) for length in LENGTHS]
    params = [dataclasses.replace(SAMPLED, n=1 + i % 4, seed=i, max_tokens=8 + i) for i in range(len(prompts))]
    expected = tokens_of(llm, prompts, params)
    with engine(folder, **options) as other:
        assert tokens_of(other, prompts, params) == expected
        stats = other.stats()
        assert stats["kv_blocks_free"] == stats["kv_blocks_total"]
        assert stats["max_seqs_in_flight"] <= options.get("max_num_seqs", 512)


def test_preempted_samples_are_whole(folder):
    stops = dataclasses.replace(SAMPLED, n=6, max_tokens=40, ignore_eos=False)  # lengths that admission has to guess
    with engine(folder) as llm:
        expected = tokens_of(llm, [prompt_of(20), prompt_of(9)], stops)
    with engine(folder, num_kvcache_blocks=15, max_in_flight=2) as llm:
        llm.engine.scheduler._admission.output_ratio = 0.0
        assert tokens_of(llm, [prompt_of(20), prompt_of(9)], stops) == expected
        assert llm.stats()["preemptions"] > 0


def test_samples_end_each_by_itself(llm):
    (tokens,) = tokens_of(llm, [prompt_of(20)], SAMPLED)
    stop = tokens[2][3]
    output = llm.generate(prompt_of(20), dataclasses.replace(SAMPLED, stop_token_ids=[stop]), use_tqdm=False)[0]
    for completion, whole in zip(output.outputs, tokens, strict=True):
        end = whole.index(stop) + 1 if stop in whole else None
        assert completion.token_ids == whole[:end]
        assert (completion.finish_reason, completion.stop_reason) == (("stop", stop) if end else ("length", None))
    assert len({completion.text for completion in output.outputs}) == 4


def test_samples_with_logprobs(llm):
    params = dataclasses.replace(SAMPLED, logprobs=1, prompt_logprobs=0)
    alone = dataclasses.replace(params, n=1, max_tokens=1)
    for length in (2, BLOCK + 1, 45):
        output = llm.generate(prompt_of(length), params, use_tqdm=False)[0]
        assert len(output.prompt_logprobs) == length and output.prompt_logprobs[0] is None
        for completion in output.outputs:
            assert len(completion.logprobs) == 12
            for prefix in (0, 5):  # what a request that ends there says of the same token
                ids = prompt_of(length) + completion.token_ids[: prefix + 1]
                known = llm.generate(ids, alone, use_tqdm=False)[0].prompt_logprobs[-1][ids[-1]]
                assert completion.logprobs[prefix][ids[-1]].logprob == pytest.approx(known.logprob, abs=1e-4)


def test_abort_drops_all_samples(llm):
    for num_steps in range(6):
        request_id = llm.add_request(prompt_of(45), dataclasses.replace(SAMPLED, n=20))
        for _ in range(num_steps):
            llm.step()
        llm.abort(request_id)
        assert llm.is_finished()
        stats = llm.stats()
        assert stats["kv_blocks_free"] == stats["kv_blocks_total"]


def test_the_callers_own_loop_gives_whole_requests(llm):
    params = dataclasses.replace(SAMPLED, n=3)
    ids = [llm.add_request(prompt_of(length), dataclasses.replace(params, seed=length)) for length in (9, 20)]
    outputs = {}
    while not llm.is_finished():
        for output in llm.step():
            outputs[output.request_id] = output
    assert set(outputs) == set(ids)
    assert all(len(output.outputs) == 3 for output in outputs.values())


@pytest.mark.parametrize("n", [0, -1, 1.0, True, None])
def test_n_is_checked(n):
    with pytest.raises((ValueError, TypeError), match="n must be"):
        SamplingParams(n=n)


# ---- the scheduler's side, on the fake device -----------------------------------------------------------------------


def simulation(**options) -> Simulation:
    defaults = dict(max_num_seqs=8, max_num_batched_tokens=1000, max_model_len=400, num_blocks=500, block_size=16)
    return Simulation(Scheduler(**(defaults | options)))


def group(simulation: Simulation, length: int = 100, n: int = 4, max_tokens: int = 20):
    prompt = [random.Random(length).randrange(VOCAB_SIZE) for _ in range(length)]
    first = make_sequence(len(simulation.live), prompt, max_tokens, max_model_len=400, n=n)
    seqs = [first, *first.forks]
    simulation.add(first)
    return seqs


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [1000, 30, 1])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 100])
def test_forks_start_behind_their_prompt(length, budget, caching):
    sim = simulation(enable_prefix_caching=caching, max_num_batched_tokens=budget)
    seqs = group(sim, length)
    sim.run()
    assert sim.scheduler.num_prompt_tokens_computed == length + 3
    assert sim.scheduler.num_prompt_tokens_cached == 0
    assert sim.counts["block_copies"] == (0 if (length - 1) % 16 == 0 else 3)
    assert len({tuple(seq.token_ids) for seq in seqs}) == 4


def test_forks_share_the_full_blocks():
    sim = simulation(max_in_flight=1)
    seqs = group(sim)
    sim.turn()
    sim.turn()
    assert [seq.block_table[:6] for seq in seqs] == [seqs[0].block_table[:6]] * 4
    assert len({seq.block_table[6] for seq in seqs}) == 4
    assert sim.scheduler.num_free_blocks == sim.scheduler.num_total_blocks - 6 - 4
    sim.run()


def test_forks_beyond_max_num_seqs_wait_with_their_prompt():
    """A31, and the prompt is still computed once: the simulation counts the sequences at every step."""
    sim = simulation(max_num_seqs=2, enable_prefix_caching=False)
    group(sim, n=8)
    group(sim, length=50, n=3)
    sim.run()
    assert sim.scheduler.max_seqs_in_flight == 2
    assert sim.scheduler.num_prompt_tokens_computed == 100 + 7 + 50 + 2


def test_a_pool_too_small_to_hold_a_prompt_for_those_that_wait():
    # 119 slots are 8 blocks; a fork needs two of its own beside the 6 shared ones, and the one that is copied is held
    sim = simulation(max_num_seqs=1, num_blocks=1 + 8, enable_prefix_caching=False)
    group(sim, n=3)
    sim.run()
    assert sim.counts["prompts_given_up"] > 0


def test_the_first_is_dropped_before_its_prompt_is_computed():
    sim = simulation(max_num_batched_tokens=30)
    seqs = group(sim)
    sim.turn()
    sim.abort(seqs[0])
    sim.abort(seqs[2])
    sim.run()
    assert [seq.finish_reason for seq in seqs] == ["abort", "length", "abort", "length"]


def test_forks_of_forgotten_prefixes_register_nothing():
    sim = simulation(max_in_flight=1, block_size=4)
    seqs = group(sim, max_tokens=30)
    sim.turn()
    sim.scheduler.reset_prefix_cache()
    sim.turn()
    assert all(seq.row for seq in seqs)
    sim.run()
    assert not sim.scheduler.blocks._block_of_hash


@pytest.mark.parametrize("seed", range(20))
def test_known_lengths_are_never_preempted(seed):
    """Admission counts what forks will hold of their prompt, also beyond the end of the one that computed it."""
    rng = random.Random(seed)
    sim = simulation(
        num_blocks=rng.randint(20, 60),
        block_size=rng.choice((2, 4, 8)),
        max_in_flight=rng.randint(1, 3),
        max_num_seqs=rng.choice((3, 20)),
        enable_prefix_caching=rng.random() < 0.5,
    )
    for _ in range(40):
        group(sim, rng.randint(1, 20), n=rng.choice((1, 1, 2, 5)), max_tokens=rng.randint(1, 16))
    sim.run()
    assert sim.scheduler.num_preemptions == 0 and sim.counts["prompts_given_up"] == 0
    assert sim.scheduler.max_seqs_in_flight > 2
