"""A figure of the paper: its lines (trials), its table, and its picture.

Curves by epoch come from the monitor's metrics.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atas._utils.plotting import save_figure
from atas.paper import plots, published
from atas.paper.grid import Grid
from atas.paper.measurements import Norms
from atas.paper.study import QUICK_NOTE, Page, StudyOptions, TrainingStudy
from atas.sweeps import markdown
from atas.sweeps.record import Record
from atas.sweeps.store import Store
from atas.sweeps.trial import GREY_LEVEL_LIMIT, Measurement, Trial, missing_measurements


@dataclass(frozen=True)
class Line:
    """One line of a figure: its panel, its name, and its trial with seed 0."""

    panel: str
    name: str
    trial: Trial


LineRecords = list[tuple[Line, list[Record]]]
LineStyle = Callable[[Line], tuple[str, str]]
"""Returns the colour and the line style of a line."""


@dataclass(frozen=True)
class Table:
    """The table of a figure; `rows` hold the same as plain values."""

    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    rows: Sequence[dict[str, Any]]
    left: int = 2
    notes: Sequence[str] = ()


class MeasuredStudy(TrainingStudy):
    """A study whose trials are lines, and whose page is a table of their measurements."""

    accepted_options: tuple[str, ...] = ("seeds", "examples", "values", "reuse")
    required_measurements: tuple[str, ...] = ()
    """Names of measurements that a record must have to be shown."""

    def __init__(self, name: str, about: str, title: str, paper: str, measured: str) -> None:
        super().__init__(name, about)
        self.title, self._paper, self._measured = title, paper, measured
        self._last: tuple[StudyOptions, list[Line]] | None = None

    @abstractmethod
    def lines(self, options: StudyOptions) -> list[Line]:
        """Return all lines of the figure."""

    @abstractmethod
    def table(self, options: StudyOptions, store: Store) -> Table:
        """Return the table of the figure."""

    def dependencies(self, options: StudyOptions) -> list[Trial]:
        """Return the trials that the lines depend on."""
        return []

    def trials(self, options: StudyOptions) -> list[Trial]:
        """Return every line with every seed, ordered by seed."""
        pairs = itertools.product(options.seeds or (0,), self._lines(options))
        own = [replace(line.trial, seed=seed) if seed else line.trial for seed, line in pairs]
        return [*self.dependencies(options), *own]

    def _lines(self, options: StudyOptions) -> list[Line]:
        """Return the lines; the last result is kept, because pages are written often and recipes resolve slowly."""
        if self._last is None or self._last[0] is not options:
            self._last = options, self.lines(options)
        return self._last[1]

    def trial(
        self,
        options: StudyOptions,
        grid: Grid,
        cell: tuple[str, str, float],
        measurements: tuple[Measurement, ...],
        attacks: tuple[str, ...] = (),
        values: Mapping[str, Any] | None = None,
    ) -> Trial:
        """Return the trial of a network, a method and a budget, with `values` and the user's values on top."""
        resolved = grid.cell(*cell)
        assert resolved is not None
        recipe, own = resolved
        changed = {**own, **(values or {}), **options.values}
        return Trial(recipe, changed, 0, attacks, examples=options.examples or grid.examples, measurements=measurements)

    def line_records(self, options: StudyOptions, store: Store) -> LineRecords:
        """Return the lines, each with its complete records in the order of seeds."""
        known = store.by_row()
        return [
            (line, [record for record in known.get(line.trial.row, []) if self._is_complete(line, record)])
            for line in self._lines(options)
        ]

    def _is_complete(self, line: Line, record: Record) -> bool:
        required = [one for one in line.trial.measurements if one.name in self.required_measurements]
        return not missing_measurements(record, required)

    def page(self, options: StudyOptions, store: Store) -> Page:
        """Return a page with the paper's statement, what is measured here, the picture and the table."""
        table, errors = self.table(options, store), store.errors_by_row()
        keys = dict.fromkeys(line.trial.row for line in self._lines(options))
        return self.build_page(
            options,
            title=self.title,
            preface=[
                f"The paper: {self._paper}",
                f"Here: {self._measured}",
                QUICK_NOTE.format("figure") if options.quick else "",
                markdown.overrides_sentence(options.values),
            ],
            body=[
                "",
                *self.image(options),
                *markdown.table(table.header, table.lines, table.left),
                *(line for note in table.notes for line in ("", note)),
            ],
            rows=table.rows,
            records=[record for _, records in self.line_records(options, store) for record in records],
            errors=[error for key in keys for error in errors.get(key, [])],
        )

    def image(self, options: StudyOptions) -> list[str]:
        """Return the lines before the table."""
        return []


