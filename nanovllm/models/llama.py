"""Llama 2, 3 and 3.1+, and what shares their architecture (SmolLM2, for one).

Differs from Qwen3: no norm of q and k; `attention_bias` and `mlp_bias` of config.json may add biases; the `llama3`
rope type. All three are fields of `ModelConfig`, so the text is Qwen3's.
"""

from __future__ import annotations

from nanovllm.models.qwen3 import Qwen3ForCausalLM


class LlamaForCausalLM(Qwen3ForCausalLM):
    """See the module's docstring for what differs from Qwen3."""
