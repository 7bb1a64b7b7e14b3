"""Requests in flight, and who waits for each.

Owns: the calls of users, each a set of requests, and which request belongs to which. Invariant: a request that is in
flight is in the `pending` of a call until its result is in `finished`; one whose call nobody holds any more, or that
an interrupt left half entered or half removed, is found and dropped by `forget_dropped`. It deliberately runs nothing.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Protocol

from nanovllm.engine.request import Request
from nanovllm.outputs import RequestOutput


class Call:
    """Requests that belong together: those of one generate or generate_iter, or all that add_request took.

    `pending` holds the requests still to come, `finished` the results that nobody has fetched yet.
    """

    def __init__(self) -> None:
        self.pending: dict[str, Request] = {}
        self.finished: deque[tuple[int, RequestOutput]] = deque()
        self.broken = False  # an exception came out of it: its requests are to be dropped
        self.lost: str | None = None  # why requests of it went without a result

    def discard(self, request_id: str) -> None:
        """Take back a result that nobody has fetched."""
        self.finished = deque(item for item in self.finished if item[1].request_id != request_id)

    def check(self) -> None:
        """Raise a RuntimeError, once, if the engine was closed, or died, before it had all results."""
        if self.lost is not None:
            reason, self.lost = self.lost, None
            raise RuntimeError(reason)


class Engine(Protocol):
    """What runs calls."""

    def turn(self, call: Call) -> object: ...
    def drop(self, call: Call) -> object: ...


def results(call: Call, engine: Engine) -> Iterator[tuple[int, RequestOutput]]:
    """Results of `call` as they finish, each with its position in the call; closing it aborts the rest."""
    try:
        while call.pending or call.finished:
            while call.finished:
                yield call.finished.popleft()
            if call.pending:
                engine.turn(call)
        call.check()
    finally:
        engine.drop(call)


class Calls:
    """Requests by id, each with its call.

    Calls are held weakly: they are their callers', and one that is gone has nobody to give results to.
    """

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.expected_tokens = 0  # of all of them
        self.has_orphans = False  # a call is gone that had requests in flight
        self._calls: dict[str, weakref.ref[Call]] = {}

    def add(self, request: Request, call: Call) -> None:
        # first of the three, since the others are found by it
        self._calls[request.request_id] = weakref.ref(call, self._note_orphan)
        self.requests[request.request_id] = call.pending[request.request_id] = request
        self.expected_tokens += request.expected_tokens

    def _note_orphan(self, _: object) -> None:
        self.has_orphans = True

    def deliver(self, request: Request, output: RequestOutput) -> None:
        """Give a result to whoever waits for it."""
        call = self._call_of(request.request_id)
        if call is not None:
            call.finished.append((request.position, output))
        self.forget(request.request_id)

    def lose_all(self, reason: str) -> None:
        """Forget all requests, which will have no results, and let their callers know."""
        for request_id in list(self._calls):
            if (call := self._call_of(request_id)) is not None:
                call.lost = reason
            self.forget(request_id)

    def forget(self, request_id: str) -> Request | None:
        """Take a request out; an id that is not here is passed over."""
        call = self._call_of(request_id)
        if call is not None:
            call.pending.pop(request_id, None)
        self._calls.pop(request_id, None)
        request = self.requests.pop(request_id, None)
        self.expected_tokens = self.expected_tokens - request.expected_tokens if request and self.requests else 0
        return request

    def forget_dropped(self) -> None:
        """Take out the requests of broken calls, those without a caller, and those that are half gone already."""
        self.has_orphans = False
        calls = {call for reference in self._calls.values() if (call := reference()) is not None}
        delivered = {id(output.metrics) for call in calls for _, output in call.finished}
        for request_id in list(self._calls):
            call, request = self._call_of(request_id), self.requests.get(request_id)
            is_waited_for = call is not None and not call.broken and request_id in call.pending
            if not is_waited_for or request is None or id(request.metrics) in delivered:
                self.forget(request_id)
        for call in calls:
            call.broken = False

    def _call_of(self, request_id: str) -> Call | None:
        reference = self._calls.get(request_id)
        return reference() if reference is not None else None
