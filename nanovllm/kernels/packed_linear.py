"""Matrix products of few rows on the CPU, with weights in the layout that oneDNN multiplies fastest.

Owns: the packed copy of a weight, and when to use it. Invariant: a product is that of the plain weight, up to the order
of its sums. It deliberately replaces nothing: the plain weight stays, since loading, updating, embedding lookups and
prompts need it, so packing costs memory once more; who packs decides whether it is worth that, and when to do it again.

torch multiplies by a plain weight through MKL, which arranges it anew in every call. For a few rows, a decode, that is
most of the time: docs/performance.md has the numbers. The packed layout and its product are what torch's own compiler
uses for weights that it may take as constant.
"""

from __future__ import annotations

import platform

import torch
from torch import Tensor
from torch.nn import functional

# Beyond, arranging the weight is little of the work, and oneDNN keeps 0.7 MB of code for each number of rows and shape.
MAX_PACKED_ROWS = 64
NUM_ROWS_HINT = 32  # the layout depends little on it: any but 1 gives one that is good for all of them


def can_pack(weight: Tensor) -> bool:
    """Whether this machine and torch multiply a weight [out, in] of this device and dtype faster packed."""
    has_fast_product = weight.dtype == torch.float32
    if weight.dtype == torch.bfloat16:
        has_fast_product = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return (
        has_fast_product
        and weight.device.type == "cpu"
        and platform.machine().lower() in ("x86_64", "amd64")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def pack(weight: Tensor) -> Tensor:
    """An opaque copy of `weight` [out, in] for `linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight, NUM_ROWS_HINT)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    """x [T, in] @ weight.T + bias for weight [out, in]: a new [T, out]; `packed` is `pack(weight)`, or None."""
    if packed is None or not 0 < x.shape[0] <= MAX_PACKED_ROWS:
        return functional.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
