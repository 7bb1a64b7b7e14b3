"""What is drawn has the right distribution: the noise itself, then tokens under every filter, and cases A15 to A20."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.noise import log2_exponential_reference, noise_bits_reference
from nanovllm.kernels.sampling import sample
from nanovllm.kernels.sampling_filters import filter_threshold_reference

NUM_DRAWS = 20_000


def draw(
    logits: Tensor,
    num_draws: int = NUM_DRAWS,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 1,
    vary: str = "position",
) -> Tensor:
    """Tokens drawn from `logits` [V] at successive positions of one seed, or at one position of successive seeds."""
    counter = torch.arange(num_draws, dtype=torch.int32)
    constant = torch.full_like(counter, seed)
    low, num_tokens = (constant, counter) if vary == "position" else (counter, constant)
    return sample(
        logits.expand(num_draws, -1),
        counter,
        torch.full((num_draws,), temperature),
        torch.full((num_draws,), top_k, dtype=torch.int32),
        torch.full((num_draws,), top_p),
        torch.full((num_draws,), min_p),
        torch.stack((low, torch.zeros_like(low)), 1),
        num_tokens,
    )


def chi_square_is_plausible(counts: Tensor, probabilities: Tensor) -> bool:
    """Whether counts [C] fit probabilities [C], to five sigma of chi-square; nothing in impossible cells."""
    possible = probabilities > 0
    expected = probabilities[possible].double() * counts.sum()
    assert expected.min() >= 5, "too few draws for a chi-square test"
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    freedom = max(int(possible.sum()) - 1, 1)
    # Wilson-Hilferty: the cube root of chi2 / df is nearly normal.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
    return bool(counts[~possible].sum() == 0) and z < 5


def uniforms(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    bits = noise_bits_reference(seeds.int(), positions.int(), vocab_size)
    return ((bits.long() & 0xFFFFFFFF).double() + 0.5) * 2.0**-32


def keys(kind: str, num_rows: int) -> tuple[Tensor, Tensor]:
    """(seeds [N, 2], positions [N]) that differ as little as keys can, in one place."""
    counter, zero = torch.arange(num_rows), torch.zeros(num_rows, dtype=torch.long)
    if kind == "positions":
        return torch.stack((zero + 42, zero), 1), counter
    if kind == "seeds":
        return torch.stack((counter, zero), 1), zero + 7
    if kind == "high words":
        return torch.stack((zero, counter), 1), zero
    return torch.stack((1 << counter % 31, zero), 1), counter // 31  # single bits


@pytest.mark.parametrize("kind", ["positions", "seeds", "high words", "single bits"])
def test_noise_is_uniform_and_independent(kind: str) -> None:
    seeds, positions = keys(kind, 512)
    u = uniforms(seeds, positions, 2048)  # [N, V]
    flat = u.flatten()
    num = flat.numel()
    # Kolmogorov-Smirnov against the uniform distribution; 2.3 / sqrt(n) is passed once in 10^4.
    ordered = flat.sort().values
    steps = torch.arange(1, num + 1, dtype=torch.float64) / num
    assert float((ordered - steps).abs().max()) < 2.3 / math.sqrt(num)
    # Pairs of neighbours, across ids (1, 2, 64 apart), across rows, and diagonally, on a 32 x 32 grid.
    grid = (u * 32).long()
    pairs = [(grid[:, :-d], grid[:, d:]) for d in (1, 2, 64)] + [(grid[:-d], grid[d:]) for d in (1, 2, 31)]
    pairs += [(grid[:-1, :-1], grid[1:, 1:]), (grid[:-1, 1:], grid[1:, :-1])]
    for a, b in pairs:
        counts = torch.bincount((a * 32 + b).flatten(), minlength=1024)
        assert chi_square_is_plausible(counts, torch.full((1024,), 1 / 1024))
    # The tail that decides over a large vocabulary: how many of each row, and of each column, lie under 1/64.
    for tail in ((u < 1 / 64).sum(1), (u < 1 / 64).sum(0)):
        mean = num / tail.numel() / 64
        assert float((tail - mean).abs().max()) < 6 * math.sqrt(mean)
        assert 0.75 < float(tail.double().var()) / (mean * 63 / 64) < 1.25


def test_smallest_variates_of_a_large_vocabulary() -> None:
    """Over 151,936 ids: no two equal, the winner anywhere, its variate as fine as the least of V uniforms should be."""
    vocab_size, num_rows = 151_936, 256
    seeds, positions = keys("positions", num_rows)
    least, winner = [], []
    for part in range(0, num_rows, 32):
        u = uniforms(seeds[part : part + 32], positions[part : part + 32], vocab_size)
        if part == 0:
            assert u[0].unique().numel() == vocab_size
        low = u.min(dim=1)
        least.append(low.values * vocab_size)
        winner.append(low.indices / vocab_size)
    steps = torch.arange(1, num_rows + 1, dtype=torch.float64) / num_rows
    for values in (1 - torch.exp(-torch.cat(least)), torch.cat(winner).double()):
        assert float((values.sort().values - steps).abs().max()) < 2.3 / math.sqrt(num_rows)
    rank_pairs = torch.stack((torch.cat(winner)[:-1], torch.cat(winner)[1:]))
    assert abs(float(torch.corrcoef(rank_pairs)[0, 1])) < 5 / math.sqrt(num_rows)


def test_exponential_variates_have_both_tails() -> None:
    bits = torch.tensor([0, 1, 2, -1, -2, -(2**31), 2**25 - 1, 2**25, 2**25 + 1, 2**30], dtype=torch.int32)
    v = ((bits.long() & 0xFFFFFFFF).double() + 0.5) * 2.0**-32
    expected = torch.log2(-torch.log1p(-v))
    assert (log2_exponential_reference(bits).double() - expected).abs().max() < 4e-6
    every = torch.arange(-(2**31), 2**31, 65_537).int().sort().values
    in_order = torch.cat((every[every >= 0], every[every < 0]))
    assert (log2_exponential_reference(in_order).diff() >= 0).all()


LOGITS = torch.tensor([1.0, 0.2, -0.5, 2.0, 0.9, -2.0, 1.5, 0.0, -1.0, 0.4, 1.2, -0.1])


@pytest.mark.parametrize("vary", ["position", "seed"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_unfiltered_tokens(vary: str, temperature: float) -> None:
    counts = torch.bincount(draw(LOGITS, num_draws=50_000, temperature=temperature, vary=vary), minlength=12)
    assert chi_square_is_plausible(counts, (LOGITS / temperature).softmax(0))


def test_unfiltered_tokens_of_a_large_vocabulary() -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    counts = torch.bincount(torch.cat([draw(logits, num_draws=5000, seed=s) for s in (1, 2)]), minlength=1000)
    order = logits.argsort()  # cells of equal size in draws: group tokens
    cells = torch.arange(1000) // 20
    grouped = torch.zeros(50, dtype=torch.long).index_add_(0, cells, counts[order])
    expected = torch.zeros(50).index_add_(0, cells, logits.softmax(0)[order])
    assert chi_square_is_plausible(grouped, expected)


def kept_by_sorting(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """The plain oracle for logits without ties: which tokens [V] the filters keep."""
    p = (logits.double() / temperature).softmax(0)
    order = p.argsort(descending=True)
    kept = [t for t in order.tolist() if min_p == 0 or p[t] >= min_p * p.max() * (1 - 1e-12)]
    if 0 < top_k < len(logits):
        kept = kept[:top_k]
    if top_p < 1:
        total, mass, nucleus = float(p[kept].sum()), 0.0, []
        for token in kept:
            nucleus.append(token)
            mass += float(p[token])
            if mass >= top_p * total:
                break
        kept = nucleus
    mask = torch.zeros(len(logits), dtype=torch.bool)
    mask[kept] = True
    return mask


@pytest.mark.parametrize("min_p", [0.0, 0.03, 0.3, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.9, 0.5, 1e-6])
@pytest.mark.parametrize("top_k", [0, 1, 5, 99, 100, 101, 1 << 30])
def test_filters_against_sorting(top_k: int, top_p: float, min_p: float) -> None:
    for seed, temperature in ((0, 1.0), (1, 0.4), (2, 2.5)):
        logits = torch.randn(100, generator=torch.Generator().manual_seed(seed)) * 2
        settings = [torch.tensor([v]) for v in (temperature, top_k, top_p, min_p)]
        threshold = filter_threshold_reference(logits[None], *settings)
        expected = kept_by_sorting(logits, temperature, top_k, top_p, min_p)
        assert torch.equal(logits >= threshold, expected), (seed, temperature)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(4, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.2), (8, 0.9, 0.1), (1, 1.0, 0.0)]
)
def test_filtered_tokens(top_k: int, top_p: float, min_p: float) -> None:
    p = LOGITS.softmax(0) * kept_by_sorting(LOGITS, 1.0, top_k, top_p, min_p)
    counts = torch.bincount(draw(LOGITS, top_k=top_k, top_p=top_p, min_p=min_p), minlength=12)
    assert chi_square_is_plausible(counts, p / p.sum())


def test_case_a15_greedy_rows_beside_rows_that_vary() -> None:
    n = 64
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3))
    counter = torch.arange(n, dtype=torch.int32)
    temperature = torch.where(counter % 2 == 0, 0.0, 1.0)
    ones, zeros = torch.ones(n), torch.zeros(n)
    seeds = torch.stack((counter, counter), 1)
    sampled = sample(logits.expand(n, -1), counter, temperature, counter * 0, ones, zeros, seeds, counter)
    assert sampled[::2].tolist() == [int(logits.argmax())] * (n // 2)
    assert sampled[1::2].unique().numel() > 5


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-8, 0.0])
def test_case_a16_very_low_temperatures(temperature: float) -> None:
    logits = (torch.randn(500, generator=torch.Generator().manual_seed(4)) * 10).bfloat16()
    logits[[17, 300]] = logits.amax() + 1
    sampled = set(draw(logits, num_draws=200, temperature=temperature).tolist())
    assert sampled == ({17} if temperature <= 1e-5 else {17, 300})


def test_case_a17_the_token_that_crosses_top_p_stays() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    counts = torch.bincount(draw(logits, num_draws=10_000, top_p=0.6), minlength=4)
    assert chi_square_is_plausible(counts, torch.tensor([4 / 7, 3 / 7, 0.0, 0.0]))


def test_case_a18_filters_at_their_edges() -> None:
    """The least top_p leaves the best token; top_k of 1 too; the values that mean "off" change nothing."""
    best = [int(LOGITS.argmax())] * 1000
    assert draw(LOGITS, num_draws=1000, top_p=1e-7).tolist() == best
    assert draw(LOGITS, num_draws=1000, top_k=1).tolist() == best
    assert draw(LOGITS, num_draws=1000, min_p=1.0).tolist() == best
    plain = draw(LOGITS, num_draws=1000)
    for off in ({"top_k": 0}, {"top_k": -1}, {"top_k": 12}, {"top_k": 13}, {"top_p": 1.0}, {"min_p": 0.0}):
        assert torch.equal(draw(LOGITS, num_draws=1000, **off), plain)


def test_case_a19_a_seeded_row_whatever_its_company() -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(5))
    rows = torch.arange(6, dtype=torch.int32)
    settings = (
        torch.tensor([1.0, 0.0, 0.7, 1.0, 1.5, 1.0]),
        torch.tensor([0, 5, 20, 0, 0, 7], dtype=torch.int32),
        torch.tensor([1.0, 1.0, 0.9, 0.8, 1.0, 1.0]),
        torch.tensor([0.0, 0.0, 0.0, 0.0, 0.1, 0.0]),
        torch.tensor([[9, 0]] * 6, dtype=torch.int32),
        torch.tensor([3, 4, 5, 6, 7, 8], dtype=torch.int32),
    )
    together = sample(logits, rows, *settings).tolist()
    for company in ([0], [0, 1], [5, 0, 2], [3, 3, 3], [4, 2]):
        index = torch.tensor(company)
        assert sample(logits[index], rows[index], *settings).tolist() == [together[i] for i in company]


def test_case_a20_samples_of_neighbouring_seeds_differ() -> None:
    """Four sequences of 30 tokens, from seeds that are neighbours or differ in the high word alone: no two alike."""
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(6))
    sequences = [tuple(draw(logits, num_draws=30, seed=seed).tolist()) for seed in (1, 2, 3, 4)]
    assert len(set(sequences)) == 4
    for i in range(4):
        for j in range(i):
            assert sum(a == b for a, b in zip(sequences[i], sequences[j], strict=True)) < 4
    assert sequences == [tuple(draw(logits, num_draws=30, seed=seed).tolist()) for seed in (1, 2, 3, 4)]
