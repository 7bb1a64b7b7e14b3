"""Qwen2 and Qwen2.5.

Differs from Qwen3: no norm of q and k; q, k and v always have biases, the output projection never. Both are fields of
`ModelConfig`, so the text is Qwen3's.
"""

from __future__ import annotations

from nanovllm.models.qwen3 import Qwen3ForCausalLM


class Qwen2ForCausalLM(Qwen3ForCausalLM):
    """See the module's docstring for what differs from Qwen3."""
