"""The matrix products of a decode step, with the norm before them and the addition behind them fused in.

Owns: the residual stream of a decode step and the two products that touch it, for 1 to 16 rows.
`linear_residual` adds a product to the residual and leaves two things for its reader: the new rows times the next
norm's weight, and their sums of squares, one per column tile. `norm_linear` multiplies the former with its weight and
scales each row of the result by 1 / rms of the latter, so an RMSNorm costs no pass of its own; for packed gate and up
rows it ends with SiLU(gate) * up. Invariant: results do not vary from run to run: split products are summed in the
order of the splits, by whichever program comes last. It deliberately has no path for prompts: there cuBLAS wins.

The programs of one row (batch 1) hold their weights in registers and multiply on the CUDA cores; from 2 rows on the
tensor cores do it. With programmatic dependent launch (compute capability 9 and later) a kernel starts while its
predecessor runs, loads weights (into registers, or into L2), and waits only then: the weights' latency is hidden. Every
program waits, so that "my predecessor has finished" implies the same of all kernels before it.

Rounding: the norm multiplies by its weight first and by 1 / rms last, in float32, and the residual addition joins the
product in float32: fewer roundings than `norm.py` and a matrix product of their own make, never more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nanovllm.kernels._triton import triton
from nanovllm.kernels.activation import silu_and_mul, silu_and_mul_reference
from nanovllm.kernels.decode_linear_config import (
    MAX_PARTIAL_ELEMENTS,
    MAX_TILES,
    Config,
    Kind,
    TileConfig,
    VectorConfig,
    choose_config,
    num_column_tiles,
)
from nanovllm.kernels.decode_linear_kernels import scale_rows_kernel, tile_kernel, vector_kernel
from nanovllm.kernels.device import Device, dependent_launch, device_of
from nanovllm.kernels.norm import rms_norm, rms_norm_reference

L2_PREFETCH_BYTES = 24 * 2**20  # of weights, at most, while the predecessor still runs


@dataclass(frozen=True)
class LinearWorkspace:
    """Where split products leave their parts: one for all layers and batch sizes of a device, so graphs can hold it."""

    partials: Tensor  # float32, flat
    counters: Tensor  # int32, zero between launches

    @classmethod
    def allocate(cls, device: torch.device | str) -> LinearWorkspace:
        return cls(
            torch.empty(MAX_PARTIAL_ELEMENTS, dtype=torch.float32, device=device),
            torch.zeros(MAX_TILES, dtype=torch.int32, device=device),
        )


@dataclass
class ResidualStream:
    """The residual of a decode step, and what the last `linear_residual` left for the next norm.

    `scaled_for` is the norm weight that `scaled` was made with: `norm_linear` checks it, and makes `scaled` and
    `sum_squares` itself where they are missing (before the first layer, behind a product that cuBLAS did).
    """

    residual: Tensor  # [T, H]
    workspace: LinearWorkspace
    scaled: Tensor | None = None  # [T, H]: residual * norm weight * input_scale
    sum_squares: Tensor | None = None  # float32 [T, column tiles]
    scaled_for: Tensor | None = None


def input_scale(dtype: torch.dtype) -> float:
    """What `scaled` is multiplied by: room above for float16, whose largest value is 65504; a power of two is exact."""
    return 1 / 16 if dtype == torch.float16 else 1.0


@dataclass(frozen=True)
class Call:
    """A launch: what `kernel[grid](*args, **constants)` needs, but for USE_PDL."""

    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]


def _vector_call(
    kind: Kind, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, norm_weight: Tensor, scaled: Tensor,
    sum_squares: Tensor, eps: float, config: VectorConfig,
) -> Call:  # fmt: skip
    n, k = out.shape[1], x.shape[1]
    num_partials = sum_squares.shape[1]
    args = (x, weight, weight if bias is None else bias, out, norm_weight, scaled, sum_squares, n, num_partials, eps)
    constants = {
        "K": k,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "PARTIALS": 1 if kind in ("residual", "plain") else triton.next_power_of_2(num_partials),
        "KIND": kind,
        "HAS_BIAS": bias is not None,
        "INPUT_SCALE": input_scale(x.dtype),
        "num_warps": config.num_warps,
    }
    return Call(vector_kernel, (-(-n // config.block_n),), args, constants)


def _descriptors(x: Tensor, weight: Tensor, kind: Kind, config: TileConfig) -> tuple[Any, Any]:
    if not config.use_tma:
        return None, None
    from triton.tools.tensor_descriptor import TensorDescriptor

    block_n = config.block_n // 2 if kind == "norm_silu" else config.block_n
    return (
        TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight, [block_n, config.block_k]),
    )


def _tile_call(
    kind: Kind, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, norm_weight: Tensor, scaled: Tensor,
    sum_squares: Tensor, eps: float, config: TileConfig, workspace: LinearWorkspace,
) -> Call:  # fmt: skip
    num_rows, (n, k) = x.shape[0], weight.shape
    num_partials = sum_squares.shape[1]
    num_tiles = -(-num_rows // config.block_m) * -(-n // config.block_n)
    k_per_split = triton.cdiv(triton.cdiv(k, config.num_splits), config.block_k) * config.block_k
    num_splits = triton.cdiv(k, k_per_split)
    if num_splits > 1:
        num_elements = num_tiles * num_splits * config.block_m * config.block_n
        assert num_tiles <= workspace.counters.numel() and num_elements <= workspace.partials.numel()
    args = (
        x, weight, weight if bias is None else bias, out, norm_weight, scaled, sum_squares, workspace.partials,
        workspace.counters, *_descriptors(x, weight, kind, config), num_rows, n, k, k_per_split,
        min(k_per_split, max(L2_PREFETCH_BYTES // (n * num_splits * weight.element_size()), 64)), num_partials,
        x.stride(0), out.stride(0), eps,
    )  # fmt: skip
    constants = {
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "SPLIT": num_splits > 1,
        "EVEN_K": k % config.block_k == 0,
        "PARTIALS": 1 if kind == "residual" else triton.next_power_of_2(num_partials),
        "KIND": kind,
        "HAS_BIAS": bias is not None,
        "INPUT_SCALE": input_scale(x.dtype),
        "USE_TMA": config.use_tma,
        "num_stages": config.num_stages,
        "num_warps": config.num_warps,
    }
    return Call(tile_kernel, (num_tiles, num_splits), args, constants)


def linear_call(
    kind: Kind,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    norm_weight: Tensor,
    scaled: Tensor,
    sum_squares: Tensor,
    eps: float,
    config: Config,
    workspace: LinearWorkspace,
) -> Call:
    """The launch that `config` stands for, not yet made: what a tuner varies and compiles ahead."""
    args = (kind, x, weight, bias, out, norm_weight, scaled, sum_squares, eps)
    return _vector_call(*args, config) if isinstance(config, VectorConfig) else _tile_call(*args, config, workspace)


def launch(call: Call, device: Device) -> None:
    """Launch it, as a programmatic dependent of the kernel before it where the device can."""
    call.kernel[call.grid](*call.args, **call.constants, **dependent_launch(device))


def _scale_rows(
    stream: ResidualStream, norm_weight: Tensor, num_partials: int, device: Device, addend: Tensor | None = None
) -> None:
    """What `linear_residual` leaves for the next norm, made from the residual, to which `addend` is added before."""
    residual = stream.residual
    num_rows, hidden = residual.shape
    stream.scaled = torch.empty((num_rows, hidden), dtype=residual.dtype, device=residual.device)
    stream.sum_squares = torch.empty((num_rows, num_partials), dtype=torch.float32, device=residual.device)
    stream.scaled_for = norm_weight
    constants = {
        "HIDDEN": hidden,
        "BLOCK": triton.next_power_of_2(hidden),
        "PARTIALS": triton.next_power_of_2(num_partials),
        "NUM_PARTIALS": num_partials,
        "INPUT_SCALE": input_scale(residual.dtype),
        "HAS_ADDEND": addend is not None,
        "num_warps": 4 if hidden <= 2048 else 8,
    }
    addend = residual if addend is None else addend
    args = (residual, addend, norm_weight, stream.scaled, stream.sum_squares, residual.stride(0))
    launch(Call(scale_rows_kernel, (num_rows,), args, constants), device)


def norm_linear_triton(
    stream: ResidualStream,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    silu: bool = False,
    config: Config | None = None,
) -> Tensor:
    residual = stream.residual
    num_rows, hidden = residual.shape
    _check(residual, weight, hidden)
    device = device_of(residual.device)
    kind: Kind = "norm_silu" if silu else "norm"
    config = config or choose_config(kind, num_rows, weight.shape[0], hidden, device)
    if config is None:
        y = functional.linear(rms_norm(residual, norm_weight, eps), weight, bias)
        return silu_and_mul(y) if silu else y
    if stream.scaled_for is not norm_weight:
        _scale_rows(stream, norm_weight, num_column_tiles(num_rows, hidden, device), device)
    assert stream.scaled is not None and stream.sum_squares is not None
    width = weight.shape[0] // 2 if silu else weight.shape[0]
    out = torch.empty((num_rows, width), dtype=residual.dtype, device=residual.device)
    call = linear_call(
        kind, stream.scaled, weight, bias, out, norm_weight, stream.scaled, stream.sum_squares, eps, config,
        stream.workspace,
    )  # fmt: skip
    launch(call, device)
    return out


def linear_residual_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stream: ResidualStream,
    next_norm_weight: Tensor,
    config: Config | None = None,
) -> None:
    residual = stream.residual
    num_rows, hidden = residual.shape
    _check(x, weight, x.shape[1])
    device = device_of(x.device)
    config = config or choose_config("residual", num_rows, hidden, x.shape[1], device)
    if config is None:
        residual.addmm_(x, weight.t())
        if bias is not None:
            residual += bias
        stream.scaled_for = None
        return
    num_partials = -(-hidden // config.block_n)
    stream.scaled = torch.empty((num_rows, hidden), dtype=x.dtype, device=x.device)
    stream.sum_squares = torch.empty((num_rows, num_partials), dtype=torch.float32, device=x.device)
    stream.scaled_for = next_norm_weight
    call = linear_call(
        "residual", x, weight, bias, residual, next_norm_weight, stream.scaled, stream.sum_squares, 0.0, config,
        stream.workspace,
    )  # fmt: skip
    launch(call, device)


def _check(x: Tensor, weight: Tensor, k: int) -> None:
    if x.stride(1) != 1 or not weight.is_contiguous() or weight.shape[1] != k or x.dtype != weight.dtype:
        raise ValueError(
            f"decode linear: x [M, K] with contiguous rows and contiguous weight [N, K] of one dtype needed, "
            f"got {tuple(x.shape)} {x.stride()} {x.dtype}, {tuple(weight.shape)} {weight.stride()} {weight.dtype}"
        )


def linear_partial_triton(x: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
    device = device_of(x.device)
    config = choose_config("plain", len(x), weight.shape[0], weight.shape[1], device)
    if config is None:
        return torch.mm(x, weight.t(), out=out)
    if out is None:
        out = torch.empty((len(x), len(weight)), dtype=x.dtype, device=x.device)
    workspace = LinearWorkspace(x, x)  # a product of one row needs none
    launch(linear_call("plain", x, weight, None, out, x, x, x[:, :1], 0.0, config, workspace), device)
    return out


def add_residual_triton(stream: ResidualStream, y: Tensor, next_norm_weight: Tensor) -> None:
    device = device_of(y.device)
    _scale_rows(stream, next_norm_weight, num_column_tiles(len(y), y.shape[1], device), device, y)


def norm_linear_reference(
    stream: ResidualStream, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None,
    silu: bool = False,
) -> Tensor:  # fmt: skip
    y = functional.linear(rms_norm_reference(stream.residual, norm_weight, eps), weight, bias)
    return silu_and_mul_reference(y) if silu else y


def linear_residual_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, stream: ResidualStream, next_norm_weight: Tensor
) -> None:
    stream.residual += functional.linear(x, weight, bias)


def norm_linear(
    stream: ResidualStream,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    silu: bool = False,
) -> Tensor:
    """RMSNorm(residual [M, K]) @ weight.T + bias for weight [N, K]: a new [M, N].

    With `silu`, weight and bias are gate's N / 2 rows, then up's: SiLU(gate) * up, a new [M, N / 2]. `norm_weight` is
    the tensor that the last `linear_residual` was given, or else one more small kernel runs first.
    """
    run = norm_linear_triton if is_fused(stream.residual) else norm_linear_reference
    return run(stream, norm_weight, eps, weight, bias, silu)


def linear_residual(
    x: Tensor, weight: Tensor, bias: Tensor | None, stream: ResidualStream, next_norm_weight: Tensor
) -> None:
    """stream.residual [M, N] += x [M, K] @ weight.T + bias, in place; prepares the norm with `next_norm_weight`."""
    run = linear_residual_triton if is_fused(x) else linear_residual_reference
    run(x, weight, bias, stream, next_norm_weight)


def linear_partial(x: Tensor, weight: Tensor, out: Tensor | None) -> Tensor:
    """x [M, K] @ weight.T, [M, N], into `out` where given: what `add_residual` adds once the ranks have summed."""
    return linear_partial_triton(x, weight, out) if is_fused(x) else torch.mm(x, weight.t(), out=out)


def add_residual(stream: ResidualStream, y: Tensor, next_norm_weight: Tensor) -> None:
    """stream.residual [M, N] += y [M, N], in place; prepares the norm with `next_norm_weight`."""
    if is_fused(y):
        add_residual_triton(stream, y, next_norm_weight)
    else:
        stream.residual += y


def is_fused(x: Tensor) -> bool:
    """Whether these kernels serve such tensors: half precision on a GPU; float32 would want IEEE products."""
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
