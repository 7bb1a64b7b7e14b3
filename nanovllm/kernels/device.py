"""What kernels need to know of the GPU that they run on.

Owns: `device_of`, read once a device, and the options of a dependent launch. Invariant: tile choices follow from these
numbers, never from a card's name. It deliberately knows no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from nanovllm.kernels._triton import HAS_TRITON, triton


@dataclass(frozen=True)
class Device:
    """Of one GPU; the defaults serve Triton's interpreter."""

    num_sms: int = 4
    shared_memory: int = 99 * 1024  # bytes, of one program
    use_pdl: bool = False  # programmatic dependent launch


@cache
def device_of(device: torch.device) -> Device:
    """Read it once: the calls that ask run in every layer."""
    if device.type != "cuda" or not HAS_TRITON:
        return Device()
    index = device.index if device.index is not None else torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(index)
    shared_memory = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
    use_pdl = torch.version.hip is None and properties.major >= 9
    return Device(properties.multi_processor_count, shared_memory, use_pdl)


def dependent_launch(device: Device) -> dict[str, bool]:
    """Options of a launch whose kernel starts with gdc_launch_dependents and gdc_wait `if USE_PDL`: never one alone.

    With programmatic dependent launch (compute capability 9 and later) a kernel starts while the one before it ends,
    and waits for it where it first reads what that one wrote. Every program has to wait, also one that has nothing to
    do: only then does "my predecessor has finished" imply the same of all kernels before it.

    It pays where both kernels are of this kind and small: the products of a step of few rows. With more rows cuBLAS's
    stand in between, which start nobody early.
    """
    return {"USE_PDL": True, "launch_pdl": True} if device.use_pdl else {"USE_PDL": False}
