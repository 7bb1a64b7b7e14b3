"""Two ranks on two GPUs: float32 tokens as one GPU gives them, half precision near the reference's best, graphs.

Sums run through symmetric memory where the machine has it, else through NCCL; these tests hold for both.
"""

from __future__ import annotations

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.reference import reference_logits
from tests.test_gpu_engine import GREEDY, MEDIUM, POOL, VOCAB_SIZE, assert_same, gaps, mixed_prompts, tokens_of
from tests.test_tensor_parallel import assert_gone
from tests.tiny_models import make_tiny_model

NUM_TOKENS = GREEDY.max_tokens
pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


# As in test_gpu_engine.py, but for a vocabulary that two ranks do not divide.
SHAPE = MEDIUM | dict(vocab_size=VOCAB_SIZE + 3)


@pytest.fixture(scope="module")
def medium(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("medium"), **SHAPE))


@pytest.mark.gpu(seconds=30)
def test_float32_tokens_equal_one_rank(medium):
    """Graphs and eager steps, one prompt and many, plain rows and rows that need all logits. All memory comes back: it
    is that of processes that end."""
    prompts = mixed_prompts(14, 300)
    plain = [
        SamplingParams(temperature=i % 3 * 0.6, seed=i, max_tokens=NUM_TOKENS, ignore_eos=True)
        for i in range(len(prompts))
    ]
    mixed = [
        SamplingParams(temperature=0.8, seed=1, top_k=30, top_p=0.9, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, logprobs=4, prompt_logprobs=1, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=12, min_tokens=6, repetition_penalty=1.2, stop_token_ids=[7]),
    ]
    options = POOL | dict(dtype="float32")
    with LLM(medium, **options) as llm:
        expected = tokens_of(llm, prompts, plain)
        alone = tokens_of(llm, prompts[:1])
        expected_mixed = llm.generate(prompts[:4], mixed, use_tqdm=False)
    for schedule in ({}, dict(enforce_eager=True, max_num_batched_tokens=200, num_kvcache_blocks=40)):
        with LLM(medium, tensor_parallel_size=2, **(options | schedule)) as llm:
            assert_same(medium, prompts, plain, tokens_of(llm, prompts, plain), expected)
            assert_same(medium, prompts[:1], [GREEDY], tokens_of(llm, prompts[:1]), alone)
            outputs = llm.generate(prompts[:4], mixed, use_tqdm=False)
            for output, wanted in zip(outputs[1:3], expected_mixed[1:3], strict=True):
                assert output["token_ids"] == wanted["token_ids"]
            assert len(outputs[0]["token_ids"]) == 12 and len(outputs[3]["token_ids"]) >= 6
            found, wanted = outputs[1].outputs[0].logprobs, expected_mixed[1].outputs[0].logprobs
            for one, other in zip(found, wanted, strict=True):
                assert all(abs(one[key].logprob - other[key].logprob) < 1e-3 for key in one.keys() & other.keys())
            stats = llm.stats()
            assert stats["mean_step_ms"] > 0 and stats["kv_blocks_free"] == stats["kv_blocks_total"]
        assert_gone(llm)


@pytest.mark.gpu(seconds=25)
def test_half_precision_tokens_are_near_the_top(medium, tmp_path):
    """As with one rank: every greedy token is the reference's best but for a gap that bfloat16 explains; before and
    after new weights, which reach captured graphs."""
    prompts = mixed_prompts(5, 200)
    other = make_tiny_model(tmp_path, seed=1, **SHAPE)
    with LLM(medium, tensor_parallel_size=2, dtype="bfloat16", **POOL) as llm:
        for folder in (medium, str(other)):
            num_best = 0
            for prompt, tokens in zip(prompts, tokens_of(llm, prompts), strict=True):
                exact = reference_logits(folder, prompt + tokens, device="cuda")
                rounded = reference_logits(folder, prompt + tokens, torch.bfloat16, device="cuda")
                tolerance = 2 * (exact - rounded)[len(prompt) - 1 : -1].abs().max()
                gap = gaps(exact, prompt, tokens)
                assert gap.max() <= tolerance, f"gap {gap.max():.4f} over tolerance {tolerance:.4f}"
                num_best += int((gap == 0).sum())
            assert num_best > 0.8 * len(prompts) * NUM_TOKENS
            llm.sleep(level=1)
            llm.wake_up()
            llm.update_weights(other)
