"""Trying a kernel out before it is trusted: one tiny call, compared with the reference.

Owns: what "works here" means. Invariant: whatever goes wrong in a foreign package (import, compilation, call, numbers)
becomes one `BackendUnavailable` with its reason. It deliberately measures no speed: which kernel is the
faster one is written down in the backends.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from nanovllm.attention import AttentionSpec, BackendUnavailable
from nanovllm.attention.composed import DecodeKernel, PagedPromptKernel, PromptBatch, RaggedPromptKernel
from nanovllm.kernels.paged_decode import DecodeBatch, paged_decode_reference
from nanovllm.kernels.paged_prefill import paged_prefill_reference
from nanovllm.kernels.rope import Rope

T = TypeVar("T")


def attempt(what: str, function: Callable[[], T]) -> T:
    """Call `function`; any exception becomes BackendUnavailable.

    The one broad except of the library: optional packages break in every way (ABI, drivers, compilers), and none of
    that may keep an engine from starting.
    """
    try:
        return function()
    except BackendUnavailable:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise BackendUnavailable(f"{what}: {type(error).__name__}: {lines[0] if lines else ''}") from error


def probe_decode(
    what: str, kernel: DecodeKernel, spec: AttentionSpec, block_size: int, has_rope: bool = True
) -> None:  # fmt: skip
    """Raises BackendUnavailable unless `kernel` decodes right under every window of the spec.

    One that rotates is tried with two rows and with one, which may have a launch of its own, and with rows that come
    rotated. They run side by side, since each compiles; what they are compared with is computed in this thread, for
    cuBLAS keeps a workspace for each that multiplies.
    """
    kinds = [(2, True), (1, True), (2, False)] if has_rope else [(2, False)]
    cases = [_DecodeCase(spec, block_size, *kind) for kind in kinds]
    stream = torch.cuda.current_stream(spec.device) if spec.device.type == "cuda" else None

    def run(case: _DecodeCase) -> list[list[Tensor]]:
        with torch.cuda.stream(stream):  # and on its device
            return [case.run(what, kernel, window) for window in spec.windows]

    with ThreadPoolExecutor(len(cases)) as pool:
        found = list(pool.map(run, cases))
    for case, results in zip(cases, found, strict=True):
        for window, result in zip(spec.windows, results, strict=True):
            for own, expected in zip(result, case.run(what, paged_decode_reference, window), strict=True):
                case.compare(what, own, expected, window)


def probe_paged(what: str, kernel: PagedPromptKernel, spec: AttentionSpec, block_size: int) -> None:
    """Raises BackendUnavailable unless `kernel` is right for chunks behind a cached prefix under every window."""
    case = _Case(spec, block_size)
    for window in spec.windows:
        expected = case.paged_reference(case.seq_lens, window)
        batch = case.batch(case.seq_lens)
        out = attempt(what, partial(kernel, case.q, case.k_cache, case.v_cache, batch, case.scale, window))
        case.compare(what, out[case.first_token :], expected[case.first_token :], window)


def probe_ragged(what: str, kernel: RaggedPromptKernel, spec: AttentionSpec, block_size: int) -> None:
    """Raises BackendUnavailable unless `kernel` is right for whole prompts under every window of the spec."""
    case = _Case(spec, block_size)
    seq_lens = case.cu_seqlens_q.diff()
    k, v = case.copy_to_ragged(seq_lens)
    for window in spec.windows:
        expected = case.paged_reference(seq_lens, window)
        batch = case.batch(seq_lens)
        out = attempt(what, partial(kernel, case.q, k, v, batch, case.scale, window))
        case.compare(what, out[case.first_token :], expected[case.first_token :], window)


class _Case:
    """Two sequences in shuffled blocks, the first with more queries than a tile has, behind one foreign query.

    Kernels read pages in another way where the queries fill more than one tile (flash-attn 3 does): both are tried.
    """

    first_token = 1
    seq_lens_list = (340, 21)
    query_lens = (300, 3)

    def __init__(self, spec: AttentionSpec, block_size: int) -> None:
        device, self.dtype = spec.device, spec.dtype
        generator = torch.Generator(device=device).manual_seed(0)  # the global generator is the user's

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(spec.dtype)

        blocks_per_seq = -(-max(self.seq_lens_list) // block_size)
        self.block_table = torch.arange(2 * blocks_per_seq, 0, -1, dtype=torch.int32, device=device).view(2, -1)
        cache_shape = (2 * blocks_per_seq + 1, block_size, spec.num_kv_heads, spec.head_dim)
        self.k_cache, self.v_cache = normal(*cache_shape), normal(*cache_shape)
        # Behind a sequence's end lies what others left, which may be NaN: a kernel that multiplies it by a probability
        # of zero would hand one request's broken numbers to the next (flash-attn 3 does, over pages).
        for cache in (self.k_cache, self.v_cache):
            for slots, seq_len in zip(self._slots(), self.seq_lens_list, strict=True):
                cache.flatten(0, 1)[slots[seq_len:]] = float("nan")
        # As in the model: q, k and v are views into one tensor.
        num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
        num_tokens = self.first_token + sum(self.query_lens)
        self.qkv = normal(num_tokens, num_heads + 2 * num_kv_heads, spec.head_dim)
        self.q, self.k, self.v = self.qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        starts = [self.first_token, self.first_token + self.query_lens[0], num_tokens]
        self.cu_seqlens_q = torch.tensor(starts, dtype=torch.int32, device=device)
        self.seq_lens = torch.tensor(self.seq_lens_list, dtype=torch.int32, device=device)
        angles = torch.rand(max(self.seq_lens_list), spec.head_dim // 2, generator=generator, device=device)
        weights = normal(2, spec.head_dim)
        self.rope = Rope(weights[0], weights[1], 1e-6, torch.cat([angles.cos(), angles.sin()], dim=1))
        self.scale = spec.head_dim**-0.5

    def batch(self, seq_lens: Tensor) -> PromptBatch:
        cu_seqlens_k = torch.nn.functional.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        max_lens = max(self.query_lens), max(self.seq_lens_list)
        return PromptBatch(self.cu_seqlens_q, cu_seqlens_k, seq_lens, self.block_table, *max_lens, self.first_token)

    def _slots(self) -> Tensor:
        """int64 [2, tokens]: where the cache has each token of a sequence, and beyond its end to the last block's."""
        block_size = self.k_cache.shape[1]
        offsets = torch.arange(block_size, device=self.k_cache.device)
        return (self.block_table.long()[:, :, None] * block_size + offsets).flatten(1)

    def last_slots(self) -> Tensor:
        """int64 [2]: of each sequence's last token."""
        return self._slots().gather(1, self.seq_lens.long()[:, None] - 1)[:, 0]

    def copy_to_ragged(self, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [T, KH, D] that hold what the cache holds."""
        for b, seq_len in enumerate(seq_lens.tolist()):
            start, blocks = int(self.cu_seqlens_q[b]), self.block_table[b].long()
            self.k[start : start + seq_len] = self.k_cache[blocks].flatten(0, 1)[:seq_len]
            self.v[start : start + seq_len] = self.v_cache[blocks].flatten(0, 1)[:seq_len]
        return self.k, self.v

    def paged_reference(self, seq_lens: Tensor, window: int | None) -> Tensor:
        out = torch.empty(self.q.shape, dtype=self.dtype, device=self.q.device)
        args = (self.q, self.k_cache, self.v_cache, self.cu_seqlens_q, seq_lens, self.block_table, self.scale, window)
        paged_prefill_reference(*args, out)
        return out

    def compare(self, what: str, out: Tensor, expected: Tensor, window: int | None) -> None:
        limits = expected.float().abs() + 1
        error = attempt(what, lambda: ((out.float() - expected.float()).abs() / limits).max().item())
        limit = 1e-4 if self.dtype == torch.float32 else 3e-2
        if not error <= limit:  # NaN fails too
            raise BackendUnavailable(f"{what}: wrong by {error:.3g} for {self.dtype}, window {window}")


class _DecodeCase(_Case):
    """The last tokens of the first `num_rows` sequences, to be rotated where `has_rope`."""

    def __init__(self, spec: AttentionSpec, block_size: int, num_rows: int, has_rope: bool) -> None:
        super().__init__(spec, block_size)
        self.projected = self.q[:num_rows], self.k[:num_rows], self.v[:num_rows]
        self.slots = self.last_slots()[:num_rows]
        seq_lens, block_table = self.seq_lens[:num_rows], self.block_table[:num_rows]
        self.decodes = DecodeBatch(seq_lens, block_table, self.slots, max(self.seq_lens_list))
        self.used_rope = self.rope if has_rope else None

    def run(self, what: str, kernel: DecodeKernel, window: int | None) -> list[Tensor]:
        """The kernel's output, and what is then in the caches at the last tokens' slots."""
        (q, k, v), out = self.projected, torch.zeros_like(self.projected[0])
        k_cache, v_cache = self.k_cache.clone(), self.v_cache.clone()
        attempt(what, partial(kernel, q, k, v, k_cache, v_cache, self.decodes, self.scale, window, out, self.used_rope))
        return [out, *(cache.flatten(0, 1)[self.slots] for cache in (k_cache, v_cache))]
