"""Paged attention against a naive float64 reference: the kernels, also interpreted, the backends and their choice."""

from __future__ import annotations

import logging
import sys
import types
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nanovllm.attention import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    BackendUnavailable,
    choose_backend,
    flash,
)
from nanovllm.attention import torch as torch_backend
from nanovllm.attention.composed import ComposedBackend
from nanovllm.attention.probe import probe_decode
from nanovllm.attention.triton import triton_decode, triton_paged
from nanovllm.kernels.paged_decode import (
    SHORT_CONTEXT,
    DecodeBatch,
    choose_num_splits,
    make_decode_workspace,
    paged_decode_reference,
    paged_decode_triton,
    row_block,
)
from nanovllm.kernels.paged_prefill import cache_descriptors, paged_prefill_reference, paged_prefill_triton
from nanovllm.kernels.rope import Rope, qk_norm_rope_store_reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # absolute, and as much relative


class Step:
    """A random step: `chunks` are (query length, sequence length), the decodes first; blocks shuffled, the rest NaN."""

    def __init__(
        self,
        chunks: list[tuple[int, int]],
        num_decodes: int,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
        poison: bool = True,
    ) -> None:
        generator = torch.Generator(device).manual_seed(seed)  # on the device: a GPU's caches are large

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        query_lens, seq_lens = [c[0] for c in chunks], [c[1] for c in chunks]
        blocks_per_seq = [-(-n // block_size) for n in seq_lens]
        num_blocks = sum(blocks_per_seq) + 3
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
        # Entries behind the last block are garbage that no kernel may follow; here they point at poisoned blocks.
        table = torch.full((len(chunks), max(blocks_per_seq) + 1), int(order[-1]), dtype=torch.int32)
        taken, slots = 0, []
        for b, (count, seq_len) in enumerate(zip(blocks_per_seq, seq_lens, strict=True)):
            blocks = order[taken : taken + count]
            taken += count
            table[b, :count] = blocks.int()
            slots.append((blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:seq_len])
        used = torch.cat(slots).to(device)
        cache_shape = (2, num_blocks, block_size, num_kv_heads, head_dim)
        self.k_cache, self.v_cache = torch.full(
            cache_shape, float("nan") if poison else 0.0, dtype=dtype, device=device
        )
        for cache in (self.k_cache, self.v_cache):
            cache.flatten(0, 1)[used] = randn(len(used), num_kv_heads, head_dim)
        qkv = randn(sum(query_lens), num_heads + 2 * num_kv_heads, head_dim)
        self.q, self.k, self.v = qkv.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        self.scale = head_dim**-0.5
        self.chunks, self.table = chunks, table
        self.heads = [num_heads, num_kv_heads, num_kv_heads]
        self.slots = slots  # of each sequence's tokens
        self.projected: Tensor | None = None
        last_slots = torch.cat(
            [own[seq_len - query_len :] for own, (query_len, seq_len) in zip(slots, chunks, strict=True)]
        )
        self.metadata = AttentionMetadata(
            cu_seqlens_q=torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            block_table=table.to(device),
            slot_mapping=last_slots.to(device),
            max_seqlen_q=max(query_lens),
            max_seqlen_k=max(seq_lens),
            num_decode_tokens=num_decodes,
            has_cached_prefix=any(q != n for q, n in chunks[num_decodes:]),
        )
        start = 0
        for b, (query_len, seq_len) in enumerate(chunks):  # fresh k and v are what the cache holds
            if query_len == seq_len:
                self.k[start : start + query_len] = self._sequence(self.k_cache, b)
                self.v[start : start + query_len] = self._sequence(self.v_cache, b)
            start += query_len

    def _sequence(self, cache: Tensor, b: int) -> Tensor:
        return cache[self.table[b].long().to(cache.device)].flatten(0, 1)[: self.chunks[b][1]]

    def expected(self, window: int | None) -> Tensor:
        """Naive attention in float64, [T, H, D]."""
        group = self.q.shape[1] // self.k_cache.shape[2]
        outs, start = [], 0
        for b, (query_len, seq_len) in enumerate(self.chunks):
            keys = self._sequence(self.k_cache, b).double().repeat_interleave(group, dim=1)  # [L, H, D]
            values = self._sequence(self.v_cache, b).double().repeat_interleave(group, dim=1)
            scores = torch.einsum("qhd,lhd->hql", self.q[start : start + query_len].double(), keys) * self.scale
            position = torch.arange(seq_len - query_len, seq_len, device=keys.device)[:, None]
            key = torch.arange(seq_len, device=keys.device)[None, :]
            hidden = key > position
            if window is not None:
                hidden |= key <= position - window
            probs = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            outs.append(torch.einsum("hql,lhd->qhd", probs, values))
            start += query_len
        return torch.cat(outs)

    def spec(self, block_size: int | None = None, windows: frozenset[int | None] = frozenset({None})) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.q.shape[1],
            num_kv_heads=self.k_cache.shape[2],
            head_dim=self.q.shape[2],
            dtype=self.q.dtype,
            device=self.q.device,
            max_num_seqs=512,
            max_model_len=32768,
            block_size=block_size if block_size is not None else self.k_cache.shape[1],
            windows=windows,
        )

    def check(self, out: Tensor, window: int | None, rows: slice = slice(None), tolerance: float | None = None) -> None:
        tolerance = tolerance or TOLERANCE[self.q.dtype]
        torch.testing.assert_close(out[rows].double(), self.expected(window)[rows], atol=tolerance, rtol=tolerance)

    def check_wanted(
        self, backend: AttentionBackend, num_wanted: int, window: int | None, tolerance: float | None = None
    ) -> None:
        """The last tokens of the first sequences by themselves, all keys being in the cache."""
        tolerance = tolerance or TOLERANCE[self.q.dtype]
        tokens = self.metadata.cu_seqlens_q[1 : num_wanted + 1].long() - 1
        q, k, v = torch.cat([self.q, self.k, self.v], dim=1)[tokens].split(self.heads, dim=1)
        where = (self.k_cache, self.v_cache, self.metadata.as_decodes(tokens))
        out = backend.forward(q, k, v, *where, self.scale, window, None)
        assert out.shape == (num_wanted, *self.q.shape[1:])
        torch.testing.assert_close(out.double(), self.expected(window)[tokens], atol=tolerance, rtol=tolerance)

    def forward(self, backend, window: int | None = None) -> Tensor:
        """Decodes go as they come from the projection where the backend rotates them."""
        if backend.rotates_decodes(self.metadata.num_decode_tokens):
            self.expect_projected()
        return self.run(backend, window)

    def run(self, backend, window: int | None = None) -> Tensor:
        """`forward` where `expect_projected`, if need be, has been called: what a graph can capture."""
        args = (self.k_cache, self.v_cache, self.metadata, self.scale, window)
        if not backend.rotates_decodes(self.metadata.num_decode_tokens):
            return backend.forward(self.q, self.k, self.v, *args, None)
        return backend.forward(*self.projected.split(self.heads, dim=1), *args, self.rope)

    def expect_projected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Views of `projected`: q, k and v of one tensor, the decodes' not yet normalised and rotated.

        What the reference makes of them goes into `q` and the cache, as `expected` reads them, and `stored`. Then the
        cache has NaN there until somebody stores the keys and values.
        """
        count, head_dim = self.metadata.num_decode_tokens, self.q.shape[2]
        if self.projected is None:
            generator = torch.Generator(self.q.device).manual_seed(1)

            def randn(*shape: int) -> Tensor:
                return torch.randn(shape, generator=generator, device=self.q.device)

            self.projected = torch.cat([self.q, self.k, self.v], dim=1)
            self.projected[:count] = randn(count, *self.projected.shape[1:]).to(self.q.dtype)
            angles = randn(max(n for _, n in self.chunks), head_dim // 2)
            weights = randn(2, head_dim).to(self.q.dtype)
            self.rope = Rope(weights[0], weights[1], 1e-6, torch.cat([angles.cos(), angles.sin()], dim=1))
        slots, caches = self.metadata.slot_mapping[:count], (self.k_cache, self.v_cache)
        rotated = self.projected[:count].flatten(1).clone()
        where = (self.metadata.seq_lens[:count] - 1, slots, *caches)
        qk_norm_rope_store_reference(rotated, self.rope, *where, self.heads[0], self.heads[1], head_dim, False)
        self.q[:count] = rotated.unflatten(1, (-1, head_dim))[:, : self.heads[0]]
        self.stored = [cache.flatten(0, 1)[slots].clone() for cache in caches]
        for cache in caches:
            cache.flatten(0, 1)[slots] = float("nan")
        q, k, v = self.projected.split(self.heads, dim=1)
        return q, k, v

    def set_lengths(self, lengths: list[int]) -> None:
        """Of decodes, none longer than at first; in place, as between replays of a graph."""
        if self.projected is not None:  # what the last keys were is known no more
            for cache, stored in zip((self.k_cache, self.v_cache), self.stored, strict=True):
                cache.flatten(0, 1)[self.metadata.slot_mapping] = stored
        self.chunks = [(1, n) for n in lengths]
        self.metadata.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.metadata.slot_mapping.copy_(torch.stack([own[n - 1] for own, n in zip(self.slots, lengths, strict=True)]))

    def check_stored(self) -> None:
        slots = self.metadata.slot_mapping[: self.metadata.num_decode_tokens]
        for cache, expected in zip((self.k_cache, self.v_cache), self.stored, strict=True):
            found, tolerance = cache.flatten(0, 1)[slots].float(), TOLERANCE[cache.dtype]
            torch.testing.assert_close(found, expected.float(), atol=tolerance, rtol=tolerance)


def skip_interpreted_bfloat16(device: str, dtype: torch.dtype) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bit patterns of bfloat16")


def run_decode(
    step: Step, window: int | None, num_splits: int | None, has_rope: bool = False, max_seq_len: int | None = None
) -> Tensor:
    """With `max_seq_len` they are said to be so long at most; otherwise longer than what has a kernel of its own."""
    num_heads, head_dim = step.q.shape[1:]
    num_kv_heads = step.k_cache.shape[2]
    num_programs = len(step.chunks) * num_kv_heads * num_splits if num_splits is not None else None
    workspace = make_decode_workspace(num_heads, num_kv_heads, head_dim, step.q.device, num_programs)
    out = torch.full(step.q.shape, float("nan"), dtype=step.q.dtype, device=step.q.device)
    meta = step.metadata
    q, k, v = step.expect_projected() if has_rope else (step.q, None, None)
    rope = step.rope if has_rope else None
    batch = DecodeBatch(meta.seq_lens, meta.block_table, meta.slot_mapping, max_seq_len or SHORT_CONTEXT + 1)
    caches = (step.k_cache, step.v_cache)
    paged_decode_triton(q, k, v, *caches, batch, step.scale, window, out, rope, workspace, num_splits)
    assert not workspace.arrivals.any()  # ready for the next launch
    if has_rope:
        step.check_stored()
    return out


def run_prefill(step: Step, window: int | None, options: dict[str, object] | None = None) -> Tensor:
    out = torch.full(step.q.shape, float("nan"), dtype=step.q.dtype, device=step.q.device)
    meta, first = step.metadata, step.metadata.num_decode_tokens
    paged_prefill_triton(
        step.q, step.k_cache, step.v_cache, meta.cu_seqlens_q[first:], meta.seq_lens[first:], meta.block_table[first:],
        step.scale, window, out, first, options,
    )  # fmt: skip
    return out


DECODES = [(1, 1), (1, 63), (1, 200), (1, 128)]
MIXED = [(1, 5), (1, 77), (20, 20), (3, 60), (50, 131), (1, 1), (1, 90)]  # 2 decodes, then chunks, two of one token


@pytest.mark.parametrize("num_splits", [1, 2, 3, 7])
@pytest.mark.parametrize("window", [None, 1, 2, 40, 64])
@pytest.mark.parametrize("has_rope", [False, True])
def test_decode_kernel_splits_and_windows(
    kernel_device: str, num_splits: int, window: int | None, has_rope: bool
) -> None:
    """Lengths beside and on the bounds of tiles, which are 32 keys in float32."""
    lengths = (1, 63, 200, 128, 32, 33, 65, 2)
    step = Step([(1, n) for n in lengths], len(lengths), device=kernel_device)
    step.check(run_decode(step, window, num_splits, has_rope), window)


def test_decode_kernel_merges_many_splits(kernel_device: str) -> None:
    """More than the merge holds at a time, of one item and of several."""
    for lengths in ((1300,), (700, 10, 900)):
        step = Step([(1, n) for n in lengths], len(lengths), 2, 2, 16, device=kernel_device)
        step.check(run_decode(step, None, 40, has_rope=True), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("has_rope", [False, True])
def test_decode_kernel_dtypes_and_block_sizes(
    kernel_device: str, dtype: torch.dtype, block_size: int, num_splits: int, has_rope: bool
) -> None:
    skip_interpreted_bfloat16(kernel_device, dtype)
    step = Step(DECODES, 4, dtype=dtype, block_size=block_size, device=kernel_device)
    step.check(run_decode(step, None, num_splits, has_rope), None)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("num_heads", [2, 6, 8, 16])  # groups of 1, 3, 4, 8
def test_decode_kernel_heads(kernel_device: str, head_dim: int, num_heads: int) -> None:
    step = Step(DECODES[1:3], 2, num_heads, 2, head_dim, dtype=torch.float16, device=kernel_device)
    step.check(run_decode(step, None, 2, has_rope=True), None)


@pytest.mark.parametrize("window", [None, 1, 40, 200])
@pytest.mark.parametrize("seq_len", [1, 2, 64, 65, 129, 700])
def test_decode_of_one_short_row(window: int | None, seq_len: int, kernel_device: str) -> None:
    """Has a kernel of its own, one block of keys a program."""
    step = Step([(1, seq_len)], 1, device=kernel_device)
    step.check(run_decode(step, window, None, True, max_seq_len=1000), window)


@pytest.mark.parametrize(("num_heads", "max_seq_len"), [(16, 128), (17, 128), (32, 128), (16, 400)])
def test_one_short_row_has_room_in_the_workspace(num_heads: int, max_seq_len: int) -> None:
    """A counter for each head, and a place for each head's blocks of 64 keys; else the other kernel serves."""
    step = Step([(1, 100)], 1, num_heads, num_heads, 128, 128, torch.float16)
    step.expect_projected()
    workspace = make_decode_workspace(num_heads, num_heads, 128, "cpu", 16 if max_seq_len > 128 else 32)
    workspace = replace(workspace, arrivals=workspace.arrivals[:16])
    batch = DecodeBatch(step.metadata.seq_lens, step.metadata.block_table, step.metadata.slot_mapping, max_seq_len)
    expected = 64 if num_heads == 16 and max_seq_len == 128 else None
    assert row_block(step.q, batch, step.rope, workspace) == expected
    assert row_block(step.q, batch, None, workspace) is None


@pytest.mark.parametrize(
    "case", [(torch.float16, 4, 1, 128, 128), (torch.bfloat16, 16, 8, 128, 128), (torch.float32, 3, 3, 80, 48)]
)
def test_decode_of_one_short_row_by_shape(case: tuple[torch.dtype, int, int, int, int], kernel_device: str) -> None:
    dtype, *shape = case
    skip_interpreted_bfloat16(kernel_device, dtype)
    step = Step([(1, 555)], 1, *shape, dtype, kernel_device)
    step.check(run_decode(step, None, None, True, max_seq_len=SHORT_CONTEXT), None)


def test_decode_of_padded_rows_is_finite(kernel_device: str) -> None:
    step = Step(DECODES, 4, device=kernel_device, poison=False)
    step.metadata.block_table[2:] = 0
    step.metadata.seq_lens[2:] = 1
    out = run_decode(step, None, 3)
    assert out.isfinite().all()
    step.check(out, None, slice(0, 2))


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("block_size", [16, 128])
def test_prefill_kernel_mixed_chunks(kernel_device: str, window: int | None, block_size: int) -> None:
    step = Step(MIXED, 2, block_size=block_size, device=kernel_device)
    step.check(run_prefill(step, window), window, slice(2, None))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_heads", [2, 6, 8, 16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_prefill_kernel_dtypes_and_groups(
    kernel_device: str, dtype: torch.dtype, num_heads: int, head_dim: int
) -> None:
    skip_interpreted_bfloat16(kernel_device, dtype)
    chunks = [(1, 5), (70, 70), (3, 60), (90, 200)]
    step = Step(chunks, 1, num_heads, 2, head_dim, 128, dtype, kernel_device)
    step.check(run_prefill(step, None), None, slice(1, None))


