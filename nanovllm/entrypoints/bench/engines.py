"""The engines under test, each behind the same four calls, through its public interface only.

Owns: how each engine is built, fed and read. Invariant: all get the same folder, token ids, lengths and sampling, and
what is timed is one call that ends with decoded text (where the model has a tokenizer). It deliberately tunes no
engine: options come from the command line.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from nanovllm.entrypoints.bench.models import BenchModel, write_random_weights
from nanovllm.entrypoints.bench.workloads import Workload

OUR_ROOT = Path(__file__).resolve().parents[3]
NANO_VLLM_PATH = "NANO_VLLM_PATH"  # a checkout of nano-vllm, whose package has our package's name


class Engine(Protocol):
    """An engine that is ready to run."""

    package: str  # the distribution whose version is reported
    can_reset: bool  # its prefix cache can be emptied, so that one process may time several runs

    def generate(self, workload: Workload) -> tuple[int, int]:
        """Run every request to its output length; (output tokens, characters of text) as the engine reports them."""

    def reset(self) -> None:
        """Forget cached prefixes."""

    def stats(self) -> dict[str, Any]:
        """Counters, {} where the engine has none."""

    def close(self) -> None:
        """Give the device back."""


class NanoVLLM:
    """This project."""

    package = "nanovllm"
    can_reset = True

    def __init__(self, model: BenchModel, max_model_len: int, dtype: str, options: dict[str, Any]) -> None:
        from nanovllm import LLM, SamplingParams

        self.params_type = SamplingParams
        self.detokenize = model.tokenizer is not None
        options = {"load_format": model.load_format, "dtype": dtype, "max_model_len": max_model_len, **options}
        options |= {"tokenizer": model.tokenizer} if self.detokenize else {"skip_tokenizer_init": True}
        self.llm = LLM(model.folder, **options)

    def generate(self, workload: Workload) -> tuple[int, int]:
        """See Engine."""
        params = [
            self.params_type(max_tokens=length, ignore_eos=True, **workload.sampling) for length in workload.output_lens
        ]
        return _count(self.llm.generate(workload.prompts, params, use_tqdm=False))

    def reset(self) -> None:
        """See Engine."""
        self.llm.reset_prefix_cache()

    def stats(self) -> dict[str, Any]:
        """See Engine."""
        return dict(self.llm.stats())

    def close(self) -> None:
        """See Engine."""
        self.llm.close()


class VLLM:
    """vLLM's offline class."""

    package = "vllm"
    can_reset = True

    def __init__(self, model: BenchModel, max_model_len: int, dtype: str, options: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self.params_type = SamplingParams
        self.detokenize = model.tokenizer is not None
        options = {"load_format": model.load_format, "dtype": dtype, "max_model_len": max_model_len, **options}
        options |= {"tokenizer": model.tokenizer} if self.detokenize else {"skip_tokenizer_init": True}
        self.llm = LLM(model=model.folder, **options)

    def generate(self, workload: Workload) -> tuple[int, int]:
        """See Engine."""
        shared = {"ignore_eos": True, "detokenize": self.detokenize, **workload.sampling}
        params = [self.params_type(max_tokens=length, **shared) for length in workload.output_lens]
        prompts = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
        return _count(self.llm.generate(prompts, params, use_tqdm=False))

    def reset(self) -> None:
        """See Engine."""
        self.llm.reset_prefix_cache()

    def stats(self) -> dict[str, Any]:
        """See Engine."""
        return {}

    def close(self) -> None:
        """See Engine."""


class NanoVLLMOriginal:
    """GeeeekExplorer's nano-vllm. It needs weights and a tokenizer in the folder, and has neither top-k nor top-p."""

    package = "nano-vllm"
    can_reset = False

    def __init__(self, model: BenchModel, max_model_len: int, dtype: str, options: dict[str, Any]) -> None:
        if model.tokenizer is None:
            raise ValueError("engine nano-vllm needs a tokenizer: give --tokenizer FOLDER")
        if model.load_format == "dummy":
            write_random_weights(model.folder)
        path = nano_vllm_path()
        assert path is not None  # why_not looked
        for name in [name for name in sys.modules if name.split(".")[0] == "nanovllm"]:
            del sys.modules[name]  # the other package of this name is meant from here on
        sys.path.insert(0, str(path))
        from nanovllm import LLM, SamplingParams

        self.params_type: Callable[..., Any] = SamplingParams
        self.llm: Any = LLM(model.folder, max_model_len=max_model_len, **options)

    def generate(self, workload: Workload) -> tuple[int, int]:
        """See Engine."""
        params = [
            self.params_type(max_tokens=length, ignore_eos=True, **workload.sampling) for length in workload.output_lens
        ]
        outputs = self.llm.generate(workload.prompts, params, use_tqdm=False)
        return sum(len(out["token_ids"]) for out in outputs), sum(len(out["text"]) for out in outputs)

    def reset(self) -> None:
        """See Engine."""

    def stats(self) -> dict[str, Any]:
        """See Engine."""
        return {}

    def close(self) -> None:
        """See Engine."""


class Transformers:
    """transformers' `generate`, the plain way: padded batches that run until their longest output is done.

    Options: batch_size (default 32), attn_implementation and what else `from_pretrained` takes. Tokens past a
    request's own length are computed, as they have to be, and not counted.
    """

    package = "transformers"
    can_reset = True

    def __init__(self, model: BenchModel, max_model_len: int, dtype: str, options: dict[str, Any]) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.batch_size = options.pop("batch_size", 32)
        if model.load_format == "dummy":
            config = AutoConfig.from_pretrained(model.folder)
            torch_dtype = getattr(torch, dtype) if dtype != "auto" else config.dtype or torch.bfloat16
            with torch.device(self.device):
                self.model = AutoModelForCausalLM.from_config(config, dtype=torch_dtype, **options)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(model.folder, dtype=dtype, **options).to(self.device)
        self.model.eval()
        self.tokenizer = None if model.tokenizer is None else AutoTokenizer.from_pretrained(model.tokenizer)

    def generate(self, workload: Workload) -> tuple[int, int]:
        """See Engine."""
        from transformers import GenerationConfig

        num_tokens = num_characters = 0
        for start in range(0, len(workload.prompts), self.batch_size):
            prompts = workload.prompts[start : start + self.batch_size]
            lengths = workload.output_lens[start : start + self.batch_size]
            width, longest = max(map(len, prompts)), max(lengths)
            padded = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
            mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
            sampling = {"top_k": 0, "top_p": 1.0, "do_sample": True, **workload.sampling}
            self.model.generation_config = GenerationConfig(pad_token_id=0, max_new_tokens=longest, **sampling)
            output = self.model.generate(
                input_ids=self.torch.tensor(padded, device=self.device),  # [batch, width]
                attention_mask=self.torch.tensor(mask, device=self.device),
            )
            kept = [row[:length] for row, length in zip(output[:, width:].tolist(), lengths, strict=True)]
            num_tokens += sum(map(len, kept))
            if self.tokenizer is not None:
                num_characters += sum(map(len, self.tokenizer.batch_decode(kept)))
        return num_tokens, num_characters

    def reset(self) -> None:
        """See Engine."""

    def stats(self) -> dict[str, Any]:
        """See Engine."""
        return {}

    def close(self) -> None:
        """See Engine."""


ENGINES: dict[str, Any] = {  # classes that follow Engine
    "nanovllm": NanoVLLM,
    "transformers": Transformers,
    "vllm": VLLM,
    "nano-vllm": NanoVLLMOriginal,
}


def nano_vllm_path() -> Path | None:
    """The folder that holds nano-vllm's package `nanovllm`: $NANO_VLLM_PATH, else where pip put it; never ours."""
    candidates = []
    if os.environ.get(NANO_VLLM_PATH):
        candidates.append(Path(os.environ[NANO_VLLM_PATH]))
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        candidates.append(Path(str(importlib.metadata.distribution("nano-vllm").locate_file(""))))
    for path in candidates:
        if (path / "nanovllm" / "engine").is_dir() and path.resolve() != OUR_ROOT:
            return path.resolve()
    return None


def why_not(engine: str, workload: str, num_gpus: int) -> str | None:
    """Why this engine cannot run this workload here, or None. Imports nothing heavy."""
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    if engine == "nano-vllm":
        if nano_vllm_path() is None:
            return f"not found: pip install it elsewhere, or point ${NANO_VLLM_PATH} at a checkout"
        return "it has no top-k and top-p" if workload.endswith("+kp") else None
    if engine == "transformers" and num_gpus > 1:
        return "it runs on one GPU here"
    if engine != "nanovllm" and importlib.util.find_spec(engine) is None:
        return f"package {engine} is not installed"
    return None


def _count(outputs: list[Any]) -> tuple[int, int]:
    completions = [completion for output in outputs for completion in output.outputs]
    return sum(len(one.token_ids) for one in completions), sum(len(one.text) for one in completions)
