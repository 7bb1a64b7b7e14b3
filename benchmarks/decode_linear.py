"""Tune and time the matrix products of a decode step: `python benchmarks/decode_linear.py --out FOLDER`.

Owns: the candidates, and the comparison with cuBLAS and the separate norm and activation kernels. Invariant: every time
is that of a CUDA graph over the weights of all layers, together larger than L2, and every candidate's result is checked
against float32 and against itself (the same bits twice) before it is timed. It deliberately leaves attention out.

Each model runs in a process of its own that writes down what it is about to try, so a candidate that takes the device
down costs itself and nothing else. Prints a table a model and, last, the entries for `decode_linear_config.TUNED`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that it runs from a checkout

import torch
from torch import Tensor
from torch.nn.functional import linear

from nanovllm.kernels import decode_linear as fused
from nanovllm.kernels.activation import silu_and_mul, silu_and_mul_reference
from nanovllm.kernels.decode_linear_config import (
    Config,
    Kind,
    TileConfig,
    VectorConfig,
    choose_config,
    num_column_tiles,
)
from nanovllm.kernels.device import Device, dependent_launch, device_of
from nanovllm.kernels.norm import add_rms_norm, rms_norm, rms_norm_reference

EPS = 1e-6
ROWS = (1, 256, 16, 64, 128, 512, 4)  # the order they are measured in: the most telling first
WITHOUT_PDL = (1, 256)  # row counts at which the chain is also timed without dependent launch
GROUPS = ((1,), (4, 16), (64,), (128,), (256,), (512,))  # share a configuration, up to the largest of the group
PIECES: dict[str, Kind] = {"qkv": "norm", "o": "residual", "gate_up": "norm_silu", "down": "residual", "head": "norm"}
CUBLAS = "cublas"
SCALE_ROWS_US = 1.6  # what `norm_linear` has to do first where cuBLAS made the addition


@dataclass(frozen=True)
class Shape:
    """A model's sizes; `num_layers` is how many layers of weights are made here."""

    hidden: int
    q_size: int
    qkv_size: int
    inner: int
    vocab: int
    num_layers: int

    def weight(self, piece: str) -> tuple[int, int]:
        """[N, K] of a piece."""
        return {"qkv": (self.qkv_size, self.hidden), "o": (self.hidden, self.q_size), "down": (self.hidden, self.inner),
                "gate_up": (2 * self.inner, self.hidden), "head": (self.vocab, self.hidden)}[piece]  # fmt: skip


SHAPES = {
    "qwen3-0.6b": Shape(1024, 2048, 4096, 3072, 151936, 28),
    "qwen3-8b": Shape(4096, 4096, 6144, 12288, 151936, 8),
    "qwen3-8b-tp2": Shape(4096, 2048, 3072, 6144, 75968, 12),  # one of two ranks
    "qwen3-4b": Shape(2560, 4096, 6144, 9728, 151936, 10),
    "qwen3-1.7b": Shape(2048, 2048, 4096, 6144, 151936, 16),
}
DRY_SHAPE = Shape(64, 128, 192, 96, 500, 2)


