"""Compiling kernels side by side at start, and choosing products.

Owns: a few threads that call each Triton kernel once, on scratch tensors of the shapes that matter to its compilation.
Invariant: it changes nothing but caches: an engine without it is as right, and slower to start. It deliberately covers
what every model runs; a kernel that only some request needs compiles when that request comes.

With cold caches a kernel takes about a second to compile, most of it outside Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from nanovllm.attention import AttentionBackend, AttentionMetadata
from nanovllm.kernels.activation import silu_and_mul
from nanovllm.kernels.advance import advance
from nanovllm.kernels.cublaslt import Product, fastest_product
from nanovllm.kernels.decode_linear import ResidualStream, linear_residual, norm_linear
from nanovllm.kernels.decode_linear_config import Kind, choose_config
from nanovllm.kernels.device import device_of
from nanovllm.kernels.norm import LARGE_BATCH_ELEMENTS, add_rms_norm, rms_norm
from nanovllm.kernels.paged_decode import SHORT_CONTEXT, decode_variant
from nanovllm.kernels.prepare import prepare_inputs
from nanovllm.kernels.rope import Rope, qk_norm_rope_store
from nanovllm.kernels.update import scatter_updates
from nanovllm.layers.linear import Linear
from nanovllm.layers.parallel import local_heads
from nanovllm.layers.sampler import Sampler
from nanovllm.model_config import ModelConfig
from nanovllm.models.qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM
from nanovllm.worker.cuda_graphs import context_bounds

NUM_ROWS = 16  # of scratch tensors: a multiple of 16, as Triton compiles sizes of 1 and odd ones separately


class KernelWarmup:
    """Runs calls in threads, on one CUDA stream; `wait` raises what any of them raised. A no-op on the CPU."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None) -> None:
        self.device, self.stream = device, stream
        self._pool = ThreadPoolExecutor(12, "compile") if stream is not None else None
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


