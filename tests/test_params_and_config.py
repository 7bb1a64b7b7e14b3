"""Every rule of SamplingParams and of the engine's options: the field, the value and what is allowed stand in the
error."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import transformers

from nanovllm import LLM, SamplingParams
from nanovllm.config import Config
from nanovllm.tokenizer import tokenizer_class
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
        ("tensor_parallel_size", 3, "tensor_parallel_size=3 must divide the model's"),
        ("data_parallel_size", 0, "data_parallel_size must be at least 1, got 0"),
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
    shutil.copy(f"{folder}/config.json", tmp_path)
    with LLM(tmp_path, load_format="dummy", device="cpu", dtype="float32") as llm:
        output = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)[0]
        assert len(output["token_ids"]) == 20 and output["text"] == ""
        with pytest.raises(ValueError, match="request 0: .*needs a tokenizer|needs a tokenizer"):
            llm.generate("text", use_tqdm=False)
    with pytest.raises(ValueError, match="no tokenizer could be loaded"):
        LLM(folder, device="cpu")


def test_numbers_of_numpy_become_plain(folder):
    numbers = dict(n=np.int64(2), top_k=np.int32(5), max_tokens=np.uint8(9), min_tokens=np.int8(1), seed=np.int64(-3))
    params = SamplingParams(
        **numbers,
        temperature=np.float32(0.5),
        top_p=np.float64(0.9),
        stop_token_ids=np.array([3, 4]),
        logit_bias={np.int64(7): np.float32(1.5)},
        logprobs=np.int64(1),
    )
    for f in dataclasses.fields(params):
        assert type(getattr(params, f.name)) in (int, float, bool, tuple, dict, type(None)), f.name
    assert params.stop_token_ids == (3, 4) and params.logit_bias == {7: 1.5} and type(params.temperature) is float
    for name in numbers:
        with pytest.raises(TypeError, match=name):
            SamplingParams(**{name: np.True_})
    options = dict(
        max_num_seqs=np.int64(4), max_model_len=np.int32(64), seed=np.uint8(200), num_kvcache_blocks=np.int64(20)
    )
    with LLM(folder, device="cpu", skip_tokenizer_init=True, **options) as llm:
        assert all(type(getattr(llm.config, name)) is int for name in options)
        [output] = llm.generate([5, 6], params, use_tqdm=False)
        assert len(output.outputs) == 2
        plain = dataclasses.replace(params, seed=-3, temperature=0.5)
        assert llm.generate([5, 6], plain, use_tqdm=False)[0]["token_ids"] == output["token_ids"]


def test_settings_that_are_too_large_are_refused_or_capped(folder):
    with pytest.raises(ValueError, match="n must be from 1 to 16384, got 10"):
        SamplingParams(n=10**30)
    huge = SamplingParams(max_tokens=10**30, top_k=10**30, truncate_prompt_tokens=10**30, logprobs=10**30)
    with LLM(folder, device="cpu", skip_tokenizer_init=True, max_model_len=32, num_kvcache_blocks=20) as llm:
        [output] = llm.generate([5, 6], dataclasses.replace(huge, ignore_eos=True), use_tqdm=False)
        assert len(output["token_ids"]) == 30


def test_other_names_of_a_dtype_and_no_max_model_len(folder):
    import torch

    for name, dtype in ((torch.bfloat16, "bfloat16"), ("half", "float16"), ("float", "float32")):
        assert Config(model=folder, dtype=name).dtype == dtype
    assert Config(model=folder, max_model_len=None).max_model_len == Config(model=folder).max_model_len
    with pytest.raises(ValueError, match="dtype must be one of"):
        Config(model=folder, dtype=torch.int8)


def test_a_max_model_len_that_is_cut_warns(folder, caplog):
    Config(model=folder)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    Config(model=folder, max_model_len=10**6)
    assert "max_model_len 1000000 is more than the model supports" in caplog.text


@pytest.mark.parametrize(("name", "value"), [("temperature", -1), ("top_p", 0), ("top_k", "many"), ("top_p", None)])
def test_bad_advice_of_a_model_is_ignored(folder, tmp_path, caplog, name, value):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    advice = {"temperature": 0.5, "top_p": 0.9, "top_k": 7}
    (tmp_path / "generation_config.json").write_text(json.dumps(advice | {name: value}))
    del advice[name]
    assert Config(model=str(tmp_path)).model_config.default_sampling == advice
    assert value is None or (f"{name} must be" in caplog.text and "generation_config.json" in caplog.text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_hidden_layers", "2"),
        ("num_hidden_layers", 0),
        ("hidden_size", 0),
        ("vocab_size", -5),
        ("num_attention_heads", 2.0),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", -1),
        ("layer_types", 5),
    ],
)
def test_odd_values_in_config_json_are_named(folder, tmp_path, name, value):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {name: value}))
    with pytest.raises(ValueError, match=f"{name}={value!r} must be"):
        Config(model=str(tmp_path))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (dict(temperature=10**400), "temperature must be within the range of a float"),
        (dict(logit_bias={5: 1e39}), "logit_bias must be finite in float32"),
        (dict(logit_bias={5: 10**400}), "logit_bias must be within the range of a float"),
        (dict(repetition_penalty=1e-45), "repetition_penalty must be above 0 and finite in float32"),
        (dict(repetition_penalty=1e39), "repetition_penalty must be above 0 and finite in float32"),
    ],
)
def test_numbers_beyond_float32(values, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**values)


def test_a_qwen3_folder_gets_the_tokenizer_that_transformers_would_choose(tmp_path) -> None:
    """Found without AutoTokenizer, which imports much; anything that is not plainly Qwen3's goes through it."""
    if not issubclass(transformers.Qwen2Tokenizer, transformers.PreTrainedTokenizerFast):
        pytest.skip("transformers 4 has two classes")
    vocab = {piece: index for index, piece in enumerate(["a", "b", "c", "ab", "Ġ", "Ġa", "<|endoftext|>"])}
    made = transformers.Qwen2Tokenizer(vocab=vocab, merges=[("a", "b"), ("Ġ", "a")], unk_token="<|endoftext|>")
    made.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    found = tokenizer_class(tmp_path)
    assert found is not transformers.AutoTokenizer
    ours, theirs = (each.from_pretrained(str(tmp_path)) for each in (found, transformers.AutoTokenizer))
    assert type(ours) is type(theirs)
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()
    assert ours("ab a b c")["input_ids"] == theirs("ab a b c")["input_ids"]
    for change in ({"tokenizer_class": "LlamaTokenizer"}, {"auto_map": {"AutoTokenizer": [None, "x.Y"]}}):
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        other = tmp_path / next(iter(change))
        other.mkdir()
        (other / "tokenizer.json").write_bytes((tmp_path / "tokenizer.json").read_bytes())
        (other / "tokenizer_config.json").write_text(json.dumps(settings | change))
        assert tokenizer_class(other) is transformers.AutoTokenizer
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert tokenizer_class(tmp_path) is transformers.AutoTokenizer
