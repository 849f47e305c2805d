"""Sentences and tables on the screen."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from atas._files import discard
from atas.errors import AtasError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PIPE_WIDTH = 320  # nothing is cut where another program reads


def first_process() -> bool:
    """Whether this is the one that speaks of those that torchrun started, known before torch is loaded."""
    return int(os.environ.get("RANK", "0")) == 0


def load_torch() -> None:
    """Load what takes seconds to load, and say so meanwhile where there is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal and first_process():
        with console.status("loading PyTorch ..."):
            import torch  # noqa: F401


def say(text: str) -> None:
    """One line as it stands: paths are neither broken nor read as markup."""
    from rich.console import Console

    with _printing():
        Console().print(text, highlight=False, soft_wrap=True, markup=False, emoji=False)


def echo(text: str) -> None:
    """What another program reads."""
    with _printing():
        typer.echo(text)


def show(table: Table) -> None:
    """A table, as wide as the terminal; in a pipe, and where a terminal is too narrow for its words, as wide as it
    needs. Names and figures are never cut, and shown as they stand."""
    from rich.console import Console

    console = Console()
    wide = Console(width=_PIPE_WIDTH, markup=False, emoji=False)
    if console.is_terminal:
        _fit(table, console.width, wide)
    with _printing():
        wide.print(table)


@contextmanager
def _printing() -> Iterator[None]:
    """A sentence where standard output takes nothing. A pipe that nobody reads any more is no error to speak of."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(sys.stdout)
        raise AtasError(f"standard output takes nothing ({error.strerror}); send it elsewhere") from error


def _fit(table: Table, width: int, wide: Console) -> None:
    """Give every column room for its longest word, and what is left to those that would like more."""
    spans = [[wide.measure(cell) for cell in (column.header, *column.cells)] for column in table.columns]
    least = [max(span.minimum for span in of_column) for of_column in spans]
    most = [max(span.maximum for span in of_column) for of_column in spans]
    around = wide.measure(table).maximum - sum(most)
    spare, wish = width - around - sum(least), sum(most) - sum(least)
    for column, low, high in zip(table.columns, least, most, strict=True):
        column.width = low + (high - low) * max(0, min(spare, wish)) // max(1, wish)
