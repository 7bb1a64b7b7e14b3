"""What every test shares: Triton's interpreter where there is no GPU, the device kernels run on, and how tests marked
`gpu` run: in which order, for how long at most, and with their failures shown at once.

`TRITON_INTERPRET` has to be set before any kernel is decorated, so it is set here, when pytest loads this file.
"""

from __future__ import annotations

import os

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
GPU_SECONDS = 5  # what a test marked `gpu` without a time takes, roughly
GPU_TIMEOUT = 60  # seconds


@pytest.hookimpl(trylast=True)  # after what -m and -k leave out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not HAS_CUDA:
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        return
    for item in gpu_items:
        # By a thread that ends the process: no signal reaches Python while it waits for a kernel that hangs.
        item.add_marker(pytest.mark.timeout(GPU_TIMEOUT, method="thread"))
        if item.get_closest_marker("gpu_alone") and "PYTEST_XDIST_WORKER" in os.environ:
            item.add_marker(pytest.mark.skip(reason="measures the whole card: run `pytest -m gpu_alone`"))
    others = [item for item in items if not item.get_closest_marker("gpu")]
    gpu_items.sort(key=gpu_seconds, reverse=True)
    items[:] = deal(gpu_items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))) + others


def gpu_seconds(item: pytest.Item) -> float:
    if item.get_closest_marker("gpu_alone"):
        return 0  # skipped, or by itself
    return item.get_closest_marker("gpu").kwargs.get("seconds", GPU_SECONDS)


def deal(items: list[pytest.Item], num_workers: int) -> list[pytest.Item]:
    """In the order in which `--dist worksteal`, which cuts a list into equal pieces, gives each worker every n-th."""
    return [item for first in reversed(range(num_workers)) for item in items[first::num_workers]]


class FailuresAtOnce:
    """Prints what fails as it fails: time on a GPU machine may end before pytest's summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and "gpu" in report.keywords and terminal is not None:
            terminal.write_line(f"\n{report.nodeid} failed:\n{report.longreprtext}")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FailuresAtOnce(config))


@pytest.fixture
def kernel_device() -> str:
    """Where `*_triton` launchers can run: the GPU, or the CPU through Triton's interpreter."""
    pytest.importorskip("triton")
    return "cuda" if HAS_CUDA else "cpu"
