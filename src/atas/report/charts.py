"""Charts: data for uPlot, which draws them in the page, and the same numbers as text and as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from atas.report.elements import DataTable

Values = Sequence[float | None]
EPOCH_SYNC = "epochs"  # charts with this `sync` share their cursor


@dataclass(frozen=True)
class ChartLine:
    """A curve. `colour` is one of the page's colours: c0 to c7, or r0 to r9 from small to large."""

    label: str
    values: Values
    colour: str
    dashed: bool = False
    shown: bool = True


@dataclass(frozen=True)
class Band:
    """The area between two curves."""

    label: str
    low: Values
    high: Values
    colour: str


@dataclass(frozen=True)
class Mark:
    """A labelled position on the x axis."""

    x: float
    text: str


@dataclass(frozen=True)
class Chart:
    """A chart: title, axes, lines, ranges and marks. None among the values is a gap."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float]
    lines: Sequence[ChartLine]
    ranges: Sequence[Band] = ()
    marks: Sequence[Mark] = ()
    limits: tuple[float | None, float | None] = (None, None)
    digits: int = 1
    note: str | None = None
    sync: str | None = None
    kind: str = field(default="line", kw_only=True)
    """`line`, or `points` if the x axis holds categories."""

    def description(self) -> str:
        """Describe the chart in words, for screen readers."""
        sentences = [f"{self.title}: {self.y_label} by {self.x_label}."]
        for line in self.lines:
            points = [(x, y) for x, y in zip(self.x, line.values, strict=True) if _is_number(y)]
            if points:
                low, high = min(points, key=lambda pair: pair[1] or 0), max(points, key=lambda pair: pair[1] or 0)
                sentences.append(
                    f"{line.label}: {self._text(points[0][1])} at first, {self._text(points[-1][1])} at last; least "
                    f"{self._text(low[1])} at {low[0]:g}, most {self._text(high[1])} at {high[0]:g}."
                )
        sentences += [f"{mark.text} at {mark.x:g}." for mark in self.marks]
        return " ".join(sentences)

    def data(self) -> dict[str, object]:
        """Return what the page's script draws."""
        series: list[dict[str, object]] = []
        legend: list[dict[str, object]] = []
        columns: list[Values] = []
        for band in self.ranges:
            legend.append({"label": band.label, "series": [len(series) + 1, len(series) + 2], "band": True})
            series += [{"colour": band.colour, "edge": "low"}, {"colour": band.colour, "edge": "high"}]
            columns += [band.low, band.high]
        for line in self.lines:
            legend.append({"label": line.label, "series": [len(series) + 1]})
            series.append({"colour": line.colour, "dashed": line.dashed, "shown": line.shown})
            columns.append(line.values)
        return {
            "x": list(self.x),
            "columns": [list(column) for column in columns],
            "series": series,
            "legend": legend,
            "marks": [{"x": mark.x, "text": mark.text} for mark in self.marks],
            "xLabel": self.x_label,
            "yLabel": self.y_label,
            "limits": list(self.limits),
            "digits": self.digits,
            "sync": self.sync,
            "kind": self.kind,
        }

    def table(self) -> DataTable:
        """Return the numbers of the chart, one row for each position on the x axis."""
        columns: list[tuple[str, Values]] = []
        for band in self.ranges:
            columns += [(f"{band.label}, from", band.low), ("to", band.high)]
        columns += [(line.label, line.values) for line in self.lines]
        rows = [[f"{x:g}", *(self._text(values[row]) for _, values in columns)] for row, x in enumerate(self.x)]
        return DataTable([self.x_label, *(label for label, _ in columns)], rows, self.title, class_="figures")

    def _text(self, value: float | None) -> str:
        return f"{value:.{self.digits}f}" if value is not None and math.isfinite(value) else "-"


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
