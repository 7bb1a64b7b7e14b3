"""Model families by the architecture's name in config.json.

Owns: the dict. Invariant: it has an entry for every architecture that `model_config` lets through. It deliberately has
no registration: a family is added by a line here, one there, and a file.
"""

from __future__ import annotations

import torch

from nanovllm.attention import AttentionBackend
from nanovllm.layers.parallel import SINGLE, TensorParallel
from nanovllm.model_config import ModelConfig
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.mistral import MistralForCausalLM
from nanovllm.models.qwen2 import Qwen2ForCausalLM
from nanovllm.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[Qwen3ForCausalLM]] = {
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
}


def build_model(
    model_config: ModelConfig,
    backend: AttentionBackend,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int | None = None,
    tp: TensorParallel = SINGLE,
) -> Qwen3ForCausalLM:
    """The model with uninitialised parameters on `device`, for sequences of at most `max_model_len` tokens.

    None: the model's own limit, with a rope table that long.
    """
    config = model_config if max_model_len is None else model_config.capped(max_model_len)
    return MODELS[model_config.architecture](config, backend, dtype, device, tp).eval()
