"""Which tiles the matrix products of a decode step use, by their shape and the device.

Owns: the configurations of `decode_linear.py`: rules that follow from the number of multiprocessors and their shared
memory, and measured exceptions. Invariant: a configuration depends on the kind, the shape and the device alone, so a
captured graph and a later capture agree. It deliberately tunes nothing while running: `benchmarks/decode_linear.py`
does, once, and what it finds is written down here.

A product of up to 16 rows is bound by reading its weights: the rules give each multiprocessor about one tile (or
several small ones), and split K only where the columns do not suffice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from nanovllm.kernels.device import Device

Kind = Literal["norm", "norm_silu", "residual", "plain"]

MAX_ROWS = 16  # beyond, cuBLAS is faster
MAX_TILES = 4096  # of split products
MAX_PARTIAL_ELEMENTS = 8 * 2**20


@dataclass(frozen=True)
class VectorConfig:
    """One row. A program computes block_n outputs (each with its gate, in norm_silu) from chunks of block_k inputs."""

    block_n: int
    block_k: int
    num_warps: int = 4


@dataclass(frozen=True)
class TileConfig:
    """A program computes a tile of block_m rows by block_n rows of the weight, over 1 / num_splits of K."""

    block_m: int
    block_n: int
    block_k: int
    num_splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    use_tma: bool = False


Config = VectorConfig | TileConfig


def choose_config(kind: Kind, num_rows: int, n: int, k: int, device: Device) -> Config | None:
    """The configuration for `num_rows` x weight [n, k]; None: cuBLAS and the separate kernels are faster."""
    if num_rows > MAX_ROWS or k % 16 or (kind == "plain" and num_rows > 1):
        return None
    for max_rows, tuned in TUNED.get((kind, n, k), ()) if _is_measured(device) else ():
        if num_rows <= max_rows:
            return tuned
    return vector_rule(kind, n, k) if num_rows == 1 else _fit(small_rule(kind, n, k, device), device)


def fused_rows(products: list[tuple[Kind, int, int]], device: Device) -> int:
    """Up to how many rows a model with these products (kind, n, k) should decode through them.

    One row gains everywhere: its kernels read the weights once, at full width. For 2 to 16 rows cuBLAS is close, so
    only what was measured is used; beyond, cuBLAS measured faster (docs/performance.md).
    """
    if any(k % 16 for _, _, k in products):
        return 0
    if not _is_measured(device):
        return 1
    return min(TUNED[product][-1][0] if product in TUNED else 1 for product in products)


def _is_measured(device: Device) -> bool:
    return device.num_sms >= TUNED_NUM_SMS and device.shared_memory >= TUNED_SHARED_MEMORY and device.use_pdl


def num_column_tiles(num_rows: int, hidden: int, device: Device) -> int:
    """How many partial sums of squares `linear_residual` leaves a row, so that what stands in for it leaves as many."""
    config = choose_config("residual", num_rows, hidden, hidden, device)
    return 1 if config is None else -(-hidden // config.block_n)


def vector_rule(kind: Kind, n: int, k: int) -> VectorConfig:
    """16 KiB of weights (32 of a large matrix) in the registers of a program's threads, in at most 3 chunks of K."""
    sizes = [size for size in (4096, 2048, 1024, 512, 256, 128, 64, 32, 16) if -(-k // size) <= 3]
    block_k = min(sizes or [4096], key=lambda size: (-(-k // size) * size, -size))
    held = block_k * min(-(-k // block_k), 3)  # values of a row
    target = 8192 if n * k <= 8 * 2**20 else 16384
    block_n = _power_of_2(max(min(target // held, 16), 2))
    num_warps = 4 if block_n * held <= 16384 else 8
    return VectorConfig(block_n // 2 if kind == "norm_silu" else block_n, block_k, num_warps)


def small_rule(kind: Kind, n: int, k: int, device: Device) -> TileConfig:
    """2 to 16 rows: narrow tiles, long steps along K, splits until every multiprocessor streams."""
    block_n = 32 if kind == "residual" or n >= 24 * device.num_sms else 16
    num_splits = 1
    if kind == "residual":
        num_splits = max(1, min(2 * device.num_sms // -(-n // block_n), k // 512, 8))
    return TileConfig(16, block_n, min(256, _largest_step(k)), num_splits)


def _power_of_2(value: int) -> int:
    """The largest one up to `value`."""
    return 1 << (value.bit_length() - 1)


def _largest_step(k: int) -> int:
    """The largest power of two up to 256 that divides K, at least 16."""
    return min(256, k & -k)


def _fit(config: TileConfig, device: Device) -> TileConfig:
    """Fewer stages where shared memory is small."""
    stage = 2 * config.block_k * (config.block_m + config.block_n)
    return replace(config, num_stages=max(2, min(config.num_stages, (device.shared_memory - 4096) // stage)))


# Measured on an H200 (132 multiprocessors): (kind, n, k) -> (most rows, configuration), ascending.
TUNED_NUM_SMS = 114
TUNED_SHARED_MEMORY = 227 * 1024
TUNED: dict[tuple[Kind, int, int], tuple[tuple[int, Config | None], ...]] = {
    # Qwen3-0.6B: qkv, o, gate and up, down
    ("norm", 4096, 1024): ((1, VectorConfig(4, 1024)), (16, TileConfig(16, 32, 256, use_tma=True))),
    ("residual", 1024, 2048): ((1, VectorConfig(2, 2048)), (16, TileConfig(16, 32, 256, 8, use_tma=True))),
    ("norm_silu", 6144, 1024): ((1, VectorConfig(2, 1024)), (16, TileConfig(16, 32, 128, num_stages=6))),
    ("residual", 1024, 3072): ((1, VectorConfig(4, 1024)), (16, TileConfig(16, 32, 256, 8, use_tma=True))),
    # Qwen3-8B
    ("norm", 6144, 4096): ((1, VectorConfig(2, 2048, 8)),),
    ("residual", 4096, 4096): ((1, VectorConfig(8, 512, 8)),),
    ("norm_silu", 24576, 4096): ((1, VectorConfig(1, 4096, 8)),),
    ("residual", 4096, 12288): ((1, VectorConfig(2, 2048, 8)),),
    # Qwen3-8B on two ranks
    ("norm", 3072, 4096): ((1, VectorConfig(2, 1024)),),
    ("plain", 4096, 2048): ((1, VectorConfig(4, 512)),),
    ("norm_silu", 12288, 4096): ((1, VectorConfig(1, 4096, 8)),),
    ("plain", 4096, 6144): ((1, VectorConfig(4, 2048, 8)),),
}
