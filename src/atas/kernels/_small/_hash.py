"""The random numbers of `atas.noise` inside of kernels, bit by bit."""

from __future__ import annotations

import triton
import triton.language as tl

from atas import noise

_GOLDEN = tl.constexpr(noise._GOLDEN)
_LOW = tl.constexpr(0x7FEB352D)
_HIGH = tl.constexpr(0x846CA68B)
_STEP = tl.constexpr(2.0**-23)


@triton.jit
def _mix(word):  # type: ignore[no-untyped-def]
    word = (word ^ (word >> 16)) * _LOW
    word = (word ^ (word >> 15)) * _HIGH
    return word ^ (word >> 16)


@triton.jit
def uniform(salt, epoch, example, position):  # type: ignore[no-untyped-def]
    """`Draw.uniform` at a position of an example."""
    salt = salt.to(tl.uint32)
    low = _mix(example.to(tl.uint32) + _mix(epoch.to(tl.uint32) + salt))
    high = _mix(_mix(low ^ _GOLDEN) ^ salt)
    word = _mix(position.to(tl.uint32) * _GOLDEN + low)
    word = _mix(word ^ high)
    return ((word >> 9).to(tl.float32) + 0.5) * _STEP


def salt(seed: int, purpose: noise.Purpose) -> int:
    """What the numbers of a purpose begin with, as a signed word so that it has the same type for every seed."""
    word = noise._mix((noise._seed_word(seed) + int(purpose) * noise._GOLDEN) & noise._MASK)
    return word - (1 << 32) if word >> 31 else word
