"""The sampling kernels against their references: the same noise, the same thresholds, the same tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.kernels._triton import tl, triton
from nanovllm.kernels.noise import log2_exponential_reference, noise_bits, noise_bits_reference, row_keys
from nanovllm.kernels.sampling import SamplingWorkspace, sample, sample_reference, sample_triton
from nanovllm.kernels.sampling_filters import filter_threshold_reference

Settings = dict[str, Any]
MIXED = [  # (temperature, top_k, top_p, min_p)
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.6, 20, 0.95, 0.0),
    (0.3, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.3, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.05),
    (5e-6, 20, 0.5, 0.0),
    (0.8, 300, 0.7, 0.01),
    (1e-3, 0, 1.0, 0.0),
    (1e-4, 5, 0.9, 0.0),
    (2.0, 1 << 30, 1.0, 0.0),
]


def make_settings(values: list[tuple[float, int, float, float]], seed: int = 0, device: str = "cpu") -> Settings:
    """Rows 1.. with these settings, random seeds and positions; row 0 is a greedy stand-in."""
    generator = torch.Generator().manual_seed(seed)
    columns = list(zip(*[(0.0, 0, 1.0, 0.0), *values], strict=True))
    num_rows = len(values) + 1
    settings = {
        "temperature": torch.tensor(columns[0], dtype=torch.float32),
        "top_k": torch.tensor(columns[1], dtype=torch.int32),
        "top_p": torch.tensor(columns[2], dtype=torch.float32),
        "min_p": torch.tensor(columns[3], dtype=torch.float32),
        "seeds": torch.randint(-(1 << 31), 1 << 31, (num_rows, 2), dtype=torch.int32, generator=generator),
        "num_tokens": torch.randint(1, 4096, (num_rows,), dtype=torch.int32, generator=generator),
    }
    return {name: value.to(device) for name, value in settings.items()}


def make_logits(num_rows: int, vocab_size: int, dtype: torch.dtype, seed: int = 0, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * spread).to(dtype)


def explained(logits: Tensor, rows: Tensor, settings: Settings, token: Tensor, tolerance: float = 1e-4) -> Tensor:
    """Whether each row's token wins up to rounding [S]: maybe kept, and no worse than what is surely kept."""
    rows = rows.long()
    x = logits.double()
    temperature, top_k, top_p, min_p = (settings[name][rows] for name in ("temperature", "top_k", "top_p", "min_p"))
    is_greedy = temperature <= 1e-5
    temperature = torch.where(is_greedy, 1.0, temperature)
    bits = noise_bits_reference(settings["seeds"][rows], settings["num_tokens"][rows], logits.shape[1])
    x_less_max = x - x.amax(1, keepdim=True)
    noise = log2_exponential_reference(bits).double()
    score = x_less_max * (math.log2(math.e) / temperature[:, None].double()) - noise
    score = torch.where(is_greedy[:, None], x_less_max, score)
    temperature = temperature.double()
    more, less = torch.where(top_p < 1, top_p + 1e-5, 1.0), torch.where(top_p < 1, top_p - 1e-5, 1.0)
    loose = filter_threshold_reference(x, temperature, top_k, more, min_p * (1 - 1e-5))
    strict = filter_threshold_reference(x, temperature, top_k, less, min_p * (1 + 1e-5))
    loose, strict = (torch.where(is_greedy, -torch.inf, threshold) for threshold in (loose, strict))
    strict = torch.minimum(strict, x.amax(1))
    at = token.long()[:, None]
    best = score.masked_fill(x < strict[:, None], -torch.inf).amax(1)
    return (x.gather(1, at)[:, 0] >= loose) & (score.gather(1, at)[:, 0] >= best - tolerance)


def assert_same(logits: Tensor, rows: Tensor, settings: Settings, actual: Tensor, allow_rounding: bool = False) -> None:
    expected = sample_reference(logits, rows, **settings)
    differ = (actual != expected).nonzero()[:, 0]
    if not allow_rounding:
        assert differ.numel() == 0, (differ.tolist(), actual[differ].tolist(), expected[differ].tolist())
    elif differ.numel():
        assert explained(logits[differ], rows[differ], settings, actual[differ]).all(), differ.tolist()


@triton.jit
def _noise_kernel(seeds_ptr, positions_ptr, out_ptr, V: tl.constexpr):
    row = tl.program_id(0)
    keys = row_keys(tl.load(seeds_ptr + 2 * row), tl.load(seeds_ptr + 2 * row + 1), tl.load(positions_ptr + row))
    ids = tl.arange(0, V)
    tl.store(out_ptr + row * V + ids, noise_bits(keys[0], keys[1], ids).to(tl.int32, bitcast=True))


