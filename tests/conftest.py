"""What every test shares: Triton's interpreter where there is no GPU, the `gpu` marker, the device kernels run on.

`TRITON_INTERPRET` has to be set before any kernel is decorated, so it is set here, when pytest loads this file.
"""

from __future__ import annotations

import os

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped where there is none")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def kernel_device() -> str:
    """Where `*_triton` launchers can run: the GPU, or the CPU through Triton's interpreter."""
    pytest.importorskip("triton")
    return "cuda" if HAS_CUDA else "cpu"
