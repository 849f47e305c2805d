"""Loggers: where the metrics of a run go while it trains, besides its own file.

TensorBoard and Weights & Biases get the same scalars and histograms after every epoch; so does a logger of your own. A
logger that raises is dropped, and the training goes on.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from atas._utils.files import write_text
from atas.distributed.world import World
from atas.errors import UsageError
from atas.recipes import Recipe
from atas.training.callbacks import Logger
from atas.training.metrics import read_metrics

if TYPE_CHECKING:
    from atas.training.run import RunFolder


NAMES = ("tensorboard", "wandb")


def create(name: str, run_folder: RunFolder, recipe: Recipe) -> Logger | None:
    """The logger of that name; None where it is on by default and its package is not installed."""
    if name == "wandb":
        return WeightsAndBiases(run_folder, recipe)
    return TensorBoard(run_folder.tensorboard) if tensorboard_installed() else None


class Loggers:
    """All loggers of a run. What one of them raises is said once and never stops a training."""

    def __init__(self, loggers: Sequence[Logger], log: Callable[[str], None]) -> None:
        self._loggers, self._log = list(loggers), log

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
                self._log(
                    f"the logger {type(logger).__name__} failed and is left out from here on "
                    f"({why[0] if why else type(error).__name__}); training goes on, and metrics.jsonl has every row"
                )


def open_loggers(
    recipe: Recipe, run_folder: RunFolder, more: Sequence[Logger], log: Callable[[str], None], world: World
) -> Loggers:
    """The loggers that a recipe names, and more; of several processes the first alone has any."""
    if not world.is_main:
        return Loggers((), log)
    named = (create(name, run_folder, recipe) for name in recipe.training.loggers)
    return Loggers([logger for logger in (*named, *more) if logger is not None], log)


def tensorboard_installed() -> bool:
    """Whether TensorBoard can be written."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        return False
    return True


class TensorBoard:
    """Writes event files into a folder; look at them with `tensorboard --logdir`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def start(self, epoch: int) -> None:
        """A new file, which takes back what earlier ones say of this epoch and later ones."""
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self._writer = SummaryWriter(str(self._folder), purge_step=epoch)

    def log(self, epoch: int, scalars: Mapping[str, float], histograms: Mapping[str, Tensor]) -> None:
        """Seen at once, not when a buffer is full."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, epoch)
        for name, values in histograms.items():
            self._writer.add_histogram(name, values, epoch)
        self._writer.flush()

    def close(self) -> None:
        """Finish the file."""
        if self._writer is not None:
            self._writer.close()


_PROJECT = "atas"


class WeightsAndBiases:
    """One run there for one run here, also over stops and resumes.

    Its step is the number of the row among the epochs in metrics.jsonl: rows that were sent before a crash have a step
    that is known there, and are not sent again; an epoch that is trained once more after a collapse has a new one. The
    charts are drawn over the epoch.
    """

    def __init__(self, run_folder: RunFolder, recipe: Recipe) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UsageError(
                f"training.loggers names wandb, which is not installed ({error}); pip install 'atas[wandb]', "
                f"or leave it out"
            ) from error
        self._wandb: Any = wandb
        self._run_folder, self._recipe = run_folder, recipe
        self._run: Any = None

    def start(self, epoch: int) -> None:
        """Open the run, or go on with it; a return to an earlier epoch only adds rows."""
        if self._run is not None:
            return
        self._run_folder.wandb.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            id=self._id(),
            resume="allow",
            name=self._run_folder.path.resolve().name,
            dir=str(self._run_folder.path),
            config=self._recipe.to_dict(),
        )
        self._run.define_metric("*", step_metric="epoch")
        self._known = int(self._run.step)

    def log(self, epoch: int, scalars: Mapping[str, float], histograms: Mapping[str, Tensor]) -> None:
        """The row that metrics.jsonl has got just now, unless it is known there."""
        step = sum("event" not in row for row in read_metrics(self._run_folder.metrics)) - 1
        if step < self._known:
            return
        drawn = {name: self._wandb.Histogram(values.numpy()) for name, values in histograms.items()}
        self._run.log({"epoch": epoch, **scalars, **drawn}, step=step, commit=True)

    def close(self) -> None:
        """Send the rest."""
        if self._run is not None:
            self._run.finish()

    def _id(self) -> str:
        """Drawn once for a run, and kept in its folder."""
        path = self._run_folder.wandb / "run-id"
        if not path.exists():
            write_text(path, uuid.uuid4().hex[:12])
        return path.read_text(encoding="utf-8").strip()
