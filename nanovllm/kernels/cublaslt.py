"""Large matrix products by the algorithm that measures best, through the C interface of cuBLASLt.

Owns: the library's handle and `Product`, one shape of a product with its algorithm. Invariant: a Product is taken only
if it computed what torch's own product did, to the bit, so which one was the fastest when it was measured changes no
result. It deliberately writes no kernel, and without the library, or without an algorithm that is as good and faster,
there is simply no Product: callers go on with torch.

torch takes the first algorithm of cuBLAS's heuristics, which know neither the clock that a GPU's power limit leaves nor
the tensors. On an H200 that costs about 5 % of a prompt's products (docs/performance.md).
"""

from __future__ import annotations

import ctypes
import logging
import statistics
from collections.abc import Callable, Sequence
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

logger = logging.getLogger("nanovllm")

NUM_ALGORITHMS = 16  # that the heuristics are asked for
NUM_ROUNDS = 5
MIN_GAIN = 0.01  # below, torch's product stays
MIN_FLOPS = 1e10  # smaller products are bound by something else
SAMPLED_ROWS = 16  # every so many rows are compared: some of every tile

# Of cublasLt.h and library_types.h
_COMPUTE_32F, _R_32F = 68, 0
_TYPES = {torch.bfloat16: 14, torch.float16: 2}
_DESC_TRANSA, _OP_T = 3, 1


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace_size", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class _Library:
    """cuBLASLt, as torch has loaded it. Raises OSError where there is none, RuntimeError where a call fails."""

    def __init__(self) -> None:
        if torch.version.cuda is None:
            raise OSError("torch is not built for CUDA")
        self._lib = ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
        self.handle = c_void_p()
        self.call("cublasLtCreate", byref(self.handle))

    def call(self, name: str, *args: object) -> None:
        status = getattr(self._lib, name)(*args)
        if status != 0:
            raise RuntimeError(f"{name} failed with status {status}")


@cache
def _library(device: torch.device) -> _Library:
    """A handle belongs to a device's context."""
    with torch.cuda.device(device):
        return _Library()


@dataclass(frozen=True)
class Product:
    """x [num_rows, K] @ weight.T for weight [N, K], contiguous, of one half-precision dtype."""

    num_rows: int
    library: _Library
    operation: c_void_p
    layouts: tuple[c_void_p, c_void_p, c_void_p]  # of weight, x and the result: columns first, as BLAS has it
    algorithm: _Heuristic

    def fits(self, x: Tensor, out: Tensor) -> bool:
        """Whether it may multiply x into `out`."""
        return x.shape[0] == self.num_rows and all(t.is_contiguous() and t.data_ptr() % 256 == 0 for t in (x, out))

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor, adds: bool = False) -> Tensor:
        """Into `out` [num_rows, N], or with `adds` onto it before the sum is rounded; returns it."""
        one, beta = c_float(1.0), c_float(float(adds))
        layout_w, layout_x, layout_y = self.layouts
        y = c_void_p(out.data_ptr())
        self.library.call(
            "cublasLtMatmul", self.library.handle, self.operation, byref(one), c_void_p(weight.data_ptr()), layout_w,
            c_void_p(x.data_ptr()), layout_x, byref(beta), y, layout_y, y, layout_y, byref(self.algorithm.algorithm),
            c_void_p(0), c_size_t(0), c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )  # fmt: skip
        return out


def _products(num_rows: int, weight: Tensor) -> list[Product]:
    """What cuBLASLt offers for this shape without a workspace, so without sums split over K."""
    n, k = weight.shape
    library, value_type = _library(weight.device), _TYPES[weight.dtype]

    def layout(rows: int, columns: int) -> c_void_p:
        result = c_void_p()
        size = c_uint64(rows), c_uint64(columns), c_int64(rows)
        library.call("cublasLtMatrixLayoutCreate", byref(result), value_type, *size)
        return result

    operation, preference = c_void_p(), c_void_p()
    library.call("cublasLtMatmulDescCreate", byref(operation), _COMPUTE_32F, _R_32F)
    transposed = c_int32(_OP_T)
    library.call("cublasLtMatmulDescSetAttribute", operation, _DESC_TRANSA, byref(transposed), c_size_t(4))
    layouts = layout(k, n), layout(k, num_rows), layout(n, num_rows)
    library.call("cublasLtMatmulPreferenceCreate", byref(preference))  # of no workspace
    found, num_found = (_Heuristic * NUM_ALGORITHMS)(), c_int()
    library.call(
        "cublasLtMatmulAlgoGetHeuristic", library.handle, operation, *layouts, layouts[2], preference, NUM_ALGORITHMS,
        found, byref(num_found),
    )  # fmt: skip
    library.call("cublasLtMatmulPreferenceDestroy", preference)
    fitting = [algorithm for algorithm in found[: num_found.value] if algorithm.state == 0]
    return [Product(num_rows, library, operation, layouts, algorithm) for algorithm in fitting]


def fastest_product(num_rows: int, weight: Tensor, adds: bool = False) -> Product | None:
    """The fastest Product for `num_rows` rows and this weight [N, K]; None: torch's is, or nothing else is to be had.

    Runs each a few times, in turns, on the current stream, with a row's input and output of scratch memory for each
    row. With `adds` it is to have torch's bits in sums with a residual, too.
    """
    n, k = weight.shape
    if not weight.is_cuda or weight.dtype not in _TYPES or 2 * num_rows * n * k < MIN_FLOPS:
        return None
    generator = torch.Generator(weight.device).manual_seed(0)  # the global generator is the user's
    try:
        x, out = (weight.new_empty(num_rows, width).normal_(generator=generator) for width in (k, n))
        products = [product for product in _products(num_rows, weight) if product.fits(x, out)]
        products = _with_torchs_bits(products, x, weight, out, generator, adds)
        runs = [partial(torch.mm, x, weight.t(), out=out), *(partial(product, x, weight, out) for product in products)]
        torchs_time, *times = _median_times(runs)
    except (OSError, AttributeError, RuntimeError) as error:  # out of memory is one of them
        logger.debug("products by torch alone: %s", error)
        return None
    logger.debug("product of %d x %d x %d: torch %.3f ms, others %s", num_rows, n, k, torchs_time, times)
    if not times or min(times) > (1 - MIN_GAIN) * torchs_time:
        return None
    return products[times.index(min(times))]


def _with_torchs_bits(
    products: list[Product], x: Tensor, weight: Tensor, out: Tensor, generator: torch.Generator, adds: bool
) -> list[Product]:
    def residual() -> Tensor:
        return out.normal_(generator=generator.manual_seed(1))

    expected = torch.mm(x, weight.t(), out=out)[::SAMPLED_ROWS].clone()
    equal = [product for product in products if torch.equal(product(x, weight, out)[::SAMPLED_ROWS], expected)]
    if adds:
        expected = residual().addmm_(x, weight.t())[::SAMPLED_ROWS].clone()
        equal = [p for p in equal if torch.equal(p(x, weight, residual(), adds=True)[::SAMPLED_ROWS], expected)]
    return equal


def _median_times(runs: Sequence[Callable[[], object]]) -> list[float]:
    """Milliseconds of each, measured in turns: a GPU at its power limit changes its clock."""
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in runs]
    for _ in range(NUM_ROUNDS):
        for run, own in zip(runs, events, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            own.append((start, end))
    torch.cuda.current_stream().synchronize()
    return [statistics.median(start.elapsed_time(end) for start, end in own) for own in events]
