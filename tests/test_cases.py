"""Faults that users of other engines reported, as inputs with the right answer; each test's name has its case's id.

docs/cases.md lists every case; those that are not here are tested beside what they are about.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import block_manager
from nanovllm.engine.admission import BlockDemand
from nanovllm.model_config import read_model_config
from nanovllm.worker import kv_cache
from nanovllm.worker.cuda_graphs import CudaGraphs, graph_sizes
from nanovllm.worker.platform import resolve_dtype
from tests.reference import reference_greedy
from tests.test_chat_stream import with_start_token
from tests.test_detokenizer import byte_level, llama2
from tests.tiny_models import VOCAB_SIZE, make_tiny_model

ROOT = Path(__file__).resolve().parents[1]
BLOCK_SIZE = 8
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=True)


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("long"), "qwen3", max_position_embeddings=4096)


def engine(folder: Path, **options) -> LLM:
    defaults = dict(
        skip_tokenizer_init=True, dtype="float32", device="cpu", max_model_len=64, kvcache_block_size=BLOCK_SIZE
    )
    return LLM(folder, **(defaults | options))


@pytest.fixture(scope="module")
def llm(folder):
    with engine(folder, skip_tokenizer_init=False) as llm:
        yield llm


def tokens(llm: LLM, prompts: list, params=GREEDY) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def is_usable(llm: LLM, folder: Path) -> bool:
    """Nothing is queued or held, and the next answer is right."""
    stats = llm.stats()
    assert llm.is_finished() and stats["kv_blocks_free"] == stats["kv_blocks_total"]
    return tokens(llm, [PROMPT]) == [reference_greedy(folder, PROMPT, NUM_TOKENS)]


def random_prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(3, 256) for _ in range(length)]


def expected(folder: Path, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    return [reference_greedy(folder, prompt, num_tokens) for prompt in prompts]


def test_every_case_is_listed_with_tests_that_exist():
    rows = re.findall(r"^\| (A\d+) \| .+ \| (.+) \|$", (ROOT / "docs/cases.md").read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == [f"A{number}" for number in range(1, 55)]
    for name, cell in rows:
        tests = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
        assert tests or "waits for " in cell, name
        for file, test in tests:
            assert f"def {test}(" in (ROOT / "tests" / file).read_text(), (name, file, test)


# ---- input ----------------------------------------------------------------------------------------------------------


def test_a1_an_empty_prompt_is_refused_by_its_position(llm, folder):
    steps = llm.stats()["steps"]
    for prompts in (["a", "", "b"], [[5], [], [6]], ["a", {"prompt": ""}, [5]]):
        with pytest.raises(ValueError, match="request 1: the prompt is empty"):
            llm.generate(prompts, GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match="the prompt is empty"):
        llm.add_request("", GREEDY)
    assert llm.stats()["steps"] == steps
    assert is_usable(llm, folder)


@pytest.mark.parametrize("make", [llama2, byte_level], ids=lambda make: make.__name__)
def test_a1_an_empty_prompt_is_its_start_token_where_there_is_one(make, tmp_path):
    with engine(with_start_token(make, tmp_path), skip_tokenizer_init=False) as llm:
        start = llm.tokenizer.bos_token_id
        outputs = llm.generate(["the", "", "fox"], GREEDY, use_tqdm=False)
        assert [output["finish_reason"] for output in outputs] == ["length"] * 3
        assert outputs[1].prompt_token_ids == [start]
        assert outputs[1]["token_ids"] == reference_greedy(tmp_path, [start], NUM_TOKENS)


@pytest.mark.parametrize("bad", [VOCAB_SIZE, VOCAB_SIZE + 1000, -1])
def test_a2_ids_outside_the_vocabulary(llm, folder, bad):
    steps = llm.stats()["steps"]
    for prompt in ([5, bad], (bad,), {"prompt_token_ids": [bad, 5]}, torch.tensor([5, bad])):
        with pytest.raises(ValueError, match=f"request 1: token id {bad} is outside the vocabulary: ids are 0 to 319"):
            llm.generate([PROMPT, prompt], GREEDY, use_tqdm=False)
    assert llm.stats()["steps"] == steps
    assert len(tokens(llm, [[VOCAB_SIZE - 1, 0]])[0]) == NUM_TOKENS
    assert is_usable(llm, folder)


@pytest.mark.parametrize("num_params", [0, 2, 4])
def test_a3_a_list_of_params_of_another_length(llm, folder, num_params):
    steps = llm.stats()["steps"]
    with pytest.raises(ValueError, match=f"3 prompts, but {num_params} sampling_params"):
        llm.generate([PROMPT] * 3, [GREEDY] * num_params, use_tqdm=False)
    conversations = [[{"role": "user", "content": "hi"}]] * 3
    with pytest.raises(ValueError, match=f"3 prompts, but {num_params} sampling_params"):
        llm.chat(conversations, [GREEDY] * num_params, use_tqdm=False)
    assert llm.stats()["steps"] == steps
    assert is_usable(llm, folder)


# ---- length ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("too_long", [[7] * 64, [7] * 500, "the fox runs " * 200], ids=["exact", "more", "text"])
def test_a5_an_overlong_prompt_between_short_ones(llm, folder, too_long):
    prompts, steps = [PROMPT, too_long, [9, 8]], llm.stats()["steps"]
    with pytest.raises(ValueError, match=r"request 1: the prompt has \d+ tokens, and max_model_len=64"):
        llm.generate(prompts, GREEDY, use_tqdm=False)
    assert llm.stats()["steps"] == steps
    short = expected(folder, [PROMPT, [9, 8]])
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, on_error="return")
    assert [output["token_ids"] for output in outputs] == [short[0], [], short[1]]
    assert [output["finish_reason"] for output in outputs] == ["length", "error", "length"]
    results = dict(llm.generate_iter(prompts, GREEDY, on_error="return"))
    assert [results[index]["token_ids"] for index in range(3)] == [short[0], [], short[1]]
    assert "max_model_len=64" in outputs[1].error == results[1].error
    assert is_usable(llm, folder)


@pytest.mark.parametrize("max_tokens", [1, 8, None])
def test_a6_a_prompt_larger_than_the_pool(folder, max_tokens):
    params = dataclasses.replace(GREEDY, max_tokens=max_tokens)
    with engine(folder, num_kvcache_blocks=5) as llm:  # 32 tokens
        prompts = [PROMPT, random_prompt(33), [9, 8]]
        needed = 32 + (max_tokens or 1)
        message = rf"request needs KV cache for {needed} tokens \(33 of the prompt\), and the whole pool holds 32"
        with pytest.raises(ValueError, match=f"request 1: the {message}"):
            llm.generate(prompts, [GREEDY, params, GREEDY], use_tqdm=False)
        outputs = llm.generate(prompts, [GREEDY, params, GREEDY], use_tqdm=False, on_error="return")
        small = expected(folder, [PROMPT, [9, 8]])
        assert [output["token_ids"] for output in outputs] == [small[0], [], small[1]]
        largest = random_prompt(32)  # the last sampled token needs no slot
        assert tokens(llm, [largest], dataclasses.replace(GREEDY, max_tokens=1)) == expected(folder, [largest], 1)
        assert is_usable(llm, folder)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a7_what_room_is_left(folder, enforce_eager):
    prompts = [random_prompt(length) for length in (59, 63, 58)]
    params = dataclasses.replace(GREEDY, max_tokens=100)
    with engine(folder, enforce_eager=enforce_eager) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output["token_ids"] == reference_greedy(folder, prompt, 64 - len(prompt))
        assert (output["finish_reason"], output["stop_reason"]) == ("length", None)


def test_a8_no_max_tokens(folder, tmp_path):
    whole = reference_greedy(folder, PROMPT, 64 - len(PROMPT))
    params = dataclasses.replace(GREEDY, max_tokens=None)
    with engine(folder) as llm:
        [output] = llm.generate(PROMPT, params, use_tqdm=False)
        assert (output["token_ids"], output["finish_reason"]) == (whole, "length")
    end = next(token for index, token in enumerate(whole) if index > 20 and token not in whole[:index])
    other = shutil.copytree(folder, tmp_path / "other")
    for name in ("config.json", "generation_config.json"):
        (other / name).write_text(json.dumps(json.loads((other / name).read_text()) | {"eos_token_id": end}))
    with engine(other) as llm:
        [output] = llm.generate(PROMPT, dataclasses.replace(params, ignore_eos=False), use_tqdm=False)
        assert (output["token_ids"], output["finish_reason"]) == (whole[: whole.index(end) + 1], "stop")


# ---- text and sampling ----------------------------------------------------------------------------------------------


def test_a13_text_is_one_decode_of_all_ids(llm):
    text = "naïve 🙂🚀 日本語 é"
    ids = llm.tokenizer(text, add_special_tokens=False)["input_ids"]
    for seed in range(4):  # whole characters, parts of them and nonsense, in any order
        params = SamplingParams(seed=seed, max_tokens=50, ignore_eos=True, allowed_token_ids=sorted(set(ids)))
        [output] = llm.generate(PROMPT, params, use_tqdm=False)
        assert output["text"] == llm.tokenizer.decode(output["token_ids"], skip_special_tokens=True)
        assert "".join(llm.stream(PROMPT, params)) == output["text"]


@pytest.mark.parametrize(
    ("field", "value", "is_allowed"),
    [
        ("top_p", 0, False),
        ("top_p", 1.0, True),
        ("top_p", 1.1, False),
        ("top_p", -0.1, False),
        ("top_k", 0, True),
        ("top_k", -1, True),
        ("top_k", 1, True),
        ("top_k", -5, False),
    ],
)
def test_a18_filters_are_accepted_or_refused_by_the_constructor(llm, field, value, is_allowed):
    if not is_allowed:
        with pytest.raises(ValueError, match=rf"{field} must be .*got {float(value) if field == 'top_p' else value}"):
            SamplingParams(**{field: value})
        return
    plain = SamplingParams(seed=1, max_tokens=20, ignore_eos=True)
    given = tokens(llm, [PROMPT], dataclasses.replace(plain, **{field: value}))
    same_as = dataclasses.replace(plain, temperature=0.0) if value == 1 and field == "top_k" else plain
    assert given == tokens(llm, [PROMPT], same_as)


# ---- outputs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_num_seqs", [3, 20])
def test_a23_outputs_are_in_the_order_of_the_prompts(folder, max_num_seqs):
    prompts = [random_prompt(1 + index % 5, index) for index in range(20)]
    params = [dataclasses.replace(GREEDY, max_tokens=20 - index) for index in range(20)]
    with engine(folder, max_num_seqs=max_num_seqs) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        finished = [index for index, _ in llm.generate_iter(zip(prompts, params, strict=True))]
    assert finished != sorted(finished)
    assert [output.prompt_token_ids for output in outputs] == prompts
    for prompt, param, output in zip(prompts, params, outputs, strict=True):
        assert output["token_ids"] == reference_greedy(folder, prompt, param.max_tokens)


@pytest.mark.parametrize("options", [dict(max_num_batched_tokens=16), dict(max_num_seqs=4, max_in_flight=2)], ids=str)
def test_a51_more_prompts_than_a_step_takes(folder, options):
    params = dataclasses.replace(GREEDY, max_tokens=5)
    calls = [[random_prompt(4, seed) for seed in range(first, first + 24)] for first in (0, 100)]
    with engine(folder, **options) as llm:
        results = [llm.generate(prompts, params, use_tqdm=False) for prompts in calls]
    for prompts, outputs in zip(calls, results, strict=True):
        answers = expected(folder, prompts, 5)
        assert len({tuple(answer) for answer in answers}) > 20  # recognisable
        assert [output["token_ids"] for output in outputs] == answers
        assert {output["finish_reason"] for output in outputs} == {"length"}
    assert len({output.request_id for outputs in results for output in outputs}) == 48


# ---- prefix cache ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 2 * BLOCK_SIZE])
def test_a26_a_prompt_that_is_cached_whole(folder, length):
    prompt = random_prompt(length)
    longer = [prompt + random_prompt(2 * BLOCK_SIZE, 1)]
    with engine(folder) as llm:
        outputs = [llm.generate(prompt, GREEDY, use_tqdm=False)[0] for _ in range(2)]
        assert [output["token_ids"] for output in outputs] == expected(folder, [prompt] * 2)
        num_cached = (length - 1) // BLOCK_SIZE * BLOCK_SIZE  # the last token is always computed
        assert [output.num_cached_tokens for output in outputs] == [0, num_cached]
        assert llm.stats()["prompt_tokens_computed"] == 2 * length - num_cached
        [third] = llm.generate(longer, GREEDY, use_tqdm=False)
        assert third.num_cached_tokens == length // BLOCK_SIZE * BLOCK_SIZE  # and its own last block still hits
        assert [third["token_ids"]] == expected(folder, longer)


@pytest.mark.parametrize("bad_hash", [lambda parent, content: 7, lambda parent, content: hash(content)])
def test_a27_hash_collisions_cost_hits_alone(folder, monkeypatch, bad_hash):
    """With a constant every block collides; without the parent, equal blocks behind other prefixes do."""
    a, b, c = (random_prompt(BLOCK_SIZE, seed) for seed in range(3))
    prompts = [a + b + c, b + b + c, c + b + a, a + c + c, a + b + c + a]
    monkeypatch.setattr(block_manager, "hash_block", bad_hash)
    with engine(folder) as llm:
        for _ in range(2):
            assert tokens(llm, prompts) == expected(folder, prompts)
            assert [tokens(llm, [prompt])[0] for prompt in prompts] == expected(folder, prompts)
        few = dataclasses.replace(GREEDY, max_tokens=4)  # so that the first block is the last to be registered
        one_block = [block + [5] for block in (a, b, c, c)]
        outputs = [llm.generate(prompt, few, use_tqdm=False)[0] for prompt in one_block]
        assert [output["token_ids"] for output in outputs] == expected(folder, one_block, 4)
        assert outputs[3].num_cached_tokens == BLOCK_SIZE
        assert is_usable(llm, folder)


def test_a28_copies_of_one_prompt_in_a_call(long_folder):
    prompt = random_prompt(1000)
    with engine(long_folder, max_model_len=1024) as llm:
        assert tokens(llm, [prompt] * 8) == expected(long_folder, [prompt]) * 8
        assert llm.stats()["prompt_tokens_computed"] == 1000 + 7 * BLOCK_SIZE  # 992 = 124 blocks are shared


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_a52_a_pool_full_of_old_prefixes(folder, block_size):
    rng = random.Random(block_size)
    old = [random_prompt(rng.randint(1, 40), seed) for seed in range(6)]
    answers = expected(folder, old)
    options = dict(kvcache_block_size=block_size, num_kvcache_blocks=1 + 64 // block_size)
    with engine(folder, **options) as llm:
        num_total = llm.stats()["kv_blocks_total"]
        assert num_total == 64 // block_size
        for index in (0, 1, 2, 0, 3, 4, 1, 1, 5, 0):  # old ones and new ones, alone
            assert tokens(llm, [old[index]]) == [answers[index]]
            assert llm.stats()["kv_blocks_free"] == num_total
        assert tokens(llm, old * 2) == answers * 2  # and together
        assert llm.stats()["kv_blocks_free"] == num_total
        assert llm.stats()["prompt_tokens_cached"] > 0


# ---- scheduling -----------------------------------------------------------------------------------------------------


def test_a29_a_long_prompt_in_chunks(long_folder):
    prompt = random_prompt(3000)
    params = dataclasses.replace(GREEDY, max_tokens=4)
    answer = expected(long_folder, [prompt], 4)
    for budget in (256, 500, 3000):
        options = dict(max_model_len=3072, max_num_batched_tokens=budget, kvcache_block_size=64)
        with engine(long_folder, **options) as llm:
            assert tokens(llm, [prompt], params) == answer, budget
            assert llm.stats()["steps"] == -(-3000 // budget) + 3


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_a30_preempted_requests_have_whole_answers(folder, monkeypatch, max_in_flight):
    monkeypatch.setattr(BlockDemand, "admit", lambda *_: True)  # lengths are known: nothing would be preempted
    params = dataclasses.replace(GREEDY, max_tokens=30)
    prompts = [random_prompt(9, seed) for seed in range(6)]
    with engine(folder, num_kvcache_blocks=14, max_in_flight=max_in_flight) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats()["preemptions"] > 0
    assert [output["token_ids"] for output in outputs] == expected(folder, prompts, 30)
    assert {output["finish_reason"] for output in outputs} == {"length"}


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a31_max_num_seqs_bounds_what_is_in_flight(folder, monkeypatch, max_in_flight):
    with engine(folder, max_num_seqs=4, max_in_flight=max_in_flight) as llm:
        for index in range(40):
            llm.add_request([5 + index], dataclasses.replace(GREEDY, max_tokens=1 + index % 7))
        submit, num_live, num_finished = llm.engine.executor.submit, [], 0

        def watched(plan):
            num_live.append(max(len(plan.rows), llm.engine.scheduler.num_seqs_in_flight))
            return submit(plan)

        monkeypatch.setattr(llm.engine.executor, "submit", watched)
        while not llm.is_finished():
            num_finished += len(llm.step())
        assert len(num_live) == llm.stats()["steps"] and num_finished == 40
        assert max(num_live) == llm.stats()["max_seqs_in_flight"] == 4


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_a32_block_edges(folder, num_blocks):
    """Prompts around an edge, with as many tokens as end before, on and behind the next ones."""
    edge = num_blocks * BLOCK_SIZE
    work = [(edge + d, n) for d in (-1, 0, 1) for n in (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 20)]
    prompts = [random_prompt(length, length + n) for length, n in work]
    params = [dataclasses.replace(GREEDY, max_tokens=n) for _, n in work]
    with engine(folder) as llm:
        answers = tokens(llm, prompts, params)
    for (length, n), prompt, answer in zip(work, prompts, answers, strict=True):
        assert answer == reference_greedy(folder, prompt, n), (length, n)


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_a53_a_chunked_prompt_beside_decodes(long_folder, max_in_flight):
    """Short ones decode while the chunks of a long one run, whose steps sample nothing of it."""
    short = [random_prompt(3 + seed, seed) for seed in range(4)]
    long = random_prompt(400)
    options = dict(max_model_len=512, max_num_batched_tokens=20, max_num_seqs=5, max_in_flight=max_in_flight)
    params = dataclasses.replace(GREEDY, max_tokens=40)
    with engine(long_folder, **options) as llm:
        assert tokens(llm, [*short, long], params) == expected(long_folder, [*short, long], 40)
        assert llm.stats()["max_seqs_in_flight"] == 5


# ---- graphs and memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden_size", [1024, 4096])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 9, 10, 20, 100, 161, 300, 512, 700])
def test_a33_every_batch_size_has_a_graph(max_num_seqs, hidden_size):
    sizes = graph_sizes(max_num_seqs, hidden_size)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_num_seqs
    graphs = CudaGraphs(sizes, 4096, NotImplemented, NotImplemented)
    padded = [graphs.padded_size(num_rows) for num_rows in range(1, max_num_seqs + 1)]
    is_wide = hidden_size == 4096
    most = [48 if is_wide and 160 < size < 512 else 8 if size <= 256 else 16 for size in padded]
    assert all(
        size in sizes and 0 <= size - num_rows < limit
        for num_rows, (size, limit) in enumerate(zip(padded, most, strict=True), start=1)
    )


MANY = [[5 + seed, 7 + seed % 3] for seed in range(100)]


@pytest.mark.parametrize("max_num_seqs", [1, 3, 9, 10, 20, 100])
def test_a33_as_many_prompts_as_max_num_seqs(folder, max_num_seqs):
    params = [dataclasses.replace(GREEDY, max_tokens=1 + index % 4) for index in range(max_num_seqs)]
    with engine(folder, max_num_seqs=max_num_seqs) as llm:
        answers = tokens(llm, MANY[:max_num_seqs], params)
        assert llm.stats()["max_seqs_in_flight"] == max_num_seqs
    for prompt, param, answer in zip(MANY, params, answers, strict=False):
        assert answer == reference_greedy(folder, prompt, param.max_tokens)


GIB = 1 << 30


class FakeCard:
    """What torch.cuda says of a card of 100 GiB, of which others hold a part, and this process another."""

    def __init__(self, monkeypatch, others: float) -> None:
        self.others, self.own, self.reserved = int(others * GIB), 0, 0
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100 * GIB - self.others - self.own, 100 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: self.reserved)

    def take(self, gib: float) -> None:
        self.own += int(gib * GIB)
        self.reserved += int(gib * GIB)


@pytest.mark.parametrize("others", [0, 40, 55])
def test_a34_memory_of_others_is_not_charged(monkeypatch, others):
    card = FakeCard(monkeypatch, others)
    memory = kv_cache.GpuMemory(torch.device("cuda"), 0.4)
    card.take(10)
    num_bytes = memory.num_blocks(1 << 20, GIB, 1, 0.4) << 20
    assert 28 * GIB < num_bytes < 29 * GIB  # 40, less 10 of weights, 1 for graphs and the context


def test_a34_too_little_is_left(monkeypatch):
    card = FakeCard(monkeypatch, 85)
    memory = kv_cache.GpuMemory(torch.device("cuda"), 0.4)
    card.take(10)
    assert memory.num_blocks(1 << 20, GIB, 1, 0.4) << 20 < 4 * GIB  # what is free, not the share
    card.others = 90 * GIB - 1
    message = r"the card has 100\.00 GiB, of which 85\.00 GiB were in use .*=0\.4 asks for 40\.00 GiB"
    with pytest.raises(ValueError, match=message):
        memory.num_blocks(1 << 20, 0, 1, 0.4)


@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_a35_everything_held_is_within_the_share(monkeypatch, share):
    card = FakeCard(monkeypatch, 5)
    memory = kv_cache.GpuMemory(torch.device("cuda"), share)
    card.take(20)
    graphs, block = 2 * GIB, 3 << 20
    num_bytes = memory.num_blocks(block, graphs, 1, share) * block
    whole = 20 * GIB + kv_cache.CONTEXT_BYTES + graphs + num_bytes
    assert share * 100 * GIB - block < whole <= share * 100 * GIB


# ---- lifecycle ------------------------------------------------------------------------------------------------------

CHILD = """
import sys
import nanovllm.engine.executor
from nanovllm import LLM, SamplingParams
print("ready", flush=True)
sys.stdin.readline()
options = dict(skip_tokenizer_init=True, dtype="float32", device="cpu", max_model_len=64, kvcache_block_size=8)
with LLM(sys.argv[1], **options) as llm:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    print(llm.generate([5, 6, 7, 8, 9], params, use_tqdm=False)[0]["token_ids"], flush=True)
    sys.stdin.readline()  # hold the engine until all four have answered
