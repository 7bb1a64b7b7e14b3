"""RMSNorm (arXiv:1910.07467), with or without the residual addition before it.

Owns: the weight. Invariant: the float32 statistics and their rounding are those of the kernel's reference, whichever
form is called. It deliberately never edits its input `x`; only the residual is updated in place.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanovllm.kernels.norm import add_rms_norm, rms_norm
from nanovllm.layers.linear import empty_parameter


class RMSNorm(nn.Module):
    """weight [H]."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter((size,), dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)  # [T, H]

    def add(self, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + residual, x + residual), both [T, H]; the latter is `residual`, updated in place.

        x is None where it has been added before (`Linear.add`).
        """
        if x is None:
            return self(residual), residual
        return add_rms_norm(x, residual, self.weight, self.eps)
