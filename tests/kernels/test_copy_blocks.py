"""The copy of KV blocks against plain indexing."""

from __future__ import annotations

import pytest
import torch

from nanovllm.kernels.copy_blocks import copy_blocks, copy_blocks_reference, copy_blocks_triton

PAIRS = [[(3, 1)], [(3, 1), (3, 2), (5, 4), (0, 6)]]


def make_case(pairs: list[tuple[int, int]], dtype: torch.dtype, shape: tuple[int, ...]):
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn((4, 8, *shape), generator=generator).to(dtype)
    expected = kv.clone()
    for source, target in pairs:
        expected[:, target] = kv[:, source]
    return kv, torch.tensor(pairs, dtype=torch.int32), expected


@pytest.mark.parametrize("run", [copy_blocks, copy_blocks_reference])
@pytest.mark.parametrize("pairs", PAIRS)
def test_reference(run, pairs) -> None:
    kv, pairs, expected = make_case(pairs, torch.float32, (4, 2, 16))
    run(kv, pairs)
    assert torch.equal(kv, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("shape", [(1, 1, 2), (5, 3, 34), (128, 2, 64)])
def test_kernel(kernel_device, shape, pairs, dtype) -> None:
    kv, pairs, expected = make_case(pairs, dtype, shape)
    kv = kv.to(kernel_device)
    copy_blocks_triton(kv, pairs.to(kernel_device))
    assert torch.equal(kv.cpu(), expected)
