"""Time every kernel of the engine at real shapes, each against its floor: `python benchmarks/kernels.py --help`.

Owns: the shapes and the clock. Invariant: a kernel never finds its data in the L2 cache by luck: each call of a
captured CUDA graph works on buffers of its own, together larger than L2. It deliberately checks no results:
tests/kernels does.

The floor is bytes over bandwidth, or FLOPs over FLOP/s where that is more. Needs a GPU; on a CPU only --dry-run works,
which calls everything once at small shapes. All of it takes under a minute on an H200, compilation included.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from a checkout

import torch

from nanovllm.attention import AttentionBackend, AttentionMetadata, AttentionSpec, choose_backend, describe
from nanovllm.entrypoints.bench.floors import Chip, chip_of
from nanovllm.entrypoints.bench.models import QWEN3_SHAPES, published_config
from nanovllm.entrypoints.bench.report import commit, machine
from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.advance import advance
from nanovllm.kernels.norm import add_rms_norm, rms_norm
from nanovllm.kernels.prepare import prepare_inputs
from nanovllm.kernels.rope import Rope, qk_norm_rope_store
from nanovllm.kernels.sampling import SamplingWorkspace, sample
from nanovllm.kernels.update import scatter_updates

Call = Callable[[], object]
MAX_MODEL_LEN = 8192
MAX_BUFFER_SETS = 64
BUFFER_BYTES = 16 * 2**30  # at most, of one case


@dataclass(frozen=True)
class Dims:
    """One model's sizes; with --dry-run small ones."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @classmethod
    def of(cls, name: str, small: bool) -> Dims:
        """Of a published Qwen3 size."""
        config = published_config(name)
        if small:
            return cls(name, 64, 96, 4, 2, 32, 500)
        return cls(name, config["hidden_size"], config["intermediate_size"], config["num_attention_heads"],
                   config["num_key_value_heads"], config["head_dim"], config["vocab_size"])  # fmt: skip

    @property
    def qkv_size(self) -> int:
        """Width of the merged q, k and v."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True)
class Case:
    """A kernel at one shape. `make()` allocates a set of buffers and returns the call that works on them."""

    kernel: str
    model: str
    shape: str
    make: Callable[[], Call]
    num_bytes: float  # that have to move
    flops: float = 0.0
    buffer_bytes: float | None = None  # of one set, where it is not num_bytes
    graph: bool = True


@dataclass(frozen=True)
class Result:
    """Microseconds of one call; `floor_us` and `share` are None on an unknown chip."""

    kernel: str
    model: str
    shape: str
    us: float
    floor_us: float | None
    share: float | None
    rate: str


class Bench:
    """Where the tensors live, and the clock."""

    def __init__(self, device: torch.device, chip: Chip | None) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.chip = chip

    def normal(self, *shape: int) -> torch.Tensor:
        """Random values in the model's dtype."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def ints(self, values: list[int] | range, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """An int32 tensor of the values."""
        return torch.tensor(list(values), dtype=dtype, device=self.device)

    def run(self, case: Case) -> Result:
        """Time one case."""
        seconds = self._seconds_on_gpu(case) if self.device.type == "cuda" else self._seconds_once(case)
        floor = None
        if self.chip is not None:
            floor = max(case.num_bytes / self.chip.bandwidth, case.flops / self.chip.flops)
        is_compute = self.chip is not None and case.flops / self.chip.flops > case.num_bytes / self.chip.bandwidth
        rate = (
            f"{case.flops / seconds / 1e12:.0f} TFLOP/s"
            if is_compute
            else f"{case.num_bytes / seconds / 1e12:.2f} TB/s"
        )
        return Result(case.kernel, case.model, case.shape, round(seconds * 1e6, 2), floor and round(floor * 1e6, 2),
                      floor and round(floor / seconds, 3), rate)  # fmt: skip

    def _seconds_once(self, case: Case) -> float:
        call = case.make()
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def _seconds_on_gpu(self, case: Case) -> float:
        """Best of five replays of a graph that holds at least 16 calls (few, where one call is long)."""
        l2_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
        set_bytes = max(1.0, case.buffer_bytes or case.num_bytes)
        num_sets = min(
            MAX_BUFFER_SETS, max(2, math.ceil(3 * l2_bytes / set_bytes)), int(BUFFER_BYTES // set_bytes) or 1
        )
        calls = [case.make() for _ in range(num_sets)]
        for call in calls[:2]:  # compiles, and lets cuBLAS choose
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        calls[0]()
        torch.cuda.synchronize()
        rounds = max(1, math.ceil(16 / num_sets)) if time.perf_counter() - start < 2e-3 else 1

        def all_calls() -> None:
            for _ in range(rounds):
                outputs = [call() for call in calls]  # kept, so that no output reuses the last one's memory
                del outputs

        replay: Call = all_calls
        if case.graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                all_calls()
            replay = graph.replay
        replay()
        best = math.inf
        for _ in range(5):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            replay()
            end.record()
            end.synchronize()
            best = min(best, begin.elapsed_time(end) / 1e3)
        return best / (rounds * num_sets)


def matmul_cases(bench: Bench, dims: Dims, num_tokens: int) -> Iterator[Case]:
    """The layer's matrix products as the engine calls them; the output layer for rows that sample."""
    sizes = {
        "qkv": (dims.hidden, dims.qkv_size), "o": (dims.heads * dims.head_dim, dims.hidden),
        "gate_up": (dims.hidden, 2 * dims.inner), "down": (dims.inner, dims.hidden),
        "logits": (dims.hidden, dims.vocab),
    }  # fmt: skip
    for name, (width, out) in sizes.items():
        if name == "logits" and num_tokens > 1024:
            continue

        def make(width: int = width, out: int = out) -> Call:
            x, weight = bench.normal(num_tokens, width), bench.normal(out, width)
            return lambda: torch.nn.functional.linear(x, weight)

        num_bytes = 2 * (num_tokens * width + width * out + num_tokens * out)
        yield Case(f"linear {name}", dims.name, f"T={num_tokens}", make, num_bytes, 2 * num_tokens * width * out)


def pointwise_cases(bench: Bench, dims: Dims, num_tokens: int, block_size: int = 128) -> Iterator[Case]:
    """The memory-bound kernels between the matrix products."""
    shape = f"T={num_tokens}"
    weight = torch.ones(dims.hidden, device=bench.device, dtype=bench.dtype)
    head_weight = torch.ones(dims.head_dim, device=bench.device, dtype=bench.dtype)
    cos_sin = torch.rand(MAX_MODEL_LEN, dims.head_dim, device=bench.device)  # float32
    positions = torch.randint(0, MAX_MODEL_LEN, (num_tokens,), device=bench.device, dtype=torch.int32)
    num_blocks = num_tokens // block_size + 2
    slots = torch.randperm(num_blocks * block_size, device=bench.device)[:num_tokens]
    rope = Rope(head_weight, head_weight, 1e-6, cos_sin)

    def make_norm() -> Call:
        x = bench.normal(num_tokens, dims.hidden)
        return lambda: rms_norm(x, weight, 1e-6)

    def make_add_norm() -> Call:
        x, residual = bench.normal(num_tokens, dims.hidden), bench.normal(num_tokens, dims.hidden)
        return lambda: add_rms_norm(x, residual, weight, 1e-6)

    def make_rope() -> Call:
        qkv = bench.normal(num_tokens, dims.qkv_size)
        k_cache, v_cache = (bench.normal(num_blocks, block_size, dims.kv_heads, dims.head_dim) for _ in range(2))
        return lambda: qk_norm_rope_store(
            qkv, rope, positions, slots, k_cache, v_cache,
            dims.heads, dims.kv_heads, dims.head_dim, num_tokens > 1024,
        )  # fmt: skip

    def make_silu() -> Call:
        x = bench.normal(num_tokens, 2 * dims.inner)
        return lambda: silu_and_mul(x)

    row = 2 * num_tokens * dims.hidden  # bytes of a [T, hidden]
    heads_moved = 2 * dims.heads + 4 * dims.kv_heads + (dims.kv_heads if num_tokens > 1024 else 0)
    yield Case("rms_norm", dims.name, shape, make_norm, 2 * row)
    yield Case("add_rms_norm", dims.name, shape, make_add_norm, 4 * row)
    yield Case("qk_norm_rope_store", dims.name, shape, make_rope, 2 * num_tokens * heads_moved * dims.head_dim)
    yield Case("silu_and_mul", dims.name, shape, make_silu, 6 * num_tokens * dims.inner)


def sampling_cases(bench: Bench, dims: Dims, num_rows: int) -> Iterator[Case]:
    """One pass over the logits is the floor, with filters too."""
    rows = bench.ints(range(1, num_rows + 1))
    seeds = torch.randint(0, 2**31 - 1, (num_rows + 1, 2), device=bench.device, dtype=torch.int32)
    num_tokens = torch.full((num_rows + 1,), 100, device=bench.device, dtype=torch.int32)
    full: dict[str, Any] = {"device": bench.device, "dtype": torch.float32}
    workspace = SamplingWorkspace.allocate(num_rows, dims.vocab, bench.device) if bench.device.type == "cuda" else None
    for label, top_k, top_p in (("sample", 0, 1.0), ("sample top_k 20 top_p 0.95", 20, 0.95)):
        temperature, min_p = torch.full((num_rows + 1,), 0.6, **full), torch.zeros(num_rows + 1, **full)
        top_ks = torch.full((num_rows + 1,), top_k, device=bench.device, dtype=torch.int32)
        top_ps = torch.full((num_rows + 1,), top_p, **full)

        def make(top_ks: torch.Tensor = top_ks, top_ps: torch.Tensor = top_ps,
                 temperature: torch.Tensor = temperature, min_p: torch.Tensor = min_p) -> Call:  # fmt: skip
            logits = 2 * bench.normal(num_rows, dims.vocab)
            return lambda: sample(logits, rows, temperature, top_ks, top_ps, min_p, seeds, num_tokens, workspace)

        yield Case(label, dims.name, f"S={num_rows}", make, 2 * num_rows * dims.vocab)


def step_cases(bench: Bench, num_seqs: int, block_size: int = 128) -> Iterator[Case]:
    """Bookkeeping of a decode step: no bytes to speak of, so the floor is a launch."""
    num_rows, max_blocks = num_seqs + 1, MAX_MODEL_LEN // block_size
    rows, cu_seqlens = bench.ints(range(1, num_rows)), bench.ints(range(num_seqs + 1))
    token_ids = torch.zeros(num_rows, MAX_MODEL_LEN, device=bench.device, dtype=torch.int32)
    num_computed, sampled = bench.ints([600] * num_rows), bench.ints([7] * num_seqs)
    num_tokens = num_computed + 1
    tables = torch.randint(1, 1000, (num_rows, max_blocks), device=bench.device, dtype=torch.int32)
    ids, positions, seq_lens = (torch.empty(num_seqs, device=bench.device, dtype=torch.int32) for _ in range(3))
    slots, out_table = torch.empty(num_seqs, device=bench.device, dtype=torch.int64), torch.empty_like(tables[1:])
    state = torch.zeros(num_rows * max_blocks, device=bench.device, dtype=torch.int32)
    segments = [number for index in range(num_seqs) for number in (index * max_blocks, 3 * num_seqs + index, 1)]
    staged = bench.ints(segments + [1] * num_seqs)  # one block append a sequence

    def prepare() -> None:
        prepare_inputs(rows, cu_seqlens, token_ids, num_computed, tables, block_size, 1,
                       ids, positions, slots, seq_lens, out_table)  # fmt: skip

    shape = f"B={num_seqs}"
    yield Case(
        "scatter_updates", "any", shape, lambda: lambda: scatter_updates(state, staged, num_seqs, 1), 20 * num_seqs
    )
    yield Case("prepare_inputs", "any", shape, lambda: prepare, 64 * num_seqs)
    # its counters run away over the replays, which changes nothing: a token without room is not written
    yield Case("advance", "any", shape,
               lambda: lambda: advance(rows, cu_seqlens, num_seqs, sampled, token_ids, num_tokens, num_computed),
               28 * num_seqs)  # fmt: skip


def attention_case(
    bench: Bench, dims: Dims, backend: AttentionBackend, query_lens: list[int], seq_lens: list[int], label: str
) -> Case:
    """Attention of one layer; a decode step where every query length is 1, else prompts, behind a prefix or not."""
    block_size, is_decode = backend.block_size, max(query_lens) == 1
    blocks_of = [-(-length // block_size) for length in seq_lens]
    num_tokens, num_blocks = sum(query_lens), sum(blocks_of) + 1
    cu_seqlens = [0]
    for length in query_lens:
        cu_seqlens.append(cu_seqlens[-1] + length)

    def make() -> Call:
        ids = iter((torch.randperm(num_blocks - 1) + 1).tolist())
        table = torch.zeros(len(seq_lens), max(blocks_of), dtype=torch.int32)
        for index, count in enumerate(blocks_of):
            table[index, :count] = torch.tensor([next(ids) for _ in range(count)], dtype=torch.int32)
        ends = zip(table.tolist(), seq_lens, strict=True)  # where decodes store their keys
        slots = [blocks[(n - 1) // block_size] * block_size + (n - 1) % block_size for blocks, n in ends]
        metadata = AttentionMetadata(
            bench.ints(cu_seqlens), bench.ints(seq_lens), table.to(bench.device),
            bench.ints(slots if is_decode else [0] * num_tokens, torch.int64), max(query_lens), max(seq_lens),
            len(seq_lens) if is_decode else 0, not is_decode and query_lens != seq_lens,
        )  # fmt: skip
        q, k, v = bench.normal(num_tokens, dims.qkv_size).view(num_tokens, -1, dims.head_dim).split(
            [dims.heads, dims.kv_heads, dims.kv_heads], dim=1
        )  # fmt: skip
        k_cache, v_cache = (bench.normal(num_blocks, block_size, dims.kv_heads, dims.head_dim) for _ in range(2))
        weight, cos_sin = bench.normal(dims.head_dim), bench.normal(max(seq_lens), dims.head_dim).float()
        rope = Rope(weight, weight, 1e-6, cos_sin) if is_decode and backend.rotates_decodes(len(seq_lens)) else None
        return lambda: backend.forward(q, k, v, k_cache, v_cache, metadata, dims.head_dim**-0.5, None, rope)

    num_bytes = 4 * (sum(seq_lens) * dims.kv_heads + num_tokens * dims.heads) * dims.head_dim
    pairs = sum(query * seq - query * (query - 1) / 2 for query, seq in zip(query_lens, seq_lens, strict=True))
    flops = 0 if is_decode else 4 * pairs * dims.heads * dims.head_dim
    shape = f"{len(seq_lens)} x {sum(seq_lens) // len(seq_lens)}"
    return Case(f"{backend.name} {label}", dims.name, shape, make, num_bytes, flops, graph=is_decode)


def attention_cases(bench: Bench, dims: Dims, backend_name: str, scale: int) -> Iterator[Case]:
    """Decode at the batches of the workloads, prompts of 4 x 4,096, and a second chunk behind 4,096 cached tokens."""
    spec = AttentionSpec(
        num_heads=dims.heads, num_kv_heads=dims.kv_heads, head_dim=dims.head_dim, dtype=bench.dtype,
        device=bench.device, max_num_seqs=512, max_model_len=16384,
    )  # fmt: skip
    try:
        backend = choose_backend(backend_name, spec)
    except ValueError as error:
        print(f"{dims.name}: {error}", file=sys.stderr)
        return
    print(f"{dims.name}: {describe(backend)}, block size {backend.block_size}", file=sys.stderr)
    rng = random.Random(0)
    for num_seqs, mean in ((1, 512), (8, 16_384), (256, 600), (512, 850)):
        num_seqs, mean = (num_seqs, mean) if scale == 1 else (min(num_seqs, 4), mean // scale)
        spread = 0 if num_seqs <= 8 else mean // 2
        lengths = [rng.randint(mean - spread, mean + spread) for _ in range(num_seqs)]
        yield attention_case(bench, dims, backend, [1] * num_seqs, lengths, "decode")
    length = 4096 // scale
    yield attention_case(bench, dims, backend, [length] * 4, [length] * 4, "prompt")
    yield attention_case(bench, dims, backend, [length] * 4, [2 * length] * 4, "prompt behind prefix")


def all_cases(bench: Bench, models: list[str], backends: list[str], dry_run: bool) -> Iterator[Case]:
    """Everything, the bookkeeping once."""
    batches = [1, 4] if dry_run else [1, 256, 512]
    for num_seqs in batches:
        yield from step_cases(bench, num_seqs)
    for model in models:
        dims = Dims.of(model, dry_run)
        for backend in backends:
            yield from attention_cases(bench, dims, backend, scale=64 if dry_run else 1)
        for num_tokens in [*batches, 8 if dry_run else 16_384]:
            yield from pointwise_cases(bench, dims, num_tokens)
            yield from matmul_cases(bench, dims, num_tokens)
            if num_tokens in batches:
                yield from sampling_cases(bench, dims, num_tokens)


def table(results: list[Result]) -> str:
    """The results for people."""
    lines = [f"{'kernel':34} {'model':11} {'shape':12} {'us':>9} {'floor':>9} {'share':>6}  rate"]
    for one in results:
        floor, share = (f"{one.floor_us:9.1f}", f"{one.share:6.0%}") if one.floor_us else (f"{'-':>9}", f"{'-':>6}")
        lines.append(f"{one.kernel:34} {one.model:11} {one.shape:12} {one.us:9.1f} {floor} {share}  {one.rate}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time the engine's kernels at real shapes.")
    parser.add_argument("--model", nargs="+", default=["qwen3-0.6b", "qwen3-8b"], choices=list(QWEN3_SHAPES))
    parser.add_argument("--backend", nargs="+", default=["triton", "flash_attn"], help="attention backends")
    parser.add_argument("--only", default="", help="a regular expression on the kernel's name")
    parser.add_argument("--bandwidth", type=float, help="bytes/s, for the floor; known for an H200")
    parser.add_argument("--flops", type=float, help="FLOP/s in large bf16 matrix products")
    parser.add_argument("--out", help="write the results to this file, as JSON")
    parser.add_argument("--dry-run", action="store_true", help="small shapes, each once; works on a CPU")
    args = parser.parse_args(argv)
    on_gpu = torch.cuda.is_available()
    if not on_gpu and not args.dry_run:
        parser.error("needs a CUDA GPU; --dry-run does not")
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    bench = Bench(device, chip_of(torch.cuda.get_device_name() if on_gpu else "", args.bandwidth, args.flops))
    backends = args.backend if on_gpu else ["torch"]
    results, num_failed = [], 0
    with torch.inference_mode():
        for case in all_cases(bench, args.model, backends, args.dry_run):
            if not re.search(args.only, case.kernel):
                continue
            try:
                results.append(bench.run(case))
            except Exception as error:  # whatever a kernel that fails raises: the others are still timed
                num_failed += 1
                print(
                    f"{case.kernel} {case.model} {case.shape}: FAILED, {type(error).__name__}: {error}", file=sys.stderr
                )
    print(table(results))
    if args.out:
        document = {"machine": machine(), "commit": commit(), "torch": torch.__version__,
                    "results": [asdict(result) for result in results]}  # fmt: skip
        Path(args.out).write_text(json.dumps(document, indent=1) + "\n")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
