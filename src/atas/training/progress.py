"""Progress of a training run: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Column

from atas._utils.console import ProgressDisplay
from atas._utils.formatting import format_duration, printable

_MANY_IMAGES = 1000  # decoding fewer takes no time worth a message
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

    def start(self, title: str, total: int, done: int) -> None:
        """Start the bar; `done` of `total` steps were made before a resume."""
        self._total, self._done_before, self._done = total, done, done
        self._started = self.clock()
        self._probes, self._probing, self._probe_began = 0, 0.0, self._started
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
        plain = f"{number}  {done:,} of {self._total:,} steps  {_status(status)}  {left} left"
        moving = {
            key: value for key, value in status.items() if key not in _ACCURACIES
        }  # the line above has the others
        self.show("steps", plain, completed=done, text=f"{number}  {_status(moving)}")

    def start_probe(self) -> None:
        """Start the monitor's probe after the steps of an epoch; it is timed separately."""
        self._probe_began = self.clock()

    def end_epoch(self, done: int, row: dict[str, Any], epochs: int) -> None:
        """Print one line for an epoch after its probe."""
        self._done = done
        self._probes, self._probing = self._probes + 1, self._probing + self.clock() - self._probe_began
        number = f"{self._label}epoch {row['epoch'] + 1:>{len(str(epochs))}}/{epochs}"
        self.show(
            "steps", "", completed=done, text=f"{self._label}epoch {number} done"
        )  # a short epoch had no other update
        left = "" if done >= self._total else f"  {self._time_left(epochs - row['epoch'] - 1)} left"
        self.log(f"{number}  {_status(row)}{left}")

    def _time_left(self, probes: int) -> str:
        """Estimate the time of the remaining steps and probes from those since the start or the resume."""
        made = self._done - self._done_before
        if made <= 0:
            return "?"
        step_seconds = (self.clock() - self._started - self._probing) / made
        probe_seconds = self._probing / max(1, self._probes)
        return format_duration(step_seconds * (self._total - self._done) + probe_seconds * probes)


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
    """Format a mean step size: as k/255 unless it is large."""
    return f"{255 * value:.1f}/255" if value < 0.15 else f"{value:.3f}"
