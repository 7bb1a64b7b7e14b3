"""The fused norm, rotation and KV store: kernel against reference, reference against the formulas spelt out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from nanovllm.kernels.rope import (
    Rope,
    qk_norm_rope_store,
    qk_norm_rope_store_reference,
    qk_norm_rope_store_triton,
)

EPS = 1e-6
MAX_POSITION = 200
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# A rotation adds two products, so the error counts in units of the values (up to 5 or so), not of the result.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2**-8, torch.bfloat16: 2**-5}


@dataclass
class Case:
    qkv: Tensor  # [T, (H + 2 * KH) * D]
    q_weight: Tensor | None
    k_weight: Tensor | None
    cos_sin: Tensor  # [MAX_POSITION, D]
    positions: Tensor
    slot_mapping: Tensor
    k_cache: Tensor
    v_cache: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    write_k: bool

    def run(self, function: Callable[..., None], first_token: int = 0) -> None:
        rope = Rope(self.q_weight, self.k_weight, EPS, self.cos_sin)
        where = (self.positions, self.slot_mapping, self.k_cache, self.v_cache)
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        function(self.qkv, rope, *where, *heads, self.write_k, first_token)

    def copy(self, dtype: torch.dtype | None = None) -> Case:
        """A deep copy, floating values but cos_sin in `dtype`."""
        fields = {
            name: value.to(dtype or value.dtype, copy=True)
            if isinstance(value, Tensor) and value.is_floating_point() and name != "cos_sin"
            else value
            for name, value in vars(self).items()
        }
        return Case(**fields)


def make_cos_sin(head_dim: int, max_position: int) -> Tensor:
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(max_position)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def make_case(
    num_tokens: int,
    heads: tuple[int, int, int],  # query heads, KV heads, head dimension
    dtype: torch.dtype,
    device: str,
    norm: bool = True,
    write_k: bool = False,
    strided: bool = False,
    block_size: int = 16,
) -> Case:
    """Slots in a shuffled order, one in five of them -1; the caches hold a known value."""
    num_heads, num_kv_heads, head_dim = heads
    torch.manual_seed(num_tokens + head_dim)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    num_blocks = num_tokens // block_size + 2
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    slots[1::5] = -1
    cache = torch.full((2, num_blocks, block_size, num_kv_heads, head_dim), 7.0, dtype=dtype, device=device)
    return Case(
        qkv=torch.randn(num_tokens, width + 64 * strided, device=device).to(dtype)[:, :width],
        q_weight=torch.randn(head_dim).to(device, dtype) if norm else None,
        k_weight=torch.randn(head_dim).to(device, dtype) if norm else None,
        cos_sin=make_cos_sin(head_dim, MAX_POSITION).to(device),
        positions=torch.randint(0, MAX_POSITION, (num_tokens,), dtype=torch.int32).to(device),
        slot_mapping=slots.to(device),
        k_cache=cache[0],
        v_cache=cache[1],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        write_k=write_k,
    )


def assert_same(actual: Case, expected: Case, tolerance: float) -> None:
    """What must be a plain copy, or must not change, is equal bit for bit; the rest within the tolerance."""
    for name in ("qkv", "k_cache"):
        got, wanted = getattr(actual, name).float(), getattr(expected, name).float()
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")
    head_dim, first_k = actual.head_dim, actual.num_heads * actual.head_dim
    first_v = first_k + actual.num_kv_heads * head_dim
    first_copied = first_v if actual.write_k else first_k
    assert torch.equal(actual.qkv[:, first_copied:].float(), expected.qkv[:, first_copied:].float())
    assert torch.equal(actual.v_cache.float(), expected.v_cache.float())
    written = actual.slot_mapping[actual.slot_mapping >= 0]
    for cache in (actual.k_cache, actual.v_cache):
        is_untouched = torch.ones(len(cache.flatten(0, 1)), dtype=torch.bool, device=cache.device)
        is_untouched[written] = False
        assert cache.flatten(0, 1)[is_untouched].eq(7).all()


def spelt_out(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """q [T, H, D], k and v [T, KH, D] in float64, by complex multiplication instead of two halves."""
    heads = case.qkv.double().view(len(case.qkv), -1, case.head_dim)
    parts = list(heads.split([case.num_heads, case.num_kv_heads, case.num_kv_heads], dim=1))
    cos, sin = case.cos_sin.double()[case.positions.long()].chunk(2, dim=-1)
    turn = torch.complex(cos, sin)[:, None]
    for index, weight in enumerate((case.q_weight, case.k_weight)):
        x = parts[index]
        if weight is not None:
            x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        turned = torch.complex(*x.chunk(2, dim=-1)) * turn
        parts[index] = torch.cat((turned.real, turned.imag), dim=-1)
    return parts[0], parts[1], parts[2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("write_k", [False, True])
def test_reference(dtype: torch.dtype, norm: bool, write_k: bool) -> None:
    case = make_case(33, (6, 2, 80), dtype, "cpu", norm, write_k)
    before = case.copy()
    q, k, v = spelt_out(case)
    case.run(qk_norm_rope_store)
    got_q, got_k, got_v = case.qkv.double().view(33, -1, 80).split([6, 2, 2], dim=1)
    close = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(got_q, q, **close)
    torch.testing.assert_close(got_k, k if write_k else before.qkv.double().view(33, -1, 80)[:, 6:8], **close)
    assert torch.equal(got_v, v)
    k_cache, v_cache = case.k_cache.double().view(-1, 2, 80), case.v_cache.double().view(-1, 2, 80)
    for token, slot in enumerate(case.slot_mapping.tolist()):
        if slot >= 0:
            torch.testing.assert_close(k_cache[slot], k[token], **close)
            assert torch.equal(v_cache[slot], v[token])
    unwritten = torch.ones(len(k_cache), dtype=torch.bool)
    unwritten[case.slot_mapping[case.slot_mapping >= 0]] = False
    assert k_cache[unwritten].eq(7).all() and v_cache[unwritten].eq(7).all()


def test_reference_equals_transformers_in_float32() -> None:
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    case = make_case(9, (4, 2, 64), torch.float32, "cpu", norm=False, write_k=True)
    q, k, _ = case.qkv.view(1, 9, 8, 64).transpose(1, 2).clone().split([4, 2, 2], dim=1)
    cos, sin = case.cos_sin[case.positions.long()].view(1, 9, 2, 32).repeat(1, 1, 1, 2).unbind(2)
    q, k = qwen3.apply_rotary_pos_emb(q, k, cos, sin)
    case.run(qk_norm_rope_store_reference)
    got_q, got_k, _ = case.qkv.view(9, 8, 64).split([4, 2, 2], dim=1)
    torch.testing.assert_close(got_q, q[0].transpose(0, 1), rtol=0, atol=1e-6)
    torch.testing.assert_close(got_k, k[0].transpose(0, 1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 33])
@pytest.mark.parametrize("heads", [(4, 2, 64), (3, 1, 80), (7, 1, 96), (5, 5, 128), (2, 1, 256)], ids=str)
def test_kernel(
    heads: tuple[int, int, int], num_tokens: int, norm: bool, dtype: torch.dtype, kernel_device: str
) -> None:
    odd = num_tokens % 2 == 1 and norm  # vary what is independent of the shapes without a product of everything
    case = make_case(num_tokens, heads, dtype, kernel_device, norm, write_k=odd, strided=not norm)
    expected = case.copy()
    expected.run(qk_norm_rope_store_reference)
    case.run(qk_norm_rope_store_triton)
    truncated = kernel_device == "cpu" and dtype is torch.bfloat16  # Triton's interpreter does not round to bf16
    assert_same(case, expected, TOLERANCE[dtype] * (2 if truncated else 1))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("write_k", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_kernel_options(norm: bool, write_k: bool, strided: bool, kernel_device: str) -> None:
    case = make_case(17, (6, 2, 64), torch.float32, kernel_device, norm, write_k, strided, block_size=3)
    expected = case.copy()
    expected.run(qk_norm_rope_store_reference)
    case.run(qk_norm_rope_store_triton)
    assert_same(case, expected, 1e-5)


@pytest.mark.parametrize("first_token", [1, 5, 17])
def test_kernel_leaves_the_first_tokens_alone(first_token: int, kernel_device: str) -> None:
    case = make_case(17 + first_token, (6, 2, 64), torch.float32, kernel_device, write_k=True)
    expected, before = case.copy(), case.copy()
    expected.run(qk_norm_rope_store_reference, first_token)
    case.run(qk_norm_rope_store_triton, first_token)
    assert torch.equal(case.qkv[:first_token], before.qkv[:first_token])
    torch.testing.assert_close(case.qkv, expected.qkv, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(case.k_cache, expected.k_cache, rtol=1e-5, atol=1e-5)
    assert torch.equal(case.v_cache, expected.v_cache)
    left_out = before.slot_mapping[:first_token]
    assert case.k_cache.flatten(0, 1)[left_out[left_out >= 0]].eq(7).all()


def test_kernel_refuses_what_would_corrupt(kernel_device: str) -> None:
    case = make_case(3, (4, 2, 64), torch.float32, kernel_device)
    case.k_cache = case.k_cache.transpose(1, 2)
    with pytest.raises(ValueError, match="contiguous"):
        case.run(qk_norm_rope_store_triton)
    case = make_case(3, (4, 2, 64), torch.float32, kernel_device)
    case.num_heads = 3
    with pytest.raises(ValueError, match="qkv"):
        case.run(qk_norm_rope_store_triton)


@pytest.mark.gpu(seconds=6)
def test_real_shapes() -> None:
    for heads, dtype, write_k in (
        ((16, 8, 128), torch.bfloat16, False),
        ((16, 8, 128), torch.bfloat16, True),
        ((32, 8, 128), torch.float16, False),
        ((14, 2, 64), torch.float32, True),
        ((32, 32, 80), torch.bfloat16, True),
        ((6, 2, 96), torch.float16, True),
        ((8, 1, 256), torch.bfloat16, False),
    ):
        for num_tokens in (1, 7, 512, 16384 if heads[0] == 16 else 2048):
            case = make_case(num_tokens, heads, dtype, "cuda", True, write_k, block_size=128)
            expected = case.copy(torch.float32)
            expected.run(qk_norm_rope_store_reference)
            case.run(qk_norm_rope_store)
            assert_same(case, expected, TOLERANCE[dtype])
