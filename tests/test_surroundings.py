"""What a training script sets in torch around the engine: its results stay what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.tiny_models import make_tiny_model

PROMPTS = [[i, i + 1, 7] for i in range(10, 30)]
KINDS = {
    "greedy": dict(temperature=0),
    "sampled": dict(temperature=1, seed=1),
    "filtered": dict(temperature=1, seed=1, top_p=0.9, top_k=30),
    "min_p": dict(temperature=1, seed=2, min_p=0.05),
    "rules": dict(temperature=0, repetition_penalty=1.3, presence_penalty=0.5, logit_bias={5: 1.0}),
    "allowed": dict(temperature=1, seed=1, allowed_token_ids=list(range(50))),
    "logprobs": dict(temperature=0, logprobs=2, prompt_logprobs=1),
}


@contextmanager
def changed(set_: Callable[[object], None], value: object, before: object) -> Iterator[None]:
    set_(value)
    try:
        yield
    finally:
        set_(before)


SETTINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "bfloat16 by default": lambda: changed(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "float64 by default": lambda: changed(torch.set_default_dtype, torch.float64, torch.float32),
    "another device by default": lambda: changed(torch.set_default_device, "meta", None),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "grad mode": torch.enable_grad,
    "inference mode": torch.inference_mode,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny"), "qwen3"))


def engine(folder: str) -> LLM:
    return LLM(folder, dtype="float32", device="cpu", max_model_len=64, skip_tokenizer_init=True)


def results(llm: LLM, kind: str) -> list[object]:
    params = SamplingParams(max_tokens=10, ignore_eos=True, **KINDS[kind])
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [(output["token_ids"], output["logprobs"], output.prompt_logprobs) for output in outputs]


@pytest.fixture(scope="module")
def llm(folder):
    with engine(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm):
    return {kind: results(llm, kind) for kind in KINDS}


@pytest.mark.parametrize("setting", SETTINGS)
def test_results_do_not_depend_on_the_callers_settings(llm, expected, setting):
    with SETTINGS[setting]():
        found = {kind: results(llm, kind) for kind in KINDS}
    assert found == expected
    assert torch.get_default_dtype() == torch.float32 and torch.get_default_device().type == "cpu"


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_engine_starts_and_wakes_up_under_them(folder, expected, setting):
    with SETTINGS[setting](), engine(folder) as llm:
        assert results(llm, "sampled") == expected["sampled"]
        llm.sleep()
        llm.wake_up()
        assert results(llm, "rules") == expected["rules"]
