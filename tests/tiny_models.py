"""Tiny random checkpoints of every supported family, built and saved by transformers.

Owns: `make_tiny_model`, `make_tiny_tokenizer` and `FAMILIES`. Invariant: the same arguments write the same weights.
Their size is such that greedy continuations vary: attention, positions, biases and norms all show in the tokens.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 320
CONFIG_CLASSES = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama", "mistral": "Mistral"}

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_FAMILY_BASE: dict[str, dict[str, Any]] = {"qwen3": {"head_dim": 32}, "mistral": {"sliding_window": None}}


def _rope(rope_type: str, **fields: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10000.0, **fields}


# (name, keyword arguments of make_tiny_model)
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"family": "qwen3"}),
    ("qwen3-tied", {"family": "qwen3", "tie_word_embeddings": True}),
    ("qwen3-bias", {"family": "qwen3", "attention_bias": True}),
    (
        "qwen3-yarn",
        {
            "family": "qwen3",
            "max_position_embeddings": 128,
            "rope_parameters": _rope("yarn", factor=4.0, original_max_position_embeddings=32),
        },
    ),
    ("qwen3-sharded", {"family": "qwen3", "max_shard_size": "60KB"}),
    ("llama", {"family": "llama", "num_key_value_heads": 4}),
    ("llama-bias", {"family": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    (
        "llama3-rope",
        {
            "family": "llama",
            "rope_parameters": _rope(
                "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
            ),
        },
    ),
    (
        "llama-linear",
        {"family": "llama", "max_position_embeddings": 64, "rope_parameters": _rope("linear", factor=2.0)},
    ),
    ("qwen2", {"family": "qwen2"}),
    ("qwen2-window", {"family": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ("mistral-window", {"family": "mistral", "sliding_window": 8}),
]


def make_tiny_model(
    folder: str | os.PathLike[str],
    family: str = "qwen3",
    *,
    tokenizer: bool = False,
    seed: int = 0,
    gain: float = 2.0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **config_overrides: Any,
) -> Path:
    """Write a random model of `family` into `folder` (made if needed) and return the folder.

    `config_overrides` go to transformers' config class. `tokenizer=True` adds a tokenizer of fewer tokens than the
    model's vocabulary, whose end token then is the model's. `max_shard_size="60KB"` gives several files and an index.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    options = {**_BASE, **_FAMILY_BASE.get(family, {}), **config_overrides}
    if tokenizer:
        saved = make_tiny_tokenizer(folder)
        options["eos_token_id"] = config_overrides.get("eos_token_id", saved.eos_token_id)
    name = CONFIG_CLASSES[family]
    config = getattr(transformers, f"{name}Config")(**options)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and bool((parameter == 1).all())
            scale = gain / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 0.25  # by the fan-in; a bias has none
            parameter.copy_(1.0 + 0.2 * noise if is_norm else scale * noise)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


_CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps, and the fox runs away.",
    "Language models read tokens and write tokens, one after the other, until they stop.",
    "What is the capital of France? The capital of France is Paris.",
    "Größe, naïve, 日本語, 🙂: text that takes more than one byte for a character.",
    "def add(a, b):\n    return a + b\n",
]
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_tokenizer(folder: str | os.PathLike[str], vocab_size: int = 300) -> PreTrainedTokenizerFast:
    """Write a byte-level BPE tokenizer with an end token and a chat template into `folder`; every byte has a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = _CHAT_TEMPLATE
    fast.save_pretrained(folder)
    return fast
