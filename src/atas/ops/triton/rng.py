"""The random numbers of `atas.core.rng` inside kernels, equal bit by bit."""

from __future__ import annotations

import triton
import triton.language as tl

from atas.core import rng

_GOLDEN = tl.constexpr(rng._GOLDEN)
_LOW = tl.constexpr(0x7FEB352D)
_HIGH = tl.constexpr(0x846CA68B)
_STEP = tl.constexpr(2.0**-23)


@triton.jit
def _mix(word):
    word = (word ^ (word >> 16)) * _LOW
    word = (word ^ (word >> 15)) * _HIGH
    return word ^ (word >> 16)


@triton.jit
def uniform(key, epoch, example, position):
    """`Draw.uniform` at a position of an example."""
    key = key.to(tl.uint32)
    low = _mix(example.to(tl.uint32) + _mix(epoch.to(tl.uint32) + key))
    high = _mix(_mix(low ^ _GOLDEN) ^ key)
    word = _mix(position.to(tl.uint32) * _GOLDEN + low)
    word = _mix(word ^ high)
    return ((word >> 9).to(tl.float32) + 0.5) * _STEP


def stream_key(seed: int, purpose: rng.Stream) -> int:
    """Return the first word of a stream's hash, as a signed word so that it has the same type for every seed."""
    word = rng._mix((rng._seed_word(seed) + int(purpose) * rng._GOLDEN) & rng._MASK)
    return word - (1 << 32) if word >> 31 else word