class FigureStudy(MeasuredStudy):
    """A measured study with a picture."""

    @abstractmethod
    def picture(self, options: StudyOptions, store: Store) -> Any:
        """Draw the figure."""

    def prepare(self, options: StudyOptions) -> None:
        """Raise UsageError if matplotlib is missing."""
        if options.pictures:
            plots.require_matplotlib()

    def image(self, options: StudyOptions) -> list[str]:
        """Return the link to the picture."""
        return [f"![{self.title}]({self.file(options, '.png').name})", ""] if options.pictures else []

    def draw(self, options: StudyOptions, store: Store) -> tuple[Path, ...]:
        """Write the picture as PNG and SVG."""
        if not options.pictures:
            return ()
        figure, files = self.picture(options, store), tuple(self.file(options, suffix) for suffix in (".png", ".svg"))
        for file in files:
            save_figure(figure, file)
        return files


def by_panel(results: LineRecords) -> Iterator[tuple[str, LineRecords]]:
    """Yield each panel with its lines, in the order of the first lines."""
    for name in dict.fromkeys(line.panel for line, _ in results):
        yield name, [pair for pair in results if pair[0].panel == name]


def entries(line: Line, records: Sequence[Record], kind: type[Measurement]) -> list[dict[str, Any]]:
    """Return what records hold of the line's measurement of this kind, with its settings."""
    wanted = [measurement for measurement in line.trial.measurements if isinstance(measurement, kind)]
    return [entry for record in records for one in wanted if (entry := one.find(record)) is not None]


DrawPanel = Callable[[Any, str, LineRecords], None]
"""Draws the lines of one panel into axes; called with the axes, the name of the panel, and its lines."""


