"""Console output: lines, JSON and tables on standard output, and progress displays.

`print_line`, `print_json` and `print_table` print results. `ProgressDisplay` is the base of all progress displays, and
`DataProgress` shows downloads, decoding and packing. Displays write through `ResilientStream`, so a closed pipe or a
full disk does not stop the work. In a notebook all of them write plain text, and progress is one line that changes.

Text may come from files of someone else. All of these, and the displays, print it as `printable` returns it.

Importing this module imports neither torch nor rich, so that `--help` is fast.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self, cast

from atas._utils.files import redirect_to_devnull
from atas._utils.formatting import format_duration, printable
from atas.errors import AtasError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.progress import Progress, ProgressColumn, TaskID
    from rich.segment import Segment
    from rich.table import Table

_PIPE_WIDTH = 320  # columns; wide enough that nothing is cut in a pipe
_INSIDE_FIELD = re.compile(r"(?<=\S) (?=\S)")


def is_rank0() -> bool:
    """Return whether this process is rank 0 of torchrun, without importing torch."""
    return int(os.environ.get("RANK", "0")) == 0


def import_torch(*, quiet: bool = False) -> None:
    """Import torch, which takes seconds, with a status line in a terminal unless `quiet`."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal and is_rank0() and not quiet:
        with console.status("loading PyTorch ..."):
            import torch  # noqa: F401


def print_line(text: str, *, wrap: bool = False) -> None:
    """Print one line: no markup, no control characters. With `wrap`, a terminal breaks it between words; commands and
    paths, which people copy, are left in one piece."""
    from rich.console import Console

    console = _plain_in_notebook(Console())
    text = _wrapped(printable(text), console) if wrap else printable(text)
    with _printing():
        console.print(text, highlight=False, soft_wrap=True, markup=False, emoji=False)


def _wrapped(text: str, console: Console) -> str:
    """Break a line for a terminal between words, or between fields, which are two spaces apart."""
    if not console.is_terminal or len(text) <= console.width:
        return text
    if "  " in text.strip():
        text = _INSIDE_FIELD.sub("\0", text)
    lines = textwrap.wrap(text, console.width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


def print_page(text: str) -> None:
    """Print several lines."""
    for line in text.split("\n"):
        print_line(line)


def print_json(text: str) -> None:
    """Print JSON for other programs."""
    import typer

    with _printing():
        typer.echo(text)


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal. Cells are never cut: where the words of a row need more room, each row is
    printed as a block of lines."""
    from rich.console import Console

    console = _plain_in_notebook(Console())
    wide = _plain_in_notebook(Console(width=_PIPE_WIDTH, markup=False, emoji=False))
    if console.is_terminal and not _fit(table, console.width, wide):
        for line in _blocks(table, console.width):
            print_line(line)
        return
    with _printing():
        wide.print(_Printable(table))


def _plain_in_notebook(console: Console) -> Console:
    """Return the console, or in a notebook one that writes text instead of HTML and escape codes."""
    from rich.console import Console

    if not console.is_jupyter:
        return console
    return Console(
        file=console.file,
        quiet=console.quiet,
        width=console.width,
        markup=False,
        emoji=False,
        force_jupyter=False,
        force_terminal=False,
    )


def _blocks(table: Table, width: int) -> Iterator[str]:
    """Return lines for each row: its first cell, then the others that have a value, indented, with their headings."""
    if table.title:
        yield str(table.title)
    headings = [str(column.header) for column in table.columns]
    for row in zip(*(column.cells for column in table.columns), strict=True):
        name, *values = (str(cell).replace("\n", " ") for cell in row)
        yield name
        line = ""
        for heading, value in zip(headings[1:], values, strict=True):
            if value in ("", "-"):
                continue
            part = f"{heading}: {value}" if heading else value
            if line and len(line) + len(part) + 4 > width:
                yield from _indented(line, width)
                line = ""
            line = f"{line}, {part}" if line else part
        yield from _indented(line, width)
    if table.caption:
        yield from str(table.caption).split("\n")


def _indented(text: str, width: int) -> list[str]:
    """Wrap a text at words, with an indentation."""
    options = {"initial_indent": "  ", "subsequent_indent": "    ", "break_long_words": False}
    return textwrap.wrap(text, width, break_on_hyphens=False, **options)  # type: ignore[arg-type]


class _Printable:
    """A renderable whose text has no control characters; styles are no part of the text."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._table, options):
            yield segment._replace(text=printable(segment.text, keep="\n"))


@contextmanager
def _printing() -> Iterator[None]:
    """Turn an error of standard output into a sentence; a closed pipe is left to the caller."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        redirect_to_devnull(sys.stdout)
        raise AtasError(f"cannot write to standard output: {error.strerror}; redirect it to another file") from error


def _fit(table: Table, width: int, wide: Console) -> bool:
    """Give every column the width of its longest word, and share the rest evenly among columns that need more; return
    whether all words have room. Columns with `no_wrap` are not broken."""
    spans = [[wide.measure(cell) for cell in (column.header, *column.cells)] for column in table.columns]
    maximum = [max(span.maximum for span in column) for column in spans]
    minimum = [
        most if column.no_wrap else max(span.minimum for span in own)
        for column, own, most in zip(table.columns, spans, maximum, strict=True)
    ]
    borders = wide.measure(table).maximum - sum(maximum)
    spare = width - borders - sum(minimum)
    fits = spare >= 0
    by_need = sorted(zip(table.columns, minimum, maximum, strict=True), key=lambda column: column[2] - column[1])
    for left, (column, low, high) in zip(range(len(by_need), 0, -1), by_need, strict=True):
        column.width = low + min(high - low, max(0, spare) // left)
        spare -= column.width - low
    return fits


class ResilientStream:
    """A stream that never raises.

    If writing fails, because the reader closed the pipe or the disk is full, it prints one line to standard error and
    discards further output. Characters that the stream cannot encode are replaced.
    """

    def __init__(self, stream: IO[str]) -> None:
        self._stream, self._lost = stream, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text if the stream still works."""
        try:
            return 0 if self._lost else self._stream.write(text)
        except UnicodeEncodeError as error:
            return self.write(text.encode(error.encoding, "replace").decode(error.encoding))
        except OSError as error:
            return self._lose(error)

    def flush(self) -> None:
        """Flush if the stream still works."""
        try:
            if not self._lost:
                self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> int:
        self._lost = True
        if self._stream in (sys.__stdout__, sys.__stderr__):
            redirect_to_devnull(self._stream)
        with contextlib.suppress(OSError):
            sentence = f"atas: cannot write output: {error.strerror or error}; continuing without it"
            print(sentence, file=sys.stderr, flush=True)
        return 0


class NotebookLine:
    """A line among the outputs of a notebook's cell that changes in place."""

    def __init__(self) -> None:
        self._handle: Any = None

    def update(self, text: str) -> None:
        """Show the text in place of the earlier one."""
        from IPython.display import display

        content = {"text/plain": text}
        if self._handle is None:
            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)

    def clear(self) -> None:
        """Remove the text, if there is one."""
        if self._handle is not None:
            self.update("")


