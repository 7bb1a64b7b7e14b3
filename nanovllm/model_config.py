"""What a checkpoint's config.json says, in one frozen dataclass.

Owns: the reading of config.json and generation_config.json, the defaults of each model family, and the refusal by name
of everything that this library cannot run. Invariant: a `ModelConfig` that exists describes a model that `models/` can
build; a family's peculiarities (biases, QK-norm, windows) are plain fields by then. It deliberately opens no weights
beyond one safetensors header, and imports neither torch nor transformers: the defaults are the published config
classes'.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nanovllm.rope_config import RopeConfig, read_rope_config
from nanovllm.sampling_params import SamplingParams

logger = logging.getLogger("nanovllm")

INDEX = "model.safetensors.index.json"  # which of several weight files holds which tensor
_DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "float32": "float32", "float64": "float32"}
_SAFETENSORS_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float32"}
_MAX_HEADER_BYTES = 100 << 20  # what the format allows

# What each family's config class fills in where config.json is silent. A key that is present and null is not silent.
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096},
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
ARCHITECTURES = {
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2ForCausalLM": "qwen2",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only model. Lengths are in tokens.

    `layer_windows[i]` is the sliding window of layer i: query i sees keys j > i - window; None: all earlier keys.
    `max_model_len` is the longest length the model supports, its rope scaling counted once. `dtype` is the
    checkpoint's, None when neither config.json nor a weight file tells. `eos_token_ids` is the union of config.json's
    and generation_config.json's, in that order; `default_sampling` holds temperature, top_k, top_p where the latter
    has them.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]
    rope: RopeConfig
    max_position_embeddings: int
    max_model_len: int
    dtype: str | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    default_sampling: dict[str, Any] = field(default_factory=dict)

    def capped(self, max_model_len: int) -> ModelConfig:
        """The same model run at most this long: a smaller rope table, and no window that could never hide a key."""
        limit = min(max_model_len, self.max_model_len)
        windows = tuple(None if window is None or window >= limit else window for window in self.layer_windows)
        return replace(self, max_model_len=limit, layer_windows=windows)


def read_model_config(folder: str | os.PathLike[str], load_format: str = "auto") -> ModelConfig:
    """Read `folder`/config.json (saved by transformers 4 or 5) and generation_config.json.

    `load_format="dummy"` asks nothing of the weight files. Raises ValueError, naming the field, its value and what is
    allowed, for a path that is no folder, a folder without config.json or with .bin weights only, and a model that is
    not supported (architecture, activation, rope type, layer kind, quantization, experts, partial rotary).
    """
    path = checkpoint_folder(folder)
    raw = _read_json(path / "config.json")
    if load_format != "dummy":
        _refuse_bin_only(path)
    architecture = _architecture(raw)
    family = ARCHITECTURES[architecture]
    config = {**_FAMILY_DEFAULTS[family], **raw}
    _refuse_unsupported(config)

    num_layers, num_heads = _positive(config, "num_hidden_layers"), _positive(config, "num_attention_heads")
    num_kv_heads = num_heads if config.get("num_key_value_heads") is None else _positive(config, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_key_value_heads={num_kv_heads} must divide num_attention_heads={num_heads}")
    max_positions = _positive(config, "max_position_embeddings")
    eps = config.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, int | float) or not 0 <= eps < 1:
        raise ValueError(f"config.json: rms_norm_eps={eps!r} must be a small number, at least 0")
    rope, max_model_len = read_rope_config(config, max_positions)
    qkv_bias, o_bias, mlp_bias = _biases(family, config)
    generation_path = path / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    bos_token_ids = _token_ids(config, generation, "bos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=_positive(config, "hidden_size"),
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, num_heads),
        rms_norm_eps=float(eps),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=family == "qwen3",
        layer_windows=_layer_windows(architecture, config, num_layers),
        rope=rope,
        max_position_embeddings=max_positions,
        max_model_len=max_model_len,
        dtype=_dtype(config, path),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        eos_token_ids=_token_ids(config, generation, "eos_token_id"),
        default_sampling=_default_sampling(generation, generation_path),
    )


def _default_sampling(generation: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The file's advice, as far as it can be followed: it is no more than that."""
    advice = {}
    for name in ("temperature", "top_k", "top_p"):
        if generation.get(name) is not None:
            try:
                advice[name] = getattr(SamplingParams(**{name: generation[name]}), name)
            except (TypeError, ValueError) as error:
                logger.warning("%s is ignored in part: %s", path, error)
    return advice


