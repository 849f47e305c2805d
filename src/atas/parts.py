"""Which examples of a training set a process has, and the order in which it sees them.

Examples are dealt to `shards` like cards: example i belongs to shard i % shards. A process has whole shards, next to
each other, and numbers its examples, its `rows`, from 0 in the order of the training set. The order of an epoch deals
from the shards in turn, each in an order of its own, so every global batch holds as many examples of one shard as of
another, and is the same however many processes share the shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atas.noise import Purpose, seed_for


@dataclass(frozen=True)
class Part:
    """The shards `first` to `first + held - 1` of a training set.

    >>> part = Part.of(10, shards=4, process=1, processes=2)
    >>> part.numbers(torch.arange(len(part))).tolist()
    [2, 3, 6, 7]
    """

    examples: int  # of the whole training set
    shards: int = 1
    first: int = 0
    held: int = 1

    @classmethod
    def of(cls, examples: int, shards: int, process: int, processes: int) -> Part:
        """The part of one process; where shards do not divide evenly, some processes have one more."""
        first, end = (shards * edge // processes for edge in (process, process + 1))
        return cls(examples, shards, first, end - first)

    @property
    def whole(self) -> bool:
        """Whether this is the whole training set."""
        return self.held == self.shards

    def __len__(self) -> int:
        return self.share(self.examples)

    def share(self, count: int) -> int:
        """How many of `count` things that are dealt to the shards are dealt to these.

        >>> Part(10, shards=4, first=2, held=2).share(7)
        3
        """
        return count // self.shards * self.held + min(max(count % self.shards - self.first, 0), self.held)

    def numbers(self, rows: Tensor) -> Tensor:
        """Which examples of the training set these rows are."""
        if self.whole:
            return rows
        return rows // self.held * self.shards + self.first + rows % self.held

    def order(self, seed: int, epoch: int) -> Tensor:
        """The rows in the order of an epoch, on the host."""
        found = torch.empty(len(self), dtype=torch.int64)
        for place in range(self.held):
            generator = torch.Generator().manual_seed(seed_for(seed, epoch, Purpose.ORDER, self.first + place))
            dealt = found[place :: self.held]
            dealt.copy_(torch.randperm(len(dealt), generator=generator) * self.held + place)
        return found