@pytest.mark.parametrize("head_dim", [80, 96, 256])
@pytest.mark.parametrize("window", [None, 33])
def test_prefill_kernel_head_dims(kernel_device: str, head_dim: int, window: int | None) -> None:
    step = Step([(1, 5), (33, 33), (20, 150)], 1, 4, 2, head_dim, 64, torch.float16, kernel_device)
    step.check(run_prefill(step, window), window, slice(1, None))


TMA_CHUNKS = [(1, 5), (70, 70), (3, 60), (90, 200), (1, 1), (64, 128), (40, 168), (130, 130)]


def skip_without_tma() -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("tensor descriptors need compute capability 9")


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("num_heads", [2, 6, 8])
@pytest.mark.parametrize("block_n", [32, 64])
def test_prefill_kernel_with_descriptors(kernel_device: str, window: int | None, num_heads: int, block_n: int) -> None:
    skip_without_tma()
    step = Step(TMA_CHUNKS, 1, num_heads, 2, 64, 64, torch.float16, kernel_device)
    options = {"BLOCK_M": 64, "BLOCK_N": block_n, "num_warps": 4, "num_stages": 2, "USE_TMA": True}
    step.check(run_prefill(step, window, options), window, slice(1, None))


def test_prefill_kernel_asked_for_descriptors_where_there_are_none(kernel_device: str) -> None:
    skip_without_tma()
    options = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2, "USE_TMA": True}
    for head_dim, block_size in ((80, 64), (64, 48), (64, 32)):
        step = Step(TMA_CHUNKS, 1, 4, 2, head_dim, block_size, torch.float16, kernel_device)
        assert cache_descriptors(step.k_cache, step.v_cache, 64) is None
        step.check(run_prefill(step, None, options), None, slice(1, None))
    step = Step(TMA_CHUNKS, 1, 4, 2, 64, 64, torch.float16, kernel_device)
    assert cache_descriptors(step.k_cache[:, :, :, :32], step.v_cache, 64) is None
    assert cache_descriptors(step.k_cache[::2], step.v_cache[::2], 64) is None


