"""Looks at a training under way, for studies: what is seen is the observer's to keep, and training does not change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from atas.training.engine import Engine


@dataclass(frozen=True)
class Moment:
    """Where a training stands: `batch` of the `batches` of an epoch, counted from 0, are done; and whether the monitor
    found it collapsed when it last looked."""

    epoch: int
    batch: int
    batches: int
    collapsed: bool = False

    @property
    def ends_epoch(self) -> bool:
        """Whether this is the last batch of its epoch."""
        return self.batch == self.batches

    @property
    def step(self) -> int:
        """Training steps since the beginning."""
        return self.epoch * self.batches + self.batch


class Observer(Protocol):
    """Something that looks at a training. After a resume it may see a moment again, and has to put up with that."""

    def due(self, moment: Moment) -> bool:
        """Whether to look now; asked after every step, so it has to be quick."""

    def look(self, moment: Moment, engine: Engine) -> None:
        """Look, while the clock of the training stands still."""
