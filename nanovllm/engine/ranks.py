"""The ranks of one engine as processes of their own, and what passes between them and the scheduler.

Owns: the processes, their pipes, and two threads that do all sending and receiving. Invariant: a message goes to all
ranks or to none, in one order. An interrupt reaches the main thread alone, wherever it is; so it never cuts a message
in two, and never leaves a rank alone in a collective call. It deliberately decides nothing, and imports no torch.

A rank that fails says why and ends; one that is killed leaves its pipe closed. Either way the engine is dead: the
others are ended, since what they wait for will not come, and every later use raises the reason.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import connection as mp
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from nanovllm.config import Config

logger = logging.getLogger("nanovllm")

PATIENCE = 1.0  # seconds in which the rank at fault can tell: the others only notice that it is gone
CLOSING_SECONDS = 10.0
MAX_UNSENT = 4
ENDS = ("gone", "failed", "refused")  # a rank's last message


class Ranks:
    """Starts `config.tensor_parallel_size` ranks, on the devices from `first_device` on, and talks to them.

    `arrived` is set whenever one has sent something.

    Attributes:
        failure: why the engine is dead; None: it is not.

    Raises:
        ValueError: a rank refused the options or the model's files, with its traceback.
        RuntimeError: a rank did not start, with its traceback.
    """

    def __init__(self, config: Config, first_device: int, arrived: threading.Event) -> None:
        self.size = config.tensor_parallel_size
        self.failure: str | None = None
        self._outbox: SimpleQueue[tuple[bytes, ...] | None] = SimpleQueue()
        self._inbox: SimpleQueue[tuple[int, tuple[Any, ...]]] = SimpleQueue()
        self.arrived = arrived
        self._is_closing = False
        self._is_refused = False
        self._owner = os.getpid()
        self._threads: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[mp.Connection] = []
        try:
            for _ in range(self.size):
                self._spawn()
            self._threads = [
                threading.Thread(target=target, name=f"nanovllm-{target.__name__}", daemon=True)
                for target in (self._send, self._receive)
            ]
            for thread in self._threads:
                thread.start()
            self._start(config, first_device)
        except BaseException as error:
            self._kill()  # what has not started does not listen
            self.close()
            if self._is_refused and isinstance(error, RuntimeError):
                raise ValueError(self.failure) from None
            raise

    def _spawn(self) -> None:
        """A fresh interpreter, which runs nothing of the caller's: neither fork nor `__main__` is needed. It finds
        modules where this process does, not in whatever folder this happens to be."""
        ours, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[2])
        path = [str(entry) for entry in dict.fromkeys([*sys.path, root])]
        code = f"import sys; sys.path[:] = {path!r}; from nanovllm.worker.rank import main; main()"
        command = [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid())]
        environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}  # ranks on a CPU share its cores: no spinning
        with theirs:
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
        self._processes.append(process)
        self._pipes.append(mp.Connection(ours.detach()))

    def _start(self, config: Config, first_device: int) -> None:
        level = logger.getEffectiveLevel()
        messages = [
            ("start", {"config": config, "rank": rank, "size": self.size, "first_device": first_device,
                       "log_level": level}, 0)
            for rank in range(self.size)
        ]  # fmt: skip
        self._outbox.put(tuple(pickle.dumps(message) for message in messages))
        waiting = set(range(self.size))
        while waiting:
            rank, (kind, *values) = self.receive()
            if kind == "port":  # rank 0 alone knows it; it does not hear its own message
                message = pickle.dumps(("port", values[0], 0))
                self._outbox.put((b"", *[message] * (self.size - 1)))
                continue
            assert kind == "started", kind
            waiting.discard(rank)
            resolved, told = values
            for name, value in resolved.items():
                setattr(config, name, value)
            for log_level, text in told:
                logger.log(log_level, "%s", text)

    # ---- messages -----------------------------------------------------------------------------------------------

    def send(self, kind: str, payload: Any = None, ticket: int = 0) -> None:
        """To every rank or to none; returns before it is sent. An answer bears the ticket.

        Raises:
            RuntimeError: this is a fork of the process that made the engine: the threads that send are not in it.
        """
        if os.getpid() != self._owner:
            raise RuntimeError("an engine on several GPUs cannot be used in a forked process: make one there")
        self._outbox.put((pickle.dumps((kind, payload, ticket)),) * self.size)

    def wait_for_room(self) -> None:
        """Until few messages are unsent: for a sender of many large ones."""
        while self._outbox.qsize() >= MAX_UNSENT and self.failure is None and not self._is_closing:
            time.sleep(0.001)

    def receive(self) -> tuple[int, tuple[Any, ...]]:
        """The next (rank, message).

        Raises:
            RuntimeError: a rank has failed or died.
        """
        while True:
            if self.failure is not None:
                raise RuntimeError(self.failure)
            try:
                return self._inbox.get(timeout=0.5)
            except Empty:
                continue

    def try_receive(self) -> tuple[int, tuple[Any, ...]] | None:
        """As `receive`, of what has arrived; None: nothing has."""
        if self.failure is not None:
            raise RuntimeError(self.failure)
        try:
            return self._inbox.get_nowait()
        except Empty:
            return None

    def _send(self) -> None:
        """The sending thread."""
        while (messages := self._outbox.get()) is not None:
            try:
                for pipe, message in zip(self._pipes, messages, strict=True):
                    if message:
                        pipe.send_bytes(message)
            except OSError:
                return  # a rank is gone: the receiving thread sees it, too, and knows more

    def _receive(self) -> None:
        """The receiving thread; ends with the first rank that does."""
        ranks = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while True:
            messages = {ranks[pipe]: message for pipe, message in _read(list(ranks))}
            ends = {rank: message for rank, message in messages.items() if message[0] in ENDS}
            for rank, message in messages.items():
                if rank not in ends:
                    self._inbox.put((rank, message))
            if ends and not self._is_closing:
                self.failure = self._blame(ends)
                self._kill()
            self.arrived.set()
            if ends:
                return

    def _blame(self, ends: dict[int, tuple[Any, ...]]) -> str:
        """What to tell, given the last messages that came first. A rank that says nothing is to blame before those that
        tell of the loss of it; else the one that failed first."""
        deadline = time.monotonic() + PATIENCE
        while not any(kind == "gone" for kind, *_ in ends.values()):
            others = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in ends}
            patience = deadline - time.monotonic()
            if not others or patience <= 0:
                rank, (kind, text, _) = min(ends.items(), key=lambda item: item[1][2])
                self._is_refused = kind == "refused"
                return f"rank {rank} of {self.size} failed:\n{text}"
            ends |= {others[pipe]: message for pipe, message in _read(list(others), patience) if message[0] in ENDS}
        rank = next(rank for rank, (kind, *_) in ends.items() if kind == "gone")
        try:
            code: int | None = self._processes[rank].wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = None
        if code is not None and code < 0:
            return f"rank {rank} of {self.size} was killed by signal {-code}"
        return f"rank {rank} of {self.size} ended with exit code {code}"

    # ---- the end ------------------------------------------------------------------------------------------------

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()

    def close(self) -> None:
        """End the processes, all of whose memory comes back; may be called again."""
        if self._is_closing:
            return
        self._is_closing = True
        if os.getpid() != self._owner:
            return  # the ranks are another's children
        self.send("close")
        self._outbox.put(None)
        end = time.monotonic() + (CLOSING_SECONDS if self.failure is None else 0.0)
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for thread in self._threads:  # they use the pipes
            # the garbage collector may close an engine anywhere, an interrupt before they have started
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(CLOSING_SECONDS)
        for pipe in self._pipes:
            pipe.close()


def _read(pipes: list[mp.Connection], timeout: float | None = None) -> list[tuple[mp.Connection, tuple[Any, ...]]]:
    """Wait; a message of each pipe that has one, ("gone",) of one that is closed."""
    messages: list[tuple[mp.Connection, tuple[Any, ...]]] = []
    for pipe in mp.wait(pipes, timeout):
        assert isinstance(pipe, mp.Connection)
        try:
            messages.append((pipe, pipe.recv()))
        except (EOFError, OSError):
            messages.append((pipe, ("gone",)))
    return messages