def two_column_figure(results: LineRecords, draw: DrawPanel, **options: Any) -> tuple[Any, Any]:
    """Return a figure with a titled panel for each name, in two columns, and its grid of axes."""
    groups = list(by_panel(results))
    columns = min(2, len(groups))
    figure, grid = plots.panels(-(-len(groups) // columns), columns, **options)
    for axes in grid.flat[len(groups) :]:
        axes.set_visible(False)
    for axes, (name, lines) in zip(grid.flat, groups, strict=False):
        draw(axes, name, lines)
        axes.set_title(name, fontsize=11)
    return figure, grid


def pgd10_figure(results: LineRecords, style: LineStyle, *, titles: bool) -> Any:
    """Return a figure of the PGD-10 accuracy on training images by epoch, with a panel for each name."""
    groups = list(by_panel(results))
    figure, grid = plots.panels(1, len(groups), width=6.0, height=3.9)
    for axes, (name, lines) in zip(grid.flat, groups, strict=True):
        draw_curves(axes, lines, "pgd10", style, scale=100)
        if titles:
            axes.set_title(name, fontsize=11)
        axes.set_ylabel("PGD-10 accuracy on training images, %")
        axes.set_ylim(bottom=plots.PERCENT_BOTTOM)
    plots.legend(figure, grid)
    return figure


def seed_list(records: Sequence[Record]) -> str:
    """Return the seeds of the records as text."""
    return ",".join(str(record.seed) for record in records) or "-"


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value."""
    return sum(values) / len(values)


def axis_unit(eps: float) -> tuple[float, str]:
    """Return the unit of an axis of step sizes or budgets: its factor and its name."""
    return (255.0, "k/255") if eps < GREY_LEVEL_LIMIT else (1.0, "pixel units")


def format_step(value: float, eps: float) -> str:
    """Return a mean step size as text, in the unit that suits the budget.

    >>> format_step(9.34 / 255, 8 / 255), format_step(0.1, 0.25)
    ('9.3/255', '0.10')
    """
    return f"{255 * value:.1f}/255" if eps < GREY_LEVEL_LIMIT else f"{value:.2f}"


def metric_curve(record: Record, key: str, scale: float = 1.0) -> list[float]:
    """Return a column of the monitor's metrics by epoch."""
    return [scale * value for value in record.observed["curves"][key]]


def collapse_epochs(records: Sequence[Record]) -> list[int | None]:
    """Return the collapse epoch of each record, or None."""
    return [record.observed["curves"]["collapsed_in"] for record in records]


def draw_curves(
    axes: Any, results: LineRecords, key: str, style: LineStyle, *, scale: float = 1.0, share: bool = False
) -> None:
    """Draw a line for each run; lines of further seeds are thin.

    With `share`, the horizontal axis is the percentage of the training, for methods with different numbers of epochs.
    """
    plots.placeholder(axes, [record for _, records in results for record in records])
    for line, records in results:
        colour, dashes = style(line)
        for number, record in enumerate(records):
            epochs = metric_curve(record, "epoch")
            x = [100 * epoch / epochs[-1] for epoch in epochs] if share else epochs
            label = plots.math_label(line.name) if number == 0 else None
            width = 1.8 if number == 0 else 0.7
            axes.plot(x, metric_curve(record, key, scale), dashes, color=colour, label=label, linewidth=width)
    if share:
        axes.set_xlabel("share of the training, %")
    else:
        plots.epoch_axis(axes)


def mean_step_cells(line: Line, records: Sequence[Record], fixed: float | None, *, printed: bool = True) -> list[str]:
    """Return our step size and the paper's: the fixed one, or the mean of adaptive ones.

    The paper's is shown only where it prints one (`printed`).
    """
    method, eps = line.trial.resolved_recipe.method, line.trial.resolved_recipe.method.eps
    theirs = published.mean_step(method.name) if printed and fixed is None and eps <= GREY_LEVEL_LIMIT else None
    steps = [record.observed[Norms.name]["average"]["step_size"] for record in records if Norms.name in record.observed]
    ours = fixed if fixed is not None else mean(steps) if steps else None
    return ["-" if value is None else format_step(value, eps) for value in (ours, theirs)]


def curve_table(
    results: LineRecords, extra: Callable[[Line, Sequence[Record]], Sequence[str]], header: Sequence[str]
) -> Table:
    """Return a table of the PGD-10 accuracy on training images: best epoch, last epoch, collapse, and `extra` cells."""
    lines, rows = [], []
    for line, records in results:
        values = [metric_curve(record, "pgd10", 100) for record in records]
        best, last = [max(value) for value in values], [value[-1] for value in values]
        cells = [f"{mean(accuracies):.1f}" if accuracies else "-" for accuracies in (best, last)]
        lines.append(
            [
                line.panel,
                line.name,
                *cells,
                markdown.format_collapse_epochs(collapse_epochs(records)),
                *extra(line, records),
                seed_list(records),
            ]
        )
        rows.append(
            {
                "panel": line.panel,
                "line": line.name,
                "pgd10_percent_by_epoch": values,
                "collapsed_in_epoch": collapse_epochs(records),
                "seeds": [record.seed for record in records],
            }
        )
    return Table(["panel", "line", "PGD-10 best", "PGD-10 last", "collapse", *header, "seeds"], lines, rows)
