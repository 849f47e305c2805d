"""Loggers: TensorBoard, Weights & Biases, and loggers of the user's own.

Each gets the same scalars and histograms after every epoch. A logger that raises is dropped; training
continues.
"""

from __future__ import annotations

import functools
import os
import threading
import time
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


def create(name: str, run_folder: RunFolder, recipe: Recipe) -> Logger | None:
    """Create the logger of that name; None for TensorBoard if it is not installed."""
    if name == "wandb":
        return WeightsAndBiases(run_folder, recipe)
    return TensorBoard(run_folder.tensorboard) if tensorboard_installed() else None


class Loggers:
    """All loggers of a run. A logger that raises is dropped with one message."""

    def __init__(self, loggers: Sequence[Logger], log: Callable[[str], None]) -> None:
        self._loggers, self._log = list(loggers), log

    def __bool__(self) -> bool:
        return bool(self._loggers)

    def start(self, epoch: int) -> None:
        """Start all loggers at this epoch."""
        self._each(lambda logger: logger.start(epoch))

    def log(self, row: Mapping[str, Any], histograms: Mapping[str, Tensor]) -> None:
        """Log all numbers of an epoch's row, and the histograms."""
        scalars = {name: value for name, value in row.items() if isinstance(value, int | float) and name != "epoch"}
        self._each(lambda logger: logger.log(row["epoch"], scalars, histograms))

    def close(self) -> None:
        """Close all loggers."""
        self._each(lambda logger: logger.close())
        self._loggers = []

    def _each(self, action: Callable[[Logger], None]) -> None:
        for logger in list(self._loggers):
            try:
                action(logger)
            except Exception as error:
                self._loggers.remove(logger)
                why = str(error).strip().splitlines()
                self._log(
                    f"the logger {type(logger).__name__} failed and is dropped "
                    f"({why[0] if why else type(error).__name__}); training continues, and metrics.jsonl has every row"
                )


def open_loggers(
    recipe: Recipe, run_folder: RunFolder, more: Sequence[Logger], log: Callable[[str], None], world: World
) -> Loggers:
    """Open the loggers that a recipe names, and those in `more`, on rank 0; an error is raised on all ranks."""
    loggers: list[Logger] = []

    def open_all() -> None:
        named = (create(name, run_folder, recipe) for name in recipe.training.loggers)
        loggers.extend(logger for logger in (*named, *more) if logger is not None)

    world.on_rank0(open_all)
    return Loggers(loggers, log)


def tensorboard_installed() -> bool:
    """Return whether TensorBoard is installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        return False
    return True


class TensorBoard:
    """Writes event files into a folder, to be shown by `tensorboard --logdir`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def start(self, epoch: int) -> None:
        """Open a new file, which replaces this epoch and later ones in earlier files."""
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        _silence_writer_threads()
        earlier = set(self._folder.glob("*.tfevents.*"))
        self._writer = SummaryWriter(str(self._folder), purge_step=epoch)
        opened = set(self._folder.glob("*.tfevents.*")) - earlier
        if opened and earlier and max(earlier) > max(opened):  # TensorBoard reads files in the order of their names
            self._writer.close()
            for path in opened:
                path.unlink()
            time.sleep(1)  # names begin with the second
            self._writer = SummaryWriter(str(self._folder), purge_step=epoch)

    def log(self, epoch: int, scalars: Mapping[str, float], histograms: Mapping[str, Tensor]) -> None:
        """Log an epoch, and flush so that it is shown at once."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, epoch)
        for name, values in histograms.items():
            self._writer.add_histogram(name, values, epoch)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


@functools.cache
def _silence_writer_threads() -> None:
    """Keep TensorBoard's threads from printing a traceback on a full disk: the next call of the writer raises the
    error, and the logger is then dropped with a sentence."""
    hook = threading.excepthook

    def without_tensorboard(error: threading.ExceptHookArgs) -> None:
        if not type(error.thread).__module__.startswith("tensorboard."):
            hook(error)

    threading.excepthook = without_tensorboard


_PROJECT = "atas"


class WeightsAndBiases:
    """Logs to one run of Weights & Biases, also across stops and resumes.

    The step is the number of the row among the epochs in metrics.jsonl. Rows that were sent before a crash have a known
    step and are not sent again; an epoch that is trained again after a rollback has a new one. Charts have the epoch as
    their axis.
    """

    def __init__(self, run_folder: RunFolder, recipe: Recipe) -> None:
        try:
            import wandb
        except Exception as error:  # an installation that is broken may raise anything, and must on all ranks
            why = next(iter(str(error).splitlines()), type(error).__name__)
            raise UsageError(
                f"training.loggers names wandb, which is not installed ({why}); pip install 'atas[wandb]', "
                f"or remove it from the list"
            ) from error
        self._wandb: Any = wandb
        self._run_folder, self._recipe = run_folder, recipe
        self._run: Any = None

    def start(self, epoch: int) -> None:
        """Open the run or resume it; after a rollback the run stays open and rows are added."""
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
        self._sent_steps = int(self._run.step)

    def log(self, epoch: int, scalars: Mapping[str, float], histograms: Mapping[str, Tensor]) -> None:
        """Send the last row of metrics.jsonl, unless it was sent before."""
        step = sum("event" not in row for row in read_metrics(self._run_folder.metrics)) - 1
        if step < self._sent_steps:
            return
        charts = {name: self._wandb.Histogram(values.numpy()) for name, values in histograms.items()}
        self._run.log({"epoch": epoch, **scalars, **charts}, step=step, commit=True)

    def close(self) -> None:
        """Send what is buffered, and finish the run."""
        if self._run is not None:
            self._run.finish()

    def _id(self) -> str:
        """Return the id of the run, which is drawn once and kept in its folder."""
        path = self._run_folder.wandb / "run-id"
        if not path.exists():
            write_text(path, uuid.uuid4().hex[:12])
        return path.read_text(encoding="utf-8").strip()
