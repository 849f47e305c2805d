"""The paper's tables of accuracy: methods by networks and budgets, ours beside the paper's."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atas.attacks import Clean
from atas.errors import UsageError
from atas.evaluation._names import written
from atas.reproduce import markdown, paper
from atas.reproduce.figures import Figure, collapses, difference, figure, time_of
from atas.reproduce.grid import Grid
from atas.reproduce.record import Record
from atas.reproduce.released import PADDING
from atas.reproduce.store import Store
from atas.reproduce.study import Page, Request, Sweep, chosen, chosen_budgets
from atas.reproduce.trial import Trial, level

_IN_THE_PAPER = {"atas-literal": "atas"}  # one row there, two readings of it
_NOTE = (
    "Accuracy in percent. Ours: [a, b] is the 95% interval of one run over its test images, (a to b) the range over "
    "seeds; time is that of the training steps. Difference: ours less the paper's, in points."
)


@dataclass(frozen=True)
class Line:
    """One cell of the grid, in one kind of evaluation: what is known of it, and what the paper says."""

    network: str
    method: str
    eps: float
    padding: int
    records: tuple[Record, ...]
    errors: tuple[str, ...]
    paper: paper.Figures | None
    side: int | None = None
    """Of a padded image, in pixels."""

    @property
    def ours(self) -> str:
        """How our row is called."""
        if not self.padding:
            return "ours"
        return f"ours, {self.side} x {self.side}" if self.side else f"ours, padded by {self.padding}"

    def figure(self, attack: str) -> Figure | None:
        """Ours, of an attack."""
        return figure(self.records, attack)

    def theirs(self, attack: str) -> float | None:
        """The paper's, of an attack."""
        return None if self.paper is None else self.paper.accuracy(attack)

    @property
    def time(self) -> str:
        """Of a training, the mean over seeds."""
        return time_of(self.records)

    def to_json(self, attacks: Sequence[str]) -> dict[str, Any]:
        """Plain values."""
        figures = {attack: found for attack in attacks if (found := self.figure(attack)) is not None}
        gaps = {a: f.value - theirs for a, f in figures.items() if (theirs := self.theirs(a)) is not None}
        return {
            "network": self.network,
            "method": self.method,
            "eps": level(self.eps),
            "padding": self.padding,
            "ours": {attack: found.to_json() for attack, found in figures.items()},
            "paper": None if self.paper is None else vars(self.paper),
            "difference": gaps,
            "seeds": [record.seed for record in self.records],
            "training_seconds": [record.seconds for record in self.records],
            "hardware": sorted({record.hardware for record in self.records}),
            "collapsed_in_epoch": [record.collapsed_in for record in self.records],
            "runs": [record.key for record in self.records],
            "errors": list(self.errors),
        }


