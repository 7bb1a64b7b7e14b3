"""In a step with prompts the last layer computes K and V of all tokens, and the rest for those that are wanted: how
many rows each part of it sees, and that answers are those of transformers all the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.attention import AttentionSpec
from nanovllm.attention.composed import ComposedBackend
from nanovllm.attention.triton import triton_decode, triton_paged
from nanovllm.kernels.device import Device
from nanovllm.kernels.paged_decode import SHORT_CONTEXT, decode_variant, has_many_items
from nanovllm.messages import SchedulerOutput
from nanovllm.model_config import read_model_config
from nanovllm.worker import model_runner, warmup
from tests.reference import reference_greedy
from tests.test_logprobs import check_output
from tests.test_rotated_decodes import BLOCK_SIZE, choose_rotating
from tests.tiny_models import FAMILIES, make_tiny_model

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PARTS = ("qkv_proj", "o_proj", "mlp", "norm")


@dataclass
class SeenStep:
    plan: SchedulerOutput
    first_layer: dict[str, int] = field(default_factory=dict)  # rows that each part of it computed
    last_layer: dict[str, int] = field(default_factory=dict)

    @property
    def is_decode(self) -> bool:
        return self.plan.num_decodes == len(self.plan.rows)


def adding_parts(layer: Any) -> dict[str, Any]:
    return {"o_proj": layer.self_attn.o_proj, "norm": layer.post_attention_layernorm}


@contextmanager
def watched(llm: LLM) -> Iterator[list[SeenStep]]:
    """The steps of an engine whose model runner is in this process; "norm" is the one behind the layer's attention."""
    runner, steps = llm.engine.executor.runner, []
    execute, handles = runner.execute, []

    def watch(layer: Any, counts: str) -> None:
        for name, part in (("qkv_proj", layer.self_attn.qkv_proj), ("mlp", layer.mlp)):
            handles.append(part.register_forward_hook(lambda _, args, __, name=name: note(counts, name, len(args[0]))))
        for name, part in adding_parts(layer).items():

            def noted(
                x: torch.Tensor | None, residual: torch.Tensor, name: str = name, add: Any = part.add
            ) -> tuple[torch.Tensor | None, torch.Tensor]:
                assert x is None or len(x) == len(residual)  # None: the product before has added it
                note(counts, name, len(residual))
                return add(x, residual)

            part.add = noted

    def note(counts: str, name: str, num_rows: int) -> None:
        getattr(steps[-1], counts)[name] = num_rows

    def noted_execute(plan: SchedulerOutput) -> Any:
        steps.append(SeenStep(replace(plan)))
        return execute(plan)

    layers = runner.model.model.layers
    watch(layers[0], "first_layer")
    watch(layers[-1], "last_layer")
    runner.execute = noted_execute
    try:
        yield steps
    finally:
        runner.execute = execute
        for handle in handles:
            handle.remove()
        for layer in (layers[0], layers[-1]):
            for part in adding_parts(layer).values():
                part.__dict__.pop("add", None)  # a model of one layer has it once


def check_rows(steps: list[SeenStep]) -> list[tuple[SeenStep, bool]]:
    """Steps with prompts, and whether all tokens were wanted. Those of decodes may be graphs, which no hook sees."""
    asking: set[int] = set()  # rows that want logprobs of their prompt
    checked = []
    for step in steps:
        plan = step.plan
        asking -= {new.row for new in plan.new_rows}
        asking |= {new.row for new in plan.new_rows if new.first_prompt_logprob is not None}
        if step.is_decode:
            assert step.last_layer == step.first_layer
            continue
        wants_all = not asking.isdisjoint(plan.rows[plan.num_decodes :])
        num_wanted = plan.num_tokens if wants_all else plan.num_sampled
        assert step.first_layer == dict.fromkeys(PARTS, plan.num_tokens)
        assert step.last_layer == dict.fromkeys(PARTS, num_wanted) | {"qkv_proj": plan.num_tokens}
        checked.append((step, wants_all))
    return checked


def choose_interpreted(name: str, spec: AttentionSpec) -> ComposedBackend:
    decode, rotates_decodes = triton_decode(spec)
    return ComposedBackend("triton", "triton", BLOCK_SIZE, decode, triton_paged, rotates_decodes)


def engine(folder: Path, **options: Any) -> LLM:
    defaults = dict(skip_tokenizer_init=True, dtype="float32", device="cpu", max_model_len=128, max_num_seqs=9)
    return LLM(folder, **(defaults | options))


def prompts_of(*lengths: int) -> list[list[int]]:
    return [[(7 * i + 31 * length) % 250 + 3 for i in range(length)] for length in lengths]


