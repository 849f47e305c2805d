"""Sentences and tables on the screen."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

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

    Console().print(text, highlight=False, soft_wrap=True, markup=False)


def show(table: Table) -> None:
    """A table, as wide as the terminal; in a pipe, and where a terminal is too narrow for its words, as wide as it
    needs. Names and figures are never cut."""
    from rich.console import Console

    console = Console()
    wide = Console(width=_PIPE_WIDTH)
    if console.is_terminal:
        _fit(table, console.width, wide)
    wide.print(table)


def _fit(table: Table, width: int, wide: Console) -> None:
    """Give every column room for its longest word, and what is left to those that would like more."""
    spans = [[wide.measure(cell) for cell in (column.header, *column.cells)] for column in table.columns]
    least = [max(span.minimum for span in of_column) for of_column in spans]
    most = [max(span.maximum for span in of_column) for of_column in spans]
    around = wide.measure(table).maximum - sum(most)
    spare, wish = width - around - sum(least), sum(most) - sum(least)
    for column, low, high in zip(table.columns, least, most, strict=True):
        column.width = low + (high - low) * max(0, min(spare, wish)) // max(1, wish)
