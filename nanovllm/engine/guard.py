"""Who is in the engine, and how it is changed.

Owns: the entries of everyone who is inside: a call that runs to its end, a change of the engine's state, an abort.
Invariant: one change at a time, whoever asks: another thread, a signal handler, an iterator that the garbage collector
closes, a callback. It deliberately never makes a change wait for a change (a step may take long, and may be waiting for
its caller): what can be put off, aborts and closing, is carried out at the end of the change that is running; all else
is refused.

An interrupt can come between any two instructions, so what it should have released may be left behind. An entry
therefore counts only while the function that made it is being executed, which Python knows whatever is raised where.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING

from nanovllm.engine.call import Call

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.engine.replicas import ReplicatedEngine

CALL, CHANGE, ABORT = "call", "change", "abort"
POLL_SECONDS = 0.0005


class EngineBusyError(RuntimeError):
    """The engine is in use, from another thread or further up the stack."""


@dataclass(slots=True, eq=False)
class Entry:
    """Somebody who is in the engine, for as long as `frame` is being executed."""

    frame: FrameType | None
    kind: str
    thread: int = field(default_factory=get_ident)


class Gate:
    """Lets one thread in at a time, and one change of its."""

    def __init__(self) -> None:
        self._entries: dict[Entry, None] = {}  # in order; each operation on it is atomic

    def enter(self, frame: FrameType, kind: str) -> Entry:
        """Raises EngineBusyError if somebody is inside. An abort in another thread, which is short, is waited for."""
        entry = Entry(frame, kind)
        self._entries[entry] = None  # first, so that of two that come at once one sees the other
        try:
            for other in takewhile(lambda other: other is not entry, list(self._entries)):
                while self._is_inside(other) and self._must_wait(entry, other):
                    time.sleep(POLL_SECONDS)
        except BaseException:
            self.leave(entry)
            raise
        return entry

    @staticmethod
    def _must_wait(entry: Entry, other: Entry) -> bool:
        if other.thread != entry.thread:
            if other.kind == ABORT and entry.kind != ABORT:
                return True
            raise EngineBusyError("an engine is used by one thread at a time, and another thread is using this one")
        if other.kind != CALL:
            raise EngineBusyError(
                "the engine is in the middle of a step, or of sleep, wake_up or update_weights: only abort and close "
                "can be called there"
            )
        return False

    def _is_inside(self, entry: Entry) -> bool:
        frame = entry.frame
        if frame is None:
            return False
        try:
            frame.clear()  # drops the variables of a function that has ended, and refuses while it runs
        except RuntimeError:
            return entry in self._entries
        self.leave(entry)
        return False

    def leave(self, entry: Entry) -> None:
        self._entries.pop(entry, None)
        entry.frame = None  # it holds the frame, and the frame may hold it

    def wait_for_others(self, seconds: float) -> None:
        """Until no other thread is inside, but not for ever."""
        deadline = time.monotonic() + seconds
        others = [entry for entry in list(self._entries) if entry.thread != get_ident()]
        while any(self._is_inside(entry) for entry in others) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


@dataclass
class Session:
    """A call that runs to its end: from its first request to its last result no other thread gets in."""

    engine: LLMEngine | ReplicatedEngine

    def __enter__(self) -> None:
        self.entry = self.engine.gate.enter(sys._getframe(1), CALL)

    def __exit__(self, *_: object) -> None:
        self.engine.gate.leave(self.entry)
        self.engine.catch_up()


@dataclass
class Guard:
    """Run a change of the engine's state whole, or mend what an exception out of it left.

    A class, not a generator: one that an interrupt leaves suspended would be closed, and mend, at any time later.

    Args:
        engine: which is entered.
        call: of a turn: who turns the engine.
        check: raises what refuses the change, before anything has changed.
        kind: CHANGE or ABORT.
    """

    engine: LLMEngine
    call: Call | None = None
    check: Callable[[], object] | None = None
    kind: str = CHANGE

    def __enter__(self) -> None:
        self.entry = self.engine.gate.enter(sys._getframe(1), self.kind)
        try:
            self.engine.begin_change(self.check)
        except BaseException:
            self.engine.gate.leave(self.entry)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        is_delivered = False
        try:
            if error is None:
                self.engine.end_change()
            else:
                is_delivered = self.engine.break_change(self.call, error)
        finally:
            self.engine.gate.leave(self.entry)
        self.engine.catch_up()
        return is_delivered