class ProgressDisplay:
    """Base of the displays: a bar in a terminal from entry to exit, one line in a notebook, plain lines elsewhere.

    `due` limits how often a display changes. The work continues if the output is lost.
    """

    refresh_interval = 0.5
    """Seconds between updates of a bar."""
    plain_interval = 30.0
    """Seconds between plain lines."""

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        shown = console.file in (sys.stdout, sys.stderr) and not console.quiet
        self._line = NotebookLine() if console.is_jupyter and shown else None
        console = _plain_in_notebook(console)
        if not isinstance(console.file, ResilientStream):
            console.file = cast("IO[str]", ResilientStream(console.file))
        self.console, self.clock = console, clock
        self.bar: Progress | None = None
        """None without a terminal."""
        self._tasks: dict[str, TaskID] = {}
        self._last = clock()

    def add_bar(self, *columns: ProgressColumn, **options: Any) -> None:
        """Show a bar where the console is a terminal; by default title, share and text, removed at the end."""
        if not self.console.is_terminal:
            return
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

        if not columns:
            title, text = "{task.description}", "{task.fields[text]}"
            columns = (
                TextColumn(title, markup=False),
                BarColumn(24),
                TaskProgressColumn(),
                TextColumn(text, markup=False),
            )
        self.bar = Progress(*columns, console=self.console, **{"transient": True, **options})

    def due(self) -> bool:
        """Return whether it is time for an update."""
        interval = self.plain_interval if self.bar is None and self._line is None else self.refresh_interval
        return self.clock() - self._last >= interval

    def show(self, task: str, plain: str, **fields: Any) -> None:
        """Update a task of the bar, which the first update adds; without a bar, show the line `plain` if not empty."""
        self._last = self.clock()
        if self.bar is None:
            if plain:
                self.log(plain) if self._line is None else self._line.update(printable(plain))
            return
        fields = {name: printable(value) if isinstance(value, str) else value for name, value in fields.items()}
        if task not in self._tasks:
            self._tasks[task] = self.bar.add_task(printable(task), total=fields.get("total"), text="")
        self.bar.update(self._tasks[task], **fields)

    def log(self, text: str, style: str | None = None, *, wrap: bool = True) -> None:
        """Print a line that stays, above the bar. A terminal breaks it between words, unless not `wrap`."""
        text = _wrapped(printable(text), self.console) if wrap else printable(text)
        self.console.print(text, style=style, highlight=False, soft_wrap=True, markup=False, emoji=False)

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self._line is not None:
            self._line.clear()


ProgressCallback = Callable[[str, int, int | None], None]
"""Called with the name of the task, the amount done (bytes or images), and the total, if known."""


def no_progress(what: str, done: int, total: int | None) -> None:
    """Show nothing: the `ProgressCallback` of callers that gave none."""


class DataProgress(ProgressDisplay):
    """Progress of downloads, decoding and packing: one bar for each task, or a line now and then."""

    def __init__(
        self,
        console: Console | None = None,
        *,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

        super().__init__(console or Console(stderr=True, quiet=quiet), clock=clock)
        title = TextColumn("{task.description}", markup=False)
        self.add_bar(title, BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), transient=False)
        self._started: dict[str, tuple[float, int]] = {}

    @property
    def has_work(self) -> bool:
        """Whether any progress was reported."""
        return bool(self._started)

    def __call__(self, task: str, done: int, total: int | None) -> None:
        """Show `done` of `total` units; the total may be unknown."""
        began, at_first = self._started.setdefault(task, (self.clock(), done))
        if self.bar is not None:
            self.show(task, "", completed=done, total=total)
        elif total and self.due():
            made = done - at_first
            left = (self.clock() - began) / made * (total - done) if made > 0 else None
            self.show(
                task, f"{task}: {done:,} of {total:,}" + (f", about {format_duration(left)} left" if left else "")
            )
