"""Sampled ids on their way to the host.

Owns: a ring of device and pinned host slots, and the copy stream. Invariant: a slot is written again only after the
host has read it, since the ring is one longer than the steps in flight. It deliberately blocks in `wait` alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.messages import ModelRunnerOutput
from nanovllm.worker.logprobs import PendingLogprobs


@dataclass(slots=True)
class PendingOutput:
    """The output of a step in flight."""

    ring: OutputRing
    slot: int
    num_sampled: int
    ids: torch.Tensor | None = None  # on the CPU: the ids themselves
    logprobs: PendingLogprobs | None = None

    def wait(self) -> ModelRunnerOutput:
        """Block until the step has run; its sampled ids. Raises what the device raised."""
        ids = self.ids.tolist() if self.ids is not None else self.ring.read(self.slot, self.num_sampled)
        output = ModelRunnerOutput(ids)
        if self.logprobs is not None:
            self.logprobs.fill(output)
        return output


class OutputRing:
    """`num_slots` slots of up to `max_num_seqs` ids each; times the steps as they pass."""

    def __init__(
        self, max_num_seqs: int, device: torch.device, compute_stream: torch.cuda.Stream | None, num_slots: int
    ) -> None:
        self.compute_stream = compute_stream
        self.num_steps = 0
        self.step_ms = 0.0
        self.exposed_ms = 0.0
        self._last_end: torch.cuda.Event | None = None
        if compute_stream is None:
            return
        self.copy_stream = torch.cuda.Stream(device)
        self._next = 0
        self._device = torch.empty(num_slots, max_num_seqs, dtype=torch.int32, device=device)
        self._host = torch.empty(num_slots, max_num_seqs, dtype=torch.int32, pin_memory=True)
        self._started = [torch.cuda.Event(enable_timing=True) for _ in range(num_slots)]
        self._ended = [torch.cuda.Event(enable_timing=True) for _ in range(num_slots)]
        self._copied = [torch.cuda.Event() for _ in range(num_slots)]

    def begin(self) -> int:
        """Take the next slot; a step's time starts here."""
        if self.compute_stream is None:
            return 0
        slot = self._next
        self._next = (slot + 1) % len(self._started)
        self._started[slot].record(self.compute_stream)
        return slot

    def end(self, slot: int, sampled: torch.Tensor, logprobs: PendingLogprobs | None = None) -> PendingOutput:
        """Send `sampled` int32 [S] on its way: into the slot on the compute stream, to the host on the copy stream.

        `logprobs` are on their way already, on the compute stream: there once the ids are.
        """
        num_sampled = sampled.shape[0]
        if self.compute_stream is None:
            return PendingOutput(self, 0, num_sampled, sampled.clone(), logprobs)
        self._device[slot, :num_sampled].copy_(sampled)
        self._ended[slot].record(self.compute_stream)
        self.copy_stream.wait_event(self._ended[slot])
        with torch.cuda.stream(self.copy_stream):
            self._host[slot, :num_sampled].copy_(self._device[slot, :num_sampled], non_blocking=True)
            self._copied[slot].record(self.copy_stream)
        return PendingOutput(self, slot, num_sampled, logprobs=logprobs)

    def read(self, slot: int, num_sampled: int) -> list[int]:
        """Wait for the slot's copy; its ids. Notes how long the step ran and how long the device idled before it."""
        self._copied[slot].synchronize()
        self.num_steps += 1
        self.step_ms += self._started[slot].elapsed_time(self._ended[slot])
        if self._last_end is not None:
            self.exposed_ms += self._last_end.elapsed_time(self._started[slot])
        self._last_end = self._ended[slot]
        return self._host[slot, :num_sampled].tolist()

    def idle(self) -> None:
        """The engine has nothing to do: the time until the next step is not the host's doing."""
        self._last_end = None

    def stats(self) -> dict[str, float]:
        steps = max(1, self.num_steps)
        return {"mean_step_ms": self.step_ms / steps, "host_exposed_ms": self.exposed_ms}
