"""The products of a decode step: kernels against float32, with the norm, the addition and what passes between them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nanovllm.kernels import decode_linear as fused
from nanovllm.kernels.decode_linear_config import (
    MAX_PARTIAL_ELEMENTS,
    MAX_TILES,
    Config,
    Device,
    Kind,
    TileConfig,
    VectorConfig,
    choose_config,
    fused_rows,
)

EPS = 1e-6
H200 = Device(132, 227 * 1024, True)
RTX_3090 = Device(82, 99 * 1024, False)
# Of the whole tensor: what is stored rounds once or twice, sums are float32.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}

CONFIGS: list[Config | None] = [
    None,  # the rule's own
    VectorConfig(4, 32),  # two and three chunks
    VectorConfig(8, 16),  # more chunks than are held at once
    VectorConfig(4, 128),  # masked
    TileConfig(16, 32, 32),
    TileConfig(16, 16, 16, num_splits=3),
    TileConfig(32, 32, 32, num_splits=2),  # does not divide K
    TileConfig(64, 64, 64, num_warps=8),
]


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


class Layer:
    """Weights of one layer's MLP and of the projection behind it, and the same in float32."""

    def __init__(self, hidden: int, inner: int, out: int, dtype: torch.dtype, device: str, bias: bool) -> None:
        generator = torch.Generator(device).manual_seed(hidden + inner)

        def make(*shape: int, scale: float = 1.0) -> Tensor:
            return (scale * torch.randn(shape, generator=generator, device=device)).to(dtype)

        self.norm, self.next_norm = 1 + make(hidden, scale=0.2), 1 + make(hidden, scale=0.2)
        self.gate_up, self.gate_up_bias = make(2 * inner, hidden, scale=hidden**-0.5), make(2 * inner)
        self.down, self.down_bias = make(hidden, inner, scale=inner**-0.5), make(hidden)
        self.qkv, self.qkv_bias = make(out, hidden, scale=hidden**-0.5), make(out)
        self.bias = bias

    def biases(self, dtype: torch.dtype) -> list[Tensor | None]:
        return [b.to(dtype) if self.bias else None for b in (self.gate_up_bias, self.down_bias, self.qkv_bias)]

    def kernels(self, residual: Tensor, config: Config | None, split: Config | None = None) -> list[Tensor]:
        """Product behind a norm with SiLU, addition, product behind the next norm."""
        stream = fused.ResidualStream(residual, fused.LinearWorkspace.allocate(residual.device))
        gate_up_bias, down_bias, qkv_bias = self.biases(residual.dtype)
        inner = fused.norm_linear_triton(stream, self.norm, EPS, self.gate_up, gate_up_bias, True, config)
        fused.linear_residual_triton(inner, self.down, down_bias, stream, self.next_norm, split or config)
        assert stream.scaled_for is self.next_norm and stream.residual is residual
        qkv = fused.norm_linear_triton(stream, self.next_norm, EPS, self.qkv, qkv_bias, False, config)
        assert not stream.workspace.counters.any()
        return [inner, residual, qkv]

    def reference(self, residual: Tensor) -> list[Tensor]:
        """The same in float32 through the references."""
        stream = fused.ResidualStream(residual.float(), fused.LinearWorkspace.allocate("cpu"))
        gate_up_bias, down_bias, qkv_bias = self.biases(torch.float32)
        args = (self.norm.float(), EPS, self.gate_up.float(), gate_up_bias, True)
        inner = fused.norm_linear_reference(stream, *args)
        fused.linear_residual_reference(inner, self.down.float(), down_bias, stream, self.next_norm)
        args = (self.next_norm.float(), EPS, self.qkv.float(), qkv_bias, False)
        return [inner, stream.residual, fused.norm_linear_reference(stream, *args)]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("num_rows", [1, 3, 16])
def test_layer(num_rows: int, config: Config | None, kernel_device: str) -> None:
    if isinstance(config, VectorConfig) and num_rows > 1:
        pytest.skip("for one row")
    layer = Layer(80, 48, 100, torch.float16, kernel_device, bias=num_rows == 3)
    wide = 3 * torch.randn(num_rows, 96, generator=torch.Generator().manual_seed(num_rows)).to(kernel_device).half()
    residual, guard = wide[:, :80], wide[:, 80:].clone()  # rows of a wider tensor
    expected = layer.reference(residual)
    for actual, wanted in zip(layer.kernels(residual, config), expected, strict=True):
        assert relative(actual, wanted) < TOLERANCE[torch.float16]
    assert torch.equal(wide[:, 80:], guard)


