"""Curves by epoch, as the monitor saw them: drawn, and in figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from atas.reproduce import paper, plots
from atas.reproduce.figure_study import Found, Line, Table, mean, seeds, size
from atas.reproduce.figures import collapsed
from atas.reproduce.observations import Norms
from atas.reproduce.record import Record
from atas.reproduce.trial import LARGE

Style = Callable[[Line], tuple[str, str]]
"""Colour and line style of a line."""


def curve(record: Record, key: str, scale: float = 1.0) -> list[float]:
    """A column of the monitor's, epoch by epoch."""
    return [scale * value for value in record.observed["curves"][key]]


def falls(records: Sequence[Record]) -> list[int | None]:
    """The epoch in which each of these curves shows a collapse, or None."""
    return [record.observed["curves"]["collapsed_in"] for record in records]


def draw(axes: Any, found: Found, key: str, style: Style, *, scale: float = 1.0, share: bool = False) -> None:
    """A line for each run; further seeds are thin. `share` counts the training in percent, for methods whose numbers of
    epochs differ."""
    plots.waiting(axes, [record for _, records in found for record in records])
    for line, records in found:
        colour, dashes = style(line)
        for number, record in enumerate(records):
            epochs = curve(record, "epoch")
            x = [100 * epoch / epochs[-1] for epoch in epochs] if share else epochs
            label = plots.mathematical(line.name) if number == 0 else None
            width = 1.8 if number == 0 else 0.7
            axes.plot(x, curve(record, key, scale), dashes, color=colour, label=label, linewidth=width)
    if share:
        axes.set_xlabel("share of the training, %")
    else:
        plots.epochs(axes)


def mean_steps(line: Line, records: Sequence[Record], fixed: float | None, *, printed: bool = True) -> list[str]:
    """The step of a line, ours and the paper's: a fixed one, or the mean of adaptive ones, if it is `printed`."""
    method, eps = line.trial.settings.method, line.trial.settings.method.eps
    theirs = paper.mean_step(method.name) if printed and fixed is None and eps <= LARGE else None
    seen = [record.observed[Norms.name]["average"]["step_size"] for record in records if Norms.name in record.observed]
    ours = fixed if fixed is not None else mean(seen) if seen else None
    return ["-" if value is None else size(value, eps) for value in (ours, theirs)]


def accuracies(found: Found, extra: Callable[[Line, Sequence[Record]], Sequence[str]], header: Sequence[str]) -> Table:
    """PGD-10 accuracy on training images: the best epoch, the last, and whether it collapsed; then what `extra` has."""
    lines, rows = [], []
    for line, records in found:
        values = [curve(record, "pgd10", 100) for record in records]
        best, last = [max(value) for value in values], [value[-1] for value in values]
        cells = [f"{mean(found):.1f}" if found else "-" for found in (best, last)]
        lines.append([line.panel, line.name, *cells, collapsed(falls(records)), *extra(line, records), seeds(records)])
        rows.append(
            {
                "panel": line.panel,
                "line": line.name,
                "pgd10_percent_by_epoch": values,
                "collapsed_in_epoch": falls(records),
                "seeds": [record.seed for record in records],
            }
        )
    return Table(["panel", "line", "PGD-10 best", "PGD-10 last", "collapse", *header, "seeds"], lines, rows)
