"""The whole engine on a GPU: float32 against transformers and against itself under other schedules, half precision by
logits, graphs against eager steps, memory.

The checkpoint of most tests has Qwen3-0.6B's heads, so that the kernels run as they were written for, and little else,
so that it is made in a second. Every engine but one bounds its memory by `num_kvcache_blocks`: tests run side by side.
"""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.noise import log2_exponential_reference, noise_bits_reference
from tests.reference import reference_logits
from tests.test_end_to_end import NUM_TOKENS, prompts_for, tiny_folder
from tests.test_last_layer import check_rows, watched
from tests.tiny_models import make_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
ROUNDING = 1e-3  # of a float32 logit: a hundred times what was seen
VOCAB_SIZE = 4000
POOL = dict(
    skip_tokenizer_init=True, max_model_len=1024, max_num_batched_tokens=4096, num_kvcache_blocks=100, max_num_seqs=32
)


@pytest.fixture(autouse=True)
def nothing_stays_on_the_gpu():
    yield
    gc.collect()
    torch.cuda.empty_cache()


MEDIUM = dict(
    hidden_size=512,
    intermediate_size=1024,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=2048,
    vocab_size=VOCAB_SIZE,
)


@pytest.fixture(scope="session")
def medium(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("medium"), **MEDIUM))


def mixed_prompts(count: int, longest: int) -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def tokens_of(llm: LLM, prompts, params=GREEDY) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


