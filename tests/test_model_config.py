"""What is read from config.json and generation_config.json, old format and new, and what is refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from nanovllm.model_config import ModelConfig, read_model_config

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
    "eos_token_id": 151645,
}


def write(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def read(folder: Path, config: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return read_model_config(write(folder, QWEN3 if config is None else config, **changes))


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in QWEN3.items() if name not in names}


def test_published_config(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert config.architecture == "Qwen3ForCausalLM"
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (4, 16, 8, 128)
    assert config.qk_norm and not config.qkv_bias and config.tie_word_embeddings
    assert config.layer_windows == (None,) * 4
    assert (config.rope.type, config.rope.theta) == ("default", 1e6)
    assert config.max_model_len == 40960 and config.dtype == "bfloat16" and config.eos_token_ids == (151645,)
    with pytest.raises(AttributeError):
        config.vocab_size = 3  # type: ignore[misc]


SMALL: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 96}
CONFIGS = [
    Qwen3Config(**SMALL, attention_bias=True, use_sliding_window=True, sliding_window=7, max_window_layers=2),
    Qwen2Config(**SMALL, num_key_value_heads=2, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, eos_token_id=[5, 6]),
    LlamaConfig(**SMALL, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}),
    MistralConfig(**SMALL, num_key_value_heads=2, head_dim=32),
    MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=None),
]


@pytest.mark.parametrize("saved", CONFIGS, ids=lambda config: config.model_type)
def test_what_transformers_saves_is_what_we_read(saved: Any, tmp_path: Path) -> None:
    saved.num_key_value_heads = min(saved.num_key_value_heads, 4)
    saved.save_pretrained(tmp_path)
    name = type(saved).__name__.replace("Config", "ForCausalLM")
    config = read_model_config(
        write(tmp_path, json.loads((tmp_path / "config.json").read_text()), architectures=[name])
    )
    assert config.head_dim == (getattr(saved, "head_dim", None) or 16)
    assert config.num_kv_heads == saved.num_key_value_heads
    assert config.rope.theta == saved.rope_parameters["rope_theta"]
    assert config.rms_norm_eps == saved.rms_norm_eps
    window = getattr(saved, "sliding_window", None)
    kinds = getattr(saved, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * 3
    assert config.layer_windows == tuple(window if kind == "sliding_attention" else None for kind in kinds)
    end = saved.eos_token_id
    assert config.eos_token_ids == (tuple(end) if isinstance(end, list) else () if end is None else (end,))
    attention_bias = bool(getattr(saved, "attention_bias", False))
    assert config.qkv_bias == (attention_bias or saved.model_type == "qwen2")
    assert config.o_bias == attention_bias and config.mlp_bias == bool(getattr(saved, "mlp_bias", False))


@pytest.mark.parametrize("silent", ["num_key_value_heads", "max_position_embeddings", "sliding_window", "head_dim"])
@pytest.mark.parametrize(("name", "saved"), [("Llama", LlamaConfig()), ("Mistral", MistralConfig())])
def test_a_silent_field_has_the_config_class_default(name: str, saved: Any, silent: str, tmp_path: Path) -> None:
    config = {key: value for key, value in saved.to_dict().items() if key != silent}
    ours = read(tmp_path, config, architectures=[f"{name}ForCausalLM"])
    theirs = type(saved).from_dict(config)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == theirs.head_dim
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.layer_windows[0] == getattr(theirs, "sliding_window", None)


def test_head_dim_absent_and_null(tmp_path: Path) -> None:
    assert read(tmp_path, without("head_dim")).head_dim == 128  # Qwen3Config's own default
    assert read(tmp_path, head_dim=None).head_dim == 64
    with pytest.raises(ValueError, match="hidden_size=1024.*15 heads"):
        read(tmp_path, head_dim=None, num_attention_heads=15, num_key_value_heads=5)
    with pytest.raises(ValueError, match="head_dim=65"):
        read(tmp_path, head_dim=65)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("type_key", ["type", "rope_type"])
@pytest.mark.parametrize(
    ("rope", "max_positions", "limit"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 40960, 131072),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072, 131072),
        ({"type": "yarn", "factor": 4.0}, 32768, 131072),
        ({"type": "yarn", "factor": None, "original_max_position_embeddings": 32768}, 65536, 65536),
        ({"type": "linear", "factor": 2.0}, 4096, 8192),
        ({"type": "linear", "factor": 2.0, "original_max_position_embeddings": 2048}, 4096, 4096),
        ({"type": "default"}, 4096, 4096),
        (
            {
                "type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            131072,
            131072,
        ),
    ],
)
def test_scaling_counts_once_in_the_longest_length(
    key: str, type_key: str, rope: dict[str, Any], max_positions: int, limit: int, tmp_path: Path
) -> None:
    given = {(type_key if name == "type" else name): value for name, value in rope.items()}
    config = read(tmp_path, without("rope_scaling"), max_position_embeddings=max_positions, **{key: given})
    assert config.max_model_len == limit
    assert config.rope.type == rope["type"]
    assert config.rope.theta == 1e6  # from the top level


def test_theta_inside_rope_parameters_and_nowhere(tmp_path: Path) -> None:
    assert read(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 7.0}).rope.theta == 7.0
    assert read(tmp_path, without("rope_theta", "rope_scaling")).rope.theta == 10000.0


def test_dynamic_is_limited_to_its_original_length(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="nanovllm"):
        config = read(tmp_path, rope_scaling={"type": "dynamic", "factor": 4.0})
    assert config.max_model_len == 40960 and config.rope.type == "default"
    assert "dynamic" in caplog.text and "40960" in caplog.text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, (None, None, 16, 16)),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 28}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": None}, (None,) * 4),
        ({"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 0}, (None,) * 4),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (16, None, 16, None),
        ),
        ({"layer_types": ["full_attention"] * 4}, (None,) * 4),
    ],
)
def test_qwen_windows(changes: dict[str, Any], expected: tuple[int | None, ...], tmp_path: Path) -> None:
    assert read(tmp_path, **changes).layer_windows == expected


def test_end_ids_are_the_union(tmp_path: Path) -> None:
    for ours, generation, expected in [
        (1, [1, 2], (1, 2)),
        ([3, 4], 5, (3, 4, 5)),
        (None, None, ()),
        (None, 7, (7,)),
    ]:
        write(tmp_path, QWEN3, {"eos_token_id": generation}, eos_token_id=ours)
        assert read_model_config(tmp_path).eos_token_ids == expected
    with pytest.raises(ValueError, match="eos_token_id: 'end'"):
        read(tmp_path, eos_token_id="end")


def test_default_sampling_is_what_generation_config_advises(tmp_path: Path) -> None:
    assert read(tmp_path).default_sampling == {}
    advice = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": None, "bos_token_id": 3}
    config = read_model_config(write(tmp_path, QWEN3, advice))
    assert config.default_sampling == {"temperature": 0.6, "top_k": 20}
    assert config.bos_token_id == 3


def test_dtype(tmp_path: Path) -> None:
    assert read(tmp_path, without("torch_dtype"), dtype="float16").dtype == "float16"
    assert read(tmp_path, without("torch_dtype")).dtype is None
    tensors = {"a": torch.zeros(2), "b": torch.zeros(8, dtype=torch.bfloat16), "c": torch.zeros(99, dtype=torch.int64)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert read(tmp_path, without("torch_dtype")).dtype == "bfloat16"
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    assert read(tmp_path, without("torch_dtype")).dtype is None
    with pytest.raises(ValueError, match="dtype='int8'.*bfloat16"):
        read(tmp_path, torch_dtype="int8")


def test_architecture_falls_back_to_the_model_type(tmp_path: Path) -> None:
    assert read(tmp_path, without("architectures")).architecture == "Qwen3ForCausalLM"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM is not supported; supported: Qwen3ForCausalLM"),
    ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'.*silu"),
    ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope_type='longrope'.*yarn"),
    ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "rope_type='mrope'"),
    ({"rope_scaling": {"type": "yarn", "factor": "4"}}, "'yarn' needs a positive factor, got '4'"),
    ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer kind"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"quantization_config": {"quant_method": "awq", "bits": 4}}, r"quantization_config.*awq"),
    ({"num_experts": 8}, "num_experts=8"),
    ({"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "'linear_attention'.*'full_attention'"),
    ({"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
    ({"layer_types": ["full_attention"] * 3}, "3 entries for num_hidden_layers=4"),
    ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=16"),
    ({"vocab_size": None}, "vocab_size=None"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, **changes)


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'Qwen/Qwen3-0.6B' is not a local folder.*never downloads"):
        read_model_config("Qwen/Qwen3-0.6B")
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(ValueError, match="no config.json; it holds tokenizer.json"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json' is not valid JSON"):
        read_model_config(str(tmp_path))


def test_bin_weights_only(tmp_path: Path) -> None:
    (write(tmp_path, QWEN3) / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match="only pytorch_model.bin.*save_pretrained"):
        read_model_config(tmp_path)
    assert read_model_config(tmp_path, load_format="dummy").num_layers == 4
    (tmp_path / "model.safetensors").touch()
    assert read_model_config(tmp_path).num_layers == 4
