"""ATTA with one larger step for all images beside ATAS: whether adaptive steps are better than one well-chosen step."""

from __future__ import annotations

from typing import Any

from atas.paper import published
from atas.paper.accuracy_table import AccuracyTable
from atas.paper.grid import CellRecipe, Grid, cifar, digits
from atas.sweeps.padded_evaluation import NOTE

_STEPS = {"atta-step8": 8, "atta-step10": 10, "atta-step12": 12}  # in 1/255; `atta` itself has 4/255
_METHODS = ("atas", "atta", *_STEPS)


def _with_steps(cell: CellRecipe, unit: float) -> CellRecipe:
    """Return the recipes of a grid, with the steps as methods of their own."""

    def step_cell(network: str, method: str, eps: float) -> tuple[str, dict[str, Any]] | None:
        if method not in _STEPS:
            return cell(network, method, eps)
        base = cell(network, "atta", eps)
        return None if base is None else (base[0], {**base[1], "method.step_size": _STEPS[method] * unit})

    return step_cell


def _grid() -> Grid:
    base = cifar("cifar10", tuple(published.budgets("cifar10")))
    return Grid("cifar10", base.networks, base.budgets, _with_steps(base.cell, 1 / 255), _METHODS, ("atas-literal",))


def _quick_grid() -> Grid:
    base = digits()
    unit = base.budgets[0] / 8
    cell = _with_steps(base.cell, unit)
    return Grid("digits", base.networks, base.budgets, cell, _METHODS, (), base.attacks, base.examples)


STUDY = AccuracyTable(
    "table-atta-steps",
    "ATTA with one step of 8, 10 or 12/255 for all images beside ATAS, eps 8, 12 and 16/255",
    "ATTA with one larger step beside ATAS",
    _grid(),
    _quick_grid(),
    notes=(
        "`atta-step8` is ATTA with a step of 8/255, and so on; `atta` has the paper's 4/255 at every budget. The "
        "paper's tables have no other steps of ATTA.",
        NOTE,
    ),
)
