"""Data parallelism: several engines, each with its own copy of the model and its own GPUs, behind the face of one.

Owns: which engine runs which request. Invariant: results do not depend on that: seeds are drawn in the order of the
requests, before they are dealt. It deliberately shares nothing between engines, prefixes neither; all of them are
driven from the caller's thread, and only their ranks are processes.

Requests are dealt by expected tokens: to the engine that has the fewest to come, of several at once the largest first.
An engine is never waited for while another could go on.
"""

from __future__ import annotations

import copy
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.call import Call, results
from nanovllm.engine.executor import AnyExecutor, RanksExecutor, start_executor, update_ranks
from nanovllm.engine.guard import CHANGE, Gate
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Request, Tokenizer
from nanovllm.outputs import RequestOutput

POLL_SECONDS = 0.5


def start_executors(config: Config) -> list[AnyExecutor]:
    """One executor a copy of the model, side by side; what was "auto" or None in `config` is resolved.

    Raises:
        ValueError, RuntimeError: one did not start; the others are closed.
    """
    configs = [config, *(copy.copy(config) for _ in range(config.data_parallel_size - 1))]
    if len(configs) == 1:
        return [start_executor(config)]
    arrived = threading.Event()
    starts: list[Future[AnyExecutor]] = []
    try:
        with ThreadPoolExecutor(len(configs), "start") as pool:
            for index, each in enumerate(configs):
                starts.append(pool.submit(start_executor, each, index * config.tensor_parallel_size, arrived))
        return [start.result() for start in starts]
    except BaseException:  # an interrupt, or what the first that failed has raised
        for start in starts:
            if start.exception() is None:  # waits for it
                start.result().close()
        raise


def build_engine(
    config: Config, executors: list[AnyExecutor], tokenizer: Tokenizer | None
) -> LLMEngine | ReplicatedEngine:
    """The engine of one copy of the model, or of several."""
    engines = [LLMEngine(config, executor, tokenizer) for executor in executors]
    return engines[0] if len(engines) == 1 else ReplicatedEngine(config, engines)


class ReplicatedEngine:
    """Engines behind the methods of one; see `LLMEngine` for what each does and raises."""

    def __init__(self, config: Config, engines: list[LLMEngine]) -> None:
        self.config = config
        self.engines = engines
        self.num_kvcache_blocks = sum(engine.num_kvcache_blocks for engine in engines)
        self.limits = replace(engines[0].limits, pool_tokens=min(engine.limits.pool_tokens for engine in engines))
        self.gate = Gate()
        self.loop_call = engines[0].loop_call
        for engine in engines:
            engine.loop_call = self.loop_call
        self._ids = itertools.count()
        self._ordinals = itertools.count()
        executor = engines[0].executor
        assert isinstance(executor, RanksExecutor)
        self._arrived = executor.ranks.arrived  # shared by all

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """One change at a time. Each engine mends itself after an exception."""
        entry = self.gate.enter(sys._getframe(), CHANGE)
        try:
            yield
        finally:
            self.gate.leave(entry)

    def catch_up(self) -> None:
        for engine in self.engines:
            engine.catch_up()

    # ---- requests -----------------------------------------------------------------------------------------------

    def new_request_id(self) -> str:
        while self._holds(request_id := str(next(self._ids))):
            pass
        return request_id

    def _holds(self, request_id: str) -> bool:
        return any(request_id in engine.calls.requests for engine in self.engines)

    def submit(self, requests: Iterable[Request], call: Call) -> None:
        requests = list(requests)
        with self._inside():
            for engine in self.engines:
                engine.check_alive()  # without one of them, who is served would be chance
            for request in requests:
                if self._holds(request.request_id):
                    raise ValueError(f"request_id {request.request_id!r} is in use by a request that has not finished")
            for request in requests:
                request.ordinal = next(self._ordinals)
            for engine, share in zip(self.engines, self._deal(requests), strict=True):
                if share:
                    engine.submit(share, call)

    def _deal(self, requests: Sequence[Request]) -> list[list[Request]]:
        """Each engine's, in the order of the call: prompts that begin alike often follow each other."""
        loads = [engine.calls.expected_tokens for engine in self.engines]
        owner: dict[int, int] = {}
        for index in sorted(range(len(requests)), key=lambda index: -requests[index].expected_tokens):
            owner[index] = loads.index(min(loads))
            loads[owner[index]] += requests[index].expected_tokens
        shares: list[list[Request]] = [[] for _ in self.engines]
        for index, request in enumerate(requests):
            shares[owner[index]].append(request)
        return shares

    def abort(self, request_ids: Iterable[str]) -> None:
        request_ids = list(request_ids)
        for engine in self.engines:
            engine.abort(request_ids)

    def drop(self, call: Call) -> None:
        for engine in self.engines:
            engine.drop(call)

    # ---- the loop -----------------------------------------------------------------------------------------------

    def run(self, call: Call) -> Iterator[tuple[int, RequestOutput]]:
        return results(call, self)

    def turn(self, call: Call | None = None) -> None:
        """Have every engine that can go on do so; if none can, wait until something has come of a step."""
        with self._inside():
            self._arrived.clear()  # before they look: what comes after that ends the wait
            busy = [engine for engine in self.engines if engine.calls.requests]
            went_on = [engine.turn(call, may_wait=False) for engine in busy]
            if busy and not any(went_on):
                self._arrived.wait(POLL_SECONDS)

    # ---- weights, memory, facts ---------------------------------------------------------------------------------

    def _each(self, act: Callable[[LLMEngine], object]) -> None:
        with self._inside():
            for engine in self.engines:
                act(engine)

    def sleep(self, level: int) -> None:
        self._each(lambda engine: engine.require_idle("sleep"))
        self._each(lambda engine: engine.sleep(level))

    def wake_up(self) -> None:
        """All of them, or none."""
        try:
            self._each(lambda engine: engine.wake_up())
        except BaseException:
            self._each(lambda engine: engine.sleep(1 if engine.executor.weights_missing is None else 2))
            raise

    def update_weights(self, source: Any) -> None:
        def update(rest: list[LLMEngine]) -> None:
            """Inside the change of every engine, send each tensor to all."""
            if rest:
                rest[0].update_weights(source, lambda: update(rest[1:]))
            else:
                executors = [engine.executor for engine in self.engines]
                update_ranks([executor for executor in executors if isinstance(executor, RanksExecutor)], source)

        with self._inside():
            update(self.engines)

    def reset_prefix_cache(self) -> None:
        self._each(lambda engine: engine.reset_prefix_cache())

    def stats(self) -> dict[str, float]:
        """Sums over the engines; times are means."""
        each = [engine.stats() for engine in self.engines]
        sums = {name: sum(stats.get(name, 0) for stats in each) for name in each[0]}
        return {name: value / len(each) if name.endswith("_ms") else value for name, value in sums.items()}

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
