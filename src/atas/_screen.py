"""What all live views share: a bar with a line of text, sentences above it, and times as people write them."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn


def bar(console: Console) -> Progress | None:
    """A bar that goes away at the end; each task has a field `text`. None where there is no terminal."""
    if not console.is_terminal:
        return None
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[text]}"),
        console=console,
        transient=True,
    )


class Screen:
    """A console, and a bar where it is a terminal, shown from entry to exit."""

    def __init__(self, console: Console, progress: Progress | None = None) -> None:
        self.console, self._progress = console, progress

    def say(self, text: str, style: str | None = None) -> None:
        """One sentence that stays, above the bar."""
        self.console.print(text, style=style, highlight=False, soft_wrap=True, markup=False)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()


def clock(seconds: float) -> str:
    """A time as people write it.

    >>> clock(75), clock(3675)
    ('1:15', '1:01:15')
    """
    hours, minutes, seconds = int(seconds) // 3600, int(seconds) // 60 % 60, int(seconds) % 60
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
