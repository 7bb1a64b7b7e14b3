"""Slices of the vocabulary on several ranks: their candidates give what sampling from the whole row gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.sampling import SamplingWorkspace, sample_reference
from nanovllm.kernels.sampling_slices import (
    best_of_slices_reference,
    best_of_slices_triton,
    candidates_reference,
    candidates_triton,
)
from nanovllm.layers.parallel import local_vocab
from nanovllm.layers.sampler import SliceSampler
from tests.kernels.test_sampling import Settings, explained, make_logits, make_settings

UNFILTERED = [(temperature, 0, 1.0, 0.0) for temperature in (0.0, 1.0, 0.3, 5e-6, 1e-3, 1.3, 2.0, 50.0)]


def slices_of(logits: Tensor, size: int) -> list[Tensor]:
    """As the output layer cuts them: equally wide, -inf where a row stands for no id."""
    width = local_vocab(logits.shape[1], size)
    whole = torch.full((len(logits), width * size), -torch.inf, dtype=logits.dtype, device=logits.device)
    whole[:, : logits.shape[1]] = logits
    return list(whole.split(width, dim=1))


def by_reference(logits: Tensor, rows: Tensor, settings: Settings, size: int) -> Tensor:
    temperature, seeds, num_tokens = (settings[name] for name in ("temperature", "seeds", "num_tokens"))
    slices = slices_of(logits, size)
    candidates = [
        candidates_reference(part, rows, temperature, seeds, num_tokens, rank * part.shape[1])
        for rank, part in enumerate(slices)
    ]
    assert all(each.dtype == torch.float32 and each.shape == (len(rows), 3) for each in candidates)
    return best_of_slices_reference(torch.stack(candidates), rows, temperature)


def by_triton(logits: Tensor, rows: Tensor, settings: Settings, size: int) -> Tensor:
    slices = slices_of(logits, size)
    candidates = []
    for rank, part in enumerate(slices):
        workspace = SamplingWorkspace.allocate(len(rows), part.shape[1], logits.device)
        out = torch.full((len(rows) + 2, 3), torch.nan, device=logits.device)
        each = candidates_triton(part, rows, **settings, first_id=rank * part.shape[1], workspace=workspace, out=out)
        assert each.shape == (len(rows), 3) and out[len(rows) :].isnan().all()
        candidates.append(each.clone())
    out = torch.full((len(rows) + 2,), -7, dtype=torch.int32, device=logits.device)
    sampled = best_of_slices_triton(torch.stack(candidates), rows, settings["temperature"], out)
    assert out[len(rows) :].tolist() == [-7, -7]
    return sampled


RUNS = pytest.mark.parametrize("run", [by_reference, by_triton])


@RUNS
@pytest.mark.parametrize(("vocab_size", "size"), [(320, 2), (1003, 2), (1003, 4), (330, 8), (4096, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_winner_is_the_whole_rows(kernel_device: str, run: Any, vocab_size: int, size: int, dtype: Any) -> None:
    """Up to the rounding of a score; in bfloat16 logits tie often, also in two slices."""
    values = UNFILTERED * 2
    settings = make_settings(values, seed=vocab_size + size, device=kernel_device)
    logits = make_logits(len(values), vocab_size, dtype, seed=size).to(kernel_device)
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(1))
    rows = order.int().to(kernel_device) + 1
    expected = sample_reference(logits, rows, **settings)
    actual = run(logits, rows, settings, size)
    assert actual.dtype == torch.int32
    is_greedy = settings["temperature"][rows.long()] <= 1e-5
    assert torch.equal(actual[is_greedy], expected[is_greedy])
    assert explained(logits, rows, settings, actual).all()
    assert (actual != expected).sum() <= 1


@RUNS
def test_equal_logits_go_to_the_lowest_id(kernel_device: str, run: Any) -> None:
    settings = make_settings([(0.0, 0, 1.0, 0.0)] * 3, device=kernel_device)
    logits = torch.full((3, 512), -3.0, device=kernel_device)
    logits[0, [511, 200, 201, 300]] = 0.0
    logits[1, [130, 500]] = torch.tensor([-0.0, 0.0], device=kernel_device)
    rows = torch.arange(1, 4, dtype=torch.int32, device=kernel_device)
    assert run(logits, rows, settings, 4).tolist() == [200, 130, 0]


@RUNS
def test_rows_that_are_not_finite(kernel_device: str, run: Any) -> None:
    """One slice condemns the whole row, whichever it is; masked tokens, and whole slices of them, are never sampled."""
    settings = make_settings([(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0)] * 7, device=kernel_device)
    logits = make_logits(14, 500, torch.float32).to(kernel_device)
    logits[0:2, 3] = torch.nan
    logits[2:4, 499] = torch.nan
    logits[4:6, 300] = torch.inf
    logits[6:8] = -torch.inf
    logits[8:10] = -torch.inf
    logits[8:10, 321] = -3e38
    logits[10:12, :256] = -torch.inf
    logits[12:14, 128:] = -torch.inf
    rows = torch.arange(1, 15, dtype=torch.int32, device=kernel_device)
    sampled = run(logits, rows, settings, 4).tolist()
    assert sampled[:8] == [-1] * 8
    assert sampled[8:10] == [321] * 2
    assert all(256 <= token < 500 for token in sampled[10:12])
    assert all(0 <= token < 128 for token in sampled[12:14])


@RUNS
@pytest.mark.parametrize("magnitude", [1e3, 1e30, 3e38])
def test_huge_logits_do_not_overflow(kernel_device: str, run: Any, magnitude: float) -> None:
    settings = make_settings([(temperature, 0, 1.0, 0.0) for temperature in (1e-4, 0.0, 0.5)], device=kernel_device)
    logits = make_logits(3, 300, torch.float32, spread=0.1).clamp_(-0.9, 0.9).to(kernel_device) * magnitude
    logits[:, 250] = magnitude
    logits[:, 3] = -magnitude
    rows = torch.arange(1, 4, dtype=torch.int32, device=kernel_device)
    assert run(logits, rows, settings, 2).tolist() == [250] * 3


def test_draws_over_slices_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    num_rows = 20_000
    logits = torch.full((num_rows, 128), -torch.inf)
    at = torch.tensor([5, 70, 64, 63, 127])
    logits[:, at] = probabilities.log()
    settings = make_settings([(1.0, 0, 1.0, 0.0)] * num_rows, seed=5)
    sampled = by_reference(logits, torch.arange(1, num_rows + 1, dtype=torch.int32), settings, 2)
    shares = torch.bincount(sampled.long(), minlength=128)[at] / num_rows
    deviations = (probabilities * (1 - probabilities) / num_rows).sqrt()
    assert ((shares - probabilities).abs() < 5 * deviations).all(), shares.tolist()


@RUNS
def test_no_rows(kernel_device: str, run: Any) -> None:
    settings = make_settings([(1.0, 0, 1.0, 0.0)], device=kernel_device)
    rows = torch.zeros(0, dtype=torch.int32, device=kernel_device)
    assert run(torch.zeros(0, 320, device=kernel_device), rows, settings, 2).shape == (0,)


@pytest.mark.gpu(seconds=8)
def test_real_vocabulary_and_graphs() -> None:
    """A Qwen3 vocabulary on 2, 4 and 8 ranks, captured once and replayed on other logits."""
    from types import SimpleNamespace

    num_rows, vocab_size = 64, 151_936
    values = [UNFILTERED[i % len(UNFILTERED)] for i in range(num_rows)]
    settings = make_settings(values, seed=3, device="cuda")
    rows = torch.arange(1, num_rows + 1, dtype=torch.int32, device="cuda")
    state: Any = SimpleNamespace(**settings)
    for size in (2, 4, 8):
        width = local_vocab(vocab_size, size)
        samplers = [SliceSampler(width, rank * width, num_rows, torch.device("cuda")) for rank in range(size)]
        slices = [part.clone() for part in slices_of(make_logits(num_rows, vocab_size, torch.bfloat16).cuda(), size)]

        def sample(samplers=samplers, slices=slices) -> Tensor:
            parts = zip(samplers, slices, strict=True)
            candidates = torch.stack([sampler.candidates(part, rows, state) for sampler, part in parts])
            return samplers[0].best(candidates, rows, state)

        sample()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sampled = sample()
        for seed in range(2):
            logits = make_logits(num_rows, vocab_size, torch.bfloat16, seed=seed).cuda()
            for part, new in zip(slices, slices_of(logits, size), strict=True):
                part.copy_(new)
            graph.replay()
            assert explained(logits, rows, settings, sampled).all()


@pytest.mark.gpu(seconds=5)
def test_edge_cases_on_gpu() -> None:
    """What holds under the interpreter, too."""
    test_equal_logits_go_to_the_lowest_id("cuda", by_triton)
    test_rows_that_are_not_finite("cuda", by_triton)
    for magnitude in (1e3, 1e30, 3e38):
        test_huge_logits_do_not_overflow("cuda", by_triton, magnitude)
    test_no_rows("cuda", by_triton)
