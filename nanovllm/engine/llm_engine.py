"""The engine: requests in, results out, steps overlapped in between.

Owns: the requests in flight, the steps in flight and the one loop that turns them into results. Invariant: between
two calls from outside, scheduler, requests and device agree; whatever breaks that (an exception, Ctrl-C) is mended
before anything else runs. It deliberately holds no policy: what runs next is the scheduler's, what ends a request the
output processor's.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.executor import Executor
from nanovllm.engine.output_processor import OutputProcessor
from nanovllm.engine.request import Limits, Request, Tokenizer, request_seed
from nanovllm.engine.scheduler import Scheduler, Step
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import RequestOutput

logger = logging.getLogger("nanovllm")


class Call:
    """Requests that belong together: those of one generate or generate_iter, or all that add_request took.

    `pending` holds the requests still to come, `finished` the results that nobody has fetched yet.
    """

    def __init__(self) -> None:
        self.pending: dict[str, Request] = {}
        self.finished: deque[tuple[int, RequestOutput]] = deque()
        self.broken = False  # an exception came out of it: its requests are to be dropped


class LLMEngine:
    """Runs checked requests to their end.

    Args:
        config: engine options.
        tokenizer: for the text of results; None: text is "".

    Raises:
        ValueError: an option that cannot work on this device.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self.executor = Executor(config)
        self._finalizer = weakref.finalize(self, self.executor.close)  # also at exit
        self.num_kvcache_blocks = self.executor.num_kvcache_blocks
        self.scheduler = self._new_scheduler()
        self.output_processor = OutputProcessor(tokenizer)
        self.limits = Limits(
            vocab_size=config.model_config.vocab_size,
            max_model_len=config.max_model_len,
            pool_tokens=(self.num_kvcache_blocks - 1) * self.executor.block_size,
            eos_token_ids=self._eos_token_ids(tokenizer),
        )
        self._calls: dict[str, Call] = {}  # request id -> its call
        self._requests: dict[str, Request] = {}
        self._in_flight: deque[tuple[Step, Any]] = deque()
        self._ids = itertools.count()
        self._num_requests = 0
        self._num_steps = 0
        self._num_generated_tokens = 0
        self._dirty = False  # the host's state may be half-changed
        self._dead: str | None = None

    def _new_scheduler(self) -> Scheduler:
        config = self.config
        assert config.max_in_flight is not None
        return Scheduler(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            num_blocks=self.num_kvcache_blocks,
            block_size=self.executor.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            max_in_flight=config.max_in_flight,
        )

    def _eos_token_ids(self, tokenizer: Any) -> tuple[int, ...]:
        ids = list(self.config.model_config.eos_token_ids)
        if tokenizer is not None and getattr(tokenizer, "eos_token_id", None) is not None:
            ids.append(tokenizer.eos_token_id)
        return tuple(dict.fromkeys(ids))

    # ---- requests -----------------------------------------------------------------------------------------------

    def submit(self, requests: Iterable[Request], call: Call) -> None:
        """Queue checked requests as part of `call`, in order.

        Raises:
            ValueError: a request id that is in use.
        """
        requests = list(requests)
        for request in requests:
            if request.request_id in self._requests:
                raise ValueError(f"request_id {request.request_id!r} is in use by a request that has not finished")
        with self._guard(call):
            for request in requests:
                request.seed = request_seed(request.params, self.config.seed, self._num_requests)
                self._num_requests += 1
                self._requests[request.request_id] = call.pending[request.request_id] = request
                self._calls[request.request_id] = call
                self._queue(request, request.prompt_token_ids)

    def _queue(self, request: Request, token_ids: list[int]) -> None:
        request.seq = Sequence(
            request.request_id,
            list(token_ids),
            request.params,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_total_tokens=request.max_total_tokens,
            seed=request.seed,
            end_ids=request.end_ids,
        )
        self.scheduler.add(request.seq)

    def new_request_id(self) -> str:
        """A fresh id: the next number that no request in flight has for its name."""
        while (request_id := str(next(self._ids))) in self._requests:
            pass
        return request_id

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests wherever they are; ids that are not here are passed over."""
        with self._guard(None):
            for request_id in request_ids:
                request = self._forget(request_id)
                if request is not None and request.seq is not None:
                    self.scheduler.abort(request.seq)

    def _forget(self, request_id: str) -> Request | None:
        request = self._requests.pop(request_id, None)
        call = self._calls.pop(request_id, None)
        if call is not None:
            call.pending.pop(request_id, None)
        return request

    # ---- the loop -----------------------------------------------------------------------------------------------

    def run(self, call: Call) -> Iterator[tuple[int, RequestOutput]]:
        """Results of `call` as they finish, each with its position in the call; closing it aborts the rest."""
        try:
            while call.pending or call.finished:
                while call.finished:
                    yield call.finished.popleft()
                if call.pending:
                    self.turn(call)
        finally:
            if call.pending:
                self.abort(list(call.pending))

    def turn(self, call: Call | None = None) -> None:
        """One turn of the loop for whoever has work; an exception in it is charged to `call`.

        Raises:
            RuntimeError: the engine is closed or dead, or work is waiting that can never run.
        """
        with self._guard(call):
            step = self.scheduler.schedule()
            if step is not None:
                self._in_flight.append((step, self.executor.submit(step.plan)))
            elif not self._in_flight and self.scheduler.has_work():
                raise RuntimeError(self.scheduler.stuck_reason())
            if self._in_flight and (step is None or len(self._in_flight) == self.config.max_in_flight):
                self._collect()
            if not self.scheduler.has_work():
                self._drain()

    def _collect(self) -> None:
        """Wait for the oldest step in flight and give out what it finished."""
        step, pending = self._in_flight.popleft()
        output = pending.wait()  # tokens reach the host here, nowhere else
        self.scheduler.update(step, output)
        self._num_steps += 1
        self._num_generated_tokens += len(output.token_ids)
        finished = self.output_processor.process(step, self._requests)
        if finished:
            self.scheduler.finish([request.seq for request in finished if request.seq is not None])
            for request in finished:
                self._deliver(request)

    def _deliver(self, request: Request) -> None:
        output = self.output_processor.output(request)
        call = self._calls[request.request_id]
        call.finished.append((request.position, output))
        self._forget(request.request_id)

    def _drain(self) -> None:
        """Nothing left to schedule: collect what is in flight, so that every row and block is free again."""
        while self._in_flight:
            self._collect()
        self.executor.idle()

    # ---- when something breaks ----------------------------------------------------------------------------------

    @contextmanager
    def _guard(self, call: Call | None) -> Iterator[None]:
        """Run a change of state whole, or mend: an exception out of it drops `call`'s requests, no others."""
        self._check_alive()
        if self._dirty:
            self._recover()
        self._dirty = True
        try:
            yield
            self._dirty = False
        except BaseException:
            if call is not None:
                call.broken = True
            self._recover()
            raise

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise RuntimeError(self._dead)

    def _recover(self) -> None:
        """Forget all steps in flight, free every row and block, and queue again what no broken call owns.

        Requests of other callers go on from the tokens that reached the host: noise depends on seed and position
        alone, so they end up with the tokens that they would have had.
        """
        self._in_flight.clear()
        try:
            self.executor.recover()
        except RuntimeError as error:
            self._dead = f"the engine is dead: the device failed with {error}"
            for request_id in list(self._requests):
                self._forget(request_id)
            return
        self.scheduler.reset()
        broken = {call for call in self._calls.values() if call.broken}
        for request_id in list(self._requests):
            call = self._calls.get(request_id)
            delivered = call is not None and any(output.request_id == request_id for _, output in call.finished)
            if call is None or call in broken or delivered:
                self._forget(request_id)
        for call in broken:
            call.broken = False
        for request in list(self._requests.values()):
            seq = request.seq
            if seq is not None and (seq.finish_reason or self.output_processor.check_end(seq, request)):
                self._deliver(request)
            else:
                self._queue(request, seq.token_ids if seq is not None else request.prompt_token_ids)
        self._dirty = False

    # ---- facts --------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running requests keep theirs."""
        with self._guard(None):
            self.scheduler.reset_prefix_cache()

    def stats(self) -> dict[str, float]:
        """Counts since the engine started; see the LLM class."""
        scheduler = self.scheduler
        stats: dict[str, float] = {
            "prompt_tokens_computed": scheduler.num_prompt_tokens_computed,
            "prompt_tokens_cached": scheduler.num_prompt_tokens_cached,
            "generated_tokens": self._num_generated_tokens,
            "steps": self._num_steps,
            "preemptions": scheduler.num_preemptions,
            "max_seqs_in_flight": scheduler.max_seqs_in_flight,
            "kv_blocks_total": scheduler.num_total_blocks,
            "kv_blocks_free": scheduler.num_free_blocks,
        }
        return stats | (self.executor.stats() if self._dead is None else {})

    def close(self) -> None:
        """Drop all requests and give back all device memory; may be called again."""
        self._dead = self._dead or "the engine is closed"
        self._in_flight.clear()
        for request_id in list(self._requests):
            self._forget(request_id)
        self._finalizer()