def candidates(kind: Kind, num_rows: int, n: int, k: int, device: Device) -> Iterator[Config]:
    """The rule's own choice first, then what lies around it."""
    rule = choose_config(kind, num_rows, n, k, device)
    if rule is not None:
        yield rule
    if num_rows == 1:
        assert isinstance(rule, VectorConfig)
        for block_k in (size for size in (512, 1024, 2048, 4096) if size <= k):
            for block_n in (1, 2, 4, 8, 16):
                for num_warps in (4, 8):
                    held = block_n * (2 if kind == "norm_silu" else 1) * block_k * min(-(-k // block_k), 3)
                    if 4096 <= held <= 32768 and 32 <= held // (32 * num_warps) <= 128:
                        yield VectorConfig(block_n, block_k, num_warps)
        if kind == "residual":
            yield TileConfig(16, 32, 256, _splits(2, num_rows, n, k, 16, 32, device))
        return
    if num_rows <= 16:
        tiles = [
            TileConfig(16, 32, 256), TileConfig(16, 32, 128, num_stages=6), TileConfig(16, 16, 256),
            TileConfig(16, 64, 128, num_stages=5), TileConfig(16, 32, 256, use_tma=True),
            TileConfig(16, 64, 128, num_stages=5, use_tma=True),
        ]  # fmt: skip
    elif num_rows <= 128:
        tiles = [
            TileConfig(64, 32, 64, num_stages=6), TileConfig(64, 32, 128), TileConfig(64, 64, 64, num_stages=5),
            TileConfig(64, 64, 128), TileConfig(64, 128, 64), TileConfig(64, 128, 128, num_stages=3),
            TileConfig(64, 64, 64, num_stages=5, use_tma=True), TileConfig(64, 64, 128, use_tma=True),
            TileConfig(64, 128, 64, num_stages=5, use_tma=True),
        ]  # fmt: skip
        if num_rows > 64:
            tiles += [TileConfig(128, 64, 64), TileConfig(128, 128, 64, num_warps=8, use_tma=True)]
    else:
        tiles = [
            TileConfig(64, 128, 64), TileConfig(64, 64, 64, num_stages=5), TileConfig(128, 64, 64),
            TileConfig(128, 128, 64, num_warps=8),
            TileConfig(64, 128, 64, num_stages=5, use_tma=True), TileConfig(128, 64, 64, num_stages=5, use_tma=True),
            TileConfig(128, 128, 64, num_warps=8, use_tma=True),
            TileConfig(128, 256, 64, num_warps=8, num_stages=3, use_tma=True),
        ]  # fmt: skip
    for tile in tiles:
        if kind == "residual":
            for per_sm in (1, 2):
                splits = _splits(per_sm, num_rows, n, k, tile.block_m, tile.block_n, device)
                if splits <= 6 or num_rows <= 16:  # the last one reads them all
                    yield replace(tile, num_splits=splits)
        else:
            yield tile
    if kind != "residual" and num_rows > 16 and n < 32768:  # the output layer's parts would not fit the workspace
        yield TileConfig(64, 64, 64, 2) if num_rows <= 128 else TileConfig(128, 128, 64, 2, 8)


def _splits(per_sm: int, num_rows: int, n: int, k: int, block_m: int, block_n: int, device: Device) -> int:
    num_tiles = -(-num_rows // block_m) * -(-n // block_n)
    return max(1, min(per_sm * (device.num_sms + 4) // num_tiles, k // 256, 12))


def label(config: Config | str) -> str:
    """Short: V(n x k, warps) or T(m x n x k / splits, warps, stages)."""
    if isinstance(config, str):
        return config
    if isinstance(config, VectorConfig):
        return f"V{config.block_n}x{config.block_k}w{config.num_warps}"
    return (f"{'TMA' if config.use_tma else 'T'}{config.block_m}x{config.block_n}x{config.block_k}/{config.num_splits}"
            f"w{config.num_warps}s{config.num_stages}")  # fmt: skip


@dataclass
class Result:
    """One candidate of one piece; `error` is relative to float32."""

    model: str
    piece: str
    num_rows: int
    config: str
    literal: str
    us: float | None = None
    error: float | None = None
    problem: str = ""


@dataclass
class Clock:
    """Time on the device, and how much of the script's own is left."""

    device: torch.device
    deadline: float
    pool: Any = None

    def left(self) -> float:
        return self.deadline - time.time()

    def per_call(self, run: Callable[[], object], num_calls: int) -> float:
        """Microseconds of one of the `num_calls` calls that `run` makes: median of replays of their graph."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e6 / num_calls
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
        graph.replay()
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        replays = max(1, min(8, int(2.0 / max(begin.elapsed_time(end), 1e-3))))
        times = []
        for _ in range(5):
            begin.record()
            for _ in range(replays):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / replays)
        graph.reset()
        return statistics.median(times) * 1e3 / num_calls


@dataclass
class Bench:
    """One model's weights and buffers."""

    name: str
    shape: Shape
    device: torch.device
    clock: Clock
    out: Path
    rows: list[int]
    results: list[Result] = field(default_factory=list)
    chains: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float16
        self.chip = device_of(self.device)
        self.workspace = fused.LinearWorkspace.allocate(self.device)
        self.weights = {
            piece: [
                self.normal(*self.shape.weight(piece)) / math.sqrt(self.shape.weight(piece)[1])
                for _ in range(2 if piece == "head" else self.shape.num_layers)
            ]
            for piece in PIECES
        }
        self.norms = [1 + 0.2 * self.normal(self.shape.hidden) for _ in range(2 * self.shape.num_layers + 1)]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    # ---- one piece ----

    def buffers(self, piece: str, num_rows: int) -> dict[str, Tensor]:
        """What a piece reads and writes; for products behind a norm, as `linear_residual` leaves it."""
        (n, k), kind = self.shape.weight(piece), PIECES[piece]
        full: dict[str, Any] = {"dtype": torch.float32, "device": self.device}
        if kind == "residual":
            return {"x": self.normal(num_rows, k), "out": 3 * self.normal(num_rows, n), "norm_weight": self.norms[0],
                    "scaled": self.normal(num_rows, n)}  # fmt: skip
        residual = 3 * self.normal(num_rows, k)
        num_partials = num_column_tiles(num_rows, k, self.chip)
        sums = torch.rand(num_rows, num_partials, **full)
        sums *= residual.float().square().sum(1, keepdim=True) / sums.sum(1, keepdim=True)
        scaled = (residual.float() * self.norms[0].float() * fused.input_scale(self.dtype)).to(self.dtype)
        width = n // 2 if kind == "norm_silu" else n
        out = torch.empty(num_rows, width, dtype=self.dtype, device=self.device)
        return {"x": scaled, "out": out, "scaled": scaled, "norm_weight": self.norms[0], "sum_squares": sums,
                "residual": residual}  # fmt: skip

    def call(self, piece: str, config: Config, b: dict[str, Tensor], weight: Tensor) -> fused.Call:
        sums = b.get("sum_squares")
        if sums is None:
            shape = (b["x"].shape[0], -(-weight.shape[0] // config.block_n))
            sums = b.setdefault(f"sums{shape[1]}", torch.empty(shape, dtype=torch.float32, device=self.device))
        tensors = (b["x"], weight, None, b["out"], b["norm_weight"], b["scaled"], sums)
        return fused.linear_call(PIECES[piece], *tensors, EPS, config, self.workspace)

    def cublas(self, piece: str, b: dict[str, Tensor], weight: Tensor) -> Tensor:
        """What the fallback does: norm and activation as kernels of their own, the addition as cuBLAS's beta."""
        if PIECES[piece] == "residual":
            return b["out"].addmm_(b["x"], weight.t())
        y = linear(rms_norm(b["residual"], b["norm_weight"], EPS), weight)
        return silu_and_mul(y) if PIECES[piece] == "norm_silu" else y

    def expected(self, piece: str, b: dict[str, Tensor], weight: Tensor) -> Tensor:
        if PIECES[piece] == "residual":
            return b["out"].float() + b["x"].float() @ weight.float().t()
        y = rms_norm_reference(b["residual"].float(), b["norm_weight"].float(), EPS) @ weight.float().t()
        return silu_and_mul_reference(y) if PIECES[piece] == "norm_silu" else y

    def check(self, piece: str, config: Config, b: dict[str, Tensor]) -> tuple[float, str]:
        """Relative error against float32, and what else is wrong."""
        weight, outputs = self.weights[piece][0], []
        if "expected" not in b:
            b["before"] = b["out"].clone()
            b["expected"] = self.expected(piece, b, weight)
        for _ in range(3):
            if PIECES[piece] == "residual":
                b["out"].copy_(b["before"])
                b["scaled"].fill_(float("nan"))
            else:
                b["out"].fill_(float("nan"))
            call = self.call(piece, config, b, weight)
            fused.launch(call, self.chip)
            outputs.append(b["out"].clone())
        problem = "" if all(torch.equal(outputs[0], other) for other in outputs) else "results vary"
        errors = [relative(outputs[0], b["expected"])]
        if PIECES[piece] == "residual":
            exact = outputs[0].float()
            scaled = exact * b["norm_weight"].float() * fused.input_scale(self.dtype)
            sums = call.args[6].sum(1)
            errors += [relative(b["scaled"], scaled), relative(sums, exact.square().sum(1))]
        error = max(errors) if all(map(math.isfinite, errors)) else math.inf
        return error, problem or ("" if error < 1e-2 else "wrong")

    def fits(self, config: Config, num_rows: int, piece: str) -> bool:
        """Whether the parts of a split product have room in the workspace."""
        if isinstance(config, VectorConfig) or config.num_splits == 1:
            return True
        num_tiles = -(-num_rows // config.block_m) * -(-self.shape.weight(piece)[0] // config.block_n)
        num_elements = num_tiles * config.num_splits * config.block_m * config.block_n
        return num_tiles <= self.workspace.counters.numel() and num_elements <= self.workspace.partials.numel()

    def plan(self) -> Iterator[tuple[int, str, Config | str]]:
        """Everything to try, in order."""
        for num_rows in self.rows:
            for piece, kind in PIECES.items():
                if piece == "head" and num_rows > 64:
                    continue
                seen: list[Config] = []
                yield num_rows, piece, CUBLAS
                for config in candidates(kind, num_rows, *self.shape.weight(piece), self.chip):
                    if config not in seen and self.fits(config, num_rows, piece):
                        seen.append(config)
                        yield num_rows, piece, config

    def compile_ahead(self) -> None:
        """All variants, in threads: Triton's passes run without the interpreter's lock."""
        if self.device.type != "cuda":
            return
        from triton.runtime._async_compile import AsyncCompileMode

        start = time.time()
        seen: set[tuple[object, ...]] = set()
        buffers: dict[tuple[str, int], dict[str, Tensor]] = {}
        num_threads = max(4, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(num_threads) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for num_rows, piece, config in self.plan():
                if isinstance(config, str):
                    continue
                if (piece, num_rows) not in buffers:
                    buffers[piece, num_rows] = self.buffers(piece, num_rows)
                call = self.call(piece, config, buffers[piece, num_rows], self.weights[piece][0])
                key = (call.kernel, repr(call.constants), repr(config) if config_is_tma(config) else "")
                also_without = num_rows in WITHOUT_PDL and config == self.rule(piece, num_rows)
                for use_pdl in (True, False) if also_without else (True,):
                    if (*key, use_pdl) in seen:
                        continue
                    seen.add((*key, use_pdl))
                    options = dependent_launch(replace(self.chip, use_pdl=use_pdl))
                    try:
                        call.kernel.warmup(*call.args, grid=call.grid, **call.constants, **options)
                    except Exception as error:
                        print(f"  compile {label(config)}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        print(f"{self.name}: {len(seen)} variants compiled in {time.time() - start:.1f} s", flush=True)

    def rule(self, piece: str, num_rows: int) -> Config | None:
        return choose_config(PIECES[piece], num_rows, *self.shape.weight(piece), self.chip)

    def run_pieces(self) -> None:
        done = {(r.num_rows, r.piece, r.config) for r in self.results}
        num_rows_now, start = 0, time.time()
        buffers: dict[str, dict[str, Tensor]] = {}
        for num_rows, piece, config in self.plan():
            if num_rows != num_rows_now:
                if num_rows_now:
                    self.finish_rows(num_rows_now, start)
                num_rows_now, start, buffers = num_rows, time.time(), {}
            if (num_rows, piece, label(config)) in done:
                continue
            if self.clock.left() < 8:
                print(f"{self.name}: out of time at {num_rows} rows", flush=True)
                break
            result = Result(self.name, piece, num_rows, label(config), repr(config))
            self.current(result)
            if piece not in buffers:
                buffers[piece] = self.buffers(piece, num_rows)
            self.results.append(self.try_one(result, piece, config, buffers[piece]))
        else:
            self.finish_rows(num_rows_now, start)
        self.current(None)

    def try_one(self, result: Result, piece: str, config: Config | str, b: dict[str, Tensor]) -> Result:
        weights = self.weights[piece]
        try:
            if isinstance(config, str):
                run: Callable[[], object] = lambda: [self.cublas(piece, b, w) for w in weights]  # noqa: E731
            else:
                result.error, result.problem = self.check(piece, config, b)
                if result.problem:
                    print(f"  {result}", flush=True)
                    return result
                calls = [self.call(piece, config, b, w) for w in weights]
                run = lambda: [fused.launch(call, self.chip) for call in calls]  # noqa: E731
            result.us = round(self.clock.per_call(run, len(weights)), 3)
        except Exception as error:
            result.problem = f"{type(error).__name__}: {str(error)[:300]}"
            print(f"  {piece} {result.num_rows} {result.config}: {result.problem}", flush=True)
            if is_fatal(error):
                self.save()
                raise
        return result

    # ---- a chain of layers ----

    def best(self, piece: str, num_rows: int) -> Result | None:
        timed = [r for r in self.results if (r.piece, r.num_rows) == (piece, num_rows) and r.us is not None]
        own = [r for r in timed if r.config != CUBLAS]
        return min(own, key=lambda r: r.us or math.inf, default=None)

    def current_chain(self, num_rows: int) -> Callable[[], Tensor]:
        b = {piece: self.buffers(piece, num_rows) for piece in ("o", "qkv")}
        attended, first = b["o"]["x"], b["qkv"]["residual"]

        def run() -> Tensor:
            hidden, residual = torch.zeros_like(first), first + 0  # a kernel, as the embedding is
            for i in range(self.shape.num_layers):
                w = {piece: weights[i] for piece, weights in self.weights.items() if piece != "head"}
                hidden, residual = add_rms_norm(hidden, residual, self.norms[2 * i], EPS)
                linear(hidden, w["qkv"])
                hidden, residual = add_rms_norm(linear(attended, w["o"]), residual, self.norms[2 * i + 1], EPS)
                hidden = linear(silu_and_mul(linear(hidden, w["gate_up"])), w["down"])
            return hidden + residual

        return run

    def fused_chain(self, num_rows: int, configs: dict[str, Config | None]) -> Callable[[], Tensor]:
        b = {piece: self.buffers(piece, num_rows) for piece in ("o", "qkv")}
        attended, first = b["o"]["x"], b["qkv"]["residual"]

        def run() -> Tensor:
            stream = fused.ResidualStream(first + 0, self.workspace)
            for i in range(self.shape.num_layers):
                w = {piece: weights[i] for piece, weights in self.weights.items() if piece != "head"}
                norm, mid, after = self.norms[2 * i : 2 * i + 3]
                fused.norm_linear_triton(stream, norm, EPS, w["qkv"], config=configs["qkv"])
                fused.linear_residual_triton(attended, w["o"], None, stream, mid, config=configs["o"])
                inner = fused.norm_linear_triton(stream, mid, EPS, w["gate_up"], silu=True, config=configs["gate_up"])
                fused.linear_residual_triton(inner, w["down"], None, stream, after, config=configs["down"])
            return stream.residual

        return run

    def finish_rows(self, num_rows: int, start: float) -> None:
        """The chain in three ways, the table's rows, and everything on disk."""
        if str(num_rows) in self.chains or any((r.piece, r.num_rows) == ("chain", num_rows) for r in self.results):
            return  # a process before this one did it, or died of it
        layers: int = self.shape.num_layers
        chain: dict[str, float] = {}
        rules = {piece: self.rule(piece, num_rows) for piece in PIECES}
        best = {piece: eval(result.literal) for piece in PIECES if (result := self.best(piece, num_rows))}
        self.current(Result(self.name, "chain", num_rows, "chain", ""))
        try:
            torch.manual_seed(num_rows)
            chain["current"] = self.clock.per_call(self.current_chain(num_rows), layers)
            chain["rules"] = self.clock.per_call(self.fused_chain(num_rows, rules), layers)
            chain["best"] = self.clock.per_call(self.fused_chain(num_rows, best), layers)
            torch.manual_seed(num_rows)
            expected = self.current_chain(num_rows)()
            torch.manual_seed(num_rows)
            run = self.fused_chain(num_rows, best)
            first, second = run(), run()
            chain["difference"] = relative(first, expected)
            chain["varies"] = float(not torch.equal(first, second))
            if self.chip.use_pdl and num_rows in WITHOUT_PDL:
                with without_pdl(self.chip):
                    chain["rules_without_pdl"] = self.clock.per_call(self.fused_chain(num_rows, rules), layers)
        except Exception as error:
            print(f"  chain at {num_rows} rows: {type(error).__name__}: {str(error)[:300]}", flush=True)
            if is_fatal(error):
                self.save()
                raise
        self.chains[str(num_rows)] = {key: round(value, 4) for key, value in chain.items()}
        pieces = []
        for piece in PIECES:
            times = {r.config: r.us for r in self.results if (r.piece, r.num_rows) == (piece, num_rows)}
            if (baseline := times.get(CUBLAS)) and (result := self.best(piece, num_rows)):
                rule = times.get(label(rules[piece])) if rules[piece] else None
                pieces.append(
                    f"{piece} {baseline:.1f} -> {result.us:.1f} {result.config} (rule {rule or math.nan:.1f})"
                )
        print(f"{self.name} rows {num_rows} ({time.time() - start:.1f} s): " + "; ".join(pieces), flush=True)
        print(f"   layer: {self.chains[str(num_rows)]}", flush=True)
        self.save()

    # ---- files ----

    def current(self, result: Result | None) -> None:
        (self.out / f"{self.name}.current").write_text("" if result is None else json.dumps(asdict(result)))

    def save(self) -> None:
        data = {"model": self.name, "results": [asdict(r) for r in self.results], "chains": self.chains}
        (self.out / f"{self.name}.json").write_text(json.dumps(data))

    def load(self) -> None:
        """Go on where a process before this one was stopped; what stopped it is not tried again."""
        path, current = self.out / f"{self.name}.json", self.out / f"{self.name}.current"
        if path.exists():
            data = json.loads(path.read_text())
            self.results, self.chains = [Result(**r) for r in data["results"]], data["chains"]
        if current.exists() and current.read_text():
            stopped = Result(**json.loads(current.read_text()))
            stopped.problem = "took the process down"
            print(f"{self.name}: skipped: {stopped.piece} {stopped.num_rows} {stopped.config}", flush=True)
            self.results.append(stopped)


class without_pdl:
    """`device_of` answers without dependent launch."""

    def __init__(self, chip: Device) -> None:
        self.plain = replace(chip, use_pdl=False)

    def __enter__(self) -> None:
        fused.device_of = lambda _: self.plain  # type: ignore[assignment]

    def __exit__(self, *_: object) -> None:
        fused.device_of = device_of


def is_fatal(error: Exception) -> bool:
    """Whether nothing on the device works behind it in this process."""
    names = ("illegal", "CUDA error", "unspecified launch failure", "misaligned", "device-side")
    is_memory = isinstance(error, torch.cuda.OutOfMemoryError)
    return not is_memory and any(name in str(error) for name in names)


def config_is_tma(config: Config) -> bool:
    return isinstance(config, TileConfig) and config.use_tma


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def tuned_entries(results: list[Result], shape: Shape) -> Iterator[str]:
    """Lines for `TUNED`: a group of row counts shares what is best for them together; None where cuBLAS wins."""
    for piece, kind in PIECES.items():
        entries = []
        for group in GROUPS:
            times: dict[str, list[float]] = {}
            for r in results:
                if r.piece == piece and r.num_rows in group and r.us is not None:
                    lost = SCALE_ROWS_US if r.config == CUBLAS and kind == "residual" else 0.0
                    times.setdefault("None" if r.config == CUBLAS else r.literal, []).append(r.us + lost)
            measured = max((len(t) for t in times.values()), default=0)
            complete = {literal: sum(t) for literal, t in times.items() if len(t) == measured}
            if complete:
                entries.append(f"({group[-1]}, {min(complete, key=lambda literal: complete[literal])})")
        n, k = shape.weight(piece)
        yield f'    ("{kind}", {n}, {k}): ({", ".join(entries)},),  # {piece}'


def run_model(name: str, args: argparse.Namespace) -> None:
    device = torch.device("cpu" if args.dry_run else "cuda", None if args.dry_run else 0)
    shape = DRY_SHAPE if args.dry_run else SHAPES[name]
    start = time.time()
    torch.manual_seed(0)
    bench = Bench(name, shape, device, Clock(device, args.deadline), args.out, args.rows)
    bench.load()
    print(f"{name}: {bench.chip}, weights made in {time.time() - start:.1f} s", flush=True)
    bench.compile_ahead()
    bench.run_pieces()
    bench.save()


def summary(names: list[str], out: Path, dry_run: bool) -> None:
    print("\nmicroseconds a layer, attention left out (current = cuBLAS + separate kernels)")
    print(f"{'model':12}{'rows':>5}{'current':>9}{'rules':>9}{'best':>9}{'no PDL':>9}{'floor':>8}  difference")
    entries = []
    for name in names:
        path = out / f"{name}.json"
        if not path.exists():
            continue
        data, shape = json.loads(path.read_text()), DRY_SHAPE if dry_run else SHAPES[name]
        size = sum(math.prod(shape.weight(piece)) for piece in PIECES if piece != "head")
        for num_rows, chain in sorted(data["chains"].items(), key=lambda item: int(item[0])):
            floor = max(2 * size / 4.3e6, 2 * size * int(num_rows) / 790e6)
            columns = ("current", "rules", "best", "rules_without_pdl")
            values = "".join(f"{chain.get(key, math.nan):9.2f}" for key in columns)
            print(f"{name:12}{num_rows:>5}{values}{floor:8.2f}  {chain.get('difference', math.nan):.1e}"
                  f"{'  VARIES' if chain.get('varies') else ''}")  # fmt: skip
        entries += tuned_entries([Result(**r) for r in data["results"]], shape)
    text = "\n".join(["TUNED: dict[tuple[Kind, int, int], tuple[tuple[int, Config | None], ...]] = {", *entries, "}"])
    (out / "tuned.txt").write_text(text + "\n")
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["qwen3-0.6b", "qwen3-8b"], choices=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="in the order of measurement")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")), help="folder of the JSON")
    parser.add_argument("--seconds", type=float, default=96.0, help="of all; what does not fit is left out")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, Triton's interpreter, no GPU")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=0.0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        run_model(args.child, args)
        return
    end = time.time() + args.seconds
    args.out.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(args.model):
        for path in (args.out / f"{name}.json", args.out / f"{name}.current"):
            path.unlink(missing_ok=True)
        deadline = time.time() + (end - time.time()) / (len(args.model) - i)
        for _ in range(4):  # goes on behind a candidate that took the process down
            if deadline - time.time() < 12:
                break
            command = [sys.executable, "-u", __file__, "--child", name, "--deadline", str(deadline)]
            command += ["--out", str(args.out), "--rows", *map(str, args.rows)]
            try:
                subprocess.run(command + ["--dry-run"] * args.dry_run, check=True, timeout=deadline - time.time() + 5)
                break
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                print(f"{name}: {error}", flush=True)
    summary(args.model, args.out, args.dry_run)


if __name__ == "__main__":
    main()
