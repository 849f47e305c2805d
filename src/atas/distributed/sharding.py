"""Which examples of the training set a process has, and in which order it visits them.

Example i belongs to shard i % shards. A process holds consecutive whole shards and numbers its examples, its rows, from
0 in the order of the training set. The order of an epoch takes one example of each shard in turn; each shard has an
order of its own. So every global batch holds equally many examples of each shard, and is the same for any number of
processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atas.core.rng import Stream, generator_seed


@dataclass(frozen=True)
class DataShard:
    """The shards `first_shard` to `first_shard + num_held - 1` of a training set.

    >>> shard = DataShard.for_rank(10, shards=4, rank=1, size=2)
    >>> shard.global_index(torch.arange(len(shard))).tolist()
    [2, 3, 6, 7]
    """

    examples: int  # of the whole training set
    shards: int = 1
    first_shard: int = 0
    num_held: int = 1

    @classmethod
    def for_rank(cls, examples: int, shards: int, rank: int, size: int) -> DataShard:
        """Return the shards of a rank. If they do not divide evenly, some ranks hold one more."""
        first, end = (shards * edge // size for edge in (rank, rank + 1))
        return cls(examples, shards, first, end - first)

    @property
    def is_whole(self) -> bool:
        """Whether these shards are the whole training set."""
        return self.num_held == self.shards

    def __len__(self) -> int:
        return self.local_count(self.examples)

    def local_count(self, count: int) -> int:
        """Return how many of `count` items, distributed over all shards in turn, fall to these shards.

        >>> DataShard(10, shards=4, first_shard=2, num_held=2).local_count(7)
        3
        """
        return count // self.shards * self.num_held + min(max(count % self.shards - self.first_shard, 0), self.num_held)

    def global_index(self, rows: Tensor) -> Tensor:
        """Return the positions of these rows in the whole training set."""
        if self.is_whole:
            return rows
        return rows // self.num_held * self.shards + self.first_shard + rows % self.num_held

    def order(self, seed: int, epoch: int) -> Tensor:
        """Return the rows in the order of an epoch, on the host."""
        order = torch.empty(len(self), dtype=torch.int64)
        for offset in range(self.num_held):
            generator = torch.Generator().manual_seed(
                generator_seed(seed, epoch, Stream.ORDER, self.first_shard + offset)
            )
            rows = order[offset :: self.num_held]
            rows.copy_(torch.randperm(len(rows), generator=generator) * self.num_held + offset)
        return order
