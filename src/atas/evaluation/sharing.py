"""Processes that share the examples of one evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from atas.errors import UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """The part of one process. Examples are dealt out like cards, so that hard and easy ones are spread evenly.

    >>> Shard(1, 3).rows(8)
    range(1, 8, 3)
    """

    rank: int = 0
    count: int = 1
    group: Any = None

    def rows(self, examples: int) -> range:
        """The examples of this process, by their index."""
        return range(self.rank, examples, self.count)

    def gather(self, value: T) -> list[T]:
        """What every process gave, in their order; all of them must call it."""
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value, group=self.group)
        return found

    def from_first(self, value: T) -> T:
        """What the first process gave; all of them must call it."""
        return self.gather(value)[0]


@contextmanager
def shard_context(wanted: bool) -> Iterator[Shard]:
    """The shard of this process in the processes of torch.distributed, or all examples."""
    if not wanted:
        yield Shard()
        return
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError("shard=True needs the processes of torch.distributed: start with torchrun and initialise them")
    group = dist.new_group(backend="gloo")  # what is exchanged is small and lives on the host
    try:
        yield Shard(dist.get_rank(), dist.get_world_size(), group)
    finally:
        dist.destroy_process_group(group)
