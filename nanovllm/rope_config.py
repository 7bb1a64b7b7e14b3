"""Rotary embedding as config.json describes it.

Owns: the reading of rope_scaling (old configs, keys "rope_type" or "type") and rope_parameters (new ones). Invariant:
a `RopeConfig` has every default filled in, so the table is built from it alone. It deliberately computes no frequency:
that is `layers/rotary.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

logger = logging.getLogger("nanovllm")

ROPE_TYPES = ("default", "linear", "yarn", "llama3", "dynamic")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding, ready to compute: every default filled in, `dynamic` already reduced to `default`.

    `attention_factor` multiplies cos and sin (YaRN, arXiv:2309.00071; 1.0 elsewhere). `beta_fast`, `beta_slow` and
    `truncate` bound YaRN's ramp; `low_freq_factor` and `high_freq_factor` bound that of Llama 3.1.
    """

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


def read_rope_config(config: Mapping[str, Any], max_positions: int) -> tuple[RopeConfig, int]:
    """The rotary embedding, and the longest length it supports with its scaling counted once, in tokens.

    Args:
        config: config.json as a dict.
        max_positions: its max_position_embeddings.

    Raises:
        ValueError: a rope type, a partial rotation or a layout that is not supported, or a field that its type lacks.
    """
    given: dict[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"rope_scaling or rope_parameters must be a dict, got {given!r}")
    if any(isinstance(value, dict) for value in given.values()):
        raise ValueError(
            f"rope_parameters per layer kind ({', '.join(given)}) are not supported; one set for all layers is"
        )
    rope_type = given.get("rope_type") or given.get("type") or "default"
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope_type={rope_type!r} is not supported; allowed: {', '.join(ROPE_TYPES)}")
    partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial is not None and partial != 1:
        raise ValueError(f"partial_rotary_factor={partial} is not supported; allowed: 1.0")
    theta = given.get("rope_theta", config.get("rope_theta"))
    if theta is not None and (isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0):
        raise ValueError(f"rope_theta must be a positive number, got {theta!r}")
    theta = 10000.0 if theta is None else float(theta)
    if rope_type == "default":
        return RopeConfig(theta=theta), max_positions
    if rope_type == "dynamic":
        # Its base grows with the longest sequence of a batch: positions cached earlier would have to be rotated anew.
        logger.warning("rope_type 'dynamic' runs within its original length only: at most %d tokens", max_positions)
        return RopeConfig(theta=theta), max_positions

    original = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    original = int(original or max_positions)
    if rope_type == "yarn":
        return _yarn(given, theta, original, max_positions)
    rope = RopeConfig(rope_type, theta, _number(given, "factor", rope_type), original)
    if rope_type == "linear":
        return rope, int(original * rope.factor)
    low, high = (_number(given, name, rope_type) for name in ("low_freq_factor", "high_freq_factor"))
    # Llama 3.1 writes the stretched length into max_position_embeddings itself.
    return replace(rope, low_freq_factor=low, high_freq_factor=high), max_positions


def _yarn(given: Mapping[str, Any], theta: float, original: int, max_positions: int) -> tuple[RopeConfig, int]:
    """YaRN (arXiv:2309.00071). Without a factor, the ratio of the two lengths is it."""
    factor = max_positions / original if given.get("factor") is None else _number(given, "factor", "yarn")

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = given.get("attention_factor")
    if attention_factor is None and given.get("mscale") and given.get("mscale_all_dim"):
        attention_factor = mscale(given["mscale"]) / mscale(given["mscale_all_dim"])
    rope = RopeConfig(
        type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=float(mscale(1.0) if attention_factor is None else attention_factor),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        truncate=bool(given.get("truncate", True)),
    )
    return rope, int(original * factor)


def _number(given: Mapping[str, Any], name: str, rope_type: str) -> float:
    value = given.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"rope_type {rope_type!r} needs a positive {name}, got {value!r}")
    return float(value)
