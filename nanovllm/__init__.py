"""nanovllm: offline batch inference for Qwen3-like language models, small enough to read.

`from nanovllm import LLM, SamplingParams` is the whole public surface. Importing the package imports neither torch
nor transformers: `LLM` is loaded on first use, so that a script's `--help` and the scheduler's tests stay quick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from nanovllm.llm import LLM

        return LLM
    raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
