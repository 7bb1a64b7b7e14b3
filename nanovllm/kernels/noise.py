"""The noise of sampling: an Exp(1) variate for every (seed, position, token id), made on the spot.

Owns: the counter-based hash and what turns its 32 bits into a variate, for Triton and for torch. Invariant: both make
the same integers, and a variate depends on nothing but its three keys: not on the batch, the row, the split of the
vocabulary or the device. It deliberately keeps no generator state: there is nothing to save, restore or advance.

The keys of a row (two words) are mixed thoroughly once; a token then costs a few instructions: its id times an odd
constant (a Weyl sequence) plus the first word goes through a two-round integer finalizer (multiply and xor-shift, with
the "lowbias32" constants of C. Wellons' hash prospector), the second word being xored in between the rounds. A last
xor-shift would leave the upper half as it is, which is the half that decides, so there is none. Each step is a
bijection of the id, so two tokens of a row never draw the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanovllm.kernels._triton import tl, triton


@triton.jit
def mix32(h):
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def row_keys(seed_low, seed_high, position):
    """Two uint32 words from the halves of a seed and a position, in two differently ordered chains."""
    seed_low = seed_low.to(tl.uint32, bitcast=True)
    seed_high = seed_high.to(tl.uint32, bitcast=True)
    position = position.to(tl.uint32, bitcast=True)
    key_a = mix32(mix32(mix32(seed_low + 0x243F6A88) ^ seed_high) + position * 0x9E3779B1)
    key_b = mix32(mix32(mix32(seed_high + 0x85A308D3) ^ position) + seed_low * 0x85EBCA6B)
    return key_a, key_b


@triton.jit
def weyl(token_ids):
    return token_ids.to(tl.uint32) * 0x9E3779B1


@triton.jit
def noise_bits_of_weyl(key_b, h):
    """uint32 bits of tokens from the sum of their `weyl` and the first key."""
    h = (h ^ (h >> 16)) * 0x7FEB352D
    return (h ^ (h >> 15) ^ key_b) * 0x846CA68B


@triton.jit
def noise_bits(key_a, key_b, token_ids):
    """uint32 bits of each token."""
    return noise_bits_of_weyl(key_b, weyl(token_ids) + key_a)


@triton.jit
def log2_exponential(bits):
    """log2 of an Exp(1) variate E = -log(1 - v), v = (bits + 0.5) / 2^32; both tails have all 32 bits of resolution."""
    v = bits.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    w = (~bits).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10  # 1 - v, without cancellation
    series = v * (1.0 + v * (0.5 + v * (0.3333333333 + v * 0.25)))
    return tl.log2(tl.where(v < 0.0078125, series, -0.6931471805599453 * tl.log2(w)))


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _shift(h: Tensor, bits: int) -> Tensor:
    return (h >> bits).bitwise_and_((1 << (32 - bits)) - 1)  # int32 shifts in its sign: cut it off


def _mix32_reference(h: Tensor) -> Tensor:
    h = (h ^ _shift(h, 16)) * 0x7FEB352D
    h = (h ^ _shift(h, 15)) * _signed(0x846CA68B)
    return h ^ _shift(h, 16)


def noise_bits_reference(seeds: Tensor, positions: Tensor, vocab_size: int, first_id: int = 0) -> Tensor:
    """The bits of V tokens from first_id on, int32 [N, V], for `seeds` int32 [N, 2] (low, high), `positions` int32 [N].

    int32 products wrap around as uint32 ones do, so this needs no wider type.
    """
    low, high = seeds[:, 0], seeds[:, 1]
    mix = _mix32_reference
    key_a = mix(mix(mix(low + 0x243F6A88) ^ high) + positions * _signed(0x9E3779B1))
    key_b = mix(mix(mix(high + _signed(0x85A308D3)) ^ positions) + low * _signed(0x85EBCA6B))
    ids = torch.arange(first_id, first_id + vocab_size, dtype=torch.int32, device=seeds.device)
    h = ids * _signed(0x9E3779B1) + key_a[:, None]
    h ^= _shift(h, 16)
    h *= 0x7FEB352D
    h ^= _shift(h, 15)
    h ^= key_b[:, None]
    h *= _signed(0x846CA68B)
    return h


def log2_exponential_reference(bits: Tensor) -> Tensor:
    """log2 of the Exp(1) variates that int32 `bits` stand for, float32 of the same shape."""
    bits = bits.long() & 0xFFFFFFFF
    v = bits.float().mul_(2.0**-32).add_(2.0**-33)
    w = (0xFFFFFFFF - bits).float().mul_(2.0**-32).add_(2.0**-33)
    series = v * (1.0 + v * (0.5 + v * (1 / 3 + v * 0.25)))
    return torch.where(v < 2.0**-7, series, w.log2_().mul_(-0.6931471805599453)).log2_()
