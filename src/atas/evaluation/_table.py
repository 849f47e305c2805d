"""A result as a table, in plain text and in colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from atas.evaluation._result import Evaluation

HEADER = ("attack", "accuracy", "95% interval", "robust", "time", "queries/image")


def rows(result: Evaluation) -> list[tuple[str, ...]]:
    """One row of text an attack, and below it one for each of its stages."""
    return [row for name in result.correct for row in rows_of(result, name)]


def rows_of(result: Evaluation, name: str) -> list[tuple[str, ...]]:
    """The row of an attack, and those of its stages."""
    n, right = result.n, int(result.correct[name].sum())
    found = [_row(name, right, n, result.interval[name], result.seconds[name], result.queries.get(name))]
    for stage in result.stages.get(name, ()):
        found.append(_row(f"  after {stage.name}", stage.right, n, stage.interval, stage.seconds, stage.queries))
    return found


def _row(
    label: str, right: int, n: int, interval: tuple[float, float], seconds: float, queries: int | None
) -> tuple[str, ...]:
    return (
        label,
        f"{100 * right / n:.2f}%",
        "{:.2f}% to {:.2f}%".format(*(100 * end for end in interval)),
        f"{right}/{n}",
        f"{seconds:.1f} s",
        "-" if queries is None else f"{queries / n:,.0f}",
    )


def rich_table(result: Evaluation) -> Table:
    """For a terminal, by rich."""
    table = Table(title=caption(result), box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in HEADER:
        table.add_column(heading, justify="left" if heading == HEADER[0] else "right")
    for row in rows(result):
        table.add_row(*map(Text, row))  # an attack's name is not read as markup
    return table


def plain_table(result: Evaluation) -> str:
    """For a log or a prompt."""
    lines = [HEADER, *rows(result)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    text = [
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    return "\n".join([caption(result), *text])


def caption(result: Evaluation) -> str:
    """What was measured, in a line."""
    return f"{result.threat}, {result.n} examples, {result.protocol['precision']}"
