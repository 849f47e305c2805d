"""ATAS with other step sizes, under AutoAttack: the paper's ablation, as it is printed and as the released code runs.

The paper varies gamma with c fixed, and c with gamma/c fixed. `max_step` is gamma/c, and c is 128 times the paper's,
whose gradients are of the mean loss over 128 examples. The released code clips steps to [4, 14]/255, so that gamma/c
above 14/255 hardly matters there; the paper does not mention it. Hence both.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atas.evaluation._names import written
from atas.reproduce import markdown, paper
from atas.reproduce.figures import difference, figure, time_of
from atas.reproduce.grid import QUICK_EPS, QUICK_EXAMPLES
from atas.reproduce.record import Record
from atas.reproduce.released import NOTE, PADDING
from atas.reproduce.store import Store
from atas.reproduce.study import Page, Request, Sweep, chosen_budgets
from atas.reproduce.trial import Trial, level

_BATCH = 128
_NAMES = {"max_step": "gamma/c", "c": "c"}
_CLIPS = {"clipped": "steps clipped to {clip}, as released", "unclipped": "steps not clipped, with the warm-up"}


@dataclass(frozen=True)
class Point:
    """One setting of ATAS. `shown` is its value as the paper writes it."""

    setting: str
    shown: float
    clip: str
    values: dict[str, Any]


@dataclass(frozen=True)
class Axes:
    """The recipes by budget, and the settings that are tried with each of them."""

    recipes: dict[float, str]
    points: tuple[Point, ...]
    clip: str
    examples: int | None = None


def _paper_points() -> tuple[Point, ...]:
    steps = [
        Point("max_step", step, "clipped", {"method.max_step": step}) for step in paper.ablation_values("max_step")
    ]
    scales = [Point("c", c, "clipped", {"method.c": round(_BATCH * c, 6)}) for c in paper.ablation_values("c")]
    return (*steps, *scales, *(_unclipped(point) for point in (*steps, *scales)))


def _quick_points() -> tuple[Point, ...]:
    """Fewer values, in proportion to the digits' larger budget."""
    eps, c = QUICK_EPS, 2.0
    clip = {"method.clip": [0.5 * eps, 1.75 * eps]}
    steps = [Point("max_step", k * eps, "clipped", clip | {"method.max_step": k * eps}) for k in (1.5, 2.0, 2.5)]
    scales = [Point("c", k * c, "clipped", clip | {"method.c": k * c}) for k in (0.5, 1.0, 4.0)]
    return (*steps, *scales, *(_unclipped(point) for point in (*steps, *scales)))


def _unclipped(point: Point) -> Point:
    return Point(point.setting, point.shown, "unclipped", {**point.values, "method.clip": "none"})


_FULL = Axes(
    {
        eps: f"cifar10-preact-resnet18-atas{'' if level(eps) == '8/255' else f'-eps{round(255 * eps)}'}"
        for eps in paper.budgets("cifar10")
    },
    _paper_points(),
    "[4, 14]/255",
)
_QUICK = Axes({QUICK_EPS: "digits-small-cnn-atas"}, _quick_points(), "[0.5, 1.75] eps", QUICK_EXAMPLES)
_QUICK_VALUES = {"training.epochs": 10, "method.eps": QUICK_EPS, "method.max_step": 2 * QUICK_EPS}


