"""The scheduler against a fake device: thousands of random workloads, every KV slot that is read checked, no torch."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.scheduler_simulation import run_random_workload

ROOT = Path(__file__).resolve().parents[1]
NUM_WORKLOADS = 6000
NUM_PARTS = 12


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_random_workloads(part: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(part, NUM_WORKLOADS, NUM_PARTS):
        try:
            counts += run_random_workload(seed)
        except Exception as error:
            raise AssertionError(f"run_random_workload({seed}) failed") from error
    # What this is about really happened.
    kinds = ("cached", "cached_in_step", "chunks", "preemptions", "resumed", "aborts", "resets", "drafts")
    for kind in (*kinds, "block_copies", "forks_waiting", "prompts_given_up"):
        assert counts[kind] > 10, (kind, counts)


def test_the_scheduler_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from tests.scheduler_simulation import run_random_workload\n"
        "for seed in range(50): run_random_workload(10**6 + seed)\n"
        "assert not {'torch', 'transformers', 'triton', 'numpy'} & set(sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
