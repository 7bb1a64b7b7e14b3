"""A real model on the CPU: SmolLM2's greedy chat answers, token for token what transformers says in float32."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.entrypoints.smollm2 import get_smollm2
from tests.reference import load_reference, reference_greedy

NUM_TOKENS = 64
ROOT = Path(__file__).resolve().parents[1]
QUESTIONS = [
    "What is the capital of France?",
    "Hi",
    "List three fruits.",
    "Write a haiku about rain.",
    "Explain gravity to a child.",
    "What is 2 + 2?",
    "Translate 'good morning' into Spanish.",
    "Name a planet with rings.",
    "Why is the sky blue?",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
    "What do bees make?",
    "Count from one to ten.",
]
TEXTS = ["A", "The", "Once upon a time", "1, 2, 3,", "def add(a, b):", "Dear Sir or Madam,"]
LONG = "The river rose in the night, and by morning the lower fields were under water. " * 20


@pytest.fixture(scope="module")
def folder() -> str:
    return str(get_smollm2())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_greedy_answers_equal_transformers(folder):
    """20 prompts of 1 to 300 tokens in one batch, 64 tokens each, end ids respected."""
    with LLM(folder, dtype="float32", device="cpu", max_model_len=1024) as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [
            tokenizer(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
                ),
                add_special_tokens=False,
            )["input_ids"]
            for question in QUESTIONS
        ]
        prompts += [tokenizer(text)["input_ids"] for text in TEXTS]
        prompts.append(tokenizer(LONG)["input_ids"][:300])
        lengths = [len(prompt) for prompt in prompts]
        assert len(prompts) == 20 and min(lengths) == 1 and max(lengths) == 300
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS), use_tqdm=False)
        end_ids = llm.config.model_config.eos_token_ids
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference_greedy(folder, prompt, NUM_TOKENS, end_ids)
        assert output["token_ids"] == expected
        assert output["finish_reason"] == ("stop" if expected[-1] in end_ids else "length")
    assert "Paris" in outputs[0]["text"]
    load_reference.cache_clear()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_example_stays_small(folder):
    """`example.py` answers, and its process never holds 2.5 GB (VmHWM: the most since its program started)."""
    code = (
        f"import runpy, sys; sys.argv = ['example.py', '--model', {folder!r}, '--max-tokens', '48']\n"
        "runpy.run_path('example.py', run_name='__main__')\n"
        "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    if not Path("/proc/self/status").exists():
        pytest.skip("needs Linux's /proc")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Paris" in done.stdout
    peak_kib = int(done.stdout.split("VmHWM:")[1].split()[0])
    assert peak_kib * 1024 < 2.5e9, f"{peak_kib} KiB"
