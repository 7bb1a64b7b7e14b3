"""The engine: requests in, results out, steps overlapped in between.

Owns: the requests in flight, the steps in flight and the one loop that turns them into results. Invariant: between
two calls from outside, scheduler, requests and device agree; whatever breaks that (an exception, Ctrl-C) is mended
before anything else runs, and what comes in the middle of a change waits for its end. It deliberately holds no policy:
what runs next is the scheduler's, what ends a request the output processor's.
"""

from __future__ import annotations

import itertools
import logging
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.call import Call, Calls, results
from nanovllm.engine.executor import AnyExecutor
from nanovllm.engine.guard import ABORT, EngineBusyError, Gate, Guard
from nanovllm.engine.logprobs import collect_logprobs
from nanovllm.engine.output_processor import OutputProcessor, lost_output
from nanovllm.engine.request import Limits, Request, Tokenizer, eos_token_ids, new_sequences, queue_order, request_seed
from nanovllm.engine.scheduler import Step, new_scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.suspects import Suspects
from nanovllm.outputs import RequestOutput

logger = logging.getLogger("nanovllm")


class LLMEngine:
    """Runs checked requests to their end.

    Args:
        config: engine options.
        executor: runs the plans; the engine closes it.
        tokenizer: for the text of results; None: text is "".
    """

    def __init__(self, config: Config, executor: AnyExecutor, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self.executor = executor
        self._finalizer = weakref.finalize(self, self.executor.close)  # also at exit
        self.num_kvcache_blocks = self.executor.num_kvcache_blocks
        self.scheduler = new_scheduler(config, self.num_kvcache_blocks, self.executor.block_size)
        self.output_processor = OutputProcessor(tokenizer, config.model_config.vocab_size)
        self.limits = Limits(
            vocab_size=config.model_config.vocab_size,
            max_model_len=config.max_model_len,
            pool_tokens=(self.num_kvcache_blocks - 1) * self.executor.block_size,
            eos_token_ids=eos_token_ids(config.model_config, tokenizer),
            tokenizer=tokenizer,
        )
        self.gate = Gate()
        self._suspects = Suspects(config.max_in_flight or 1)
        self._at_work: list[Sequence] = []  # whose error it is, if there is one now
        self.calls = Calls()
        self.loop_call = Call()  # of whoever turns the engine by hand
        self._dropped: deque[tuple[str, Call | None]] = deque()  # to be aborted; the call, so that it lives till then
        self._in_flight: deque[tuple[Step, Any]] = deque()
        self._ids = itertools.count()
        self._num_requests = 0
        self._num_steps = 0
        self._num_generated_tokens = 0
        self._dirty = False  # the host's state may be half-changed
        self._asleep = False
        self._closing = False  # asked for, by somebody who could not do it
        self._dead: str | None = None

    # ---- requests -----------------------------------------------------------------------------------------------

    def submit(self, requests: Iterable[Request], call: Call) -> None:
        """Queue checked requests as part of `call`; see `queue_order`.

        Raises:
            ValueError: a request id that is in use.
            RuntimeError: the engine is asleep, has no weights, or is closed or dead.
        """
        requests = list(requests)
        added: list[tuple[str, Call | None]] = []
        try:
            with Guard(self, check=lambda: self._check_can_take(requests)):
                call.broken = False  # an interrupt may have left it so; what it meant has been mended
                for request in requests:
                    added.append((request.request_id, None))
                    self._submit(request, call)
                for request in queue_order(requests, self.config.max_num_seqs):
                    self._admit(request)
        except BaseException:
            self._dropped.extend(added)  # by the next use; they hold nothing yet
            raise

    def _check_can_take(self, requests: list[Request]) -> None:
        if self._asleep:
            raise RuntimeError("the engine is asleep: call wake_up() first")
        if self.executor.weights_missing is not None:
            raise RuntimeError(self.executor.weights_missing)
        for request in requests:
            if request.request_id in self.calls.requests:
                raise ValueError(f"request_id {request.request_id!r} is in use by a request that has not finished")

    def _submit(self, request: Request, call: Call) -> None:
        if request.ordinal < 0:
            request.ordinal = self._num_requests
            self._num_requests += 1
        request.seed = request_seed(request.params, self.config.seed, request.ordinal)
        self.calls.add(request, call)

    def _admit(self, request: Request) -> None:
        if self._suspects.lets_through(request):
            self._queue(request)

    def _queue(self, request: Request) -> None:
        """Queue its samples, those that have not ended, from the tokens that are known. One computes the prompt."""
        request.seqs = new_sequences(request)
        first, *first.forks = [seq for seq in request.seqs if not seq.is_finished]
        for seq in (first, *first.forks):
            self.output_processor.follow(seq, request)
        self.scheduler.add(first)

    def new_request_id(self) -> str:
        """A fresh id: the next number that no request in flight has for its name."""
        while (request_id := str(next(self._ids))) in self.calls.requests:
            pass
        return request_id

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests wherever they are; ids that are not here are passed over.

        May be called from anywhere, at any time: in the middle of a change it takes effect at the end of that.
        """
        self._dropped.extend([(request_id, None) for request_id in request_ids])
        self.catch_up()

    def drop(self, call: Call) -> None:
        """Abort what is left of a call whose caller has gone; as `abort`, but nothing where all is lost anyway."""
        if call.pending and self._dead is None:
            self._dropped.extend([(request_id, call) for request_id in list(call.pending)])
            self.catch_up()

    def _abort_dropped(self) -> None:
        while self._dropped:
            request_id = self._dropped[0][0]
            request = self.calls.forget(request_id)
            if request is None:
                self.loop_call.discard(request_id)
            for seq in reversed(request.seqs if request is not None else ()):  # the first last: it has the forks
                self.scheduler.abort(seq)
            self._dropped.popleft()

    # ---- the loop -----------------------------------------------------------------------------------------------

    def run(self, call: Call) -> Iterator[tuple[int, RequestOutput]]:
        """Results of `call` as they finish, each with its position in the call; closing it aborts the rest."""
        return results(call, self)

    def turn(self, call: Call | None = None, may_wait: bool = True) -> bool:
        """One turn of the loop for whoever has work; whether anything came of it. Without `may_wait`, a step that has
        not ended is left to a later turn.

        An exception in a step is raised here and breaks `call` if the step held requests of it, or nobody's; others of
        the step are then tried alone, each of them (see `Suspects.blame`). What is found to be at fault alone gets
        the error as its result, and nobody else sees it. An interrupt breaks `call` and nobody else.

        Raises:
            RuntimeError: the engine is closed or dead, or work is waiting that can never run.
        """
        went_on = True
        with Guard(self, call):
            self._at_work = []
            self._go_on_with_trials()
            step = self.scheduler.schedule()
            if step is not None:
                self._at_work = step.seqs
                self._in_flight.append((step, self.executor.submit(step.plan)))
            elif not self._in_flight and self.scheduler.has_work():
                raise RuntimeError(self.scheduler.stuck_reason())
            if self._in_flight and (step is None or len(self._in_flight) == self.config.max_in_flight):
                if may_wait or self._in_flight[0][1].has_arrived():
                    self._collect()
                else:
                    went_on = step is not None
            if not self.scheduler.has_work() and (may_wait or went_on):
                self._drain()
        return went_on

    def _go_on_with_trials(self) -> None:
        released = self._suspects.released(self.calls.requests)
        if any(request.is_suspect for request in released):
            self._recover()  # the next one runs alone, too: whoever runs now waits, and goes on from what is known
            self._dirty = True
        else:
            for request in released:
                self._admit(request)

    def _collect(self) -> None:
        """Wait for the oldest step in flight and give out what it finished."""
        step, pending = self._in_flight.popleft()
        self._at_work = step.seqs
        output = pending.wait()  # tokens reach the host here, nowhere else
        collect_logprobs(step, output)
        self.scheduler.update(step, output)
        self._num_steps += 1
        self._num_generated_tokens += len(output.token_ids)
        ended = self.output_processor.process(step, self.calls.requests)
        if ended:
            self.scheduler.finish(ended)
            for request_id in dict.fromkeys(seq.request_id for seq in ended):
                request = self.calls.requests[request_id]
                if request.is_finished:  # all its samples
                    self._deliver(request)

    def _deliver(self, request: Request) -> None:
        self._at_work = request.seqs
        self.calls.deliver(request, self.output_processor.output(request))

    def _drain(self) -> None:
        """Nothing left to schedule: collect what is in flight, so that every row and block is free again."""
        while self._in_flight:
            self._collect()
        self.executor.idle()

    # ---- when something breaks ----------------------------------------------------------------------------------

    def begin_change(self, check: Callable[[], object] | None) -> None:
        """First complete what an interrupt may have kept from being done at once."""
        if self._closing:
            self._shut()
        self.check_alive()
        if self._dirty or self.calls.has_orphans:
            self._recover()
            self.check_alive()
        if self._dropped:
            self._dirty = True
            self.end_change()
        if check is not None:
            check()
        self._dirty = True

    def end_change(self) -> None:
        self._abort_dropped()
        self._dirty = False

    def break_change(self, call: Call | None, error: BaseException) -> bool:
        """Mend after an exception out of a change; `call`: whose turn it was. True: it need not see the error."""
        is_for_call = call is None or not isinstance(error, Exception) or self._blame(call, error)
        if call is not None:
            call.broken = is_for_call
        self._recover()
        return not is_for_call and self._dead is None

    def _blame(self, call: Call, error: Exception) -> bool:
        ids = dict.fromkeys(seq.request_id for seq in self._at_work)
        requests = [self.calls.requests[request_id] for request_id in ids if request_id in self.calls.requests]
        lost, is_for_call = self._suspects.blame(requests, call.pending)
        for request in lost:
            logger.warning("request %s is lost to an error in a step", request.request_id, exc_info=error)
            self.calls.deliver(request, lost_output(request, error))
        return is_for_call

    def catch_up(self) -> None:
        """Carry out what had to wait, unless somebody is in the engine, who does it then."""
        if self._closing:
            self.close()
        elif self._dropped:
            with suppress(EngineBusyError), Guard(self, kind=ABORT):
                pass

    def check_alive(self) -> None:
        """Raises RuntimeError if the engine is closed or dead."""
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
            self._die(f"the engine is dead: the device failed with {error}")
            return
        self.scheduler.reset()
        self._abort_dropped()
        self.calls.forget_dropped()
        self._suspects.reset()
        for request in sorted(self.calls.requests.values(), key=lambda request: not request.is_suspect):
            try:
                self._resume(request)
            except Exception as error:  # or it would come up again and again
                self.calls.deliver(request, lost_output(request, error))
                raise
        self._dirty = False

    def _resume(self, request: Request) -> None:
        for seq in request.seqs:
            if not seq.is_finished:
                self.output_processor.check_end_again(seq, request)
        if request.is_finished:
            self._deliver(request)
        else:
            self._admit(request)

    def _die(self, reason: str) -> None:
        self._dead = self._dead or reason
        self._in_flight.clear()
        self._dropped.clear()
        self.calls.lose_all(self._dead)

    # ---- weights and memory -------------------------------------------------------------------------------------

    def sleep(self, level: int) -> None:
        """Give back the memory of weights, KV cache and graphs; see the LLM class."""
        if level not in (1, 2):
            raise ValueError(f"level must be 1 (weights go to the host) or 2 (weights are dropped), got {level!r}")
        with Guard(self, check=lambda: self.require_idle("sleep")):
            self._drain()
            self.scheduler.reset_prefix_cache()
            self._asleep = True  # from here on, so that an interrupt does not leave half an engine in use
            self.executor.sleep(level)

    def wake_up(self) -> None:
        """Take the memory again; see the LLM class."""
        with Guard(self):
            if self._asleep:
                self.executor.wake_up()
                self._asleep = False

    def update_weights(self, source: Any, update: Callable[[], None] | None = None) -> None:
        """Replace the weights in place; see the LLM class. `update` does it, where this engine's executor does not."""
        with Guard(self, check=lambda: self.require_idle("update_weights", awake=True)):
            self._drain()
            self.scheduler.reset_prefix_cache()
            apply = update or (lambda: self.executor.update_weights(source))
            apply()

    def require_idle(self, what: str, awake: bool = False) -> None:
        """Raises RuntimeError if requests have not finished, or the engine is asleep and must not be."""
        if num_requests := len(self.calls.requests):
            raise RuntimeError(
                f"{what} needs an idle engine, and requests have not finished ({num_requests}): run them to their end, "
                "or abort them"
            )
        if awake and self._asleep:
            raise RuntimeError(f"{what}: the engine is asleep: call wake_up() first")

    # ---- facts --------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running requests keep theirs."""
        with Guard(self):
            self.scheduler.reset_prefix_cache()

    def stats(self) -> dict[str, float]:
        """Counts since the engine started; see the LLM class."""
        scheduler = self.scheduler
        return {
            "prompt_tokens_computed": scheduler.num_prompt_tokens_computed,
            "prompt_tokens_cached": scheduler.num_prompt_tokens_cached,
            "generated_tokens": self._num_generated_tokens,
            "steps": self._num_steps,
            "preemptions": scheduler.num_preemptions,
            "max_seqs_in_flight": scheduler.max_seqs_in_flight,
            "kv_blocks_total": scheduler.num_total_blocks,
            "kv_blocks_free": scheduler.num_free_blocks,
        } | (self.executor.stats() if self._dead is None else {})

    def close(self) -> None:
        """Drop all requests and give back all device memory; may be called again, and from anywhere.

        In the middle of a change it takes effect at the end of that, which another thread waits for.
        """
        self._closing = True
        try:
            entry = self.gate.enter(sys._getframe(), ABORT)
        except EngineBusyError:
            self.gate.wait_for_others(seconds=10.0)
        else:
            try:
                self._shut()
            finally:
                self.gate.leave(entry)

    def _shut(self) -> None:
        self._die("the engine is closed")
        self._finalizer()
