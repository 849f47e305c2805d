"""What all live views share: a bar with a line of text, and times as people write them."""

from __future__ import annotations

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


def clock(seconds: float) -> str:
    """A time as people write it.

    >>> clock(75), clock(3675)
    ('1:15', '1:01:15')
    """
    hours, minutes, seconds = int(seconds) // 3600, int(seconds) // 60 % 60, int(seconds) % 60
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