def checkpoint_folder(folder: str | os.PathLike[str]) -> Path:
    """The folder as a Path. Raises ValueError for what is no folder (a hub id, say) or holds no config.json."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ValueError(
            f"model={os.fspath(folder)!r} is not a local folder. This library never downloads: fetch the checkpoint "
            "first (`hf download <repo id> --local-dir <folder>`) and pass that folder"
        )
    if not (path / "config.json").is_file():
        raise ValueError(f"model folder {str(path)!r} has no config.json; it holds {list_folder(path)}")
    return path


def list_folder(path: Path, limit: int = 20) -> str:
    """The names in a folder, for error messages."""
    names = sorted(entry.name for entry in path.iterdir())
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "nothing") + more


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{str(path)!r} must hold a JSON object, got {type(value).__name__}")
    return value


def _refuse_bin_only(path: Path) -> None:
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").is_file():
        return
    others = [entry.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for entry in sorted(path.glob(pattern))]
    if others:
        raise ValueError(
            f"model folder {str(path)!r} has no *.safetensors, only {', '.join(others[:5])}. Convert it: load it with "
            "transformers and `save_pretrained` it into another folder"
        )


def _architecture(raw: Mapping[str, Any]) -> str:
    """The supported architecture that config.json names; model_type decides where `architectures` is absent."""
    named = raw.get("architectures") or [
        name for name, family in ARCHITECTURES.items() if family == raw.get("model_type")
    ]
    for name in named:
        if name in ARCHITECTURES:
            return name
    given = ", ".join(map(str, named)) if named else f"none (model_type={raw.get('model_type')!r})"
    raise ValueError(f"architecture {given} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    for name in ("quantization_config", "compression_config"):
        if config.get(name):
            method = config[name].get("quant_method", "?") if isinstance(config[name], dict) else config[name]
            raise ValueError(f"{name}: quantized checkpoints ({method}) are not supported; use the unquantized one")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ValueError(f"hidden_act={config['hidden_act']!r} is not supported; allowed: 'silu'")
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(name):
            raise ValueError(f"{name}={config[name]}: mixture-of-experts models are not supported")


def _positive(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {name}={value!r} must be a positive integer")
    return value


def _head_dim(config: Mapping[str, Any], num_heads: int) -> int:
    if config.get("head_dim") is not None:
        head_dim = _positive(config, "head_dim")
    else:
        hidden_size = _positive(config, "hidden_size")
        if hidden_size % num_heads:
            raise ValueError(
                f"hidden_size={hidden_size} is no multiple of {num_heads} heads, and head_dim is not given"
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} must be even: rotary embedding turns pairs")
    return head_dim


def _biases(family: str, config: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """(q, k, v), output and MLP biases. Qwen2 and Mistral fix theirs, whatever attention_bias says."""
    attention_bias = bool(config.get("attention_bias", False))
    if family == "qwen2":
        return True, False, False
    if family == "mistral":
        return False, False, False
    return attention_bias, attention_bias, family == "llama" and bool(config.get("mlp_bias", False))


def _layer_windows(architecture: str, config: Mapping[str, Any], num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer. Mistral: one for all; Qwen: those of layer_types, else from max_window_layers on."""
    family = ARCHITECTURES[architecture]
    layer_types = config.get("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list):
            raise ValueError(f"config.json: layer_types={layer_types!r} must be a list")
        for kind in layer_types:
            if kind not in ("full_attention", "sliding_attention"):
                allowed = "'full_attention', 'sliding_attention'"
                raise ValueError(f"layer_types: layer kind {kind!r} is not supported; allowed: {allowed}")
        if len(layer_types) != num_layers:
            raise ValueError(f"layer_types has {len(layer_types)} entries for num_hidden_layers={num_layers}")
    windowed = family == "mistral" or (family != "llama" and bool(config.get("use_sliding_window", False)))
    window = _positive(config, "sliding_window") if windowed and config.get("sliding_window") is not None else None
    if layer_types is None:
        first = 0 if family == "mistral" else config.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise ValueError(f"config.json: max_window_layers={first!r} must be an integer")
        return tuple(window if i >= first else None for i in range(num_layers))
    if window is None and "sliding_attention" in layer_types:
        raise ValueError(
            f"layer_types has 'sliding_attention', but {architecture} has no sliding_window switched on here"
        )
    if family == "mistral" and window is not None and "full_attention" in layer_types:
        raise ValueError(
            f"layer_types: {architecture} has one layer kind, but 'full_attention' beside {window=} was given"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _dtype(config: Mapping[str, Any], path: Path) -> str | None:
    """The checkpoint's dtype: config.json's, else that of most elements in the header of a weight file."""
    named = config.get("dtype") or config.get("torch_dtype")
    if named is None or named == "auto":
        file = _first_weight_file(path)
        return _dtype_of_file(file) if file is not None else None
    dtype = _DTYPES.get(str(named).removeprefix("torch."))
    if dtype is None:
        raise ValueError(f"config.json: dtype={named!r} is not supported; allowed: bfloat16, float16, float32")
    return dtype


def _first_weight_file(path: Path) -> Path | None:
    """A weight file that the loader would read, None: there is none. Stray files beside them have no say."""
    index, single = path / INDEX, path / "model.safetensors"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        names = weight_map.values() if isinstance(weight_map, dict) else ()
        files = [path / name for name in names if isinstance(name, str)]
    else:
        files = [single] if single.is_file() else list(path.glob("*.safetensors"))
    return min((file for file in files if file.is_file()), default=None)


def _dtype_of_file(file: Path) -> str | None:
    with file.open("rb") as stream:
        num_bytes = int.from_bytes(stream.read(8), "little")
        try:
            header = json.loads(stream.read(num_bytes)) if num_bytes <= _MAX_HEADER_BYTES else {}
        except ValueError:  # a broken file: the loader says so
            header = {}
    num_elements: dict[str, int] = {}
    for name, tensor in header.items():
        if name != "__metadata__" and tensor["dtype"] in _SAFETENSORS_DTYPES:
            dtype = _SAFETENSORS_DTYPES[tensor["dtype"]]
            num_elements[dtype] = num_elements.get(dtype, 0) + math.prod(tensor["shape"])
    return max(num_elements, key=lambda dtype: num_elements[dtype], default=None)


def _token_ids(config: Mapping[str, Any], generation: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Union of the two files' ids, config.json's first; each may be an integer, a list or null."""
    ids: list[int] = []
    for source in (config, generation):
        value = source.get(name)
        ids += value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise ValueError(f"{name}: {token_id!r} must be a token id, an integer of at least 0")
    return tuple(dict.fromkeys(ids))
