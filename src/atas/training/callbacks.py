"""The protocols that a trainer talks to: `Callback`, which looks at a training after its steps, and `Logger`.

A callback keeps what it sees for itself: the training does not change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from atas.training.engine import Engine


@dataclass(frozen=True)
class StepInfo:
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


class Callback(Protocol):
    """Something that looks at a training. After a resume it may see a step again, and has to put up with that."""

    def due(self, info: StepInfo) -> bool:
        """Whether to look now; asked after every step, so it has to be quick."""

    def on_step_end(self, info: StepInfo, engine: Engine) -> None:
        """Look, while the clock of the training stands still."""


class Logger(Protocol):
    """What a logger can do. One that raises is left out for the rest of the run, and the training goes on."""

    def start(self, epoch: int) -> None:
        """The next epoch is this one, counted from 0: what was logged of it and of later ones has been taken back, by a
        resume or by a return to an earlier checkpoint."""

    def log(self, epoch: int, scalars: Mapping[str, float], histograms: Mapping[str, Tensor]) -> None:
        """What is known at the end of an epoch: the numbers of its row of metrics, and values of every example."""

    def close(self) -> None:
        """Nothing more will come."""