def model_calls(
    config: ModelConfig, tp_size: int, dtype: torch.dtype, device: torch.device
) -> list[Callable[[], object]]:
    """Norms, activation and sampling: what needs to know no block size."""

    def zeros(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.zeros(shape, dtype=of, device=device)

    hidden, eps = config.hidden_size, config.rms_norm_eps
    num_many = LARGE_BATCH_ELEMENTS // hidden + NUM_ROWS  # a prompt step's norm has larger tiles

    def sample(num_rows: int) -> None:
        sampler = Sampler(config.vocab_size, num_rows, device)
        sampler(zeros(num_rows, config.vocab_size), zeros(num_rows, of=torch.int32), _Settings(num_rows, device))

    def norm(num_rows: int, has_addend: bool) -> None:
        x = zeros(num_rows, hidden)
        if has_addend:
            add_rms_norm(x, zeros(num_rows, hidden), zeros(hidden), eps)
        else:
            rms_norm(x, zeros(hidden), eps)

    additions = (False, True) if tp_size > 1 else (False,)  # one rank adds in its products
    return [
        lambda: sample(4),
        lambda: sample(128),
        *(partial(norm, num_rows, has_addend) for num_rows in (NUM_ROWS, num_many) for has_addend in additions),
        lambda: silu_and_mul(zeros(NUM_ROWS, 2 * config.intermediate_size // tp_size)),
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


def step_calls(backend: AttentionBackend, device: torch.device) -> list[Callable[[], object]]:
    """The kernels around the model: updates, inputs, advance."""

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    def prepare(max_query_len: int) -> None:
        slots = torch.zeros(NUM_ROWS, dtype=torch.int64, device=device)
        prepare_inputs(
            ints(NUM_ROWS), ints(NUM_ROWS + 1), ints(NUM_ROWS, 64), ints(NUM_ROWS), ints(NUM_ROWS, NUM_ROWS),
            backend.block_size, max_query_len, ints(NUM_ROWS), ints(NUM_ROWS), slots, ints(NUM_ROWS),
            ints(NUM_ROWS, NUM_ROWS),
        )  # fmt: skip

    def move_on() -> None:
        starts, counts = ints(NUM_ROWS + 1), ints(2, NUM_ROWS)
        advance(ints(NUM_ROWS), starts, NUM_ROWS, ints(NUM_ROWS), ints(NUM_ROWS, 64), counts[0], counts[1])

    updates = partial(scatter_updates, ints(64), ints(64), 1, 1)
    return [partial(prepare, 1), partial(prepare, 64), updates, move_on]


def attention_calls(
    config: ModelConfig,
    tp_size: int,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend,
    max_num_seqs: int,
) -> list[Callable[[], object]]:
    """Rope and store, and decodes, once for each launch that batches of up to `max_num_seqs` are compiled for: graphs
    have few sizes, but beside prompts there may be any number of decodes. Any number may come rotated, too: the last
    layer's do, in a step with prompts."""
    heads, kv_heads = local_heads(config.num_heads, config.num_kv_heads, tp_size)
    head_dim = config.head_dim
    cache = torch.zeros(2, backend.block_size, kv_heads, head_dim, dtype=dtype, device=device)
    weight = torch.ones(head_dim, dtype=dtype, device=device) if config.qk_norm else None
    rope = Rope(weight, weight, config.rms_norm_eps, torch.zeros(NUM_ROWS, head_dim, device=device))

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    def slots(num_tokens: int) -> Tensor:
        return torch.zeros(num_tokens, dtype=torch.int64, device=device)

    def qkv(num_tokens: int) -> Tensor:
        return torch.zeros(num_tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)

    def rotate() -> None:
        qk_norm_rope_store(
            qkv(NUM_ROWS), rope, ints(NUM_ROWS), slots(NUM_ROWS), cache, cache, heads, kv_heads, head_dim,
            backend.needs_rotated_k,
        )  # fmt: skip

    def decode(num_decodes: int, rotates: bool, max_seq_len: int) -> None:
        q, k, v = qkv(num_decodes).unflatten(1, (-1, head_dim)).split((heads, kv_heads, kv_heads), dim=1)
        starts = torch.arange(num_decodes + 1, dtype=torch.int32, device=device)
        metadata = AttentionMetadata(
            starts, ints(num_decodes) + 1, ints(num_decodes, NUM_ROWS), slots(num_decodes), 1, max_seq_len, num_decodes,
            has_cached_prefix=False,
        )  # fmt: skip
        for window in dict.fromkeys(config.layer_windows):
            backend.forward(q, k, v, cache, cache, metadata, 1.0, window, rope if rotates else None)

    first: dict[tuple[str, bool, bool], tuple[int, bool, int]] = {}
    for size in range(1, max_num_seqs + 1):
        for rotates in {False, backend.rotates_decodes(size)}:
            variant = decode_variant(size, kv_heads, head_dim, dtype, backend.block_size, device_of(device), rotates)
            for bound in context_bounds(size, config.max_model_len):
                is_short_row = rotates and size == 1 and bound <= SHORT_CONTEXT
                first.setdefault((repr(variant), rotates, is_short_row), (size, rotates, bound))
    return [*(partial(decode, *call) for call in first.values()), rotate]


def product_calls(model: Qwen3ForCausalLM, dtype: torch.dtype, sizes: list[int]) -> list[Callable[[], object]]:
    """The products of a decode step, once for each set of tiles that the batch sizes `sizes` use."""
    layer, workspace = model.model.layers[0], model.model.workspace
    assert isinstance(layer, Qwen3DecoderLayer)
    if workspace is None or dtype == torch.float32:
        return []
    qkv, o = layer.self_attn.qkv_proj.weight, layer.self_attn.o_proj.weight
    gate_up, down = layer.mlp.gate_up_proj.weight, layer.mlp.down_proj.weight
    norm, device = layer.input_layernorm, device_of(qkv.device)

    def run(num_rows: int) -> None:
        stream = ResidualStream(torch.zeros(num_rows, qkv.shape[1], dtype=dtype, device=qkv.device), workspace)
        norm_linear(stream, norm.weight, norm.eps, qkv, layer.self_attn.qkv_proj.bias)
        for weight, bias in ((o, layer.self_attn.o_proj.bias), (down, layer.mlp.down_proj.bias)):
            x = torch.zeros(num_rows, weight.shape[1], dtype=dtype, device=qkv.device)
            linear_residual(x, weight, bias, stream, norm.weight)
            norm_linear(stream, norm.weight, norm.eps, qkv, layer.self_attn.qkv_proj.bias)
            norm_linear(stream, norm.weight, norm.eps, gate_up, layer.mlp.gate_up_proj.bias, silu=True)

    first: dict[tuple[object, ...], int] = {}
    kinds: list[tuple[Kind, Tensor]] = [("norm", qkv), ("residual", o), ("norm_silu", gate_up), ("residual", down)]
    for size in (size for size in sizes if size <= model.model.max_fused_rows):
        tiles = (choose_config(kind, size, weight.shape[0], weight.shape[1], device) for kind, weight in kinds)
        first.setdefault(tuple(tiles), size)
    return [partial(run, size) for size in first.values()]


def tune_products(model: Qwen3ForCausalLM, num_tokens: int) -> None:
    """Find how the layers multiply the tokens of a full step best: most steps with prompts are full."""
    found: dict[tuple[torch.Size, bool], Product | None] = {}
    for linear in model.modules():
        if isinstance(linear, Linear):
            key = linear.weight.shape, linear.joins_residual
            if key not in found:
                found[key] = fastest_product(num_tokens, linear.weight, linear.joins_residual)
            linear.product = found[key]
