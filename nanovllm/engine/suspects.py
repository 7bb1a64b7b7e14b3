"""Which request is to blame for a step that failed.

Owns: who is suspected, who is being tried, and who waits for that. Invariant: while a suspect is tried, its steps hold
nothing else, so that if one of them fails it is known whose error that is. It deliberately judges by that alone and
reads no error: what one request brought about (a bad row) and what all did (memory) look alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

from nanovllm.engine.request import Request

MAX_FAILURES = 5  # of steps that a request was in, whoever else was, and though it ran alone in between: it is lost


class Suspects:
    """Lets requests through to the scheduler, suspects one at a time.

    Args:
        num_tokens: that a suspect must get while alone, of each sample, to be cleared: the step that failed may have
            been so far ahead of what the host knows.
    """

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.reset()

    def reset(self) -> None:
        """Nobody is tried and nobody waits; who is suspected stays so."""
        self._on_trial: Request | None = None
        self._num_known: list[int] = []  # tokens of each of its samples, when its trial began
        self._held: deque[Request] = deque()

    def blame(self, requests: list[Request], own: Mapping[str, Request]) -> tuple[list[Request], bool]:
        """After a step of `requests` failed: (those that are lost to it, whether the call that ran it has to see it).

        The rule: a step of a single request is that one's fault. Of several, one's own are at fault before those of
        others (`own`: of the call that ran the step), which are from now on suspects; without own ones all are
        suspects, and the call goes on. A request that was in `MAX_FAILURES` failing steps is lost.
        """
        others = [request for request in requests if request.request_id not in own]
        if len(requests) == 1:
            return others, not others
        for request in others:
            request.is_suspect = True
            request.num_failures += 1
        return [r for r in others if r.num_failures >= MAX_FAILURES], len(others) < len(requests) or not requests

    def lets_through(self, request: Request) -> bool:
        """Whether it may be queued now; otherwise it is held, until `released` gives it back."""
        if self._on_trial is not None:
            self._held.append(request)
            return False
        if request.is_suspect:
            self._on_trial = request
            self._num_known = [len(seq.token_ids) for seq in request.seqs]
        return True

    def released(self, requests: Mapping[str, Request]) -> Iterable[Request]:
        """If a trial is over: who waited for its end and is still in `requests`, in order, the suspects first."""
        tried = self._on_trial
        if tried is None or (requests.get(tried.request_id) is tried and not self._is_cleared(tried)):
            return ()
        tried.is_suspect = False
        held = self._held
        self.reset()
        return [request for request in held if requests.get(request.request_id) is request]

    def _is_cleared(self, request: Request) -> bool:
        return all(
            seq.is_finished or len(seq.token_ids) >= num_known + self.num_tokens
            for seq, num_known in zip(request.seqs, self._num_known, strict=True)
        )
