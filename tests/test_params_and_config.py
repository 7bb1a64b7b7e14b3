"""Every rule of SamplingParams and of the engine's options: the field, the value and what is allowed stand in the
error."""

from __future__ import annotations

import dataclasses

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from tests.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -5),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", -0.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("min_tokens", 65),
        ("seed", 2**64),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("stop_token_ids", [-1]),
    ],
)
def test_sampling_params_out_of_range(field, value):
    with pytest.raises(ValueError, match=field) as raised:
        SamplingParams(**{field: value})
    shown = value[0] if isinstance(value, list) else value
    assert str(float(shown) if isinstance(shown, float) else shown).rstrip("0").rstrip(".") in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("top_k", 1.5),
        ("max_tokens", "10"),
        ("max_tokens", True),
        ("ignore_eos", 1),
        ("stop_token_ids", "5"),
        ("stop_token_ids", ["5"]),
        ("seed", 1.0),
    ],
)
def test_sampling_params_of_the_wrong_type(field, value):
    with pytest.raises(TypeError, match=field):
        SamplingParams(**{field: value})


def test_sampling_params_accepts_its_edges_and_is_frozen():
    params = SamplingParams(temperature=0, top_k=0, top_p=1.0, min_p=1.0, max_tokens=None, seed=-1, stop_token_ids=[3])
    assert params.is_greedy and SamplingParams(temperature=1e-8).is_greedy
    assert not SamplingParams(temperature=1e-3).is_greedy
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 1.0
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("device", "tpu", "device must be one of auto, cuda, cpu, got 'tpu'"),
        ("dtype", "int8", "dtype must be one of"),
        ("load_format", "pt", "load_format must be one of"),
        ("attention_backend", "xformers", "attention_backend must be one of"),
        ("max_model_len", 1, "max_model_len must be at least 2, got 1"),
        ("max_num_seqs", 0, "max_num_seqs must be at least 1"),
        ("max_num_batched_tokens", 0, "max_num_batched_tokens must be at least 1"),
        ("num_kvcache_blocks", 1, "num_kvcache_blocks must be at least 2"),
        ("kvcache_block_size", 0, "kvcache_block_size must be at least 1"),
        ("gpu_memory_utilization", 0.0, r"gpu_memory_utilization must be in \(0, 1\], got 0.0"),
        ("gpu_memory_utilization", 1.01, "gpu_memory_utilization"),
        ("tensor_parallel_size", 2, "tensor_parallel_size must be 1, got 2"),
        ("data_parallel_size", 2, "data_parallel_size must be 1, got 2"),
        ("max_in_flight", 0, "max_in_flight must be at least 1"),
        ("tokenizer", "no-such-folder", "tokenizer must be a local folder"),
    ],
)
def test_options_out_of_range(folder, option, value, message):
    with pytest.raises(ValueError, match=message):
        LLM(folder, **{option: value})


def test_unknown_options_are_named(folder):
    with pytest.raises(TypeError, match="'max_num_seq'; did you mean 'max_num_seqs'"):
        LLM(folder, max_num_seq=4)
    with pytest.raises(TypeError, match="unknown option 'swap_space'"):
        LLM(folder, swap_space=4)


def test_max_model_len_is_capped_by_the_model(folder):
    config = Config(model=folder, max_model_len=10**6)
    assert config.max_model_len == config.model_config.max_model_len < 10**6


def test_cuda_without_a_gpu_is_refused(folder, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        LLM(folder, device="cuda", skip_tokenizer_init=True)


def test_dummy_weights_need_only_config_json(folder, tmp_path):
    import shutil

    shutil.copy(f"{folder}/config.json", tmp_path)
    with LLM(tmp_path, load_format="dummy", device="cpu", dtype="float32") as llm:
        output = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)[0]
        assert len(output["token_ids"]) == 20 and output["text"] == ""
        with pytest.raises(ValueError, match="request 0: .*needs a tokenizer|needs a tokenizer"):
            llm.generate("text", use_tqdm=False)
    with pytest.raises(ValueError, match="no tokenizer could be loaded"):
        LLM(folder, device="cpu")
