"""The gated MLP: down(silu(gate(x)) * up(x)) (SwiGLU, arXiv:2002.05202).

Owns: its three projections. Invariant: gate and up are one matrix product, gate's rows first, as the activation kernel
expects. It deliberately offers no other activation: a model that names one is refused when its config is read.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.decode_linear import ResidualStream, norm_linear
from nanovllm.layers.linear import Linear, Part
from nanovllm.layers.norm import RMSNorm
from nanovllm.layers.parallel import TensorParallel


class MLP(nn.Module):
    """[T, hidden] -> [T, hidden], for the residual."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        tp: TensorParallel,
    ) -> None:
        super().__init__()
        parts = {"gate_proj": Part(intermediate_size), "up_proj": Part(intermediate_size)}
        self.gate_up_proj = Linear(hidden_size, parts, bias, dtype, device, "output", tp)
        self.down_proj = Linear(intermediate_size, hidden_size, bias, dtype, device, "input", tp)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor | None, Tensor]:
        """x [T, hidden]; returns what `Linear.add` does."""
        gate_up = self.gate_up_proj(x)  # [T, 2 * intermediate]
        return self.down_proj.add(silu_and_mul(gate_up), residual)

    def decode(self, stream: ResidualStream, norm: RMSNorm, next_norm: RMSNorm) -> None:
        """norm, gate and up, activation, down, in two launches; adds to the stream. See `kernels/decode_linear.py`."""
        gate_up = self.gate_up_proj
        inner = norm_linear(stream, norm.weight, norm.eps, gate_up.weight, gate_up.bias, silu=True)
        self.down_proj.add_to(stream, inner, next_norm.weight)
