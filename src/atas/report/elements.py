"""Data that the templates render: sections of the page, and tables.

Nothing here holds HTML. `templates/macros.html` turns a `DataTable` into a table that scrolls and sorts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SCROLL_ABOVE_ROWS = 30


@dataclass(frozen=True)
class Section:
    """A section with a heading that can be linked to. `template` is a file in templates/sections, without its ending;
    `context` holds the variables of that template."""

    id: str
    title: str
    template: str
    context: Mapping[str, Any]


@dataclass(frozen=True)
class Unavailable:
    """Why something cannot be shown; the page shows the reason instead."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Whisker:
    """An accuracy as a point on a line from 0 to 1, with its interval. The numbers stand beside it."""

    value: float
    interval: tuple[float, float]

    @property
    def style(self) -> str:
        """Positions as CSS variables.

        >>> Whisker(0.5, (0.4, 0.6)).style
        '--low:40.00%;--value:50.00%;--high:60.00%'
        """
        low, high = self.interval
        return f"--low:{100 * low:.2f}%;--value:{100 * self.value:.2f}%;--high:{100 * high:.2f}%"


@dataclass(frozen=True)
class Cell:
    """A cell of a table: text, then a small note and a whisker. `sort` is the sort key if it is not the text."""

    text: str = ""
    note: str | None = None
    whisker: Whisker | None = None
    sort: float | str | None = None
    style: str | None = None
    title: str | None = None
    class_: str | None = None


@dataclass(frozen=True)
class DataTable:
    """A table. The first `text_columns` columns are text, the others numbers; the first cell of a row is its header."""

    head: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    caption: str
    text_columns: int = 1
    sortable: bool = False
    class_: str | None = None

    @property
    def cells(self) -> list[list[Cell]]:
        """All rows, plain strings as cells."""
        return [[Cell(cell) if isinstance(cell, str) else cell for cell in row] for row in self.rows]

    @property
    def is_tall(self) -> bool:
        """Whether the table has enough rows to scroll on its own."""
        return len(self.rows) > _SCROLL_ABOVE_ROWS
