"""The protocols that a trainer calls: `Callback` after steps, `Logger` after epochs.

A callback observes; it must not change the training.
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
    """The position of a training: `batch` of `batches` steps of the epoch are done. Epochs count from 0. `collapsed` is
    the last verdict of the monitor."""

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
        """The number of training steps so far."""
        return self.epoch * self.batches + self.batch


class Callback(Protocol):
    """An observer of training steps. After a resume it may be called for a step again."""

    def due(self, info: StepInfo) -> bool:
        """Return whether to call `on_step_end` now; called after every step, so it must be fast."""

    def on_step_end(self, info: StepInfo, engine: Engine) -> None:
        """Observe the engine after a step. The time is not counted as training time."""


class Logger(Protocol):
    """A receiver of metrics. A logger that raises is dropped for the rest of the run, and the training continues."""

    def start(self, epoch: int) -> None:
        """Start at this epoch, counted from 0. Earlier logs of it and of later epochs are void, after a resume or a
        rollback."""

    def log(self, epoch: int, scalars: Mapping[str, float], histograms: Mapping[str, Tensor]) -> None:
        """Log the end of an epoch: the numbers of its row of metrics, and histograms over all examples."""

    def close(self) -> None:
        """Finish: nothing more is logged."""
