"""Several ranks compute what one does: in threads for every family and many sizes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from tests.reference import reference_greedy
from tests.thread_ranks import ThreadsExecutor
from tests.tiny_models import FAMILIES, make_tiny_model

NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
OPTIONS: dict[str, Any] = dict(
    skip_tokenizer_init=True, dtype="float32", device="cpu", max_model_len=64, kvcache_block_size=8,
    max_num_batched_tokens=24, num_kvcache_blocks=60, max_num_seqs=8,
)  # fmt: skip


def prompts_of(lengths: tuple[int, ...], vocab_size: int = 320, seed: int = 7) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


PLAIN = [GREEDY] * 2 + [
    SamplingParams(temperature=temperature, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True, n=1 + i % 2)
    for i, temperature in enumerate((0.3, 1.0, 1.0, 2.0))
]
MIXED = [  # in one batch with rows that need none of it
    SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=1.0, seed=2, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, top_k=20, top_p=0.9, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=4, min_p=0.05, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0),
    SamplingParams(
        temperature=1.0, seed=5, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3,
        max_tokens=NUM_TOKENS, ignore_eos=True,
    ),
    SamplingParams(temperature=0, logit_bias={319: 6.0, 3: -20.0}, max_tokens=NUM_TOKENS, min_tokens=4,
                   stop_token_ids=[319]),
]  # fmt: skip


def answers(llm: LLM, prompts: list[list[int]], params: Any) -> list[Any]:
    """Everything that a request's answer says: of each sample its ids, why it ended, and its logprobs."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    stats = llm.stats()
    assert stats["kv_blocks_free"] == stats["kv_blocks_total"]
    return [
        ([(c.token_ids, c.finish_reason, c.logprobs) for c in output.outputs], output.prompt_logprobs)
        for output in outputs
    ]


def tokens_of(answer: list[Any]) -> list[Any]:
    return [[(ids, reason) for ids, reason, _ in samples] for samples, _ in answer]


def assert_equal(actual: list[Any], expected: list[Any]) -> None:
    """Equal ids, and logprobs up to rounding."""
    assert tokens_of(actual) == tokens_of(expected)
    for (samples, prompt), (expected_samples, expected_prompt) in zip(actual, expected, strict=True):
        lists = [(prompt, expected_prompt)]
        lists += [(a, b) for (_, _, a), (_, _, b) in zip(samples, expected_samples, strict=True)]
        for found, wanted in lists:
            assert (found is None) == (wanted is None)
            for one, other in zip(found or [], wanted or [], strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    assert {key: value.rank for key, value in one.items()} == {k: v.rank for k, v in other.items()}
                    assert all(abs(one[key].logprob - other[key].logprob) < 1e-4 for key in one)


def in_threads(folder: Path, size: int, monkeypatch, **options: Any) -> LLM:
    with monkeypatch.context() as patch:
        patch.setattr("nanovllm.engine.replicas.start_executor", ThreadsExecutor)
        return LLM(folder, tensor_parallel_size=size, **(OPTIONS | options))


# ---- in threads: every family, and every way to cut -----------------------------------------------------------------

EIGHT_HEADS = dict(num_attention_heads=8, head_dim=16)
CUTS: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    *((name, options, (2, 4)) for name, options in FAMILIES),  # 4 heads share 2 KV heads, or have 4
    ("eight", dict(family="qwen3", num_key_value_heads=8, **EIGHT_HEADS), (2, 8)),
    ("shared-kv", dict(family="llama", num_key_value_heads=2, attention_bias=True, mlp_bias=True, **EIGHT_HEADS), (8,)),
    ("one-kv", dict(family="qwen2", num_key_value_heads=1, **EIGHT_HEADS), (4,)),
    ("vocab-1003", dict(family="qwen3", vocab_size=1003), (2, 4)),
    ("vocab-1003-tied", dict(family="qwen2", vocab_size=1003, tie_word_embeddings=True), (2, 4)),
    ("vocab-330", dict(family="llama", vocab_size=330, num_key_value_heads=8, **EIGHT_HEADS), (8,)),  # two hold none
]


@pytest.mark.parametrize(("name", "options", "sizes"), CUTS, ids=[name for name, _, _ in CUTS])
def test_ranks_in_threads_answer_as_one(name, options, sizes, tmp_path, monkeypatch):
    folder = make_tiny_model(tmp_path, **options)
    prompts = prompts_of((1, 7, 16, 30, 41, 20), options.get("vocab_size", 320))
    with LLM(folder, **OPTIONS) as llm:
        expected = [answers(llm, prompts, params) for params in (PLAIN, MIXED)]
    assert expected[0][0][0][0][0] == reference_greedy(folder, prompts[0], NUM_TOKENS)
    for size in sizes:
        with in_threads(folder, size, monkeypatch) as llm:
            assert_equal(answers(llm, prompts, PLAIN), expected[0])
            widths = [group.gathered_widths for group in llm.engine.executor.groups]
            assert widths == [{3}] * size  # candidates alone: no row needs all its logits
            assert_equal(answers(llm, prompts, MIXED), expected[1])
