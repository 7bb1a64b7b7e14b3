"""Where the engine hands plans to the device: in this process, or in others.

Owns: the model runner of this process, or the ranks that have processes of their own. Invariant: `submit` never waits
for the device, and results come back in the order of the plans. It deliberately adds nothing to a plan.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque
from collections.abc import Mapping
from threading import Event
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.engine.ranks import Ranks
from nanovllm.messages import ModelRunnerOutput, SchedulerOutput
from nanovllm.worker.loader import check_float
from nanovllm.worker.model_runner import ModelRunner
from nanovllm.worker.output_ring import PendingOutput
from nanovllm.worker.platform import plain_torch
from nanovllm.worker.weights import Source, check_pair

REPORTED = (ValueError, TypeError, RuntimeError, OSError, MemoryError)  # by a rank, which goes on


def start_executor(config: Config, first_device: int = 0, arrived: Event | None = None) -> AnyExecutor:
    """What runs one copy of the model: one GPU's in this process, several GPUs' in processes of their own.

    Args:
        first_device: of its ranks.
        arrived: is set whenever a rank has sent something.
    """
    num_devices = config.tensor_parallel_size * config.data_parallel_size
    if num_devices == 1:
        return Executor(config)
    if config.device != "cpu" and torch.cuda.is_available() and torch.cuda.device_count() < num_devices:
        raise ValueError(
            f"tensor_parallel_size * data_parallel_size is {num_devices}, and torch sees {torch.cuda.device_count()} "
            "CUDA devices (CUDA_VISIBLE_DEVICES may hide some)"
        )
    return RanksExecutor(config, first_device, arrived)


class Executor:
    """Runs plans on one device, in this process."""

    def __init__(self, config: Config) -> None:
        with plain_torch():
            self._runner: ModelRunner | None = ModelRunner(config)
        self.num_kvcache_blocks = self._runner.num_kvcache_blocks
        self.block_size = self._runner.block_size

    @property
    def runner(self) -> ModelRunner:
        assert self._runner is not None, "the executor is closed"
        return self._runner

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        """Enqueue a step; `.wait()` of what is returned gives its ModelRunnerOutput."""
        with plain_torch():
            return self.runner.execute(plan)

    @property
    def weights_missing(self) -> str | None:
        """Why there are no weights to compute with, for the error that the caller raises; None: there are."""
        return self.runner.weights.missing

    def sleep(self, level: int) -> None:
        """Give back the memory of KV cache, graphs and weights, whose contents level 1 keeps. Nothing is in flight."""
        self.runner.sleep(keep_weights=level == 1)

    def wake_up(self) -> None:
        """Take the memory again; the KV cache is empty. Raises when there is too little, and holds none then."""
        with plain_torch():
            self.runner.wake_up()

    def update_weights(self, source: Source) -> None:
        """Replace the weights in place. Nothing is in flight."""
        with plain_torch():
            self.runner.update_weights(source)

    def idle(self) -> None:
        """The engine has run out of work for now."""
        self.runner.outputs.idle()

    def recover(self) -> None:
        """After an exception: wait for all that is enqueued and forget it. Raises when the device itself is broken."""
        self.runner.synchronize()
        self.runner.reset()

    def stats(self) -> dict[str, float]:
        return self.runner.stats()

    def close(self) -> None:
        """Give back all device memory; may be called again."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            runner.close()


class RankedOutput:
    """The output of a step that ranks run."""

    def __init__(self, executor: RanksExecutor) -> None:
        self.executor = executor
        self.output: ModelRunnerOutput | None = None

    def wait(self) -> ModelRunnerOutput:
        """Block until it is there.

        Raises:
            RuntimeError: a rank has failed or died.
        """
        while self.output is None:
            self.executor.take(self.executor.ranks.receive())
        return self.output

    def has_arrived(self) -> bool:
        """Whether `wait` would return at once; raises as it does."""
        while self.output is None and (message := self.executor.ranks.try_receive()) is not None:
            self.executor.take(message)
        return self.output is not None