@pytest.mark.filterwarnings("ignore:overflow")
def test_large_float16_values_do_not_overflow(kernel_device: str) -> None:
    """Residuals of real models have a few values in the ten thousands, and norm weights beyond 1."""
    layer = Layer(64, 32, 48, torch.float16, kernel_device, bias=False)
    layer.norm *= 8
    residual = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).to(kernel_device).half()
    residual[:, 5] = 20000.0
    inner = fused.norm_linear_triton(
        fused.ResidualStream(residual, fused.LinearWorkspace.allocate(kernel_device)), layer.norm, EPS, layer.gate_up
    )
    stream = fused.ResidualStream(residual.float(), fused.LinearWorkspace.allocate(kernel_device))
    expected = fused.norm_linear_reference(stream, layer.norm.float(), EPS, layer.gate_up.float())
    assert relative(inner, expected) < TOLERANCE[torch.float16]


def test_another_norm_weight_is_noticed(kernel_device: str) -> None:
    layer = Layer(64, 32, 48, torch.float16, kernel_device, bias=False)
    residual = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).to(kernel_device).half()
    stream = fused.ResidualStream(residual, fused.LinearWorkspace.allocate(kernel_device))
    for norm in (layer.norm, layer.next_norm, layer.norm):
        expected = fused.norm_linear_reference(stream, norm, EPS, layer.qkv)
        assert relative(fused.norm_linear_triton(stream, norm, EPS, layer.qkv), expected) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("num_rows", [1, 3])
def test_summed_over_ranks_between(num_rows: int, kernel_device: str) -> None:
    """Two halves of K, one a rank, summed before they are added, are the whole product."""
    layer = Layer(48, 96, 64, torch.float16, kernel_device, bias=False)
    x = torch.randn(num_rows, 96, device=kernel_device).half()
    residual = torch.randn(num_rows, 48, device=kernel_device).half()
    workspace = fused.LinearWorkspace.allocate(kernel_device)
    expected = residual.float() + x.float() @ layer.down.float().t()
    out = torch.empty(num_rows, 48, dtype=torch.float16, device=kernel_device)
    halves = [slice(0, 48), slice(48, 96)]
    parts = [
        fused.linear_partial_triton(x[:, half].contiguous(), layer.down[:, half].contiguous(), buffer)
        for half, buffer in zip(halves, (out, None), strict=True)
    ]
    assert parts[0].data_ptr() == out.data_ptr()
    stream = fused.ResidualStream(residual.clone(), workspace)
    fused.add_residual_triton(stream, parts[0] + parts[1], layer.next_norm)
    assert relative(stream.residual, expected) < 2e-3
    actual = fused.norm_linear_triton(stream, layer.next_norm, EPS, layer.qkv)
    fresh = fused.ResidualStream(stream.residual.clone(), workspace)
    assert relative(actual, fused.norm_linear_triton(fresh, layer.next_norm, EPS, layer.qkv)) == 0.0


def test_dispatch_on_the_cpu() -> None:
    layer = Layer(64, 32, 48, torch.float32, "cpu", bias=True)
    residual = torch.randn(3, 64)
    stream = fused.ResidualStream(residual.clone(), fused.LinearWorkspace.allocate("cpu"))
    inner = fused.norm_linear(stream, layer.norm, EPS, layer.gate_up, layer.gate_up_bias, silu=True)
    fused.linear_residual(inner, layer.down, layer.down_bias, stream, layer.next_norm)
    qkv = fused.norm_linear(stream, layer.next_norm, EPS, layer.qkv, layer.qkv_bias)
    for actual, expected in zip((inner, stream.residual, qkv), layer.reference(residual), strict=True):
        torch.testing.assert_close(actual, expected)


def test_mixed_dtypes_and_strides_are_refused(kernel_device: str) -> None:
    stream = fused.ResidualStream(
        torch.ones(2, 64, device=kernel_device).half(), fused.LinearWorkspace.allocate(kernel_device)
    )
    weight = torch.ones(32, 64, device=kernel_device)
    with pytest.raises(ValueError, match="one dtype"):
        fused.norm_linear_triton(stream, weight[0].half(), EPS, weight)
    with pytest.raises(ValueError, match="contiguous"):
        fused.norm_linear_triton(stream, weight[0].half(), EPS, weight.half().T.contiguous().T)


