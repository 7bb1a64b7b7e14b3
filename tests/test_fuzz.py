"""Random requests on random engines, against each request by itself; `tests/fuzz.py` says how.

A failure is shown in its smallest form. `python -m tests.fuzz --requests 10000` runs many more.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz import Reference, Setup, Tally, run_episode
from tests.tiny_models import make_tiny_model

NUM_EPISODES = 60


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    """The simplest ones come first in each list: a failure shrinks to them."""
    block_size = draw(st.sampled_from((16, 8, 4, 3, 2, 1)))
    max_model_len = draw(st.sampled_from((16, 32, 48, 80)))
    whole = -(-max_model_len // block_size)  # blocks of one sequence
    num_blocks = draw(st.sampled_from((whole * 4, whole * 2, whole + 2, whole, max(2, whole // 2))))
    options: dict[str, Any] = dict(
        kvcache_block_size=block_size,
        max_model_len=max_model_len,
        num_kvcache_blocks=1 + num_blocks,
        max_num_seqs=draw(st.sampled_from((1, 2, 3, 5, 8, 16))),
        max_num_batched_tokens=draw(st.sampled_from((16384, 40, 16, 7, 4, 1))),
        max_in_flight=draw(st.sampled_from((1, 2, 3))),
        enable_prefix_caching=draw(st.booleans()),
    )
    return Setup(
        str(draw(st.integers(0, 2**32))),
        options,
        num_rounds=draw(st.integers(1, 2)),
        max_requests=draw(st.sampled_from((1, 2, 4, 10, 20))),
        is_reckless=draw(st.booleans()),
        has_trouble=draw(st.booleans()),
        has_weak_hashes=draw(st.booleans()),
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = make_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=True)
    reference = Reference(folder)
    gc.collect()
    gc.freeze()  # each engine that closes collects garbage, and need not look through all libraries
    yield folder, reference
    gc.unfreeze()
    reference.llm.close()


@pytest.mark.slow
def test_a_request_gives_what_it_gives_alone(reference: tuple[Path, Reference]) -> None:
    tally = Tally()

    @settings(
        max_examples=NUM_EPISODES,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
    )
    @given(setup=setups())
    def check(setup: Setup) -> None:
        run_episode(*reference, tally, setup)

    check()
    print(tally.line())
    assert tally.counts["ties"] * 100 <= tally.counts["compared"]
    assert all(tally.counts[name] for name in ("compared", "refused", "aborted", "interrupts", "preemptions"))
