"""Apply a step's staged changes to the persistent device state: one copy to the device, one scatter.

Owns: the layout of the staged buffer, which is 3 * num_segments int32 (dst, src, length) followed by the payload;
`src` counts from the buffer's start. Invariant: afterwards `state[dst:dst+length] == staged[src:src+length]` for every
segment, and nothing else has changed. It deliberately knows nothing of what the ranges mean, nor checks them: that
would need the host to wait. Segments must not overlap, since they are written in no particular order.
"""

from __future__ import annotations

from torch import Tensor

from nanovllm.kernels._triton import tl, triton

_BLOCK = 1024  # values a program copies at once
_MAX_PROGRAMS_PER_SEGMENT = 64  # most segments are one value long: do not launch thousands of idle programs for them


@triton.jit(do_not_specialize_on_alignment=["staged_ptr"])  # a ring's slots are aligned differently: compile once
def _scatter_updates_kernel(state_ptr, staged_ptr, BLOCK: tl.constexpr):
    segment = tl.program_id(0)
    dst = tl.load(staged_ptr + 3 * segment)
    src = tl.load(staged_ptr + 3 * segment + 1)
    length = tl.load(staged_ptr + 3 * segment + 2)
    for start in range(tl.program_id(1) * BLOCK, length, BLOCK * tl.num_programs(1)):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < length
        tl.store(state_ptr + dst + offsets, tl.load(staged_ptr + src + offsets, mask=mask), mask=mask)


def scatter_updates_triton(state: Tensor, staged: Tensor, num_segments: int, max_length: int) -> None:
    programs_per_segment = min(-(-max_length // _BLOCK), _MAX_PROGRAMS_PER_SEGMENT)
    if num_segments > 0 and programs_per_segment > 0:
        _scatter_updates_kernel[(num_segments, programs_per_segment)](state, staged, BLOCK=_BLOCK)


def scatter_updates_reference(state: Tensor, staged: Tensor, num_segments: int, max_length: int) -> None:
    for dst, src, length in staged[: 3 * num_segments].view(-1, 3).tolist():
        state[dst : dst + length] = staged[src : src + length]


def scatter_updates(state: Tensor, staged: Tensor, num_segments: int, max_length: int) -> None:
    """Scatter `staged` (int32 [n], laid out as the module says) into `state` (int32 [N], contiguous), in place.

    `max_length` is at least the longest segment's length: it sizes the launch only.
    """
    run = scatter_updates_triton if state.is_cuda else scatter_updates_reference
    run(state, staged, num_segments, max_length)
