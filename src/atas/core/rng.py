"""Counter-based random numbers: every number is a hash of (seed, epoch, example, stream, position).

A generator has a history: after a resume, on another number of processes or with another batch size it gives other
numbers. A hash has none. The same example gets the same crop and the same noise in all of these cases, on every device,
because the arithmetic is on integers.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9

Word = TypeVar("Word", int, Tensor)


class Stream(enum.IntEnum):
    """What a random number is used for. Two streams never share numbers."""

    TOP = 1
    LEFT = 2
    FLIP = 3
    START = 4
    RADIUS = 5
    RESET = 6
    RESET_RADIUS = 7
    AREA = 8
    RATIO = 9
    ORDER = 10
    PROBE = 11
    PROPOSAL = 12
    SHIFT = 13
    ERASE = 14
    TARGET = 15
    CORRUPTION = 16
    HELD_OUT = 17
    MASK = 18
    BATCH = 19


def _mix(word: Word) -> Word:
    """Mix a 32-bit word bijectively: each output bit depends on every input bit (Wellons' low-bias constants)."""
    word = ((word ^ (word >> 16)) * 0x7FEB352D) & _MASK
    word = ((word ^ (word >> 15)) * 0x846CA68B) & _MASK
    return word ^ (word >> 16)


def generator_seed(seed: int, epoch: int, stream: Stream, shard: int = 0) -> int:
    """Return a 32-bit seed for a `torch.Generator`, for numbers of an epoch or shard rather than of an example."""
    word = _mix(_mix((_seed_word(seed) + epoch * _GOLDEN) & _MASK) ^ int(stream))
    return (word + shard * _GOLDEN) & _MASK


def _seed_word(seed: int) -> int:
    """Hash a seed of up to 64 bits to one word."""
    return _mix((_mix(seed & _MASK) + (seed >> 32) * _GOLDEN) & _MASK)


class UniformSource(Protocol):
    """Source of the random numbers of a batch: a `CounterRNG` or a `GeneratorRNG`."""

    def uniform(self, stream: Stream, shape: Sequence[int] = ()) -> Tensor:
        """Return uniform numbers on (0, 1) of shape (batch, *shape)."""


@dataclass(frozen=True)
class GeneratorRNG:
    """Random numbers of a batch x from a generator, for loops that count nothing."""

    x: Tensor
    generator: torch.Generator | None = None

    def uniform(self, stream: Stream, shape: Sequence[int] = ()) -> Tensor:
        """Return uniform numbers on [0, 1) of shape (batch, *shape)."""
        return torch.rand(len(self.x), *shape, device=self.x.device, generator=self.generator)


@dataclass(frozen=True)
class CounterRNG:
    """Random numbers of a batch of examples.

    >>> rng = CounterRNG(seed=0, epoch=torch.tensor(3), index=torch.tensor([7, 8]))
    >>> same = CounterRNG(seed=0, epoch=torch.tensor(3), index=torch.tensor([8]))
    >>> torch.equal(rng.uniform(Stream.START, (2, 2))[1:], same.uniform(Stream.START, (2, 2)))
    True
    """

    seed: int
    epoch: Tensor
    index: Tensor

    def uniform(self, stream: Stream, shape: Sequence[int] = ()) -> Tensor:
        """Return uniform float32 numbers on the open interval (0, 1), of shape (batch, *shape)."""
        salt = _mix((_seed_word(self.seed) + int(stream) * _GOLDEN) & _MASK)
        epoch = self.epoch.to(self.index.device)
        low = _mix((self.index.long() + _mix((epoch + salt) & _MASK)) & _MASK)
        high = _mix(_mix(low ^ _GOLDEN) ^ salt)
        batch = (-1,) + (1,) * len(shape)
        position = torch.arange(math.prod(shape), device=self.index.device).reshape(tuple(shape))
        word = _mix((position * _GOLDEN + low.view(batch)) & _MASK)
        word = _mix(word ^ high.view(batch))
        # 23 bits plus one half: exact in float32, never 0 and never 1.
        return ((word >> 9).to(torch.float32) + 0.5) * 2.0**-23

    def normal(self, stream: Stream, shape: Sequence[int] = ()) -> Tensor:
        """Return standard normal float32 numbers of shape (batch, *shape)."""
        return torch.erfinv(2 * self.uniform(stream, shape) - 1) * math.sqrt(2)