def test_prefill_kernel_finds_sequences_past_the_first_128(kernel_device: str) -> None:
    step = Step([(1 + i % 3, 4) for i in range(150)], 0, 2, 2, 16, device=kernel_device)
    step.check(run_prefill(step, None), None)


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_wanted_tokens_attend_as_decodes(kernel_device: str, name: str, window: int | None) -> None:
    """Of none, some and all sequences of a step, also where so few decodes would be rotated by the kernel."""
    step = Step(MIXED, 2, device=kernel_device)
    backend: AttentionBackend = choose_backend("torch", step.spec())
    if name == "triton":
        decode, rotates_decodes = triton_decode(step.spec())
        assert rotates_decodes(2)
        backend = ComposedBackend(name, name, 16, decode, triton_paged, rotates_decodes)
    for num_wanted in (0, 1, 4, len(MIXED)):
        step.check_wanted(backend, num_wanted, window)


@pytest.mark.parametrize("window", [None, 40])
def test_references_follow_the_naive_one(window: int | None) -> None:
    step = Step(MIXED, 2)
    meta, out = step.metadata, torch.empty_like(step.q)
    paged_prefill_reference(
        step.q, step.k_cache, step.v_cache, meta.cu_seqlens_q, meta.seq_lens, meta.block_table, step.scale, window, out
    )
    step.check(out, window)
    decodes = Step(DECODES, 4)
    meta, out = decodes.metadata, torch.empty_like(decodes.q)
    batch = DecodeBatch(meta.seq_lens, meta.block_table, meta.slot_mapping, 200)
    paged_decode_reference(
        decodes.q, None, None, decodes.k_cache, decodes.v_cache, batch, decodes.scale, window, out, None
    )
    decodes.check(out, window)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 8])
