"""The table of cosines and sines that rotary embedding reads (RoPE, arXiv:2104.09864).

Owns: the inverse frequencies of every supported rope type, and the table. Invariant: the table is float32 and holds
the whole scaling (frequencies and attention factor), so a layer only multiplies. It deliberately does not rotate: that
is fused with the KV store in `kernels/rope.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nanovllm.rope_config import RopeConfig


def build_cos_sin(rope: RopeConfig, head_dim: int, max_model_len: int, device: torch.device) -> Tensor:
    """float32 [max_model_len, head_dim]: cosines in the first half of a row, sines in the second, for NeoX's layout.

    The frequencies are computed on the CPU, so that every device rotates by the same angles.
    """
    positions = torch.arange(max_model_len, dtype=torch.float32, device=device)  # [P]
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim).to(device))  # [P, D / 2]
    return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(rope.attention_factor)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions, float32 [head_dim / 2].

    Raises:
        ValueError: a rope type that is not known here.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim  # [D / 2]
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.type == "default":
        return inv_freq
    if rope.type == "linear":
        return inv_freq / rope.factor
    if rope.type == "llama3":
        return _llama3(inv_freq, rope)
    if rope.type == "yarn":
        return _yarn(inv_freq, rope, head_dim)
    raise ValueError(f"rope type {rope.type!r} is not known")


def _llama3(inv_freq: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between blended (arXiv:2407.21783)."""
    turns = rope.original_max_position_embeddings * inv_freq / (2 * math.pi)  # full turns within the original length
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1.0 - kept) * inv_freq / rope.factor + kept * inv_freq


def _yarn(inv_freq: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """YaRN (arXiv:2309.00071), section 3.2: a linear ramp over the dimensions, from kept to stretched by `factor`."""

    def dimension_turning(turns: float) -> float:
        """The (fractional) pair that makes so many turns within the original length."""
        length = rope.original_max_position_embeddings
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    stretched = ((pairs - low) / (high - low)).clamp(0.0, 1.0)  # [D / 2], 0 keeps, 1 stretches
    return inv_freq / rope.factor * stretched + inv_freq * (1.0 - stretched)
