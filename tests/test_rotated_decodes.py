"""The engine on a backend that rotates and stores decodes itself, as the Triton kernel does on a GPU: no step may need
a key that a decode of the same step stores. The backend is composed of the references and runs on the CPU."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.attention import AttentionSpec
from nanovllm.attention.composed import ComposedBackend, PromptBatch
from nanovllm.kernels.paged_decode import DecodeBatch, paged_decode_reference
from nanovllm.kernels.paged_prefill import paged_prefill_reference
from nanovllm.worker import model_runner
from tests.reference import reference_greedy
from tests.tiny_models import FAMILIES, make_tiny_model

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def decode(q, k, v, k_cache, v_cache, batch, scale, window, out, rope) -> None:
    """One row after another, the last first: programs of a launch run in any order."""
    for row in reversed(range(len(batch.seq_lens))):
        own = slice(row, row + 1)
        where = (batch.seq_lens[own], batch.block_table[own], batch.slot_mapping[own], batch.max_seq_len)
        new = (q[own], k[own], v[own])
        paged_decode_reference(*new, k_cache, v_cache, DecodeBatch(*where), scale, window, out[own], rope)


def paged(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PromptBatch, scale: float, window: int | None) -> Tensor:
    out = torch.zeros(q.shape, dtype=q.dtype)
    where = (batch.cu_seqlens_q, batch.seq_lens, batch.block_table)
    paged_prefill_reference(q, k_cache, v_cache, *where, scale, window, out)
    return out


def choose_rotating(name: str, spec: AttentionSpec) -> ComposedBackend:
    return ComposedBackend("rotating", "rotating", BLOCK_SIZE, decode, paged, lambda num_decodes: num_decodes < 7)


@pytest.fixture
def rotating(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "choose_backend", choose_rotating)


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral-window"])
@pytest.mark.parametrize("schedule", [{}, dict(max_num_batched_tokens=31, num_kvcache_blocks=24, max_num_seqs=9)])
def test_tokens_are_those_of_transformers(family: str, schedule: dict[str, int], rotating, tmp_path: Path) -> None:
    """Up to six decodes are rotated by the backend, more before it."""
    folder = make_tiny_model(tmp_path, **dict(dict(FAMILIES)[family]))
    rng = random.Random(1)
    shared = [rng.randrange(3, 250) for _ in range(48)]
    prompts = [shared[: 4 * i + 4] + [7 + i] * (i % 3) for i in range(9)]
    with LLM(folder, skip_tokenizer_init=True, max_model_len=128, max_in_flight=2, dtype="float32", **schedule) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output["token_ids"] == reference_greedy(folder, prompt, GREEDY.max_tokens)


@pytest.mark.parametrize("num_more", [1, 5])
def test_a_last_prompt_token_by_itself_is_not_shared_in_its_step(num_more: int, rotating, tmp_path: Path) -> None:
    """The budget ends a token before a block does, and somebody waits who begins alike."""
    folder = make_tiny_model(tmp_path)
    first = [7 * i % 90 + 5 for i in range(2 * BLOCK_SIZE)]
    prompts = [first, first + [9 + i for i in range(num_more)]]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    options = dict(max_num_seqs=4, max_num_batched_tokens=2 * BLOCK_SIZE - 1, max_model_len=128, max_in_flight=2)
    with LLM(folder, skip_tokenizer_init=True, dtype="float32", **options) as llm:
        together = logprobs_of(llm, prompts, params)
        llm.reset_prefix_cache()
        alone = [logprobs_of(llm, [prompt], params)[0] for prompt in prompts]
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-4)


def logprobs_of(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[list[float]]:
    """Of each output token."""
    completions = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return [
        [values[token].logprob for token, values in zip(each.token_ids, each.logprobs, strict=True)]
        for each in completions
    ]


def test_samples_of_a_prompt(rotating, tmp_path: Path) -> None:
    """Samples begin with the prompt's last token by itself, each in its copy of the last block."""
    folder = make_tiny_model(tmp_path)
    params = SamplingParams(temperature=0.9, seed=3, n=4, max_tokens=8, ignore_eos=True)
    prompts = [[5 + i for i in range(length)] for length in (31, 32, 33)]
    outputs = {}
    for name, options in (("alone", dict(max_num_seqs=1)), ("together", dict(max_num_batched_tokens=40))):
        with LLM(folder, skip_tokenizer_init=True, max_model_len=128, dtype="float32", **options) as llm:
            results = llm.generate(prompts, params, use_tqdm=False)
            outputs[name] = [[sample.token_ids for sample in result.outputs] for result in results]
    assert outputs["alone"] == outputs["together"]


def test_without_triton(tmp_path: Path) -> None:
    """The references serve, and nothing asks for Triton on the way."""
    folder = make_tiny_model(tmp_path)
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "from nanovllm import LLM, SamplingParams\n"
        f"with LLM({str(folder)!r}, skip_tokenizer_init=True, max_model_len=64) as llm:\n"
        "    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)\n"
        "    print(len(llm.generate([[5, 6, 7]], params, use_tqdm=False)[0]['token_ids']))\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout.strip() == "4", run.stderr[-2000:]
