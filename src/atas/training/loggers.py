"""Where the metrics of a run go while it trains, besides its own file: TensorBoard, Weights & Biases, or your own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from atas.processes import Processes
from atas.training.recipe import Recipe

if TYPE_CHECKING:
    from atas.training.run import Folder

NAMES = ("tensorboard", "wandb")


class Logger(Protocol):
    """What a logger can do. One that raises is left out for the rest of the run, and the training goes on."""

    def start(self, epoch: int) -> None:
        """The next epoch is this one, counted from 0: what was logged of it and of later ones has been taken back, by a
        resume or by a return to an earlier checkpoint."""

    def log(self, epoch: int, scalars: Mapping[str, float], histograms: Mapping[str, Tensor]) -> None:
        """What is known at the end of an epoch: the numbers of its row of metrics, and values of every example."""

    def close(self) -> None:
        """Nothing more will come."""


def create(name: str, place: Folder, settings: Recipe) -> Logger | None:
    """The logger of that name; None where it is on by default and its package is not installed."""
    if name == "wandb":
        from atas.training._wandb import WeightsAndBiases

        return WeightsAndBiases(place, settings)
    from atas.training._tensorboard import TensorBoard, installed

    return TensorBoard(place.board) if installed() else None


class Loggers:
    """All loggers of a run. What one of them raises is said once and never stops a training."""

    def __init__(self, loggers: Sequence[Logger], say: Callable[[str], None]) -> None:
        self._loggers, self._say = list(loggers), say

    def __bool__(self) -> bool:
        return bool(self._loggers)

    def start(self, epoch: int) -> None:
        """Begin, or go back to the beginning of an epoch."""
        self._each(lambda logger: logger.start(epoch))

    def log(self, row: Mapping[str, Any], histograms: Mapping[str, Tensor]) -> None:
        """All numbers of an epoch's row, and the histograms."""
        scalars = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "epoch"}
        self._each(lambda logger: logger.log(row["epoch"], scalars, histograms))

    def close(self) -> None:
        """Finish all of them."""
        self._each(lambda logger: logger.close())
        self._loggers = []

    def _each(self, act: Callable[[Logger], None]) -> None:
        for logger in list(self._loggers):
            try:
                act(logger)
            except Exception as error:
                self._loggers.remove(logger)
                why = str(error).strip().splitlines()
                self._say(
                    f"the logger {type(logger).__name__} failed and is left out from here on "
                    f"({why[0] if why else type(error).__name__}); training goes on, and metrics.jsonl has every row"
                )


def open_loggers(
    settings: Recipe, place: Folder, more: Sequence[Logger], say: Callable[[str], None], peers: Processes
) -> Loggers:
    """The loggers that a recipe names, and more; of several processes the first alone has any."""
    if not peers.first:
        return Loggers((), say)
    named = (create(name, place, settings) for name in settings.training.loggers)
    return Loggers([logger for logger in (*named, *more) if logger is not None], say)
