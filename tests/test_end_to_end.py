"""The whole engine on tiny float32 checkpoints: token for token what transformers says, however the work is
scheduled."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from tests.reference import reference_greedy
from tests.tiny_models import FAMILIES, make_tiny_model

NUM_TOKENS = 24
PROMPT_LENGTHS = (1, 5, 16, 17, 31, 33, 60, 90)


def prompts_for(vocab_size: int = 256) -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in PROMPT_LENGTHS]


@pytest.fixture(scope="session", params=[name for name, _ in FAMILIES])
def family(request, tmp_path_factory) -> Path:
    return tiny_folder(request.param, tmp_path_factory)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory) -> Path:
    return tiny_folder("qwen3", tmp_path_factory)


_folders: dict[str, Path] = {}


def tiny_folder(name: str, tmp_path_factory) -> Path:
    if name not in _folders:
        overrides = dict(dict(FAMILIES)[name])
        folder = tmp_path_factory.mktemp(name.replace(" ", "_"))
        _folders[name] = Path(make_tiny_model(folder, overrides.pop("family", name), **overrides))
    return _folders[name]


_expected: dict[str, list[list[int]]] = {}


def expected_tokens(folder: Path) -> list[list[int]]:
    if str(folder) not in _expected:
        _expected[str(folder)] = [reference_greedy(folder, prompt, NUM_TOKENS) for prompt in prompts_for()]
    return _expected[str(folder)]


def engine(folder: Path, **options) -> LLM:
    defaults = dict(skip_tokenizer_init=True, dtype="float32", device="cpu", max_model_len=256, kvcache_block_size=16)
    return LLM(folder, **(defaults | options))


GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def generated(llm: LLM, prompts: list[list[int]], params=GREEDY) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def test_batched_and_single_equal_transformers(family):
    expected = expected_tokens(family)
    with engine(family) as llm:
        assert generated(llm, prompts_for()) == expected
        for prompt, tokens in zip(prompts_for(), expected, strict=True):
            assert generated(llm, [prompt]) == [tokens]


@pytest.mark.parametrize("budget", [7, 16, 50])
def test_chunks_equal_transformers(family, budget):
    with engine(family, max_num_batched_tokens=budget, enable_prefix_caching=False) as llm:
        assert generated(llm, prompts_for()) == expected_tokens(family)


def test_preempted_equals_transformers(family):
    # 90 + 24 tokens need 8 blocks; nine leave no room for a second long one, so short ones grow into each other
    with engine(family, num_kvcache_blocks=10) as llm:
        assert generated(llm, prompts_for(), params_with_stops(family)) == expected_tokens(family)


def params_with_stops(folder: Path) -> SamplingParams:
    """Greedy with a length that the scheduler cannot count on: an end id that never comes makes it guess."""
    used = {token_id for tokens in expected_tokens(folder) for token_id in tokens}
    never = next(token_id for token_id in range(320) if token_id not in used)
    return SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stop_token_ids=[never])


def test_cached_equals_transformers(family):
    with engine(family) as llm:
        for _ in range(2):
            assert generated(llm, prompts_for()) == expected_tokens(family)
        assert llm.stats()["prompt_tokens_cached"] > 0


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("max_num_seqs", [1, 3, 8])
def test_in_flight_depth_changes_nothing(qwen3, max_in_flight, max_num_seqs):
    with engine(qwen3, max_in_flight=max_in_flight, max_num_seqs=max_num_seqs, max_num_batched_tokens=40) as llm:
        assert generated(llm, prompts_for()) == expected_tokens(qwen3)
        stats = llm.stats()
        assert stats["max_seqs_in_flight"] <= max_num_seqs
        assert stats["kv_blocks_free"] == stats["kv_blocks_total"]


@pytest.mark.parametrize("block_size", [1, 8, 32, 128])
def test_block_size_changes_nothing(qwen3, block_size):
    with engine(qwen3, kvcache_block_size=block_size) as llm:
        assert generated(llm, prompts_for()) == expected_tokens(qwen3)


def test_preemption_happens_and_outputs_are_whole(qwen3):
    with engine(qwen3, num_kvcache_blocks=10, enable_prefix_caching=False) as llm:
        # short answers first teach it to expect them
        llm.generate([[5]] * 200, SamplingParams(max_tokens=64, stop_token_ids=list(range(320))), False)
        outputs = llm.generate(prompts_for(), params_with_stops(qwen3), use_tqdm=False)
        assert llm.stats()["preemptions"] > 0
        assert [output["token_ids"] for output in outputs] == expected_tokens(qwen3)
        assert {output["finish_reason"] for output in outputs} == {"length"}


def test_seeded_sampling_is_independent_of_schedule(qwen3):
    params = [SamplingParams(temperature=1.0, top_p=0.9, seed=i, max_tokens=16, ignore_eos=True) for i in range(8)]
    with engine(qwen3) as llm:
        alone = [generated(llm, [prompt], [param])[0] for prompt, param in zip(prompts_for(), params, strict=True)]
        assert generated(llm, prompts_for(), params) == alone
    with engine(qwen3, max_num_batched_tokens=20, max_in_flight=2, num_kvcache_blocks=12) as llm:
        assert generated(llm, prompts_for(), params) == alone


def test_unseeded_samples_differ_and_the_engine_seed_repeats_them(qwen3):
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    with engine(qwen3, seed=3) as llm:
        first = generated(llm, [prompts_for()[3]] * 6, params)
        assert len({tuple(tokens) for tokens in first}) == 6
    with engine(qwen3, seed=3) as llm:
        assert generated(llm, [prompts_for()[3]] * 6, params) == first
    with engine(qwen3, seed=4) as llm:
        assert generated(llm, [prompts_for()[3]] * 6, params) != first


def test_shared_prompts_are_computed_once(qwen3):
    prompt = [(i * 7) % 200 + 3 for i in range(200)]
    with engine(qwen3) as llm:
        outputs = llm.generate([prompt] * 8, GREEDY, use_tqdm=False)
        assert len({tuple(output["token_ids"]) for output in outputs}) == 1
        assert outputs[0]["token_ids"] == reference_greedy(qwen3, prompt, NUM_TOKENS)
        assert llm.stats()["prompt_tokens_computed"] <= 200 + 7 * 16
        assert outputs[7].num_cached_tokens == 192
