"""Sampling on the CPU gives the reference's tokens exactly, whatever the logits and the mix of settings."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanovllm.kernels import sampling_cpu
from nanovllm.kernels.noise import log2_exponential_reference
from nanovllm.kernels.sampling import sample_reference
from nanovllm.kernels.sampling_cpu import sample_cpu

NUM_ROWS = 48
INF = float("inf")


def cycle(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor([values[i % len(values)] for i in range(NUM_ROWS)], dtype=dtype)


def mixed_settings(filtered: bool) -> list[Tensor]:
    """Temperatures and filters in cycles of different lengths, so that rows meet many combinations."""
    temperature = cycle([0.0, 0.6, 1.0, 1.7, 1e-3, 1e-4, 0.3, 5e-6])
    if not filtered:
        return [temperature, cycle([0], torch.int32), cycle([1.0]), cycle([0.0])]
    top_k = cycle([0, 0, 1, 20, 600, 5, 0, 1 << 30, 0, 512, 513], torch.int32)
    return [temperature, top_k, cycle([1.0, 0.9, 1.0, 0.95, 0.999, 1e-7, 1.0]), cycle([0.0, 0.0, 0.05, 0.0, 1.0])]


def make_logits(kind: str, vocab_size: int, generator: torch.Generator) -> Tensor:
    logits = torch.randn(NUM_ROWS, vocab_size, generator=generator) * 3
    if kind == "bfloat16":
        return logits.bfloat16()
    if kind == "ties":
        return (logits * 2).round() / 2
    if kind == "flat":
        return logits * 1e-3
    if kind == "masked":
        logits[:, ::3] = -INF
        logits[0], logits[1, 0], logits[2, -1], logits[3] = -INF, float("nan"), INF, 1.0
    return logits


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("kind", ["plain", "bfloat16", "ties", "flat", "masked"])
@pytest.mark.parametrize("vocab_size", [1, 12, 127, 128, 129, 513, 1500, 40_000])
def test_tokens_are_the_references(vocab_size: int, kind: str, filtered: bool) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits, settings = make_logits(kind, vocab_size, generator), mixed_settings(filtered)
    seeds = torch.randint(-(1 << 31), 1 << 31, (NUM_ROWS, 2), dtype=torch.int32, generator=generator)
    for position in range(1 if vocab_size > 2000 else 8):
        rows = torch.randperm(NUM_ROWS, generator=generator).int()
        num_tokens = torch.full((NUM_ROWS,), 100 + position, dtype=torch.int32)
        expected = sample_reference(logits, rows, *settings, seeds, num_tokens)
        actual = sample_cpu(logits, rows, *settings, seeds, num_tokens)
        assert actual.dtype == expected.dtype and torch.equal(actual, expected)


@pytest.mark.parametrize("tile", [1, 1500, 4000])
def test_tiles_change_nothing(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row at once, some, and a rest."""
    monkeypatch.setattr(sampling_cpu, "TILE", tile)
    generator = torch.Generator().manual_seed(tile)
    logits, settings = make_logits("masked", 1500, generator), mixed_settings(True)
    seeds = torch.randint(-(1 << 31), 1 << 31, (NUM_ROWS, 2), dtype=torch.int32, generator=generator)
    rows, num_tokens = torch.arange(NUM_ROWS).int(), torch.arange(NUM_ROWS).int()
    expected = sample_reference(logits, rows, *settings, seeds, num_tokens)
    assert torch.equal(sample_cpu(logits, rows, *settings, seeds, num_tokens), expected)


def test_bounds_are_above_the_scores() -> None:
    """And close where noise is large, or all spans would be looked at."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(1 << 31), 1 << 31, (200_000,), generator=generator)
    bits = torch.cat((torch.arange(-600, 600), torch.tensor([-(1 << 31), (1 << 31) - 1]), bits)).int()
    score = torch.randn(len(bits), generator=generator) * 30
    bound = sampling_cpu._span_bounds(score[None, :, None], bits[None, :, None])[0]
    excess = bound - (score - log2_exponential_reference(bits))
    assert float(excess.min()) >= 0.9 * sampling_cpu.SLACK
    is_usual = (bits > 1 << 20) & (bits < 1 << 28)  # v is not close to 0, nor E much larger
    assert float(excess[is_usual].max()) < 0.15


def test_no_rows() -> None:
    settings = [setting[:0] for setting in mixed_settings(True)]
    empty = torch.empty(0, dtype=torch.int32)
    assert sample_cpu(torch.empty(0, 100), empty, *settings, torch.empty(0, 2, dtype=torch.int32), empty).shape == (0,)
