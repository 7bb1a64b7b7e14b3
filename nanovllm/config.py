"""Engine options.

Owns: every default and every validation error of an option. Invariant: a Config that exists holds values that are
allowed in themselves and fit the model (max_model_len within the model's limit). It deliberately touches no device:
what depends on one (dtype, block size, size of the KV pool) is "auto" or None here and resolved by the worker, which
writes it back.
"""

from __future__ import annotations

import difflib
import logging
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from nanovllm.model_config import ModelConfig, read_model_config

logger = logging.getLogger("nanovllm")

DEFAULT_MAX_MODEL_LEN = 4096
_CHOICES: dict[str, tuple[str, ...]] = {
    "device": ("auto", "cuda", "cpu"),
    "dtype": ("auto", "bfloat16", "float16", "float32"),
    "load_format": ("auto", "dummy"),
    "attention_backend": ("auto", "flash_attn", "triton", "torch"),
}
# name: (smallest value, whether None is allowed)
_INTS: dict[str, tuple[int, bool]] = {
    "max_model_len": (2, False),
    "max_num_batched_tokens": (1, False),
    "max_num_seqs": (1, False),
    "num_kvcache_blocks": (2, True),
    "kvcache_block_size": (1, True),
    "tensor_parallel_size": (1, False),
    "data_parallel_size": (1, False),
    "max_in_flight": (1, True),
}
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}
_BOOLS = ("skip_tokenizer_init", "enable_prefix_caching", "enforce_eager")


@dataclass(kw_only=True)
class Config:
    """Options of one engine; see the README's table for their meaning.

    Raises:
        ValueError: a value that is not allowed, naming the option, the value and what is allowed.
        TypeError: a value of the wrong type.
    """

    model: str
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    device: str = "auto"
    dtype: str = "auto"
    load_format: str = "auto"
    seed: int = 0
    max_model_len: int = DEFAULT_MAX_MODEL_LEN
    max_num_batched_tokens: int = 16384
    max_num_seqs: int = 512
    gpu_memory_utilization: float = 0.9
    num_kvcache_blocks: int | None = None
    kvcache_block_size: int | None = None
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    attention_backend: str = "auto"
    max_in_flight: int | None = None
    model_config: ModelConfig = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.model = str(self.model)
        if self.tokenizer is not None:
            self.tokenizer = str(self.tokenizer)
        dtype = str(self.dtype).removeprefix("torch.")  # torch.bfloat16, say
        self.dtype = _DTYPE_ALIASES.get(dtype, dtype)
        if self.max_model_len is None:
            self.max_model_len = DEFAULT_MAX_MODEL_LEN
        self._check_types()
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.tokenizer is not None and not Path(self.tokenizer).is_dir():
            raise ValueError(f"tokenizer must be a local folder, got {self.tokenizer!r}, which is none")
        self.model_config = read_model_config(self.model, self.load_format)
        limit = self.model_config.max_model_len
        if self.max_model_len > limit:
            level = logging.INFO if self.max_model_len == DEFAULT_MAX_MODEL_LEN else logging.WARNING
            logger.log(level, "max_model_len %d is more than the model supports: %d is used", self.max_model_len, limit)
            self.max_model_len = limit
        self.model_config = self.model_config.capped(self.max_model_len)
        self._check_ranks()
        # a step cannot decode more sequences than its token budget has room for
        self.max_num_seqs = min(self.max_num_seqs, self.max_num_batched_tokens)

    def _check_ranks(self) -> None:
        size, model = self.tensor_parallel_size, self.model_config
        for name, count in (
            ("attention heads", model.num_heads),
            ("units of intermediate_size", model.intermediate_size),
        ):
            if count % size:
                raise ValueError(f"tensor_parallel_size={size} must divide the model's {count} {name}")
        if model.num_kv_heads % size and size % model.num_kv_heads:
            raise ValueError(
                f"tensor_parallel_size={size} must divide the model's {model.num_kv_heads} KV heads, or be a multiple"
            )

    def _check_types(self) -> None:
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name, (low, optional) in _INTS.items():
            value = getattr(self, name)
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(f"{name} must be an int{' or None' if optional else ''}, got {value!r}")
            if value < low:
                raise ValueError(f"{name} must be at least {low}, got {value}")
            setattr(self, name, int(value))  # a numpy integer overflows, and is no JSON
        for name in _BOOLS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {getattr(self, name)!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, Integral):
            raise TypeError(f"seed must be an int, got {self.seed!r}")
        self.seed = int(self.seed)
        if isinstance(self.gpu_memory_utilization, bool) or not isinstance(self.gpu_memory_utilization, Real):
            raise TypeError(f"gpu_memory_utilization must be a number, got {self.gpu_memory_utilization!r}")
        self.gpu_memory_utilization = float(self.gpu_memory_utilization)

    @classmethod
    def from_options(cls, model: str, options: dict[str, Any]) -> Config:
        """Config of `LLM(model, **options)`.

        Raises:
            TypeError: an option that does not exist, with the nearest one that does.
        """
        known = [f.name for f in fields(cls) if f.init and f.name != "model"]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; the options are {', '.join(known)}"
                raise TypeError(f"LLM() got an unknown option {name!r}{hint}")
        return cls(model=model, **options)