"""


def test_a36_four_engines_started_at_once(folder):
    """With one rank each; no port and no name is theirs."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(folder)]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    children = [subprocess.Popen(command, env=env, **pipes) for _ in range(4)]
    try:
        assert [child.stdout.readline() for child in children] == ["ready\n"] * 4
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        answers = [child.stdout.readline().strip() for child in children]
        results = [child.communicate("\n", timeout=60) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert answers == [str(reference_greedy(folder, PROMPT, 8))] * 4, results
    assert [child.returncode for child in children] == [0] * 4, results


# ---- loading and numerics -------------------------------------------------------------------------------------------


def without_dtype(folder: Path) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if "dtype" not in k}))
    return folder


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a44_a_config_without_dtype(tmp_path, stored):
    """The tensors' dtype is taken, where the device computes in it; the option overrides it."""
    folder = without_dtype(make_tiny_model(tmp_path, dtype=stored))
    name = str(stored).removeprefix("torch.")
    config = read_model_config(folder)
    assert config.dtype == name
    if stored != torch.bfloat16:  # which asks the GPU for its capability
        assert resolve_dtype("auto", config.dtype, torch.device("cuda")) == stored
    on_cpu = resolve_dtype("auto", name, torch.device("cpu"))
    assert on_cpu in (torch.float32, stored)
    for option, dtype in (("auto", on_cpu), ("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        with engine(folder, dtype=option) as llm:
            assert llm.config.dtype == str(dtype).removeprefix("torch.")
            assert {parameter.dtype for parameter in llm.engine.executor.runner.model.parameters()} == {dtype}
            assert len(tokens(llm, [PROMPT])[0]) == NUM_TOKENS


@pytest.mark.parametrize("max_shard_size", ["5GB", "60KB"])
def test_a42_a44_stray_files_have_no_say_in_the_dtype(tmp_path, max_shard_size):
    from safetensors.torch import save_file

    folder = without_dtype(make_tiny_model(tmp_path, max_shard_size=max_shard_size))
    for name in ("adapter_model.safetensors", "consolidated.safetensors"):
        save_file({"other.weight": torch.zeros(10**6, dtype=torch.bfloat16)}, folder / name)
    assert read_model_config(folder).dtype == "float32"
    with engine(folder, dtype="auto") as llm:
        assert llm.config.dtype == "float32"
        assert tokens(llm, [PROMPT]) == expected(folder, [PROMPT])


def test_a45_greedy_answers_in_any_company(folder):
    prompts = [random_prompt(1 + seed % 30, seed) for seed in range(64)]
    prompts[0] = PROMPT
    with engine(folder, enable_prefix_caching=False) as llm:
        answers = tokens(llm, prompts)
        assert answers == expected(folder, prompts)
        assert tokens(llm, prompts[:7]) == answers[:7]
        assert [tokens(llm, [prompt])[0] for prompt in prompts[:7]] == answers[:7]


# ---- on a GPU -------------------------------------------------------------------------------------------------------

GPU = dict(device="cuda", num_kvcache_blocks=400, kvcache_block_size=None)


@pytest.mark.gpu(seconds=6)
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a7_gpu_what_room_is_left(folder, enforce_eager):
    prompts = [random_prompt(length) for length in (59, 63, 58)]
    params = dataclasses.replace(GREEDY, max_tokens=100)
    with engine(folder, enforce_eager=enforce_eager, max_num_seqs=4, **GPU) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output["token_ids"]) for output in outputs] == [5, 1, 6]
    assert [output["finish_reason"] for output in outputs] == ["length"] * 3
    assert [output["token_ids"] for output in outputs] == [
        reference_greedy(folder, prompt, 64 - len(prompt)) for prompt in prompts
    ]


@pytest.mark.gpu(seconds=20)
def test_a33_gpu_as_many_prompts_as_max_num_seqs(folder):
    for max_num_seqs in (9, 20, 100):  # tests/test_gpu_engine.py has the others
        params = [dataclasses.replace(GREEDY, max_tokens=1 + index % 4) for index in range(max_num_seqs)]
        with engine(folder, max_num_seqs=max_num_seqs, **GPU) as llm:
            answers = tokens(llm, MANY[:max_num_seqs], params)
        for prompt, param, answer in zip(MANY, params, answers, strict=False):
            assert answer == reference_greedy(folder, prompt, param.max_tokens)
