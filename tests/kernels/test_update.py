"""The scatter of staged updates against plain slices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.update import scatter_updates, scatter_updates_reference, scatter_updates_triton


def make_updates(lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(state, staged, the state afterwards): segments of these lengths at shuffled places with gaps between."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.randint(-9, 9, (sum(lengths) + 3 * len(lengths) + 5,), dtype=torch.int32, generator=generator)
    payload = torch.randint(100, 10**9, (sum(lengths),), dtype=torch.int32, generator=generator)
    header, expected, src, dst = [], state.clone(), 3 * len(lengths), 2
    for length in lengths:
        header.append((dst, src, length))
        expected[dst : dst + length] = payload[src - 3 * len(lengths) :][:length]
        src += length
        dst += length + 3
    order = torch.randperm(len(lengths), generator=generator)
    staged = torch.cat((torch.tensor(header, dtype=torch.int32)[order].flatten(), payload))
    return state, staged, expected


@pytest.mark.parametrize("run", [scatter_updates, scatter_updates_reference])
@pytest.mark.parametrize("lengths", [[1], [3, 1, 0, 17], [1] * 40])
def test_reference(run: Callable[..., None], lengths: list[int]) -> None:
    state, staged, expected = make_updates(lengths)
    run(state, staged, len(lengths), max(lengths))
    assert torch.equal(state, expected)


@pytest.mark.parametrize("lengths", [[1], [3, 1, 0, 17], [1] * 20 + [2500], [1024], [70_000, 1]])
def test_kernel(kernel_device: str, lengths: list[int]) -> None:
    state, staged, expected = make_updates(lengths)
    state = state.to(kernel_device)
    # Also a staging slot that is not aligned, and rubbish behind the payload.
    buffer = torch.full((staged.numel() + 9,), -7, dtype=torch.int32, device=kernel_device)
    buffer[3 : 3 + staged.numel()] = staged.to(kernel_device)
    scatter_updates_triton(state, buffer[3:], len(lengths), max(lengths))
    assert torch.equal(state.cpu(), expected)


def test_kernel_without_updates(kernel_device: str) -> None:
    state = torch.arange(5, dtype=torch.int32, device=kernel_device)
    scatter_updates_triton(state, state.new_empty(0), 0, 0)
    assert state.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.gpu(seconds=2)
def test_real_step() -> None:
    """512 block appends and a few prompts of a real length in one plan."""
    lengths = [1] * 512 + [40_000, 1024, 777, 16_384]
    state, staged, expected = make_updates(lengths)
    state = state.cuda()
    scatter_updates(state, staged.cuda(), len(lengths), max(lengths))
    assert torch.equal(state.cpu(), expected)
