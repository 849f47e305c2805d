"""Progress of a training run: a bar in a terminal, a line that changes in a notebook, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from atas._utils.console import ProgressDisplay
from atas._utils.formatting import format_duration, printable

_MANY_IMAGES = 1000  # decoding fewer takes no time worth a message
_NO_TIME = 0.05  # seconds; less is shown as 0.0
_SHORT = 100.0  # seconds
_EPOCH_INTERVAL = 5.0  # seconds between the lines of epochs that stay in a notebook
_ACCURACIES = {"clean": "clean", "fgsm": "FGSM", "pgd10": "PGD-10"}


class TrainingProgress(ProgressDisplay):
    """Progress of a training run over all its steps; `label` stands before every line, such as "seed 2 of 3"."""

    def __init__(
        self,
        console: Console | None = None,
        quiet: bool = False,
        *,
        label: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(console or Console(quiet=quiet), clock=clock)
        self._seconds: dict[str, float] = {}  # by activity, since the start or the resume
        self._label = f"{label}  " if label else ""

    def __enter__(self) -> Self:  # `start` adds the bar; the bar of an earlier run must not start again
        return self

    def start_run(self, headline: str) -> None:
        """Print the first line, which describes the run."""
        self.log(f"{self._label}{headline}")

    def data_loading(self, what: str, done: int, total: int | None) -> None:
        """Print the progress of loading: at the start if there are many images, then now and then."""
        if total is not None and ((not done and total >= _MANY_IMAGES) or self.due()):
            self._last = self.clock()
            self.log(f"{what}: {done:,} of {total:,}")

    def start(self, title: str, total: int, done: int, *, in_levels: bool = True) -> None:
        """Start the bar; `done` of `total` steps were made before a resume. `in_levels`: step sizes as k/255."""
        self._in_levels = in_levels
        self._total, self._done_before, self._done = total, done, done
        self._started = self.clock()
        self._epochs_ended, self._monitor_before = 0, self._seconds.get("monitor", 0.0)
        self._epoch_logged = self._started
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # a narrow terminal cuts this text, never a number
        self.add_bar(
            BarColumn(bar_width=12),
            TaskProgressColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[text]}  {task.description}", markup=False, table_column=rest),
            expand=True,
        )
        if self.bar is not None:
            self._tasks = {"steps": self.bar.add_task(printable(title), total=total, completed=done, text="")}
            self.bar.start()

    def update(self, done: int, epoch: int, epochs: int, **status: Any) -> None:
        """Show the position within an epoch (counted from 0)."""
        self._done = done
        number = f"{self._label}epoch {epoch + 1}/{epochs}"
        left = self._time_left(epochs - epoch)
        plain = f"{number}  {done:,} of {self._total:,} steps  {self._status(status)}  {left} left"
        moving = {
            key: value for key, value in status.items() if key not in _ACCURACIES
        }  # the line above has the others
        self.show("steps", plain, completed=done, text=f"{number}  {self._status(moving)}")

    @contextmanager
    def timing(self, activity: str) -> Iterator[None]:
        """Add the time of the context to that of an activity: monitor, saving, loading data, preparing."""
        began = self.clock()
        try:
            yield
        finally:
            self.add_time(activity, self.clock() - began)

    def add_time(self, activity: str, seconds: float) -> None:
        """Add seconds to the time of an activity."""
        self._seconds[activity] = self._seconds.get(activity, 0.0) + seconds

    def end_run(self) -> None:
        """Print where the time went, after a run that has trained."""
        if self._seconds.get("training"):
            self.log(f"{self._label}time: {_describe_times(self._seconds)}")

    def end_epoch(self, done: int, row: dict[str, Any], epochs: int) -> None:
        """Print one line for an epoch after its probe. In a notebook, lines of short epochs replace one another."""
        self._done, self._epochs_ended = done, self._epochs_ended + 1
        number = f"{self._label}epoch {row['epoch'] + 1:>{len(str(epochs))}}/{epochs}"
        self.show("steps", "", completed=done, text=f"{number} done")  # a short epoch had no other update
        left = "" if done >= self._total else f"  {self._time_left(epochs - row['epoch'] - 1)} left"
        line = f"{number}  {self._status(row)}{left}"
        if self._line is None or not left or self.clock() - self._epoch_logged >= _EPOCH_INTERVAL:
            self._epoch_logged = self.clock()
            self.log(line)
        else:
            self._line.update(printable(line))

    def _time_left(self, epochs: int) -> str:
        """Estimate the time of the remaining steps and of the monitor from that since the start or the resume."""
        made = self._done - self._done_before
        if made <= 0:
            return "?"
        monitor = self._seconds.get("monitor", 0.0) - self._monitor_before
        step_seconds = (self.clock() - self._started - monitor) / made
        monitor_seconds = monitor / max(1, self._epochs_ended)
        return format_duration(step_seconds * (self._total - self._done) + monitor_seconds * epochs)

    def _status(self, values: dict[str, Any]) -> str:
        shown = []
        if "loss" in values:
            shown.append(f"loss {values['loss']:.3f}")
        for key, label in _ACCURACIES.items():
            if values.get(key) is not None:
                shown.append(f"{label} {100 * values[key]:.1f}%")
        if size := values.get("step_size"):
            shown.append(f"step {255 * size:.1f}/255" if self._in_levels else f"step {size:.3f}")
        if "examples_per_second" in values:
            shown.append(f"{values['examples_per_second']:,.0f} examples/s")
        return "  ".join(shown)


def _describe_times(seconds: Mapping[str, float]) -> str:
    """Describe where time went, the longest first; without what took no time.

    >>> _describe_times({"monitor": 2.1, "saving": 0.01, "training": 10.42})
    '10.4 s training, 2.1 s monitor'
    """
    longest_first = sorted(seconds.items(), key=lambda item: -item[1])
    shown = [(name, value) for name, value in longest_first if value >= _NO_TIME or name == "training"]
    return ", ".join(f"{_format_seconds(value)} {name}" for name, value in shown)


def _format_seconds(value: float) -> str:
    return f"{value:.1f} s" if value < _SHORT else format_duration(value)
