"""The rows: all that the device knows of the sequences in flight.

Owns: one flat int32 tensor `state`, of which every per-row array is a view, and the staging buffers through which the
host changes it. Invariant: `state` is written on the compute stream only, in the order of the plans: by `apply` (what
the host decided) and by the advance kernel (what the model sampled). It deliberately holds no decision: which row
belongs to which sequence is the scheduler's.
"""

from __future__ import annotations

import struct

import numpy as np
import torch

from nanovllm.kernels.update import scatter_updates
from nanovllm.messages import NewRow, SchedulerOutput


def _float_bits(value: float) -> int:
    return struct.unpack("<i", struct.pack("<f", min(value, 3e38)))[0]


def _signed_words(seed: int) -> list[int]:
    """The low and the high 32 bits of a 64-bit seed, as int32 values."""
    return list(struct.unpack("<2i", struct.pack("<Q", seed % 2**64)))


class PersistentBatch:
    """Device state of `max_num_seqs` rows; row 0 is reserved for the padding of CUDA graphs.

    Args:
        max_num_seqs: rows that sequences can use.
        max_model_len: tokens a row can hold.
        max_num_blocks: entries of a row's block table.
        device: where the state lives.
        num_slots: staging buffers in rotation; one more than the steps in flight, so that a slot is reused only when
            its copy is done.
    """

    token_ids: torch.Tensor  # int32 [R, max_model_len]
    block_tables: torch.Tensor  # int32 [R, max_num_blocks]
    num_tokens: torch.Tensor  # int32 [R]
    num_prompt_tokens: torch.Tensor  # int32 [R]
    num_computed: torch.Tensor  # int32 [R]
    temperature: torch.Tensor  # float32 [R]
    top_k: torch.Tensor  # int32 [R]
    top_p: torch.Tensor  # float32 [R]
    min_p: torch.Tensor  # float32 [R]
    seeds: torch.Tensor  # int32 [R, 2]
    step_rows: torch.Tensor  # int32 [max_num_seqs + 1], the rows of this step, then row 0
    step_cu_seqlens_q: torch.Tensor  # int32 [max_num_seqs + 2], of a step with prompt chunks

    def __init__(
        self, max_num_seqs: int, max_model_len: int, max_num_blocks: int, device: torch.device, num_slots: int
    ) -> None:
        num_rows = max_num_seqs + 1
        self.device = device
        layout: list[tuple[str, tuple[int, ...], torch.dtype]] = [
            ("token_ids", (num_rows, max_model_len), torch.int32),
            ("block_tables", (num_rows, max_num_blocks), torch.int32),
            ("num_tokens", (num_rows,), torch.int32),
            ("num_prompt_tokens", (num_rows,), torch.int32),
            ("num_computed", (num_rows,), torch.int32),
            ("temperature", (num_rows,), torch.float32),
            ("top_k", (num_rows,), torch.int32),
            ("top_p", (num_rows,), torch.float32),
            ("min_p", (num_rows,), torch.float32),
            ("seeds", (num_rows, 2), torch.int32),
            ("step_rows", (num_rows,), torch.int32),
            ("step_cu_seqlens_q", (num_rows + 1,), torch.int32),
        ]
        sizes = [int(np.prod(shape)) for _, shape, _ in layout]
        self.state = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self._offsets: dict[str, int] = {}
        self._strides: dict[str, int] = {}
        offset = 0
        for (name, shape, dtype), size in zip(layout, sizes, strict=True):
            setattr(self, name, self.state[offset : offset + size].view(dtype).view(shape))
            self._offsets[name] = offset
            self._strides[name] = size // num_rows if shape[0] == num_rows else 1
            offset += size
        self.num_tokens[0] = 1  # row 0: one token, forever (advance skips it)
        self.top_p.fill_(1.0)
        self._last_rows: list[int] | None = None
        self._last_padded = 0
        self._slots: list[torch.Tensor] = []
        self._events: list[torch.cuda.Event | None] = []
        self._staged = torch.empty(0, dtype=torch.int32, device=device)
        self._slot = 0
        for _ in range(num_slots):
            self._slots.append(self._new_slot(4 * max_model_len + 64 * num_rows))
            self._events.append(None)

    def _new_slot(self, num_words: int) -> torch.Tensor:
        return torch.empty(num_words, dtype=torch.int32, pin_memory=self.device.type == "cuda")

    def reset(self) -> None:
        """Forget what was sent last: after a broken step, the device may not have received it."""
        self._last_rows = None

    def apply(self, plan: SchedulerOutput, num_padded: int) -> None:
        """Bring the device's rows up to `plan`: one copy, one scatter, on the compute stream.

        In a steady decode only block appends are sent, and often nothing at all.

        Args:
            plan: the step about to run.
            num_padded: rows that the step reads; those behind the plan's own are row 0.
        """
        segments: list[tuple[int, list[int]]] = []
        for new in plan.new_rows:
            self._append_new_row(segments, new)
        offset, stride = self._offsets["block_tables"], self._strides["block_tables"]
        for row, index, block_id in plan.block_appends:
            segments.append((offset + row * stride + index, [block_id]))
        num_rows = len(plan.rows)
        if plan.rows != self._last_rows or num_padded > self._last_padded:
            segments.append((self._offsets["step_rows"], plan.rows + [0] * (num_padded - num_rows)))
            self._last_rows, self._last_padded = list(plan.rows), num_padded
        if plan.num_decodes != num_rows:
            cu_seqlens_q = np.zeros(num_rows + 1, dtype=np.int32)
            np.cumsum(plan.num_query_tokens, out=cu_seqlens_q[1:])
            segments.append((self._offsets["step_cu_seqlens_q"], cu_seqlens_q.tolist()))
        if segments:
            self._send(segments)

    def _append_new_row(self, segments: list[tuple[int, list[int]]], new: NewRow) -> None:
        params = new.sampling_params
        values: dict[str, list[int]] = {
            "token_ids": new.token_ids,
            "block_tables": new.block_table,
            "num_tokens": [len(new.token_ids)],
            "num_prompt_tokens": [new.num_prompt_tokens],
            "num_computed": [new.num_computed_tokens],
            "temperature": [_float_bits(0.0 if params.is_greedy else params.temperature)],
            "top_k": [min(max(0, params.top_k), 2**31 - 1)],
            "top_p": [_float_bits(params.top_p)],
            "min_p": [_float_bits(params.min_p)],
            "seeds": _signed_words(new.seed),
        }
        for name, payload in values.items():
            segments.append((self._offsets[name] + new.row * self._strides[name], payload))

    def _send(self, segments: list[tuple[int, list[int]]]) -> None:
        header: list[int] = []
        payload: list[int] = []
        start, longest = 3 * len(segments), 0
        for destination, values in segments:
            header += (destination, start + len(payload), len(values))
            payload += values
            longest = max(longest, len(values))
        num_words = start + len(payload)
        slot = self._slot
        self._slot = (slot + 1) % len(self._slots)
        event = self._events[slot]
        if event is not None:
            event.synchronize()  # its last copy is done: the host may write it again
        if self._slots[slot].numel() < num_words:
            self._slots[slot] = self._new_slot(2 * num_words)
        host = self._slots[slot][:num_words]
        host.numpy()[:start] = header
        host.numpy()[start:] = payload
        if self.device.type == "cpu":
            scatter_updates(self.state, host, len(segments), longest)
            return
        if self._staged.numel() < num_words:
            self._staged = torch.empty(2 * num_words, dtype=torch.int32, device=self.device)
        staged = self._staged[:num_words]
        staged.copy_(host, non_blocking=True)
        if event is None:
            event = self._events[slot] = torch.cuda.Event()
        event.record()
        scatter_updates(self.state, staged, len(segments), longest)