def test_noise_integers_are_equal(kernel_device: str) -> None:
    settings = make_settings([(1.0, 0, 1.0, 0.0)] * 20, seed=1, device=kernel_device)
    settings["seeds"][:6] = torch.tensor([[0, 0], [1, 0], [0, 1], [-1, -1], [-(2**31), 2**31 - 1], [5, -5]])
    out = torch.empty(21, 4096, dtype=torch.int32, device=kernel_device)
    _noise_kernel[(21,)](settings["seeds"], settings["num_tokens"], out, V=4096)
    assert torch.equal(out, noise_bits_reference(settings["seeds"], settings["num_tokens"], 4096))


@pytest.mark.parametrize("vocab_size", [1000, 1003, 4096 + 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_kernels_on_mixed_rows(kernel_device: str, vocab_size: int, dtype: torch.dtype) -> None:
    settings = make_settings(MIXED, seed=vocab_size, device=kernel_device)
    logits = make_logits(len(MIXED), vocab_size, dtype).to(kernel_device)
    rows = torch.randperm(len(MIXED), generator=torch.Generator().manual_seed(2)).int().to(kernel_device) + 1
    workspace = SamplingWorkspace.allocate(len(MIXED) + 3, vocab_size, kernel_device)
    workspace.span_max.fill_(torch.nan)
    workspace.span_bound.fill_(torch.inf)
    workspace.span_list.fill_(1 << 30)
    actual = sample_triton(logits, rows, **settings, workspace=workspace)
    assert actual.dtype == torch.int32 and actual.data_ptr() == workspace.sampled.data_ptr()
    assert_same(logits, rows, settings, actual, allow_rounding=True)


@pytest.mark.parametrize("spread", [0.0, 0.01, 12.0])
def test_kernels_on_flat_and_peaked_rows(kernel_device: str, spread: float) -> None:
    """Flat rows tie at every threshold and need many spans; peaked ones have their winner far above the noise."""
    values = [(1.0, 0, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (0.7, 40, 0.9, 0.0), (1.0, 0, 1.0, 0.3), (1e-4, 0, 1.0, 0.0)]
    settings = make_settings(values * 2, seed=7, device=kernel_device)
    logits = make_logits(10, 5000, torch.bfloat16, spread=spread).to(kernel_device)
    rows = torch.arange(1, 11, dtype=torch.int32, device=kernel_device)
    assert_same(logits, rows, settings, sample_triton(logits, rows, **settings), allow_rounding=True)


@pytest.mark.parametrize("run", [sample_reference, sample_triton])
def test_rows_that_are_not_finite(kernel_device: str, run: Any) -> None:
    settings = make_settings([(0.0, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 9, 0.9, 0.1)] * 6, device=kernel_device)
    logits = make_logits(18, 700, torch.float32).to(kernel_device)
    logits[0:3, 650] = torch.nan
    logits[3:6, 5] = torch.inf
    logits[6:9] = -torch.inf
    logits[9:12, 3] = -torch.nan
    logits[12:15] = -torch.inf  # but one: fine
    logits[12:15, 321] = -1000.0
    rows = torch.arange(1, 19, dtype=torch.int32, device=kernel_device)
    sampled = run(logits, rows, **settings).tolist()
    assert sampled[:12] == [-1] * 12
    assert sampled[12:15] == [321] * 3
    assert all(0 <= token < 700 for token in sampled[15:])


@pytest.mark.parametrize("run", [sample_reference, sample_triton])
def test_masked_tokens_are_never_sampled(kernel_device: str, run: Any) -> None:
    values = [(1.0, 0, 1.0, 0.0), (5.0, 50, 1.0, 0.0), (5.0, 0, 0.999, 0.0), (5.0, 0, 1.0, 1e-9)] * 4
    settings = make_settings(values, device=kernel_device)
    logits = torch.full((16, 1003), -torch.inf, device=kernel_device)
    allowed = [0, 127, 128, 1002]
    logits[:, allowed] = make_logits(16, 4, torch.float32).to(kernel_device)
    rows = torch.arange(1, 17, dtype=torch.int32, device=kernel_device)
    assert set(run(logits, rows, **settings).tolist()) <= set(allowed)


@pytest.mark.parametrize("run", [sample_reference, sample_triton])
def test_ties_and_signed_zeros(kernel_device: str, run: Any) -> None:
    """Greedy takes the lowest id; a threshold keeps all that tie with it, +0 and -0 alike."""
    settings = make_settings([(0.0, 0, 1.0, 0.0)] + [(1.0, 2, 1.0, 0.0)] * 24, device=kernel_device)
    logits = torch.full((25, 300), -5.0, device=kernel_device)
    logits[:, [290, 7, 150]] = torch.tensor([0.0, -0.0, 0.0], device=kernel_device)
    rows = torch.arange(1, 26, dtype=torch.int32, device=kernel_device)
    sampled = run(logits, rows, **settings).tolist()
    assert sampled[0] == 7
    assert set(sampled[1:]) == {7, 150, 290}


@pytest.mark.parametrize("run", [sample_reference, sample_triton])
@pytest.mark.parametrize("magnitude", [1e3, 1e30, 3e38])
def test_huge_logits_do_not_overflow(kernel_device: str, run: Any, magnitude: float) -> None:
    values = [(1e-4, 0, 1.0, 0.0), (1e-5, 3, 0.9, 0.0), (1e-3, 0, 0.5, 0.1), (0.0, 0, 1.0, 0.0), (0.5, 0, 1.0, 0.0)]
    settings = make_settings(values, device=kernel_device)
    logits = make_logits(5, 300, torch.float32, spread=0.1).clamp_(-0.9, 0.9).to(kernel_device) * magnitude
    rows = torch.arange(1, 6, dtype=torch.int32, device=kernel_device)
    assert torch.equal(run(logits, rows, **settings).long(), logits.argmax(1))
    logits[:] = -magnitude
    logits[:, 200] = -magnitude * 0.5
    assert run(logits, rows, **settings).tolist() == [200] * 5


def test_kernels_leave_a_row_alone_whatever_its_company(kernel_device: str) -> None:
    settings = make_settings(MIXED, seed=3, device=kernel_device)
    logits = make_logits(len(MIXED), 2000, torch.bfloat16, seed=5).to(kernel_device)
    rows = torch.arange(1, len(MIXED) + 1, dtype=torch.int32, device=kernel_device)
    together = sample_triton(logits, rows, **settings).tolist()
    for order in (torch.arange(len(MIXED) - 1, -1, -1), torch.tensor([4]), torch.tensor([2, 5])):
        sampled = sample_triton(logits[order.to(kernel_device)], rows[order.to(kernel_device)], **settings)
        assert sampled.tolist() == [together[i] for i in order]


def test_strided_logits_and_no_rows(kernel_device: str) -> None:
    settings = make_settings(MIXED, device=kernel_device)
    wide = make_logits(len(MIXED), 1100, torch.float32).to(kernel_device)
    rows = torch.arange(1, len(MIXED) + 1, dtype=torch.int32, device=kernel_device)
    logits = wide[:, :1003]  # the vocabulary is padded, say
    assert torch.equal(sample_triton(logits, rows, **settings), sample_triton(logits.contiguous(), rows, **settings))
    assert sample_triton(logits[:0], rows[:0], **settings).shape == (0,)
    assert sample(logits[:0], rows[:0], **settings).shape == (0,)


@pytest.mark.gpu(seconds=10)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_real_vocabulary(dtype: torch.dtype) -> None:
    for num_rows, spread in ((1, 4.0), (7, 0.5), (512, 4.0), (64, 0.5)):
        values = [MIXED[i % len(MIXED)] for i in range(1, num_rows + 1)]
        settings = make_settings(values, seed=num_rows, device="cuda")
        logits = make_logits(8, 151_936, dtype, spread=spread).cuda().repeat(num_rows // 8 + 1, 1)[:num_rows]
        rows = torch.arange(1, num_rows + 1, dtype=torch.int32, device="cuda")
        workspace = SamplingWorkspace.allocate(num_rows, 151_936, "cuda")
        actual = sample(logits, rows, **settings, workspace=workspace).clone()
        assert torch.equal(sample(logits, rows, **settings, workspace=workspace), actual)
        for part in range(0, num_rows, 64):
            span = slice(part, part + 64)
            assert_same(logits[span], rows[span], settings, actual[span], allow_rounding=True)
        alone = [sample_triton(logits[i : i + 1], rows[i : i + 1], **settings) for i in range(min(num_rows, 24))]
        assert torch.equal(torch.cat(alone), actual[:24])


@pytest.mark.gpu(seconds=10)
def test_edge_cases_on_gpu() -> None:
    """What holds under the interpreter, too."""
    test_noise_integers_are_equal("cuda")
    test_rows_that_are_not_finite("cuda", sample_triton)
    test_masked_tokens_are_never_sampled("cuda", sample_triton)
    test_ties_and_signed_zeros("cuda", sample_triton)
    for magnitude in (1e3, 1e30, 3e38):
        test_huge_logits_do_not_overflow("cuda", sample_triton, magnitude)
    test_kernels_leave_a_row_alone_whatever_its_company("cuda")


@pytest.mark.gpu(seconds=6)
def test_graph_replays_with_new_settings() -> None:
    settings = make_settings(MIXED, device="cuda")
    logits = make_logits(len(MIXED), 151_936, torch.bfloat16).cuda()
    rows = torch.arange(1, len(MIXED) + 1, dtype=torch.int32, device="cuda")
    workspace = SamplingWorkspace.allocate(len(MIXED), 151_936, "cuda")
    sample(logits, rows, **settings, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(logits, rows, **settings, workspace=workspace)
    for shift in range(1, 4):
        for value in settings.values():
            value.copy_(value.roll(shift, 0))
        graph.replay()
        assert torch.equal(workspace.sampled, sample_triton(logits, rows, **settings))
