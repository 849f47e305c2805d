"""The paper's accuracy tables: methods by networks and budgets, our results beside the published ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atas.attacks import Clean
from atas.attacks.registry import display_name
from atas.errors import UsageError
from atas.evaluation.seed_stats import SeedStats
from atas.paper import published
from atas.paper.grid import Grid
from atas.paper.published import PublishedRow
from atas.paper.study import QUICK_NOTE, Page, StudyOptions, TrainingStudy, select, select_budgets
from atas.sweeps import markdown
from atas.sweeps.padded_evaluation import PADDING
from atas.sweeps.record import Record, summarize_seeds
from atas.sweeps.store import Store
from atas.sweeps.trial import Trial, format_eps

_PUBLISHED_AS = {"atas-literal": "atas"}  # the paper has one row for both readings of ATAS
_NOTE = (
    "Accuracy in percent. Ours: [a, b] is the 95% interval of one run over its test images, (a to b) the range over "
    "seeds; time is that of the training steps. Difference: ours less the paper's, in points."
)


@dataclass(frozen=True)
class AccuracyRow:
    """One cell of the grid in one kind of evaluation: its records, and the published row."""

    network: str
    method: str
    eps: float
    padding: int
    records: tuple[Record, ...]
    errors: tuple[str, ...]
    published: PublishedRow | None
    side: int | None = None
    """Side of a padded image, in pixels."""

    @property
    def row_label(self) -> str:
        """The label of our row."""
        if not self.padding:
            return "ours"
        return f"ours, {self.side} x {self.side}" if self.side else f"ours, padded by {self.padding}"

    def stats(self, attack: str) -> SeedStats | None:
        """Return our accuracy under an attack."""
        return summarize_seeds(self.records, attack)

    def published_accuracy(self, attack: str) -> float | None:
        """Return the paper's accuracy under an attack."""
        return None if self.published is None else self.published.accuracy(attack)

    @property
    def time(self) -> str:
        """Training time, the mean over seeds."""
        return markdown.format_training_time(self.records)

    def to_json(self, attacks: Sequence[str]) -> dict[str, Any]:
        """Return plain values."""
        ours = {attack: stats for attack in attacks if (stats := self.stats(attack)) is not None}
        paper = {attack: self.published_accuracy(attack) for attack in ours}
        return {
            "network": self.network,
            "method": self.method,
            "eps": format_eps(self.eps),
            "padding": self.padding,
            "ours": {attack: stats.to_json() for attack, stats in ours.items()},
            "paper": None if self.published is None else vars(self.published),
            "difference": {a: ours[a].value - value for a, value in paper.items() if value is not None},
            "seeds": [record.seed for record in self.records],
            "training_seconds": [record.seconds for record in self.records],
            "hardware": sorted({record.hardware for record in self.records}),
            "collapsed_in_epoch": [record.collapsed_in for record in self.records],
            "runs": [record.key for record in self.records],
            "errors": list(self.errors),
        }