@pytest.mark.parametrize("backend", ["torch", "rotating", "triton"])
@pytest.mark.parametrize("family", ["qwen3", "llama-bias", "qwen2-window", "mistral-window"])
def test_rows_of_every_kind_of_step(family: str, backend: str, tmp_path: Path, monkeypatch, request) -> None:
    """Whole prompts, chunks that end and chunks that do not, with decodes and without; under a window of 8 tokens in
    the last layer too."""
    if backend == "triton" and request.getfixturevalue("kernel_device") != "cpu":
        pytest.skip("this one is for the interpreter; tests/test_gpu_engine.py has another")
    if backend != "torch":
        choose = choose_rotating if backend == "rotating" else choose_interpreted
        monkeypatch.setattr(model_runner, "choose_backend", choose)
    folder = make_tiny_model(tmp_path, **dict(FAMILIES)[family])
    prompts = prompts_of(50, 3, 18, 41, 9)
    with engine(folder, max_num_batched_tokens=20) as llm, watched(llm) as steps:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    with_prompts = [step.plan for step, wants_all in check_rows(steps) if not wants_all]
    assert any(plan.num_sampled == 0 for plan in with_prompts)
    assert any(0 < plan.num_decodes < plan.num_sampled < len(plan.rows) for plan in with_prompts)
    assert any(0 < plan.num_decodes == plan.num_sampled for plan in with_prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output["token_ids"] == reference_greedy(folder, prompt, GREEDY.max_tokens)


def test_a_model_of_one_layer(tmp_path: Path) -> None:
    """The first layer is the last one."""
    folder = make_tiny_model(tmp_path, num_hidden_layers=1)
    prompts = prompts_of(50, 3, 18)
    with engine(folder, max_num_batched_tokens=20) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            assert output["token_ids"] == reference_greedy(folder, prompt, GREEDY.max_tokens)


@pytest.mark.parametrize("budget", [20, 200])
def test_all_tokens_where_a_prompts_logprobs_come_from_them(budget: int, tmp_path: Path) -> None:
    """In its steps alone, beside requests that want none; and nothing is left of it afterwards."""
    folder = make_tiny_model(tmp_path)
    asking = replace(GREEDY, logprobs=2, prompt_logprobs=2)
    prompts, params = prompts_of(33, 47, 5, 38), [GREEDY, asking, replace(GREEDY, logprobs=1), GREEDY]
    with engine(folder, max_num_batched_tokens=budget) as llm, watched(llm) as steps:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        wants_all = {wants_all for _, wants_all in check_rows(steps)}
        assert wants_all == ({True} if budget == 200 else {True, False})
        steps.clear()
        llm.generate(prompts_of(30, 31), GREEDY, use_tqdm=False)
        assert not any(wants_all for _, wants_all in check_rows(steps))
    for output, param in zip(outputs, params, strict=True):
        check_output(folder, output, param)


@pytest.mark.parametrize("window", [None, 8])
def test_keys_of_the_last_layer_are_all_stored(window: int | None, tmp_path: Path) -> None:
    """A second request reads them from the cache, whether the step that stored them sampled or not."""
    options = dict(family="mistral", sliding_window=window) if window else {}
    folder = make_tiny_model(tmp_path, **options)
    (prompt,) = prompts_of(70)
    longer = prompt + [11, 12, 13]
    with engine(folder, max_num_batched_tokens=20, kvcache_block_size=BLOCK_SIZE) as llm:
        for each in (prompt, longer):
            output = llm.generate([each], GREEDY, use_tqdm=False)[0]
            assert output["token_ids"] == reference_greedy(folder, each, GREEDY.max_tokens)
        assert llm.stats()["prompt_tokens_cached"] == 64


class NotedLaunches:
    """A backend that notes what a launch of its decode kernel would be compiled for."""

    name, block_size, needs_rotated_k = "noted", 128, False

    def __init__(self, num_kv_heads: int, device: Device) -> None:
        self.num_kv_heads, self.device = num_kv_heads, device
        self.launches: list[tuple[str, bool, bool, bool]] = []

    def rotates_decodes(self, num_decodes: int) -> bool:
        return not has_many_items(num_decodes * self.num_kv_heads, self.device.num_sms)

    def variant(
        self, num_decodes: int, head_dim: int, dtype: torch.dtype, rotates: bool, has_window: bool, max_seq_len: int
    ) -> tuple[str, bool, bool, bool]:
        launch = decode_variant(num_decodes, self.num_kv_heads, head_dim, dtype, self.block_size, self.device, rotates)
        is_short_row = rotates and num_decodes == 1 and max_seq_len <= SHORT_CONTEXT
        return "" if is_short_row else repr(launch), rotates, has_window, is_short_row

    def forward(self, q, k, v, k_cache, v_cache, metadata, scale, window, rope) -> torch.Tensor:
        num_decodes = metadata.num_decode_tokens
        assert num_decodes == metadata.num_seqs == len(q)
        options = (rope is not None, window is not None, metadata.max_seqlen_k)
        self.launches.append(self.variant(num_decodes, q.shape[2], q.dtype, *options))
        return q


@pytest.mark.parametrize("max_model_len", [128, 4096])
@pytest.mark.parametrize("family", ["qwen3", "qwen2-window", "mistral-window"])
@pytest.mark.parametrize("device", [Device(132, 227 << 10, True), Device(82, 99 << 10), Device(8, 227 << 10)])
def test_warm_up_knows_every_launch_of_decodes(
    device: Device, family: str, max_model_len: int, tmp_path: Path, monkeypatch
) -> None:
    """Any number of them as the backend likes them, any number rotated, and a single row, short or long: once each."""
    monkeypatch.setattr(warmup, "device_of", lambda _: device)
    config = read_model_config(make_tiny_model(tmp_path, **dict(FAMILIES)[family]))
    config = replace(config, max_model_len=max_model_len)
    backend, dtype, max_num_seqs = NotedLaunches(config.num_kv_heads, device), torch.bfloat16, 300
    for call in warmup.attention_calls(config, 1, dtype, torch.device("cpu"), backend, max_num_seqs):
        call()
    assert len(backend.launches) == len(set(backend.launches))
    reached = {
        backend.variant(num_decodes, config.head_dim, dtype, rotates, window is not None, max_seq_len)
        for num_decodes in range(1, max_num_seqs + 1)
        for rotates in {False, backend.rotates_decodes(num_decodes)}
        for window in config.layer_windows
        for max_seq_len in (1, max_model_len)
    }
    assert set(backend.launches) == reached
    assert len({rotates for _, rotates, _, _ in reached}) == 2
