"""Piece-wise and cyclic learning rates: the paper tries both for each method and keeps the better one.

It does not state the criterion. Here it is PGD-10 on held-out training images, so that the test images do not
influence the choice.
"""

from __future__ import annotations

import itertools
from typing import Any

from atas import recipes
from atas.evaluation.seed_stats import SeedStats
from atas.paper.grid import EXTRA_METHODS, METHODS, Grid, cifar, digits
from atas.paper.study import Page, StudyOptions, TrainingStudy, select, select_budgets
from atas.sweeps import markdown
from atas.sweeps.record import Record, summarize_seeds
from atas.sweeps.store import Store
from atas.sweeps.trial import Trial, format_eps

KINDS = ("piecewise", "cyclic")
ATTACK = "pgd10"
_DEFAULTS: dict[str, dict[str, Any]] = {
    "piecewise": {"schedule.peak": 0.1, "schedule.milestones": [24 / 30, 28 / 30], "schedule.factor": 0.1},
    "cyclic": {"schedule.peak": 0.2, "schedule.peak_at": 0.5, "schedule.peak_momentum": 0.8},
}
_SAME_PEAK = {"free", "yopo"}  # their peak does not depend on the schedule, because a batch takes several passes
_HELD_OUT, _QUICK_HELD_OUT = 5000, 300


class Schedules(TrainingStudy):
    """A training of every method with each schedule."""

    accepted_options = ("methods", "networks", "eps", "seeds", "examples", "values", "reuse")

    def trials(self, options: StudyOptions) -> list[Trial]:
        """Return every selected method with both schedules."""
        cells = itertools.product(options.seeds or (0,), self._cells(options), KINDS)
        return [self._trial(options, *cell, kind, seed) for seed, cell, kind in cells]

    def page(self, options: StudyOptions, store: Store) -> Page:
        """Return a page with both accuracies, the better schedule, and the recipe's."""
        known, errors = store.by_row(), store.errors_by_row()
        rows, content, shown, failed = [], [], [], []
        for cell in self._cells(options):
            trials = [self._trial(options, *cell, kind, 0) for kind in KINDS]
            records = [known.get(trial.row, []) for trial in trials]
            failed += [error for trial in trials for error in errors.get(trial.row, [])]
            shown += [record for group in records for record in group]
            figures = [summarize_seeds(group, ATTACK) for group in records]
            network, method, eps = cell
            own = recipes.load(self._base(options, *cell)[0]).schedule.name
            verdict = _verdict(figures)
            rows.append(
                [method, f"{network}, {format_eps(eps)}", *(str(ours or "-") for ours in figures), verdict, own]
            )
            rows[-1].append(_time(records))
            content.append(_json(cell, figures, records, verdict, own))
        header = ["method", "network, eps", *KINDS, "better", "recipe has", "time"]
        return self.build_page(
            options,
            title="Piece-wise or cyclic learning rates",
            preface=self._preface(options),
            body=["", *markdown.table(header, rows)],
            rows=content,
            records=shown,
            errors=failed,
        )

    def _grid(self, options: StudyOptions) -> Grid:
        return digits() if options.quick else cifar("cifar10", (8 / 255, 12 / 255, 16 / 255))

    def _cells(self, options: StudyOptions) -> list[tuple[str, str, float]]:
        """Return the selected cells, by default the smaller network at the smallest budget."""
        grid = self._grid(options)
        networks = select("network", options.networks or grid.networks[:1], grid.networks)
        budgets = select_budgets(options.eps or grid.budgets[:1], grid.budgets)
        methods = select("method", options.methods, METHODS, EXTRA_METHODS)
        return [(network, method, eps) for eps, network, method in itertools.product(budgets, networks, methods)]

    def _base(self, options: StudyOptions, network: str, method: str, eps: float) -> tuple[str, dict[str, Any]]:
        cell = self._grid(options).cell(network, method, eps)
        assert cell is not None
        return cell

    def _trial(self, options: StudyOptions, network: str, method: str, eps: float, kind: str, seed: int) -> Trial:
        name, values = self._base(options, network, method, eps)
        own = recipes.load(name).schedule
        values = {**values, "schedule.name": kind}
        if own.name != kind:
            values |= _DEFAULTS[kind] | ({"schedule.peak": own.peak} if method in _SAME_PEAK else {})
        held_out = _QUICK_HELD_OUT if options.quick else _HELD_OUT
        return Trial(name, {**values, **options.values}, seed, (ATTACK,), 0, options.examples, held_out)

    def _preface(self, options: StudyOptions) -> list[str]:
        count = _QUICK_HELD_OUT if options.quick else _HELD_OUT
        return [
            f"PGD-10 accuracy in percent on {count:,} training images that were held out. [a, b] is the "
            "95% interval of one run over them, (a to b) the range over seeds; where these overlap, the better one is "
            "not known to be better.",
            "The paper tries both for each method and keeps the better; it prints no figures of this comparison.",
            markdown.overrides_sentence(options.values),
        ]


def _verdict(figures: list[SeedStats | None]) -> str:
    """Return the better schedule; "perhaps" if the intervals overlap."""
    piecewise, cyclic = figures
    if piecewise is None or cyclic is None:
        return "-"
    better = "piecewise" if piecewise.value > cyclic.value else "cyclic"
    overlap = piecewise.low <= cyclic.high and cyclic.low <= piecewise.high
    return f"{better}, perhaps" if overlap else better


def _time(records: list[list[Record]]) -> str:
    return " / ".join(markdown.format_training_time(group) or "-" for group in records)


def _json(
    cell: tuple[str, str, float], figures: list[SeedStats | None], records: list[list[Record]], verdict: str, own: str
) -> dict[str, Any]:
    network, method, eps = cell
    row: dict[str, Any] = {
        "network": network,
        "method": method,
        "eps": format_eps(eps),
        "better": verdict,
        "recipe": own,
    }
    for kind, ours, group in zip(KINDS, figures, records, strict=True):
        row[kind] = None if ours is None else ours.to_json()
        row[f"{kind}_runs"] = [record.key for record in group]
    return row


STUDY = Schedules("schedules", "piece-wise against cyclic learning rates by PGD-10 on held-out training images")