class AccuracyTable(TrainingStudy):
    """A study with a table of all methods for each budget and network."""

    def __init__(self, name: str, about: str, title: str, grid: Grid, quick: Grid, notes: tuple[str, ...] = ()) -> None:
        super().__init__(name, about)
        self.title, self._full, self._quick, self._notes = title, grid, quick, notes

    def grid(self, options: StudyOptions) -> Grid:
        """Return the paper's grid, or the quick one."""
        return self._quick if options.quick else self._full

    def trials(self, options: StudyOptions) -> list[Trial]:
        """Return every selected cell with every seed and padding, ordered by seed so that tables fill evenly."""
        cells = self._wanted(options)
        return [self._trial(options, seed, *cell) for seed in options.seeds or (0,) for cell in cells]

    def page(self, options: StudyOptions, store: Store) -> Page:
        """Return the selected rows, and other rows that have results."""
        lines = self.lines(options, store)
        records = [record for line in lines for record in line.records]
        attacks = _attack_columns(lines, options.attacks or self.grid(options).attacks)
        body = []
        for (eps, network), group in itertools.groupby(lines, lambda line: (line.eps, line.network)):
            body += ["", f"## eps = {format_eps(eps)}, {network}", "", *_table(list(group), attacks)]
        return self.build_page(
            options,
            title=self.title,
            preface=self._preface(options, lines),
            body=body,
            rows=[line.to_json(attacks) for line in lines],
            records=records,
            errors=[error for line in lines for error in line.errors],
        )

    def lines(self, options: StudyOptions, store: Store) -> list[AccuracyRow]:
        """Return all rows to show, in the order of the grid."""
        grid, records, errors = self.grid(options), store.by_row(), store.errors_by_row()
        wanted = set(self._wanted(options))
        paddings = sorted({0, PADDING, *(options.padding or ())})
        cells = itertools.product(grid.budgets, grid.networks, (*grid.methods, *grid.extra_methods), paddings)
        rows = []
        for eps, network, method, padding in cells:
            cell = (network, method, eps, padding)
            if grid.cell(network, method, eps) is None:
                continue
            try:
                row = self._trial(options, 0, *cell).row
            except UsageError:
                if cell in wanted:
                    raise
                continue  # an overridden value does not apply to this method
            known, failed = tuple(records.get(row, ())), tuple(errors.get(row, ()))
            attacked = any(
                set(record.attacks) - {Clean.name} for record in known
            )  # runs of figures have clean accuracy only
            if cell in wanted or attacked or failed:
                paper = published.lookup(grid.data, network, eps, _PUBLISHED_AS.get(method, method))
                rows.append(AccuracyRow(network, method, eps, padding, known, failed, paper, _image_side(known)))
        return rows

    def _wanted(self, options: StudyOptions) -> list[tuple[str, str, float, int]]:
        grid = self.grid(options)
        cells = itertools.product(
            select_budgets(options.eps, grid.budgets),
            select("network", options.networks, grid.networks),
            select("method", options.methods, grid.methods, grid.extra_methods),
            options.padding or (0,),
        )
        return [(net, method, eps, pad) for eps, net, method, pad in cells if grid.cell(net, method, eps) is not None]

    def _trial(self, options: StudyOptions, seed: int, network: str, method: str, eps: float, padding: int) -> Trial:
        grid = self.grid(options)
        cell = grid.cell(network, method, eps)
        assert cell is not None
        return Trial(
            cell[0],
            {**cell[1], **options.values},
            seed,
            options.attacks or grid.attacks,
            padding,
            options.examples or grid.examples,
        )

    def _preface(self, options: StudyOptions, lines: Sequence[AccuracyRow]) -> list[str]:
        sizes = sorted({record.n for line in lines for record in line.records})
        theirs = [line.published for line in lines if line.published is not None]
        preface = [_NOTE, f"Test images: {', '.join(f'{n:,}' for n in sizes)}." if sizes else ""]
        if options.quick:
            preface.append(QUICK_NOTE.format("rows"))
        else:
            preface += [*self._notes, *(f"The paper's times are on {row.hardware}." for row in theirs)]
        preface.append(markdown.overrides_sentence(options.values))
        return preface + [
            f"{line.method}, {line.network}, {format_eps(line.eps)}: {line.published.doubt}."
            for line in lines
            if line.published is not None and line.published.doubt
        ]


def _attack_columns(lines: Sequence[AccuracyRow], selected: Sequence[str]) -> list[str]:
    """Return the selected and the recorded attacks, the published ones first, from weak to strong."""
    recorded = [attack for line in lines for record in line.records for attack in record.attacks]
    usual = ["clean", "fgsm", *published.ATTACKS[1:]]
    names = dict.fromkeys(["clean", *selected, *recorded])
    return [name for name in usual if name in names] + [name for name in names if name not in usual]


def _table(lines: Sequence[AccuracyRow], attacks: Sequence[str]) -> list[str]:
    header = ["method", "", *map(display_name, attacks), "seeds", "time", "collapse"]
    rows: list[list[str]] = []
    for _, group in itertools.groupby(lines, lambda line: line.method):
        rows += _rows(list(group), attacks)
    return markdown.table(header, rows)


def _rows(lines: Sequence[AccuracyRow], attacks: Sequence[str]) -> list[list[str]]:
    """Return the rows of a method: ours, the paper's, and the differences."""
    first, blank = lines[0], [""] * len(attacks)
    rows = []
    for line in lines:
        figures = [str(line.stats(attack) or "-") for attack in attacks]
        if line.errors and not line.records:
            figures = ["failed", *blank[1:]]
        rows.append(
            [line.row_label, *figures, str(len(line.records)), line.time, markdown.format_collapses(line.records)]
        )
    if first.published is None:
        rows.append(["paper", "no such row", *blank[1:], "", "", ""])
    else:
        theirs = [_format_published(first.published_accuracy(attack)) for attack in attacks]
        rows.append(["paper", *theirs, "", f"{first.published.hours:.2f} h", ""])
        for line in lines:
            if line.records:
                name = line.row_label.replace("ours", "difference", 1)
                rows.append(
                    [
                        name,
                        *(markdown.format_difference(line.stats(a), line.published_accuracy(a)) for a in attacks),
                        "",
                        "",
                        "",
                    ]
                )
    return [[first.method if number == 0 else "", *row] for number, row in enumerate(rows)]


def _format_published(value: float | None) -> str:
    """Return an accuracy with two digits, as the paper prints them."""
    return "-" if value is None else f"{value:.2f}"


def _image_side(records: Sequence[Record]) -> int | None:
    """Return the side of the evaluated images, or None without records."""
    for record in records:
        for evaluation in record.evaluations:
            return int(evaluation["protocol"]["image_shape"][-1])
    return None
