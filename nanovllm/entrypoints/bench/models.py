"""The models by name: published Qwen3 shapes as configs without weights, SmolLM2, or any folder.

Owns: the shapes and the temporary folders made of them. Invariant: what it hands out is a plain folder path, the same
for every engine. It deliberately fetches nothing: speed with random weights is the same as with trained ones when
every request runs to its output length.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "use_sliding_window": False, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 151936, "num_key_value_heads": 8,
}  # fmt: skip
_FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
QWEN3_SHAPES: dict[str, tuple[int, int, int, int, bool]] = {
    "qwen3-0.6b": (1024, 3072, 28, 16, True),
    "qwen3-1.7b": (2048, 6144, 28, 16, True),
    "qwen3-4b": (2560, 9728, 36, 32, True),
    "qwen3-8b": (4096, 12288, 36, 32, False),
    "qwen3-14b": (5120, 17408, 40, 40, False),
    "qwen3-32b": (5120, 25600, 64, 64, False),
}
MODEL_NAMES = [*QWEN3_SHAPES, "smollm2"]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "merges.txt")


def published_config(name: str) -> dict[str, Any]:
    """config.json of a Qwen3 size as published, as a dict. Raises KeyError for an unknown name."""
    shape = dict(zip(_FIELDS, QWEN3_SHAPES[name], strict=True))
    return {**_QWEN3, **shape, "max_window_layers": shape["num_hidden_layers"]}


@dataclass(frozen=True)
class BenchModel:
    """A model as every engine gets it."""

    name: str
    folder: str
    load_format: str  # "auto" or "dummy"
    tokenizer: str | None  # a folder, None: token ids in, token ids out


def resolve_model(model: str, tokenizer: str | None, load_format: str | None, workdir: Path) -> BenchModel:
    """Find or make the folder of `model`, a name out of MODEL_NAMES or a folder that holds a config.json.

    A Qwen3 name becomes a folder under `workdir` with config.json and, where `tokenizer` names a folder, its files.
    Raises ValueError where there is no such model or tokenizer.
    """
    if tokenizer is not None and not _has_tokenizer(Path(tokenizer)):
        raise ValueError(f"tokenizer must be a folder with a tokenizer.json, got {tokenizer!r}")
    if model in QWEN3_SHAPES:
        folder = workdir / model
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(published_config(model), indent=2))
        if tokenizer is not None:
            _copy_tokenizer(Path(tokenizer), folder)
        return BenchModel(model, str(folder), load_format or "dummy", tokenizer and str(folder))
    if model == "smollm2":
        from nanovllm.entrypoints.smollm2 import get_smollm2

        folder = get_smollm2()
    else:
        folder = Path(model)
        if not (folder / "config.json").is_file():
            names = ", ".join(MODEL_NAMES)
            raise ValueError(f"model must be a folder with a config.json or one of {names}, got {model!r}")
    if load_format is None:
        load_format = "auto" if any(folder.glob("*.safetensors")) else "dummy"
    if tokenizer is None and _has_tokenizer(folder):
        tokenizer = str(folder)
    return BenchModel(model if model == "smollm2" else folder.resolve().name, str(folder), load_format, tokenizer)


def read_config(folder: str) -> dict[str, Any]:
    """config.json of a folder."""
    return json.loads((Path(folder) / "config.json").read_text())


def write_random_weights(folder: str) -> None:
    """Give a Qwen3 folder random safetensors, one file a layer: for engines that cannot make weights up by themselves.

    The names are transformers' own; the values have standard deviation 0.02 (norms are 1). Does nothing where the
    folder has weights. Needs free disk space for the whole model in bf16.
    """
    if any(Path(folder).glob("*.safetensors")):
        return
    import torch
    from safetensors.torch import save_file

    config = read_config(folder)
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (q_size, hidden), "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden), "self_attn.o_proj": (hidden, q_size),
        "self_attn.q_norm": (head_dim,), "self_attn.k_norm": (head_dim,),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    ends: dict[str, tuple[int, ...]] = {"model.embed_tokens": (config["vocab_size"], hidden), "model.norm": (hidden,)}
    if not config["tie_word_embeddings"]:
        ends["lm_head"] = (config["vocab_size"], hidden)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def tensor(shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return (torch.randn(shape, generator=generator, device=device) * 0.02).bfloat16().cpu()

    parts = [{f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
             for index in range(config["num_hidden_layers"])]  # fmt: skip
    for index, part in enumerate([*parts, ends]):
        tensors = {f"{name}.weight": tensor(shape) for name, shape in part.items()}
        save_file(tensors, Path(folder) / f"model-{index:05d}.safetensors")


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
