"""Mistral 7B and what shares its architecture.

Differs from Qwen3: no norm of q and k, no biases; a sliding window, where there is one, holds for every layer. All are
fields of `ModelConfig`, so the text is Qwen3's.
"""

from __future__ import annotations

from nanovllm.models.qwen3 import Qwen3ForCausalLM


class MistralForCausalLM(Qwen3ForCausalLM):
    """See the module's docstring for what differs from Qwen3."""
