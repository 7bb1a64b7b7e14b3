"""Tensor-parallel ranks as threads of one process, to test what each of them computes without starting any.

Owns: `ThreadRank`, one place of a group that adds up and collects through a barrier, and `ThreadsExecutor`, an
executor whose model runners are such ranks. Invariant: a sum is made in the order of the ranks, so all get the same
bits. It deliberately tests no processes, messages or communicators.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from nanovllm.config import Config
from nanovllm.messages import SchedulerOutput
from nanovllm.worker.model_runner import ModelRunner

PATIENCE = 20.0  # seconds that a rank waits for the others


class Meeting:
    """Where `size` ranks exchange what they have."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.values: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """All ranks' values, by rank. Those that do not meet here fail with BrokenBarrierError."""
        self.values[rank] = value
        self.barrier.wait(PATIENCE)
        values = list(self.values)
        self.barrier.wait(PATIENCE)
        return values


class ThreadRank:
    """`TensorParallel`, and what else a RankGroup does, among threads."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size = rank, meeting.size
        self.meeting = meeting
        self.gathered_widths: set[int] = set()

    def partial_sums(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor | None:
        return None

    def all_reduce(self, x: Tensor) -> Tensor:
        values = self.meeting.exchange(self.rank, x.clone())
        assert all(value.shape == x.shape and value.dtype == x.dtype for value in values)
        return x.copy_(sum(values[1:], values[0]))

    def all_gather(self, x: Tensor) -> Tensor:
        self.gathered_widths.add(x.shape[-1])
        return torch.stack(self.meeting.exchange(self.rank, x.clone()))

    def minimum(self, value: int) -> int:
        return min(self.meeting.exchange(self.rank, value))

    def all_succeed(self, succeeds: bool) -> bool:
        return self.minimum(int(succeeds)) == 1


class SampledAlike:
    """The output of a step of all ranks, who have to have sampled the same."""

    def __init__(self, pending: list[Any]) -> None:
        self.pending = pending

    def wait(self) -> Any:
        outputs = [pending.wait() for pending in self.pending]
        for output in outputs[1:]:
            assert output.token_ids == outputs[0].token_ids
            assert output.logprobs == outputs[0].logprobs and output.prompt_logprobs == outputs[0].prompt_logprobs
        return outputs[0]

    def has_arrived(self) -> bool:
        return True


class ThreadsExecutor:
    """`config.tensor_parallel_size` model runners, each in its thread, behind the interface of `Executor`."""

    def __init__(self, config: Config) -> None:
        size = config.tensor_parallel_size
        self.pool = ThreadPoolExecutor(size, "rank")
        self.meeting = Meeting(size)
        self.groups = [ThreadRank(rank, self.meeting) for rank in range(size)]
        self.runners: list[ModelRunner] = []
        configs = [copy.copy(config) for _ in range(size)]
        self.runners = self._on_all(lambda rank: ModelRunner(configs[rank], self.groups[rank]))
        for name in ("device", "dtype", "max_in_flight", "kvcache_block_size", "num_kvcache_blocks"):
            (value,) = {getattr(each, name) for each in configs}  # all ranks agree
            setattr(config, name, value)
        self.num_kvcache_blocks = self.runners[0].num_kvcache_blocks
        self.block_size = self.runners[0].block_size

    def _on_all(self, call: Callable[[int], Any]) -> list[Any]:
        if self.meeting.barrier.broken:
            self.meeting.barrier.reset()
        futures = [self.pool.submit(call, rank) for rank in range(len(self.groups))]
        errors = [error for future in futures if (error := future.exception()) is not None]
        errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))  # it says the least
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def submit(self, plan: SchedulerOutput) -> SampledAlike:
        return SampledAlike(self._on_all(lambda rank: self.runners[rank].execute(copy.copy(plan))))

    @property
    def weights_missing(self) -> str | None:
        return self.runners[0].weights.missing

    def sleep(self, level: int) -> None:
        self._on_all(lambda rank: self.runners[rank].sleep(keep_weights=level == 1))

    def wake_up(self) -> None:
        self._on_all(lambda rank: self.runners[rank].wake_up())

    def update_weights(self, source: Any) -> None:
        self._on_all(lambda rank: self.runners[rank].update_weights(source))

    def idle(self) -> None:
        pass

    def recover(self) -> None:
        for runner in self.runners:
            runner.reset()

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self.runners.clear()
        self.pool.shutdown()