def test_splits_fit_the_workspace_at_every_batch_size(num_kv_heads: int) -> None:
    workspace = make_decode_workspace(16, num_kv_heads, 64, "cpu")
    for num_items in range(num_kv_heads, 64 * num_kv_heads, num_kv_heads):
        splits = choose_num_splits(num_items, workspace.num_sms)
        assert splits == 1 or num_items * splits <= workspace.arrivals.numel()


@pytest.mark.parametrize("window", [None, 1, 40, 1000])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("num_heads", [2, 6])
def test_torch_backend(window: int | None, block_size: int, num_heads: int) -> None:
    step = Step(MIXED, 2, num_heads, 2, 64, block_size)
    backend = choose_backend("torch", step.spec())
    step.check(step.forward(backend, window), window)
    step.check(step.forward(backend, window), window)  # the second layer uses what the first worked out
    decodes = Step([(1, n) for n in (300, 299, 250, 17, 16, 1, 300)], 7, num_heads, 2, 64, block_size)
    decodes.check(decodes.forward(backend, window), window)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("group_bytes", "min_padding"), [(0, 256), (1 << 20, 0), (1 << 20, 256), (1 << 30, 1 << 30)])
def test_torch_backend_groups_of_decodes(
    window: int | None, group_bytes: int, min_padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From one decode a call to all in one: each row's result in its place, whatever the order of lengths."""
    monkeypatch.setattr(torch_backend, "GROUP_BYTES", group_bytes)
    monkeypatch.setattr(torch_backend, "MIN_PADDING", min_padding)
    lens = torch.randint(1, 400, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    step = Step([(1, n) for n in lens] + [(5, 50)], 40, 6, 2, 64, 16)
    step.check(step.forward(choose_backend("torch", step.spec()), window), window)


def test_torch_backend_long_chunk_behind_a_prefix() -> None:
    step = Step([(700, 900)], 0, 2, 1, 16)
    for window in (None, 100):
        step.check(step.forward(choose_backend("torch", step.spec()), window), window)


def test_choice_on_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    spec = Step(DECODES, 4).spec()
    with caplog.at_level(logging.INFO, "nanovllm"):
        assert choose_backend("auto", spec).name == "torch"
    assert "torch" in caplog.text
    for name in ("triton", "flash_attn"):
        with pytest.raises(ValueError, match=f"{name}.*CUDA"):
            choose_backend(name, spec)
    with pytest.raises(ValueError, match="xformers.*flash_attn"):
        choose_backend("xformers", spec)
    with pytest.raises(ValueError, match="block_size"):
        choose_backend("torch", Step(DECODES, 4).spec(block_size=-1))


@pytest.mark.parametrize("fault", [None, "output of one row", "stored key", "rows that come rotated", "raises"])
def test_the_probe_runs_every_launch_of_decodes(fault: str | None) -> None:
    spec = AttentionSpec(4, 2, 64, torch.float32, torch.device("cpu"), 8, 1024, 16, frozenset({None, 50}))

    def kernel(q, k, v, k_cache, v_cache, batch, scale, window, out, rope) -> None:
        is_row = len(batch.seq_lens) == 1
        if fault == "raises" and is_row:
            raise RuntimeError("does not compile")
        paged_decode_reference(q, k, v, k_cache, v_cache, batch, scale, window, out, rope)
        if fault == "output of one row" and is_row:
            out += 0.2
        if fault == "stored key" and rope is not None:
            k_cache.flatten(0, 1)[batch.slot_mapping] += 0.2
        if fault == "rows that come rotated" and rope is None:
            out.fill_(float("nan"))

    if fault is None:
        probe_decode("kernel", kernel, spec, 16)
    else:
        with pytest.raises(BackendUnavailable, match="compile" if fault == "raises" else "wrong by"):
            probe_decode("kernel", kernel, spec, 16)


def test_a_broken_package_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a package raises at import or in a call becomes a reason."""

    class Broken(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            raise RuntimeError("undefined symbol")

    monkeypatch.setitem(sys.modules, "flash_attn_interface", Broken("flash_attn_interface"))
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", None)
    spec = Step(DECODES, 4, dtype=torch.float16).spec()
    for package in flash._PACKAGES:
        with pytest.raises(BackendUnavailable, match=package.label):
            flash._build_on(package, spec)


class CallLikeReference:
    """Flash-attn functions of all three signatures, computed by the references; checks how flash.py calls them."""

    @staticmethod
    def ragged(q, k, v, cu_seqlens, scale, window_size):
        k_pages, v_pages = k.contiguous()[:, None], v.contiguous()[:, None]  # pages of one token
        lens = cu_seqlens.diff()
        table = torch.zeros(len(lens), int(lens.max()), dtype=torch.int32)
        for b, n in enumerate(lens.tolist()):
            table[b, :n] = torch.arange(int(cu_seqlens[b]), int(cu_seqlens[b]) + n)
        return CallLikeReference.paged(q, k_pages, v_pages, cu_seqlens, lens, table, scale, window_size)

    @staticmethod
    def paged(q, k_cache, v_cache, cu_seqlens, lens, table, scale, window_size):
        left = window_size[0]
        window = None if left is None or left < 0 else left + 1
        out = torch.zeros(q.shape, dtype=q.dtype)
        paged_prefill_reference(q, k_cache, v_cache, cu_seqlens, lens, table, scale, window, out)
        return out

    @classmethod
    def version_2(cls, q, k, v, cu_q, cu_k, max_q, max_k, *, softmax_scale, causal, window_size, block_table=None):
        assert causal
        if block_table is None:
            return cls.ragged(q, k, v, cu_q, softmax_scale, window_size)
        return cls.paged(q, k, v, cu_q, cu_k.diff(), block_table, softmax_scale, window_size)

    @classmethod
    def version_3_paged(
        cls, q, k, v, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window_size
    ):
        return cls.paged(q, k, v, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, window_size)

    @classmethod
    def version_4(
        cls,
        q,
        k,
        v,
        *,
        cu_seqlens_q,
        softmax_scale,
        causal,
        window_size,
        cu_seqlens_k=None,
        seqused_k=None,
        page_table=None,
    ):
        if page_table is None:
            return cls.ragged(q, k, v, cu_seqlens_q, softmax_scale, window_size), None
        return cls.paged(q, k, v, cu_seqlens_q, seqused_k, page_table, softmax_scale, window_size), None


@pytest.mark.parametrize("version", [3, 4, 2])
def test_flash_packages_are_called_right(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    flash_attn = types.ModuleType("flash_attn")
    flash_attn.flash_attn_varlen_func = CallLikeReference.version_2
    cute = types.ModuleType("flash_attn.cute")
    cute.flash_attn_varlen_func = CallLikeReference.version_4
    interface = types.ModuleType("flash_attn_interface")
    interface.flash_attn_varlen_func = CallLikeReference.version_2
    interface.flash_attn_with_kvcache = CallLikeReference.version_3_paged
    for module in (flash_attn, cute, interface):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    package = next(p for p in flash._PACKAGES if p.label == f"flash-attn {version}")
    for chunks in (MIXED, [(1, 7), (1, 30), (20, 20), (33, 33)]):
        step = Step(chunks, 2, block_size=256, dtype=torch.float16)
        backend = flash._build_on(package, step.spec(windows=frozenset({None, 12})))
        for window in (None, 12):
            step.check(step.forward(backend, window), window)
            step.check_wanted(backend, len(chunks), window)


# On a GPU, at real shapes

CHUNKS_ON_GPU = {  # (query length, sequence length), and how many of them are decodes
    "prompt": ([(700, 700)], 0),
    "decode": ([(1, 5000)], 1),  # more splits than the merge takes at a time
    "mixed": ([(1, 600), (1, 5000), (1, 33), (300, 300), (128, 2000), (1, 1), (17, 1040), (129, 272), (65, 90)], 3),
    "large": ([(1, 1 + 5 * i) for i in range(200)] + [(2 + i, 2 + 2 * i) for i in range(56)], 200),
}
# (dtype, query heads, KV heads, head_dim, block size): every dtype, head_dim, group size and way to read pages once
CASES_ON_GPU = [
    (torch.bfloat16, 16, 8, 128, 128),
    (torch.float16, 14, 2, 64, 16),
    (torch.float32, 16, 4, 128, 128),
    (torch.bfloat16, 8, 1, 256, 64),
    (torch.float16, 4, 4, 80, 128),
    (torch.bfloat16, 6, 2, 96, 32),
    (torch.float32, 4, 2, 80, 48),
]
WINDOWS = (None, 300)


def spec_on_gpu(dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> AttentionSpec:
    return AttentionSpec(
        num_heads, num_kv_heads, head_dim, dtype, torch.device("cuda"), 512, 32768, block_size, frozenset(WINDOWS)
    )


def check_on_gpu(backend: AttentionBackend, spec: AttentionSpec, tolerance: float | None = None) -> None:
    """All batches, with cached prefixes and with whole prompts only (which may take another path)."""
    for chunks, num_decodes in CHUNKS_ON_GPU.values():
        fresh = chunks[:num_decodes] + [(q, q) for q, _ in chunks[num_decodes:]]
        for batch in [chunks] if fresh == chunks else [chunks, fresh]:
            step = Step(
                batch, num_decodes, spec.num_heads, spec.num_kv_heads, spec.head_dim, backend.block_size, spec.dtype,
                "cuda",
            )  # fmt: skip
            for window in WINDOWS:
                step.check(step.forward(backend, window), window, tolerance=tolerance)
                if len(batch) > num_decodes:
                    step.check_wanted(backend, len(batch), window, tolerance)


@pytest.mark.gpu(seconds=13)
@pytest.mark.parametrize("case", CASES_ON_GPU, ids=lambda case: "-".join(map(str, case)))
def test_triton_on_gpu(case: tuple[torch.dtype, int, int, int, int]) -> None:
    spec = spec_on_gpu(*case)
    check_on_gpu(choose_backend("triton", spec), spec)


@pytest.mark.gpu(seconds=10)
def test_torch_on_gpu() -> None:
    for case in (CASES_ON_GPU[0], CASES_ON_GPU[4], CASES_ON_GPU[6]):
        spec = spec_on_gpu(*case)
        # torch's kernel for float32 multiplies in three passes of TF32.
        check_on_gpu(choose_backend("torch", spec), spec, 5e-5 if spec.dtype == torch.float32 else None)


@pytest.mark.gpu(seconds=1)  # where there is none
@pytest.mark.parametrize("version", [2, 3, 4])
def test_flash_attn_on_gpu(version: int) -> None:
    package = next(p for p in flash._PACKAGES if p.label == f"flash-attn {version}")
    try:
        package.load()
    except Exception as error:  # a package can be broken in any way
        pytest.skip(f"{package.label}: {error}")
    built = 0
    for dtype, num_heads, num_kv_heads, head_dim, _ in CASES_ON_GPU:
        if dtype == torch.float32:
            continue
        spec = spec_on_gpu(dtype, num_heads, num_kv_heads, head_dim, package.default_block_size)
        try:
            backend = flash._build_on(package, spec)
        except BackendUnavailable:  # no kernel for this head_dim
            continue
        built += 1
        check_on_gpu(backend, spec)
    assert built > 0


@pytest.mark.gpu(seconds=8)
@pytest.mark.parametrize("name", ["auto", "torch"])
def test_graph_replays_with_other_lengths(name: str) -> None:
    """Captured at the largest length, replayed at shorter ones. "auto" always finds a backend."""
    spec = spec_on_gpu(torch.bfloat16, 16, 8, 128, 128)
    backend = choose_backend(name, spec)
    assert backend.name in (["torch"] if name == "torch" else ["flash_attn", "triton"])
    for batch in (1, 7, 256):
        lens = [2000 - 7 * i for i in range(batch)]
        step = Step([(1, n) for n in lens], batch, 16, 8, 128, backend.block_size, torch.bfloat16, "cuda")
        step.forward(backend)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step.run(backend)
        for shorter in (0, 100, 183):
            step.set_lengths([n - shorter for n in lens])
            if backend.rotates_decodes(batch):
                step.expect_projected()
            graph.replay()
            step.check(out, None)
