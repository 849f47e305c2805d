"""A figure of the paper: trials that are lines of it, the table behind it, and a picture."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atas.reproduce import markdown, plots
from atas.reproduce.grid import Grid
from atas.reproduce.observation import Observation
from atas.reproduce.record import Record
from atas.reproduce.store import Store
from atas.reproduce.study import Page, Request, Sweep
from atas.reproduce.trial import LARGE, Trial


@dataclass(frozen=True)
class Line:
    """One line of a figure: the panel that it is in, its name there, and its trial, for whatever seed."""

    panel: str
    name: str
    trial: Trial


Found = list[tuple[Line, list[Record]]]


@dataclass(frozen=True)
class Table:
    """The table behind a figure; `rows` are the same for programs."""

    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    rows: Sequence[dict[str, Any]]
    left: int = 2
    notes: Sequence[str] = ()


class ObservedStudy(Sweep):
    """A sweep whose trials are lines, and whose page is a table of what was observed of them."""

    options: tuple[str, ...] = ("seeds", "examples", "values", "reuse")
    needs: tuple[str, ...] = ()
    """What records must have observed to be shown."""

    def __init__(self, name: str, about: str, title: str, paper: str, measured: str) -> None:
        super().__init__(name, about)
        self.title, self._paper, self._measured = title, paper, measured
        self._last: tuple[Request, list[Line]] | None = None

    @abstractmethod
    def lines(self, request: Request) -> list[Line]:
        """All lines of the figure."""

    @abstractmethod
    def table(self, request: Request, store: Store) -> Table:
        """The figures behind the picture."""

    def before(self, request: Request) -> list[Trial]:
        """What the lines rest on, and so has to be run first."""
        return []

    def trials(self, request: Request) -> list[Trial]:
        """Every line with every seed; a seed at a time."""
        pairs = itertools.product(request.seeds or (0,), self._lines(request))
        own = [replace(line.trial, seed=seed) if seed else line.trial for seed, line in pairs]
        return [*self.before(request), *own]

    def _lines(self, request: Request) -> list[Line]:
        """Those of the last request are kept: resolving many recipes takes a while, and pages are written often."""
        if self._last is None or self._last[0] is not request:
            self._last = request, self.lines(request)
        return self._last[1]

    def trial(
        self,
        request: Request,
        grid: Grid,
        cell: tuple[str, str, float],
        observe: tuple[Observation, ...],
        attacks: tuple[str, ...] = (),
        values: Mapping[str, Any] | None = None,
    ) -> Trial:
        """That of a network, a method and a budget; with other values, and with those that a person set."""
        found = grid.cell(*cell)
        assert found is not None
        changed = {**found[1], **(values or {}), **request.values}
        return Trial(found[0], changed, 0, attacks, examples=request.examples or grid.examples, observe=observe)

    def found(self, request: Request, store: Store) -> Found:
        """The lines, each with its records, in the order of seeds."""
        known = store.by_row()
        return [
            (
                line,
                [record for record in known.get(line.trial.row, []) if all(n in record.observed for n in self.needs)],
            )
            for line in self._lines(request)
        ]

    def page(self, request: Request, store: Store) -> Page:
        """What the paper says, what was measured, and the table; for a figure, its picture before that."""
        table, records = self.table(request, store), [r for _, found in self.found(request, store) for r in found]
        errors = store.errors_by_row()
        rows = dict.fromkeys(line.trial.row for line in self._lines(request))
        said = [
            f"The paper: {self._paper}",
            f"Here: {self._measured}",
            "This is the quick form, on the embedded digits and cut short: the paper has no such figure."
            if request.quick
            else "",
            markdown.changed(request.values),
        ]
        text = [f"# {self.title}", "", "\n\n".join(sentence for sentence in said if sentence), ""]
        text += [*self.image(request), *markdown.table(table.header, table.lines, table.left)]
        text += [line for note in table.notes for line in ("", note)]
        text += markdown.origin(records, [error for row in rows for error in errors.get(row, [])])
        about = {"study": self.name, "quick": request.quick, "changed": markdown.told(request.values)}
        return Page("\n".join(text) + "\n", {**about, "rows": list(table.rows)})

    def image(self, request: Request) -> list[str]:
        """What comes before the table."""
        return []


class FigureStudy(ObservedStudy):
    """One whose result is a picture too."""

    @abstractmethod
    def picture(self, request: Request, store: Store) -> Any:
        """The figure, drawn."""

    def prepare(self, request: Request) -> None:
        """What is needed for drawing is there."""
        if request.pictures:
            plots.check()

    def image(self, request: Request) -> list[str]:
        """The place of the picture on the page."""
        return [f"![{self.title}]({self.file(request, '.png').name})", ""] if request.pictures else []

    def draw(self, request: Request, store: Store) -> tuple[Path, ...]:
        """The picture as PNG and SVG."""
        return plots.save(self.picture(request, store), self.file(request, "")) if request.pictures else ()


def by_panel(found: Found) -> Iterator[tuple[str, Found]]:
    """The lines of each panel, panels in the order of their first line."""
    for name in dict.fromkeys(line.panel for line, _ in found):
        yield name, [pair for pair in found if pair[0].panel == name]


def seeds(records: Sequence[Record]) -> str:
    """The seeds of these runs, for a column."""
    return ",".join(str(record.seed) for record in records) or "-"


def mean(values: Sequence[float]) -> float:
    """Of at least one."""
    return sum(values) / len(values)


def unit(eps: float) -> tuple[float, str]:
    """What sizes are drawn in where the budget is eps: the factor, and how it is called."""
    return (255.0, "k/255") if eps < LARGE else (1.0, "pixel units")


def size(value: float, eps: float) -> str:
    """A mean step size where the budget is eps.

    >>> size(9.34 / 255, 8 / 255), size(0.1, 0.25)
    ('9.3/255', '0.10')
    """
    return f"{255 * value:.1f}/255" if eps < LARGE else f"{value:.2f}"