def gaps(logits: torch.Tensor, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """How far behind the best token each of `tokens` is, [len(tokens)], by the logits of prompt + tokens."""
    logits = logits[len(prompt) - 1 : -1]
    return logits.amax(1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]


def assert_greedy(folder: str | Path, prompts: list[list[int]], outputs: list[list[int]], device: str) -> None:
    """Every token is transformers' best after the ones before it, or as good but for rounding."""
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert len(tokens) == NUM_TOKENS
        gap = gaps(reference_logits(folder, prompt + tokens, device=device), prompt, tokens)
        assert gap.max() < ROUNDING, f"prompt of {len(prompt)}: {gap.tolist()}"


def assert_same(folder: str, prompts: list[list[int]], params: list[SamplingParams], a, b) -> None:
    """Equal tokens; or two that are as good but for rounding, after which the sequences go apart."""
    for prompt, param, left, right in zip(prompts, params, a, b, strict=True):
        if left == right:
            continue
        at = next(i for i in range(len(left)) if left[i] != right[i])
        score = scores(folder, prompt + left[:at], param)
        gap = abs(float(score[left[at]] - score[right[at]]))
        assert gap < ROUNDING, f"prompt of {len(prompt)}, token {at}: {gap:.4f} between {left[at]} and {right[at]}"


def scores(folder: str, context: list[int], params: SamplingParams) -> torch.Tensor:
    """What sampling compares, [vocab_size], in units of a logit: logits, plus noise where the request draws."""
    logits = reference_logits(folder, context, device="cuda" if torch.cuda.is_available() else "cpu")[-1]
    if params.is_greedy:
        return logits
    seeds = torch.tensor([[params.seed, 0]], dtype=torch.int32)
    bits = noise_bits_reference(seeds, torch.tensor([len(context)], dtype=torch.int32), len(logits))
    return logits - log2_exponential_reference(bits)[0] * (params.temperature * 0.6931471805599453)


@pytest.mark.gpu(seconds=18)
@pytest.mark.parametrize(
    ("names", "backend"),
    [
        (["qwen3", "qwen3-tied"], "triton"),
        (["llama-bias"], "triton"),
        (["qwen2-window", "mistral-window"], "triton"),
        (["qwen2-window"], "torch"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_float32_tokens_equal_transformers(names, backend, tmp_path_factory):
    """With graphs, and in chunks of 40 tokens without. Other families differ in nothing that a GPU would notice."""
    options = dict(skip_tokenizer_init=True, dtype="float32", max_model_len=256, num_kvcache_blocks=200, max_num_seqs=6)
    for name in names:
        folder = tiny_folder(name, tmp_path_factory)
        for schedule in (dict(max_num_batched_tokens=512), dict(max_num_batched_tokens=40, enforce_eager=True)):
            with LLM(folder, attention_backend=backend, **schedule, **options) as llm:
                assert_greedy(folder, prompts_for(), tokens_of(llm, prompts_for()), "cpu")


@pytest.mark.gpu(seconds=16)
def test_float32_real_head_shapes(medium):
    prompts = mixed_prompts(12, 400)
    with LLM(medium, dtype="float32", **POOL) as llm:
        outputs = tokens_of(llm, prompts)
        assert_greedy(medium, prompts, outputs, "cuda")
        before = llm.stats()["prompt_tokens_cached"]
        assert_same(medium, prompts, [GREEDY] * len(prompts), tokens_of(llm, prompts), outputs)
        assert llm.stats()["prompt_tokens_cached"] > before

        # min_tokens beside a row without: the model's graph is replayed, and sampling runs outside
        plain = tokens_of(llm, [[5, 6, 7]])[0]
        held = SamplingParams(temperature=0, max_tokens=12, min_tokens=6, ignore_eos=True, stop_token_ids=[plain[0]])
        both = llm.generate([[5, 6, 7], [5, 6, 7]], [held, GREEDY], use_tqdm=False)
        assert plain[0] not in both[0]["token_ids"][:6]
        assert_same(medium, [[5, 6, 7]], [GREEDY], [both[1]["token_ids"]], [plain])


@pytest.mark.gpu(seconds=16)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_steps_with_prompts_want_few_hidden_states(medium, backend):
    """Chunks that end and chunks that do not, beside decodes and beside prompts whose logprobs need all of them."""
    prompts = mixed_prompts(12, 400)
    params = [replace(GREEDY, prompt_logprobs=0 if i in (2, 7) else None) for i in range(len(prompts))]
    options = POOL | dict(dtype="float32", attention_backend=backend, max_num_batched_tokens=150)
    with LLM(medium, **options) as llm, watched(llm) as steps:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    kinds = {
        (wants_all, step.plan.num_decodes > 0, step.plan.num_sampled > step.plan.num_decodes)
        for step, wants_all in check_rows(steps)
    }
    assert {(True, True, True), (False, True, True), (False, True, False), (False, False, False)} <= kinds, kinds
    assert_greedy(medium, prompts, [output["token_ids"] for output in outputs], "cuda")
    for index in (2, 7):
        prompt, found = prompts[index], outputs[index].prompt_logprobs
        exact = reference_logits(medium, prompt, device="cuda").log_softmax(-1)[:-1]
        for token, row, position in zip(prompt[1:], exact, found[1:], strict=True):
            assert abs(position[token].logprob - float(row[token])) < ROUNDING


@pytest.mark.gpu(seconds=18)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_tokens_are_near_the_top(medium, dtype):
    """Every greedy token is the reference's best but for a gap that half precision explains.

    The tolerance is twice what transformers' own half-precision run differs from its float32 run on the same texts.
    """
    prompts = mixed_prompts(6, 300)
    own = getattr(torch, dtype)
    for backend in ("auto", "triton"):
        with LLM(medium, dtype=dtype, attention_backend=backend, **POOL) as llm:
            outputs = tokens_of(llm, prompts)
            is_triton = llm.engine.executor.runner.backend.name == "triton"
        num_best = 0
        for prompt, tokens in zip(prompts, outputs, strict=True):
            exact = reference_logits(medium, prompt + tokens, device="cuda")
            rounded = reference_logits(medium, prompt + tokens, own, device="cuda")
            tolerance = 2 * (exact - rounded)[len(prompt) - 1 : -1].abs().max()
            gap = gaps(exact, prompt, tokens)
            assert gap.max() <= tolerance, f"gap {gap.max():.4f} over tolerance {tolerance:.4f}"
            num_best += int((gap == 0).sum())
        assert num_best > 0.8 * len(prompts) * NUM_TOKENS
        if is_triton:  # without flash-attn, "auto" was it
            return


@pytest.mark.gpu(seconds=18)
def test_graphs_equal_eager_steps(medium):
    """With as many rows as there are prompts, and fewer; each batch size from the most down to 1 occurs."""
    prompts = mixed_prompts(40, 60)
    params = [
        SamplingParams(temperature=i % 3 * 0.5, top_k=(i % 2) * 20, seed=i, max_tokens=3 + i % 7, ignore_eos=True)
        for i in range(len(prompts))
    ]
    options = POOL | dict(dtype="float32")
    with LLM(medium, enforce_eager=True, **(options | dict(max_num_seqs=40))) as llm:
        eager = tokens_of(llm, prompts, params)
    for max_num_seqs in (1, 3, 10, 40):
        with LLM(medium, **(options | dict(max_num_seqs=max_num_seqs))) as llm:
            assert_same(medium, prompts, params, tokens_of(llm, prompts, params), eager)


@pytest.mark.gpu(seconds=18)
def test_schedules_change_nothing(medium):
    prompts = mixed_prompts(24, 300)
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=20, ignore_eos=True) for i in range(24)]
    first = None
    for options in (
        {},
        dict(max_in_flight=1, max_num_batched_tokens=200),
        dict(max_num_seqs=5),
        dict(num_kvcache_blocks=12, max_in_flight=3),
        dict(enable_prefix_caching=False, kvcache_block_size=16, num_kvcache_blocks=800),
    ):
        with LLM(medium, dtype="float32", **(POOL | options)) as llm:
            tokens = tokens_of(llm, prompts, params)
        if first is None:
            first = tokens
        assert_same(medium, prompts, params, tokens, first)


@pytest.mark.gpu(seconds=12)
def test_too_small_a_share_says_the_numbers(medium):
    options = dict(skip_tokenizer_init=True, dtype="float32", max_model_len=256, max_num_batched_tokens=256)
    message = r"the card has .* GiB.*in use before.*gpu_memory_utilization=0.001"
    with pytest.raises(ValueError, match=message):
        LLM(medium, gpu_memory_utilization=0.001, max_num_seqs=4, **options)
    with LLM(medium, num_kvcache_blocks=10, max_num_seqs=4, **options) as llm:
        assert len(tokens_of(llm, [[1, 2, 3]])[0]) == NUM_TOKENS


@pytest.mark.gpu(seconds=30)
@pytest.mark.gpu_alone
def test_memory_comes_back_and_the_share_is_kept(medium):
    """Three engines in one process, each with half the card. What stays is cuBLAS's workspace, 32 MiB a stream."""
    free_before = None
    for _ in range(3):
        with LLM(medium, dtype="bfloat16", skip_tokenizer_init=True, gpu_memory_utilization=0.5) as llm:
            llm.generate(mixed_prompts(512, 20), SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
            free, total = torch.cuda.mem_get_info()
            if free_before is not None:  # the first one's includes the CUDA context
                assert abs(total - free - 0.5 * total) < 0.01 * total + (700 << 20), f"{total - free} of {total} in use"
        del llm
        gc.collect()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        assert free_before is None or free >= free_before - (64 << 20), f"{free_before - free} bytes stayed"
        free_before = free
