"""A rank in a process of its own: `main`, with a descriptor and the driver's process id as arguments.

Owns: the process, its end of the socket pair that the descriptor names, and the loop in which it carries out what the
driver sends, in that order. Invariant: all ranks of a group get the same messages, so their collective calls match. It
deliberately knows no scheduler, and outlives nobody: it ends when the driver does, when it is told to, or when anything
fails inside a step, with the traceback as its last message.

Messages to a rank are (kind, payload, ticket). It answers ("output", ModelRunnerOutput, stats so far) to each
"execute", if it is the first rank, and ("done", value, ticket, why weights are missing) or ("error", exception, ...) to
each of the others but "idle"; behind an "error" it goes on. The last one is ("failed", traceback, time), or
("refused", traceback, time) if options or files are to blame that it does not start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from queue import Queue
from typing import Any

from nanovllm.config import Config

RESOLVED = ("device", "dtype", "max_in_flight", "kvcache_block_size", "num_kvcache_blocks")


class Rank:
    """The loop of one rank, on its own end of the connection to the driver."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._unread: list[tuple[str, Any, int]] = []
        self._in_flight: Queue[Any] = Queue()
        self._sending = threading.Lock()

    def send(self, message: tuple[Any, ...]) -> None:
        """To the driver, whole: when one thread fails, the other may be in the middle of a message."""
        with self._sending:
            self.connection.send(message)

    def _next(self) -> tuple[str, Any, int]:
        return self._unread.pop() if self._unread else self.connection.recv()

    def run(self) -> None:
        """From the first message ("start") to the last."""
        kind, start, _ = self._next()
        assert kind == "start"
        try:
            self._start(**start)
        except ValueError as error:
            raise Refusal from error
        while True:
            kind, payload, ticket = self._next()
            if kind == "close":
                self.runner.close()
                return
            if kind == "execute":
                self._in_flight.put(self.runner.execute(payload))
                continue
            self._in_flight.join()  # whoever waits for outputs gets them first
            if kind == "idle":
                self.runner.outputs.idle()
            else:
                self._answer(kind, payload, ticket)

    def _start(self, config: Config, rank: int, size: int, first_device: int, log_level: int) -> None:
        import torch

        from nanovllm.layers.parallel import SINGLE, SingleRank
        from nanovllm.worker.model_runner import ModelRunner
        from nanovllm.worker.parallel import RankGroup, open_store
        from nanovllm.worker.platform import resolve_device

        records: list[logging.LogRecord] = []
        handler = Collector(records)
        logging.getLogger("nanovllm").addHandler(handler)
        logging.getLogger("nanovllm").setLevel(log_level)
        if config.device != "cpu" and torch.cuda.is_available():
            torch.cuda.set_device(first_device + rank)
        device = resolve_device(config.device)
        if device.type == "cpu":
            torch.set_num_threads(max(1, torch.get_num_threads() // size))
        group: RankGroup | SingleRank = SINGLE
        if size > 1:
            port = None
            if rank > 0:
                _, port, _ = self._next()
            store = open_store(port)
            if rank == 0:
                self.send(("port", store.port))
            group = RankGroup(rank, size, store, device)
        self.is_first = rank == 0
        self.runner = ModelRunner(config, group)
        threading.Thread(target=run_to_the_end, args=(self.send, self._collect), daemon=True).start()
        logging.getLogger("nanovllm").removeHandler(handler)
        resolved = {name: getattr(config, name) for name in RESOLVED}
        told = [(record.levelno, record.getMessage()) for record in records] if self.is_first else []
        self.send(("started", resolved, told))

    def _collect(self) -> None:
        """The collecting thread: a step's end and the next plan may come in any order. It alone sends while steps are
        in flight."""
        while True:
            output = self._in_flight.get().wait()
            if self.is_first:
                self.send(("output", output, self.runner.stats()))
            self._in_flight.task_done()

    def _answer(self, kind: str, payload: Any, ticket: int) -> None:
        try:
            answer = ("done", self._carry_out(kind, payload), ticket, self.runner.weights.missing)
        except (ValueError, TypeError, RuntimeError, OSError, MemoryError) as error:
            answer = ("error", error, ticket, self.runner.weights.missing)
        self.send(answer)

    def _carry_out(self, kind: str, payload: Any) -> Any:
        runner = self.runner
        if kind == "sleep":
            return runner.sleep(keep_weights=payload == 1)
        if kind == "wake_up":
            return runner.wake_up()
        if kind == "update_folder":
            return runner.update_weights(payload)
        if kind == "update_tensors":
            return self._update_tensors()
        assert kind == "reset", kind
        runner.synchronize()
        return runner.reset()

    def _update_tensors(self) -> None:
        """("tensor", (name, tensor)) messages follow, up to "tensors_end" with None or why the source failed; another
        kind means that the driver was interrupted."""
        end: tuple[str, Any, int] | None = None

        def tensors() -> Iterator[tuple[str, Any]]:
            nonlocal end
            while (message := self._next())[0] == "tensor":
                yield message[1]
            end = message
            if message[0] != "tensors_end" or message[1] is not None:
                raise RuntimeError(message[1] or "the update was interrupted")

        try:
            self.runner.update_weights(tensors())
        finally:
            while end is None:  # it gave up early: what is still sent belongs to this update
                message = self._next()
                end = message if message[0] != "tensor" else None
            if end[0] != "tensors_end":
                self._unread.append(end)


class Refusal(Exception):
    """The rank does not start, and its cause is the user's to mend."""


class Collector(logging.Handler):
    """Keeps what is logged while the engine starts: the driver's process logs it."""

    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__()
        self.records = records

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def run_to_the_end(send: Callable[[tuple[Any, ...]], None], run: Callable[[], object]) -> None:
    """Run, then end the process; the driver is told of an exception."""
    code = 1
    try:
        run()
        code = 0
    except BaseException as error:
        kind, cause = ("refused", error.__cause__) if isinstance(error, Refusal) else ("failed", error)
        send((kind, "".join(traceback.format_exception(cause)), time.monotonic()))
        raise
    finally:
        with contextlib.suppress(OSError, ValueError):  # it may be closed
            sys.stdout.flush()
        os._exit(code)  # not through destructors that wait for other ranks


def _end_with(parent: int) -> None:
    """End this process when its parent has: the main thread may wait in a collective call forever."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main() -> None:
    """Entry of the process; the driver closes its copy of the descriptor."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the driver
    connection = Connection(int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(int(sys.argv[2]),), daemon=True).start()
    rank = Rank(connection)
    run_to_the_end(rank.send, rank.run)