class Ablation(Sweep):
    """Rows are settings, columns budgets; a table for each setting, with and without the clip."""

    options = ("eps", "seeds", "attacks", "padding", "examples", "values", "reuse")

    def trials(self, request: Request) -> list[Trial]:
        """Every setting at every wanted budget."""
        axes, budgets = self._axes(request)
        cells = itertools.product(request.seeds or (0,), budgets, axes.points, request.padding or (0,))
        return [self._trial(request, eps, point, padding, seed) for seed, eps, point, padding in cells]

    def page(self, request: Request, store: Store) -> Page:
        """A table for each attack, setting and kind of clip."""
        axes, budgets = self._axes(request)
        known, errors = store.by_row(), store.errors_by_row()
        text = ["# ATAS with other step sizes", "", *self._preface(request)]
        content: list[dict[str, Any]] = []
        shown: dict[str, Record] = {}
        failed: list[str] = []
        for attack, clip, setting in itertools.product(self._attacks(request), _CLIPS, _NAMES):
            points = [point for point in axes.points if (point.clip, point.setting) == (clip, setting)]
            rows = []
            for point in points:
                for padding in sorted({0, PADDING, *(request.padding or ())}):
                    keys = [self._trial(request, eps, point, padding, 0).row for eps in budgets]
                    records = [known.get(key, []) for key in keys]
                    failed += [error for key in keys for error in errors.get(key, [])]
                    shown |= {record.key: record for found in records for record in found}
                    if any(records) or padding in (request.padding or (0,)):
                        rows += _rows(request, point, padding, budgets, records, attack)
                        content += _json(point, padding, budgets, records, attack)
            text += ["", f"## {written(attack)}, {_NAMES[setting]}: {_CLIPS[clip].format(clip=axes.clip)}", ""]
            text += markdown.table([_NAMES[setting], "", *map(level, budgets), "time"], rows)
        text += markdown.origin([*shown.values()], failed)
        about = {"study": self.name, "quick": request.quick, "changed": markdown.told(request.values)}
        return Page("\n".join(text) + "\n", {**about, "rows": content})

    def _axes(self, request: Request) -> tuple[Axes, list[float]]:
        axes = _QUICK if request.quick else _FULL
        return axes, chosen_budgets(request.eps, tuple(axes.recipes))

    def _attacks(self, request: Request) -> tuple[str, ...]:
        return request.attacks or ("autoattack",)

    def _trial(self, request: Request, eps: float, point: Point, padding: int, seed: int) -> Trial:
        axes, _ = self._axes(request)
        values = {**(_QUICK_VALUES if request.quick else {}), **point.values, **request.values}
        return Trial(
            axes.recipes[eps], values, seed, self._attacks(request), padding, request.examples or axes.examples
        )

    def _preface(self, request: Request) -> list[str]:
        said = [
            "Accuracy in percent by budget. Ours: [a, b] is the 95% interval of one run over its test images, (a to b) "
            "the range over seeds; time is that of a training's steps. Difference: ours less the paper's, in points.",
        ]
        if request.quick:
            said.append("This is the quick form, on the embedded digits and cut short: the paper has no such rows.")
        else:
            said.append(
                "c is written as in the paper, whose gradients are of the mean loss over 128 examples; `method.c` is "
                "128 times that. The paper prints one table for each of gamma/c and c and does not mention the clip."
            )
            said.append(NOTE)
        said.append(markdown.changed(request.values))
        return ["\n\n".join(sentence for sentence in said if sentence)]


def _rows(
    request: Request,
    point: Point,
    padding: int,
    budgets: Sequence[float],
    records: Sequence[Sequence[Record]],
    attack: str,
) -> list[list[str]]:
    figures = [figure(found, attack) for found in records]
    time = time_of([record for found in records for record in found])
    name = level(point.shown) if point.setting == "max_step" else f"{point.shown:g}"
    kind = f", padded by {padding}" if padding else ""
    rows = [[name, f"ours{kind}", *(str(found or "-") for found in figures), time]]
    if request.quick:
        return [*rows, ["", "paper", "no such row", *[""] * (len(budgets) - 1), ""]]
    theirs = [_theirs(point, eps, attack) for eps in budgets]
    rows.append(["", "paper", *("-" if value is None else f"{value:.2f}" for value in theirs), ""])
    if any(figures):
        gaps = [difference(ours, value) for ours, value in zip(figures, theirs, strict=True)]
        rows.append(["", f"difference{kind}", *gaps, ""])
    return rows


def _theirs(point: Point, eps: float, attack: str) -> float | None:
    return paper.ablation(point.setting, point.shown, eps) if attack == "autoattack" else None


def _json(
    point: Point, padding: int, budgets: Sequence[float], records: Sequence[Sequence[Record]], attack: str
) -> list[dict[str, Any]]:
    rows = []
    for eps, found in zip(budgets, records, strict=True):
        ours = figure(found, attack)
        rows.append(
            {
                "attack": attack,
                "setting": point.setting,
                "value": point.shown,
                "clip": point.clip,
                "padding": padding,
                "eps": level(eps),
                "ours": None if ours is None else ours.to_json(),
                "paper": _theirs(point, eps, attack),
                "seeds": [record.seed for record in found],
                "training_seconds": [record.seconds for record in found],
                "runs": [record.key for record in found],
            }
        )
    return rows


STUDY = Ablation("ablation", "ATAS with other gamma/c and c, clipped and unclipped, under AutoAttack")
