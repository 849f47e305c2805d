"""Piece-wise or cyclic learning rates: the paper tries both for each method and keeps the better one.

It does not say by what. Here it is PGD-10 on training images that were held out, so that the test images have no part
in the choice.
"""

from __future__ import annotations

import itertools
from typing import Any

from atas.reproduce import markdown
from atas.reproduce.figures import Figure, figure, time_of
from atas.reproduce.grid import METHODS, MORE, Grid, cifar, digits
from atas.reproduce.record import Record
from atas.reproduce.store import Store
from atas.reproduce.study import Page, Request, Sweep, chosen, chosen_budgets
from atas.reproduce.trial import Trial, level
from atas.training import recipe

KINDS = ("piecewise", "cyclic")
ATTACK = "pgd10"
_USUAL: dict[str, dict[str, Any]] = {
    "piecewise": {"schedule.peak": 0.1, "schedule.milestones": [24 / 30, 28 / 30], "schedule.factor": 0.1},
    "cyclic": {"schedule.peak": 0.2, "schedule.peak_at": 0.5, "schedule.peak_momentum": 0.8},
}
_SLOW = {"free", "yopo"}  # several passes go into a batch's updates; their peak is the same in either schedule
_HELD_OUT, _QUICK_HELD_OUT = 5000, 300


class Schedules(Sweep):
    """Every method with both schedules."""

    options = ("methods", "networks", "eps", "seeds", "examples", "values", "reuse")

    def trials(self, request: Request) -> list[Trial]:
        """Every wanted method with both."""
        cells = itertools.product(request.seeds or (0,), self._cells(request), KINDS)
        return [self._trial(request, *cell, kind, seed) for seed, cell, kind in cells]

    def page(self, request: Request, store: Store) -> Page:
        """Both figures, the better one, and whether the recipe has it."""
        known, errors = store.by_row(), store.errors_by_row()
        rows, content, shown, failed = [], [], [], []
        for cell in self._cells(request):
            trials = [self._trial(request, *cell, kind, 0) for kind in KINDS]
            records = [known.get(trial.row, []) for trial in trials]
            failed += [error for trial in trials for error in errors.get(trial.row, [])]
            shown += [record for found in records for record in found]
            figures = [figure(found, ATTACK) for found in records]
            network, method, eps = cell
            has = recipe.load(self._base(request, *cell)[0]).schedule.name
            verdict = _verdict(figures, has)
            rows.append([method, f"{network}, {level(eps)}", *(str(found or "-") for found in figures), verdict, has])
            rows[-1].append(_time(records))
            content.append(_json(cell, figures, records, verdict, has))
        text = ["# Piece-wise or cyclic learning rates", "", *self._preface(request), ""]
        header = ["method", "network, eps", *KINDS, "better", "recipe has", "time"]
        text += markdown.table(header, rows)
        text += markdown.origin(shown, failed)
        about = {"study": self.name, "quick": request.quick, "changed": markdown.told(request.values)}
        return Page("\n".join(text) + "\n", {**about, "rows": content})

    def _grid(self, request: Request) -> Grid:
        return digits() if request.quick else cifar("cifar10", (8 / 255, 12 / 255, 16 / 255))

    def _cells(self, request: Request) -> list[tuple[str, str, float]]:
        """Networks, methods and budgets; without a word, the smaller network at the smallest budget."""
        grid = self._grid(request)
        networks = chosen("network", request.networks or grid.networks[:1], grid.networks)
        budgets = chosen_budgets(request.eps or grid.budgets[:1], grid.budgets)
        methods = chosen("method", request.methods, METHODS, MORE)
        return [(network, method, eps) for eps, network, method in itertools.product(budgets, networks, methods)]

    def _base(self, request: Request, network: str, method: str, eps: float) -> tuple[str, dict[str, Any]]:
        cell = self._grid(request).cell(network, method, eps)
        assert cell is not None
        return cell

    def _trial(self, request: Request, network: str, method: str, eps: float, kind: str, seed: int) -> Trial:
        name, values = self._base(request, network, method, eps)
        own = recipe.load(name).schedule
        values = {**values, "schedule.name": kind}
        if own.name != kind:
            values |= _USUAL[kind] | ({"schedule.peak": own.peak} if method in _SLOW else {})
        held_out = _QUICK_HELD_OUT if request.quick else _HELD_OUT
        return Trial(name, {**values, **request.values}, seed, (ATTACK,), 0, request.examples, held_out)

    def _preface(self, request: Request) -> list[str]:
        count = _QUICK_HELD_OUT if request.quick else _HELD_OUT
        said = [
            f"PGD-10 accuracy in percent on {count:,} training images that were held out. [a, b] is the "
            "95% interval of one run over them, (a to b) the range over seeds; where these overlap, the better one is "
            "not known to be better.",
            "The paper tries both for each method and keeps the better; it prints no figures of this comparison.",
            markdown.changed(request.values),
        ]
        return ["\n\n".join(sentence for sentence in said if sentence)]


def _verdict(figures: list[Figure | None], has: str) -> str:
    """The better schedule, if it can be told."""
    piecewise, cyclic = figures
    if piecewise is None or cyclic is None:
        return "-"
    better = "piecewise" if piecewise.value > cyclic.value else "cyclic"
    overlap = piecewise.low <= cyclic.high and cyclic.low <= piecewise.high
    return f"{better}, perhaps" if overlap else better


def _time(records: list[list[Record]]) -> str:
    return " / ".join(time_of(found) or "-" for found in records)


def _json(
    cell: tuple[str, str, float], figures: list[Figure | None], records: list[list[Record]], verdict: str, has: str
) -> dict[str, Any]:
    network, method, eps = cell
    row: dict[str, Any] = {"network": network, "method": method, "eps": level(eps), "better": verdict, "recipe": has}
    for kind, ours, found in zip(KINDS, figures, records, strict=True):
        row[kind] = None if ours is None else ours.to_json()
        row[f"{kind}_runs"] = [record.key for record in found]
    return row


STUDY = Schedules("schedules", "piece-wise against cyclic learning rates by PGD-10 on held-out training images")
