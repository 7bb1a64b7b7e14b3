"""What "auto" means on this machine, and torch as it is out of the box.

Owns: the choice of device and dtype. Invariant: an explicit choice is honoured or refused with the reason, never
replaced. It deliberately does not choose the attention backend: attention/ probes those.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch

logger = logging.getLogger("nanovllm")


@contextmanager
def plain_torch() -> Iterator[None]:
    """Run as if the caller had set no default dtype, no default device and no autocast: a training script has them."""
    with ExitStack() as stack:
        dtype = torch.get_default_dtype()
        if dtype != torch.float32:
            stack.callback(torch.set_default_dtype, dtype)
            torch.set_default_dtype(torch.float32)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def resolve_device(name: str) -> torch.device:
    """The device of this engine.

    Raises:
        ValueError: "cuda" where torch sees no CUDA device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("device='cuda', but torch sees no CUDA device; device='auto' or 'cpu' runs without one")
    return torch.device("cuda", torch.cuda.current_device())


@cache
def compute_stream(device: torch.device) -> torch.cuda.Stream | None:
    """The stream of this process's engines on a GPU, None on the CPU.

    One for all of them: cuBLAS keeps a workspace of 32 MiB for every stream it ever saw.
    """
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def cpu_has_fast_bf16() -> bool:
    """Whether the processor multiplies bf16 matrices in hardware (AVX512-BF16 or AMX)."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def resolve_dtype(name: str, checkpoint_dtype: str | None, device: torch.device) -> torch.dtype:
    """The dtype of weights and KV cache; "auto" is the checkpoint's where this device computes in it.

    On a CPU, half precision without hardware for it would be slower than float32. A GPU below compute capability 8
    has no bf16 arithmetic and gets float16.
    """
    if name != "auto":
        return getattr(torch, name)
    dtype = getattr(torch, checkpoint_dtype or "bfloat16")
    if device.type == "cpu":
        return torch.bfloat16 if dtype == torch.bfloat16 and cpu_has_fast_bf16() else torch.float32
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability(device)[0] < 8:
        logger.warning("this GPU has no bfloat16 arithmetic: float16 is used for a bfloat16 checkpoint")
        return torch.float16
    return dtype