class AccuracyTable(Sweep):
    """A table for each budget and network, of all methods."""

    def __init__(self, name: str, about: str, title: str, grid: Grid, quick: Grid, notes: tuple[str, ...] = ()) -> None:
        super().__init__(name, about)
        self.title, self._full, self._quick, self._notes = title, grid, quick, notes

    def grid(self, request: Request) -> Grid:
        """The paper's, or the quick one."""
        return self._quick if request.quick else self._full

    def trials(self, request: Request) -> list[Trial]:
        """Every wanted cell with every seed and kind of evaluation; a seed at a time, so that tables fill evenly."""
        cells = self._wanted(request)
        return [self._trial(request, seed, *cell) for seed in request.seeds or (0,) for cell in cells]

    def page(self, request: Request, store: Store) -> Page:
        """The wanted rows, and others that the store has results of."""
        lines = self.lines(request, store)
        records = [record for line in lines for record in line.records]
        attacks = _attacks(lines, request.attacks or self.grid(request).attacks)
        text = [f"# {self.title}", "", *self._preface(request, lines)]
        for (eps, network), group in itertools.groupby(lines, lambda line: (line.eps, line.network)):
            text += ["", f"## eps = {level(eps)}, {network}", "", *_table(list(group), attacks)]
        text += markdown.origin(records, [error for line in lines for error in line.errors])
        content = {
            "study": self.name,
            "quick": request.quick,
            "changed": markdown.told(request.values),
            "rows": [line.to_json(attacks) for line in lines],
        }
        return Page("\n".join(text) + "\n", content)

    def lines(self, request: Request, store: Store) -> list[Line]:
        """All rows to show, in the order of the grid."""
        grid, records, errors = self.grid(request), store.by_row(), store.errors_by_row()
        wanted = set(self._wanted(request))
        paddings = sorted({0, PADDING, *(request.padding or ())})
        cells = itertools.product(grid.budgets, grid.networks, (*grid.methods, *grid.more), paddings)
        found = []
        for eps, network, method, padding in cells:
            cell = (network, method, eps, padding)
            if grid.cell(network, method, eps) is None:
                continue
            try:
                row = self._trial(request, 0, *cell).row
            except UsageError:
                if cell in wanted:
                    raise
                continue  # a value that was set is not for this method
            known, failed = tuple(records.get(row, ())), tuple(errors.get(row, ()))
            attacked = any(set(record.attacks) - {Clean.name} for record in known)  # figures leave it at clean images
            if cell in wanted or attacked or failed:
                theirs = paper.lookup(grid.data, network, eps, _IN_THE_PAPER.get(method, method))
                found.append(Line(network, method, eps, padding, known, failed, theirs, _side(known)))
        return found

    def _wanted(self, request: Request) -> list[tuple[str, str, float, int]]:
        grid = self.grid(request)
        cells = itertools.product(
            chosen_budgets(request.eps, grid.budgets),
            chosen("network", request.networks, grid.networks),
            chosen("method", request.methods, grid.methods, grid.more),
            request.padding or (0,),
        )
        return [(net, method, eps, pad) for eps, net, method, pad in cells if grid.cell(net, method, eps) is not None]

    def _trial(self, request: Request, seed: int, network: str, method: str, eps: float, padding: int) -> Trial:
        grid = self.grid(request)
        cell = grid.cell(network, method, eps)
        assert cell is not None
        return Trial(
            cell[0],
            {**cell[1], **request.values},
            seed,
            request.attacks or grid.attacks,
            padding,
            request.examples or grid.examples,
        )

    def _preface(self, request: Request, lines: Sequence[Line]) -> list[str]:
        sizes = sorted({record.n for line in lines for record in line.records})
        theirs = [line.paper for line in lines if line.paper is not None]
        said = [_NOTE, f"Test images: {', '.join(f'{n:,}' for n in sizes)}." if sizes else ""]
        if request.quick:
            said.append("This is the quick form, on the embedded digits and cut short: the paper has no such rows.")
        else:
            said += [*self._notes, *(f"The paper's times are on {found.hardware}." for found in theirs)]
        said.append(markdown.changed(request.values))
        said += [
            f"{line.method}, {line.network}, {level(line.eps)}: {line.paper.doubt}."
            for line in lines
            if line.paper is not None and line.paper.doubt
        ]
        return ["\n\n".join(dict.fromkeys(sentence for sentence in said if sentence))]


def _attacks(lines: Sequence[Line], wanted: Sequence[str]) -> list[str]:
    """Those asked for and those that are known, from weak to strong as they are usually listed."""
    known = [attack for line in lines for record in line.records for attack in record.attacks]
    usual = ["clean", "fgsm", *paper.ATTACKS[1:]]
    found = dict.fromkeys(["clean", *wanted, *known])
    return [name for name in usual if name in found] + [name for name in found if name not in usual]


def _table(lines: Sequence[Line], attacks: Sequence[str]) -> list[str]:
    header = ["method", "", *map(written, attacks), "seeds", "time", "collapse"]
    rows: list[list[str]] = []
    for _, group in itertools.groupby(lines, lambda line: line.method):
        rows += _rows(list(group), attacks)
    return markdown.table(header, rows)


def _rows(lines: Sequence[Line], attacks: Sequence[str]) -> list[list[str]]:
    """A method: our rows, the paper's, and the difference of each of ours."""
    first, blank = lines[0], [""] * len(attacks)
    rows = []
    for line in lines:
        figures = [str(line.figure(attack) or "-") for attack in attacks]
        if line.errors and not line.records:
            figures = ["failed", *blank[1:]]
        rows.append([line.ours, *figures, str(len(line.records)), line.time, collapses(line.records)])
    if first.paper is None:
        rows.append(["paper", "no such row", *blank[1:], "", "", ""])
    else:
        theirs = [_printed(first.theirs(attack)) for attack in attacks]
        rows.append(["paper", *theirs, "", f"{first.paper.hours:.2f} h", ""])
        for line in lines:
            if line.records:
                name = line.ours.replace("ours", "difference", 1)
                rows.append([name, *(difference(line.figure(a), line.theirs(a)) for a in attacks), "", "", ""])
    return [[first.method if number == 0 else "", *row] for number, row in enumerate(rows)]


def _printed(value: float | None) -> str:
    """A figure of the paper's, as it prints them."""
    return "-" if value is None else f"{value:.2f}"


def _side(records: Sequence[Record]) -> int | None:
    """Of the images that these were evaluated on."""
    for record in records:
        for about in record.evaluations:
            return int(about["protocol"]["image_shape"][-1])
    return None