class RanksExecutor:
    """Runs plans on the devices of a group of ranks, each in a process of its own.

    The first device is `first_device`, of those that CUDA_VISIBLE_DEVICES shows.
    """

    def __init__(self, config: Config, first_device: int, arrived: Event | None = None) -> None:
        self.ranks = Ranks(config, first_device, arrived or Event())
        assert config.num_kvcache_blocks is not None and config.kvcache_block_size is not None
        self.num_kvcache_blocks = config.num_kvcache_blocks
        self.block_size = config.kvcache_block_size
        self.weights_missing: str | None = None
        self._waiting: deque[RankedOutput] = deque()
        self._stats: dict[str, float] = {}
        self._tickets = itertools.count(1)

    def submit(self, plan: SchedulerOutput) -> RankedOutput:
        if self.ranks.failure is not None:
            raise RuntimeError(self.ranks.failure)
        output = RankedOutput(self)
        self._waiting.append(output)
        self.ranks.send("execute", plan)
        return output

    def take(self, message: tuple[int, tuple[Any, ...]]) -> None:
        """Give an output that has arrived to whom it belongs: they come in the order of the plans."""
        _, (kind, *values) = message
        if kind == "output" and self._waiting:  # else what was interrupted would have wanted it
            output, self._stats = values
            self._waiting.popleft().output = output

    def _ask(self, kind: str, payload: Any = None) -> None:
        """Have every rank do something, behind the steps in flight, and wait until all have.

        Raises:
            ValueError, TypeError, RuntimeError, OSError, MemoryError: what a rank raised; a RuntimeError too when one
                has failed or died.
        """
        self.await_answers(self.begin(kind, payload))

    def await_answers(self, ticket: int) -> None:
        answers: dict[int, tuple[Any, ...]] = {}
        while len(answers) < self.ranks.size:
            rank, message = self.ranks.receive()
            if message[0] == "output":
                self.take((rank, message))
            elif message[2] == ticket:
                answers[rank] = message
        in_order = [answers[rank] for rank in range(self.ranks.size)]
        self.weights_missing = next((missing for *_, missing in in_order if missing is not None), None)
        for kind, value, *_ in in_order:
            if kind == "error":
                raise value

    def sleep(self, level: int) -> None:
        self._ask("sleep", level)

    def wake_up(self) -> None:
        self._ask("wake_up")

    def update_weights(self, source: Source) -> None:
        """Replace the weights in place. Tensors are sent to every rank, which keeps its part."""
        update_ranks([self], source)

    def begin(self, kind: str, payload: Any = None) -> int:
        """Have every rank do something; what `await_answers` needs to know."""
        ticket = next(self._tickets)
        self.ranks.send(kind, payload, ticket)
        return ticket

    def idle(self) -> None:
        self.ranks.send("idle")

    def recover(self) -> None:
        """After an exception: let the ranks end what they have, and forget it.

        Raises:
            RuntimeError: a rank has failed or died.
        """
        self._waiting.clear()
        self._ask("reset")

    def stats(self) -> dict[str, float]:
        """As of the last output. Asks no rank: an interrupt of that would lose outputs, and nobody mends it."""
        return self._stats

    def close(self) -> None:
        """End the ranks; may be called again."""
        self.ranks.close()


def update_ranks(executors: list[RanksExecutor], source: Source) -> None:
    """Replace the weights of several copies of the model at once, in place; `source` is gone through once.

    Raises: as `Executor.update_weights`; an exception of the source itself too.
    """
    if isinstance(source, str | os.PathLike):
        folder = os.path.abspath(os.path.expanduser(source))  # ranks stay where they started
        tickets = [executor.begin("update_folder", folder) for executor in executors]
        _await_all(executors, tickets)
        return
    tickets = [executor.begin("update_tensors") for executor in executors]
    try:
        for pair in source.items() if isinstance(source, Mapping) else source:
            check_pair(pair)
            for executor in executors:
                executor.ranks.wait_for_room()
                executor.ranks.send("tensor", (pair[0], _to_send(*pair)))
    except BaseException as error:
        for executor in executors:
            executor.ranks.send("tensors_end", f"the source of the weights failed with {error!r}")
        with contextlib.suppress(*REPORTED):  # the source's own failure says more
            _await_all(executors, tickets)
        raise
    for executor in executors:
        executor.ranks.send("tensors_end")
    _await_all(executors, tickets)


def _to_send(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """On the host, of torch's own class (ranks may not know the caller's), and a view of nothing larger: that would be
    pickled whole."""
    check_float(name, tensor)
    tensor = tensor.detach().cpu().as_subclass(torch.Tensor)
    return tensor if tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size() else tensor.clone()


def _await_all(executors: list[RanksExecutor], tickets: list[int]) -> None:
    """Wait for all, then raise what the first one raised."""
    errors: list[Exception] = []
    for executor, ticket in zip(executors, tickets, strict=True):
        try:
            executor.await_answers(ticket)
        except REPORTED as error:
            errors.append(error)
    if errors:
        raise errors[0]


AnyExecutor = Executor | RanksExecutor
