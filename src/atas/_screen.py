"""What all live views share: a bar with a line of text, sentences above it, and times as people write them."""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import IO, Any, Self, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from atas._files import discard


def bar(console: Console) -> Progress | None:
    """A bar that goes away at the end; each task has a field `text`. None where there is no terminal."""
    if not console.is_terminal:
        return None
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        console=console,
        transient=True,
    )


class _Steady:
    """A stream that never raises: one that can take no more, as its reader went away or the disk is full, is left with
    one line on standard error, and a character that it cannot encode is replaced."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self._lost = stream, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write as much of it as can be."""
        try:
            return 0 if self._lost else self._stream.write(text)
        except UnicodeEncodeError as error:
            return self.write(text.encode(error.encoding, "replace").decode(error.encoding))
        except OSError as error:
            return self._lose(error)

    def flush(self) -> None:
        """Flush what can be."""
        try:
            if not self._lost:
                self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> int:
        self._lost = True
        if self._stream in (sys.__stdout__, sys.__stderr__):
            discard(self._stream)
        with contextlib.suppress(OSError):
            sentence = f"atas: the output takes no more ({error.strerror or error}); going on without it"
            print(sentence, file=sys.stderr, flush=True)
        return 0


class Screen:
    """A console, and a bar where it is a terminal, shown from entry to exit. The work goes on where it is lost."""

    def __init__(self, console: Console, progress: Progress | None = None) -> None:
        if not isinstance(console.file, _Steady):
            console.file = cast("IO[str]", _Steady(console.file))
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
