"""A result as a table, in plain text and in colour."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from atas.evaluation._result import Evaluation

_HEADER = ("attack", "accuracy", "95% interval", "robust", "time")


def rows(result: Evaluation) -> list[tuple[str, ...]]:
    """One row of text an attack."""
    return [
        (
            name,
            f"{100 * result.accuracy[name]:.2f}%",
            "{:.2f}% to {:.2f}%".format(*(100 * end for end in result.interval[name])),
            f"{int(verdicts.sum())}/{result.n}",
            f"{result.seconds[name]:.1f} s",
        )
        for name, verdicts in result.correct.items()
    ]


def rich_table(result: Evaluation) -> Table:
    """For a terminal, by rich."""
    table = Table(title=caption(result))
    for heading in _HEADER:
        table.add_column(heading, justify="left" if heading == _HEADER[0] else "right", no_wrap=True)
    for row in rows(result):
        table.add_row(*row)
    return table


def plain_table(result: Evaluation) -> str:
    """For a log or a prompt."""
    lines = [_HEADER, *rows(result)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    text = [
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    return "\n".join([caption(result), *text])


def caption(result: Evaluation) -> str:
    """What was measured, in a line."""
    return f"{result.threat}, {result.n} examples, {result.protocol['precision']}"
