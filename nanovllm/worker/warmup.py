"""Compiling kernels side by side at start.

Owns: a few threads that call each Triton kernel once, on scratch tensors of the shapes that matter to its compilation.
Invariant: it changes nothing but caches: an engine without it is as right, and slower to start. It deliberately covers
what every model runs; a kernel that only some request needs compiles when that request comes.

With cold caches a kernel takes about a second to compile, most of it outside Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from nanovllm.attention import AttentionBackend, AttentionMetadata
from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.advance import advance
from nanovllm.kernels.norm import add_rms_norm, rms_norm
from nanovllm.kernels.prepare import prepare_inputs
from nanovllm.kernels.rope import qk_norm_rope_store
from nanovllm.kernels.update import scatter_updates
from nanovllm.layers.sampler import Sampler
from nanovllm.model_config import ModelConfig

NUM_ROWS = 16  # of scratch tensors: a multiple of 16, as Triton compiles sizes of 1 and odd ones separately


class KernelWarmup:
    """Runs calls in threads, on one CUDA stream; `wait` raises what any of them raised. A no-op on the CPU."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self.device, self.stream = device, stream
        self._pool = ThreadPoolExecutor(8, "compile") if stream is not None else None
        self._futures: list[Future[None]] = []

    def start(self, calls: list[Callable[[], object]]) -> None:
        """Begin; returns at once."""
        if self._pool is not None:
            self._futures += [self._pool.submit(self._run, call) for call in calls]

    def _run(self, call: Callable[[], object]) -> None:
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(self.stream), torch.inference_mode():
            call()

    def wait(self) -> None:
        """Until all that was started is done."""
        for future in self._futures:
            future.result()
        self._futures.clear()
        if self._pool is not None:
            self._pool.shutdown()


def model_calls(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> list[Callable[[], object]]:
    """Norms, activation and sampling: what needs to know no block size."""

    def zeros(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=of, device=device)

    hidden, eps = config.hidden_size, config.rms_norm_eps

    def sample(num_rows: int) -> None:
        sampler = Sampler(config.vocab_size, num_rows, device)
        sampler(zeros(num_rows, config.vocab_size), zeros(num_rows, of=torch.int32), _Settings(num_rows, device))

    return [
        lambda: sample(4),
        lambda: sample(128),
        lambda: rms_norm(zeros(NUM_ROWS, hidden), zeros(hidden), eps),
        lambda: add_rms_norm(zeros(NUM_ROWS, hidden), zeros(NUM_ROWS, hidden), zeros(hidden), eps),
        lambda: silu_and_mul(zeros(NUM_ROWS, 2 * config.intermediate_size)),
    ]


class _Settings:
    """Rows of greedy requests, as the sampler reads them."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self.temperature = torch.zeros(num_rows, device=device)
        self.top_p = torch.ones(num_rows, device=device)
        self.min_p = torch.zeros(num_rows, device=device)
        self.top_k = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(num_rows, 2, dtype=torch.int32, device=device)
        self.num_tokens = torch.ones(num_rows, dtype=torch.int32, device=device)


def step_calls(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, backend: AttentionBackend, num_decodes: int
) -> list[Callable[[], object]]:
    """The kernels around the model: updates, inputs, rope and store, a decode of so many rows, advance."""

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    block_size = backend.block_size
    cache = torch.zeros(2, block_size, kv_heads, head_dim, dtype=dtype, device=device)
    cos_sin = torch.zeros(NUM_ROWS, head_dim, device=device)

    def rope() -> None:
        weight = torch.ones(head_dim, dtype=dtype, device=device) if config.qk_norm else None
        qkv = torch.zeros(NUM_ROWS, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
        slots = torch.zeros(NUM_ROWS, dtype=torch.int64, device=device)
        eps, position = config.rms_norm_eps, ints(NUM_ROWS)
        qk_norm_rope_store(
            qkv,
            weight,
            weight,
            eps,
            cos_sin,
            position,
            slots,
            cache,
            cache,
            heads,
            kv_heads,
            head_dim,
            backend.needs_rotated_k,
        )

    def decode() -> None:
        q = torch.zeros(num_decodes, heads + 2 * kv_heads, head_dim, dtype=dtype, device=device)
        metadata = AttentionMetadata(
            torch.arange(num_decodes + 1, dtype=torch.int32, device=device), ints(num_decodes) + 1,
            ints(num_decodes, NUM_ROWS), torch.zeros(num_decodes, dtype=torch.int64, device=device), 1, 1,
            num_decodes, False,
        )  # fmt: skip
        k, v = q[:, heads : heads + kv_heads], q[:, heads + kv_heads :]
        for window in dict.fromkeys(config.layer_windows):
            backend.forward(q[:, :heads], k, v, cache, cache, metadata, 1.0, window)

    def prepare(max_query_len: int) -> None:
        slots = torch.zeros(NUM_ROWS, dtype=torch.int64, device=device)
        tables, outs = ints(NUM_ROWS, NUM_ROWS), [ints(NUM_ROWS) for _ in range(3)]
        rows, cu_seqlens_q = ints(NUM_ROWS), ints(NUM_ROWS + 1)
        prepare_inputs(
            rows, cu_seqlens_q, ints(NUM_ROWS, 64), ints(NUM_ROWS), tables, block_size, max_query_len,
            outs[0], outs[1], slots, outs[2], ints(NUM_ROWS, NUM_ROWS),
        )  # fmt: skip

    counts = ints(3, NUM_ROWS)
    return [
        rope,
        decode,
        lambda: prepare(1),
        lambda: prepare(64),
        lambda: scatter_updates(ints(64), ints(64), 1, 1),
        lambda: advance(
            ints(NUM_ROWS), ints(NUM_ROWS + 1), NUM_ROWS, ints(NUM_ROWS), ints(NUM_ROWS, 64), counts[0], counts[1]
        ),
    ]
