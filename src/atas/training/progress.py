"""The progress of a training: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from atas._utils.console import ProgressDisplay
from atas._utils.formatting import format_duration

_PLAIN_EVERY = 30.0  # seconds between lines inside of an epoch, without a terminal
_MANY_IMAGES = 1000  # images that take long enough to decode to say so
_REFRESH = 0.5  # seconds between looks at the device
_ACCURACIES = {"clean": "clean", "fgsm": "FGSM", "pgd10": "PGD-10"}


class TrainingProgress(ProgressDisplay):
    """Progress of a training run over all its steps."""

    def __init__(self, console: Console | None = None, quiet: bool = False) -> None:
        super().__init__(console or Console(quiet=quiet))
        self._last = time.monotonic()

    def __enter__(self) -> Self:  # the bar comes with `start`, and one of an earlier run stays ended
        return self

    def start_run(self, headline: str) -> None:
        """The first line: what is about to be done."""
        self.log(headline)

    def data_loading(self, what: str, done: int, total: int | None) -> None:
        """Say how far the work before the training is: at its beginning, where it is much, and now and then."""
        if total is not None and ((not done and total >= _MANY_IMAGES) or self.due()):
            self._last = time.monotonic()
            self.log(f"{what}: {done:,} of {total:,}")

    def start(self, title: str, total: int, done: int) -> None:
        """Start the line; `done` of `total` steps were made before a resume."""
        self._total, self._done_before, self._done = total, done, done
        self._started = time.monotonic()
        self._probes, self._probing, self._probe_began = 0, 0.0, self._started
        if self.console.is_terminal:
            rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # in a narrow terminal the text is cut, no number
            self._progress = Progress(
                BarColumn(bar_width=12),
                TaskProgressColumn(),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[status]}  {task.description}", markup=False, table_column=rest),
                console=self.console,
                transient=True,
                expand=True,
            )
            self._task = self._progress.add_task(title, total=total, completed=done, status="")
            self._progress.start()

    def due(self) -> bool:
        """Whether it is time to show something, and so worth reading numbers from the device."""
        wait = _REFRESH if self._progress is not None else _PLAIN_EVERY
        return time.monotonic() - self._last >= wait

    def update(self, done: int, epoch: int, epochs: int, **status: Any) -> None:
        """Show where the run stands, in the middle of an epoch (counted from 0)."""
        self._last, self._done = time.monotonic(), done
        number = f"epoch {epoch + 1}/{epochs}"
        if self._progress is not None:  # accuracies stand in the line of the last epoch, just above
            moving = {key: value for key, value in status.items() if key not in _ACCURACIES}
            self._progress.update(self._task, completed=done, status=f"{number}  {_status(moving)}")
        else:
            left = self._time_left(epochs - epoch)
            self.log(f"{number}  {done:,} of {self._total:,} steps  {_status(status)}  {left} left")

    def start_probe(self) -> None:
        """The steps of an epoch are made, and the monitor's look follows, whose time is not theirs."""
        self._probe_began = time.monotonic()

    def end_epoch(self, done: int, row: dict[str, Any], epochs: int) -> None:
        """One line for an epoch that has ended with a look at the model."""
        self._last, self._done = time.monotonic(), done
        self._probes, self._probing = self._probes + 1, self._probing + self._last - self._probe_began
        number = f"{row['epoch'] + 1:>{len(str(epochs))}}/{epochs}"
        if self._progress is not None:  # short epochs end before a look inside of one is due
            self._progress.update(self._task, completed=done, status=f"epoch {number} done")
        left = "" if done >= self._total else f"  {self._time_left(epochs - row['epoch'] - 1)} left"
        self.log(f"epoch {number}  {_status(row)}{left}")

    def _time_left(self, probes: int) -> str:
        """Of the steps and looks that are left, at the pace of those since the beginning or the resume."""
        made = self._done - self._done_before
        if made <= 0:
            return "?"
        a_step = (time.monotonic() - self._started - self._probing) / made
        a_probe = self._probing / max(1, self._probes)
        return format_duration(a_step * (self._total - self._done) + a_probe * probes)


def _status(values: dict[str, Any]) -> str:
    shown = []
    if "loss" in values:
        shown.append(f"loss {values['loss']:.3f}")
    for key, label in _ACCURACIES.items():
        if values.get(key) is not None:
            shown.append(f"{label} {100 * values[key]:.1f}%")
    if values.get("step_size"):
        shown.append(f"step {_format_step_size(values['step_size'])}")
    if "examples_per_second" in values:
        shown.append(f"{values['examples_per_second']:,.0f} examples/s")
    return "  ".join(shown)


def _format_step_size(value: float) -> str:
    """A mean step size: in grey levels as people write them, unless it is a large part of the range."""
    return f"{255 * value:.1f}/255" if value < 0.15 else f"{value:.3f}"