@pytest.mark.parametrize("device", [H200, RTX_3090], ids=["h200", "rtx3090"])
@pytest.mark.parametrize("hidden,q_size,qkv_size,inner", [
    (1024, 2048, 4096, 3072), (2560, 4096, 6144, 9728), (4096, 4096, 6144, 12288), (896, 896, 1152, 4864),
    (5120, 8192, 10240, 25600),
])  # fmt: skip
def test_rules_fit_the_device_and_the_workspace(
    hidden: int, q_size: int, qkv_size: int, inner: int, device: Device
) -> None:
    shapes: list[tuple[Kind, int, int]] = [
        ("norm", qkv_size, hidden),
        ("residual", hidden, q_size),
        ("norm_silu", 2 * inner, hidden),
        ("residual", hidden, inner),
    ]
    for num_rows in (1, 2, 16):
        for kind, n, k in shapes:
            config = choose_config(kind, num_rows, n, k, device)
            if isinstance(config, VectorConfig):
                assert num_rows == 1 and config.block_n * config.block_k <= 32768
            elif config is not None:
                stage = 2 * config.block_k * (config.block_m + config.block_n)
                assert stage * config.num_stages <= device.shared_memory
                num_tiles = -(-num_rows // config.block_m) * -(-n // config.block_n)
                if config.num_splits > 1:
                    num_elements = num_tiles * config.num_splits * config.block_m * config.block_n
                    assert num_tiles <= MAX_TILES and num_elements <= MAX_PARTIAL_ELEMENTS
    assert choose_config("norm", 17, qkv_size, hidden, device) is None
    measured = device is H200 and hidden == 1024
    assert fused_rows([(kind, n, k) for kind, n, k in shapes], device) == (16 if measured else 1)


@pytest.mark.gpu(seconds=8)
@pytest.mark.parametrize(("shape", "dtype", "batch_sizes"), [
    ((1024, 3072, 4096), torch.bfloat16, (1, 2, 16)),
    ((896, 4864, 1152), torch.float16, (1, 16)),
    ((4096, 12288, 6144), torch.bfloat16, (1, 16)),
], ids=str)  # fmt: skip
def test_real_shapes(shape: tuple[int, int, int], dtype: torch.dtype, batch_sizes: tuple[int, ...]) -> None:
    """Also: the same bits each time, and from a CUDA graph, whose launches depend on each other programmatically."""
    layer = Layer(*shape, dtype, "cuda", bias=False)
    for num_rows in batch_sizes:
        check_real_batch(layer, num_rows, dtype)


def check_real_batch(layer: Layer, num_rows: int, dtype: torch.dtype) -> None:
    hidden = len(layer.norm)
    residual = (3 * torch.randn(num_rows, hidden, device="cuda")).to(dtype)
    expected = layer.reference(residual)
    first = layer.kernels(residual.clone(), None)
    for actual, wanted in zip(first, expected, strict=True):
        assert relative(actual, wanted) < TOLERANCE[dtype]

    static = residual.clone()
    stream = fused.ResidualStream(static, fused.LinearWorkspace.allocate("cuda"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # a chain
            inner_out = fused.norm_linear(stream, layer.norm, EPS, layer.gate_up, silu=True)
            fused.linear_residual(inner_out, layer.down, None, stream, layer.norm)
        chained = fused.norm_linear(stream, layer.next_norm, EPS, layer.qkv)
    results = []
    for _ in range(20):
        static.copy_(residual)
        graph.replay()
        results.append((static.clone(), chained.clone()))
    assert all(torch.equal(a, results[0][0]) and torch.equal(b, results[0][1]) for a, b in results)

    wide = fused.ResidualStream(residual.float(), stream.workspace)
    for _ in range(3):
        y = fused.norm_linear_reference(wide, layer.norm.float(), EPS, layer.gate_up.float(), silu=True)
        fused.linear_residual_reference(y, layer.down.float(), None, wide, layer.norm)
    assert relative(results[0][0], wide.residual) < 2 * TOLERANCE[dtype]
