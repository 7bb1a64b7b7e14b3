"""Step inputs made on the device against a plain loop over the rows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.prepare import prepare_inputs, prepare_inputs_reference, prepare_inputs_triton

UNTOUCHED = -77


@dataclass
class Rows:
    token_ids: Tensor  # int32 [R, max_model_len]
    num_computed: Tensor  # int32 [R]
    block_tables: Tensor  # int32 [R, M]


def make_rows(num_rows: int, max_model_len: int, block_size: int, device: str, seed: int = 0) -> Rows:
    """Rows as views of one flat tensor, as in the engine. Row 0 holds rubbish, but for its block table."""
    generator = torch.Generator().manual_seed(seed)
    max_blocks = -(-max_model_len // block_size)
    sizes = (num_rows * max_model_len, num_rows, num_rows * max_blocks)
    token_ids, num_computed, tables = torch.empty(sum(sizes), dtype=torch.int32).split(sizes)
    token_ids.random_(0, 150_000, generator=generator)
    num_computed.random_(0, max_model_len // 2, generator=generator)
    tables.random_(1, 2**31 - 1, generator=generator)
    tables[:max_blocks] = 0
    token_ids[max_model_len + num_computed[1]] = -1  # what a row whose logits were not finite holds
    return Rows(
        token_ids.view(num_rows, max_model_len).to(device),
        num_computed.to(device),
        tables.view(num_rows, max_blocks).to(device),
    )


def make_outputs(num_tokens: int, batch: int, max_blocks: int, device: str) -> list[Tensor]:
    """Buffers longer than needed, as the static ones are."""
    shapes = [((num_tokens + 5,), torch.int32)] * 2 + [((num_tokens + 5,), torch.int64), ((batch + 3,), torch.int32)]
    shapes.append(((batch + 3, max_blocks), torch.int32))
    return [torch.full(shape, UNTOUCHED, dtype=dtype, device=device) for shape, dtype in shapes]


def plain_loop(rows: list[int], query_lens: list[int], state: Rows, block_size: int, outputs: list[Tensor]) -> None:
    input_ids, positions, slots, seq_lens, table = outputs
    token = 0
    for index, (row, query_len) in enumerate(zip(rows, query_lens, strict=True)):
        computed = 0 if row == 0 else int(state.num_computed[row])
        for position in range(computed, computed + query_len):
            input_ids[token] = 0 if row == 0 else max(int(state.token_ids[row, position]), 0)
            positions[token] = position
            slots[token] = int(state.block_tables[row, position // block_size]) * block_size + position % block_size
            token += 1
        seq_lens[index] = computed + query_len
        used = -(-(computed + query_len) // block_size)
        table[index, :used] = state.block_tables[row, :used]


CASES = {  # rows and query lengths
    "one": ([1], [1]),
    "decode with padding": ([3, 1, 5, 0, 0], [1, 1, 1, 1, 1]),
    "mixed": ([2, 6, 1, 4], [1, 1, 33, 3]),
    "drafts": ([4, 2], [5, 3]),
    "chunk": ([7], [120]),
}


@pytest.mark.parametrize("block_size", [16, 48])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", [False, True])
def test_against_plain_loop(case: str, block_size: int, kernel: bool, request: pytest.FixtureRequest) -> None:
    device = request.getfixturevalue("kernel_device") if kernel else "cpu"
    rows, query_lens = CASES[case]
    state = make_rows(8, 250, block_size, device)
    max_blocks = state.block_tables.shape[1]
    cu_seqlens_q = torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32)
    outputs = make_outputs(sum(query_lens), len(rows), max_blocks, device)
    expected = [output.clone() for output in outputs]
    plain_loop(rows, query_lens, state, block_size, expected)
    batch_rows = torch.tensor([*rows, 99, 99], dtype=torch.int32, device=device)  # longer than the batch
    run = prepare_inputs_triton if kernel else prepare_inputs
    run(
        batch_rows,
        cu_seqlens_q,
        state.token_ids,
        state.num_computed,
        state.block_tables,
        block_size,
        max(query_lens),
        *outputs,
    )
    for output, wanted in zip(outputs, expected, strict=True):
        assert torch.equal(output, wanted)


@pytest.mark.parametrize("kernel", [False, True])
def test_row_zero_may_be_longer_than_its_table(kernel: bool, request: pytest.FixtureRequest) -> None:
    """A profiling run gives row 0 a whole token budget: all of it goes to block 0."""
    device = request.getfixturevalue("kernel_device") if kernel else "cpu"
    state = make_rows(2, 32, 16, device)
    outputs = make_outputs(100, 1, 2, device)
    rows = torch.zeros(1, dtype=torch.int32, device=device)
    cu_seqlens_q = torch.tensor([0, 100], dtype=torch.int32, device=device)
    run = prepare_inputs_triton if kernel else prepare_inputs
    run(rows, cu_seqlens_q, state.token_ids, state.num_computed, state.block_tables, 16, 100, *outputs)
    input_ids, positions, slots, seq_lens, table = outputs
    assert input_ids[:100].eq(0).all() and input_ids[100:].eq(UNTOUCHED).all()
    assert positions[:100].tolist() == list(range(100))
    assert slots[:100].tolist() == [position % 16 for position in range(100)]
    assert seq_lens[0] == 100 and table[0].tolist() == [0, 0]


@pytest.mark.gpu(seconds=6)
def test_real_shapes() -> None:
    for block_size in (16, 128):
        state = make_rows(513, 40_960, block_size, "cuda")
        max_blocks = state.block_tables.shape[1]
        for query_lens in ([1] * 512, [1] * 200 + [1000, 5000, 1, 777], [16_384]):
            rows = (torch.randperm(512)[: len(query_lens)] + 1).to("cuda", torch.int32)
            cu_seqlens_q = torch.tensor([0, *query_lens]).cumsum(0).to("cuda", torch.int32)
            outputs = make_outputs(sum(query_lens), len(query_lens), max_blocks, "cuda")
            expected = [output.clone() for output in outputs]
            inputs = (
                rows, cu_seqlens_q, state.token_ids, state.num_computed, state.block_tables, block_size,
                max(query_lens),
            )  # fmt: skip
            prepare_inputs(*inputs, *outputs)
            prepare_inputs_reference(*inputs, *expected)
            for output, wanted in zip(outputs, expected, strict=True):
                assert torch.equal(output, wanted)
