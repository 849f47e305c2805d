"""Sentences and tables on the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_PIPE_WIDTH = 320  # nothing is cut where another program reads


def say(text: str) -> None:
    """One line as it stands: paths are neither broken nor read as markup."""
    from rich.console import Console

    Console().print(text, highlight=False, soft_wrap=True, markup=False)


def show(table: Table) -> None:
    """A table, as wide as the terminal; in a pipe as wide as it needs."""
    from rich.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=_PIPE_WIDTH)).print(table)
