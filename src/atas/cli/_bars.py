"""Bars for work with a known end: how far it is, and how long it will take."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn

from atas._screen import clock

_PLAIN_EVERY = 30.0  # seconds between lines, without a terminal


class Bars:
    """Shows progress that is told as (what, done, total): a bar in a terminal, now and then a line elsewhere."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._tasks: dict[str, TaskID] = {}
        self._last = time.monotonic()

    @property
    def shown(self) -> bool:
        """Whether there was anything to show."""
        return bool(self._tasks)

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Show it."""
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(what, total=None)
        task = self._tasks[what]
        self._progress.update(task, completed=done, total=total)
        if not self._console.is_terminal and time.monotonic() - self._last >= _PLAIN_EVERY and total:
            self._last = time.monotonic()
            left = self._progress.tasks[task].time_remaining
            rest = "" if left is None else f", about {clock(left)} left"
            self._console.print(f"{what}: {done:,} of {total:,}{rest}", highlight=False, markup=False)

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
