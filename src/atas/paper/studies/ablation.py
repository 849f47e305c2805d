"""ATAS with other step sizes under AutoAttack: the paper's ablation, with and without the clip of the released code.

The paper varies gamma with c fixed, and c with gamma/c fixed. `max_step` is gamma/c. `c` is 128 times the paper's,
whose gradients are of the mean loss over 128 examples. The released code clips steps to [4, 14]/255, so gamma/c above
14/255 has little effect; the paper does not mention the clip. The study runs both.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atas.attacks.registry import display_name
from atas.paper import published
from atas.paper.grid import QUICK_EPS, QUICK_EXAMPLES
from atas.paper.study import QUICK_NOTE, Page, StudyOptions, TrainingStudy, select_budgets
from atas.sweeps import markdown
from atas.sweeps.padded_evaluation import NOTE, PADDING
from atas.sweeps.record import Record, summarize_seeds
from atas.sweeps.store import Store
from atas.sweeps.trial import Trial, format_eps

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
    """The recipes by budget, and the settings to try with each of them."""

    recipes: dict[float, str]
    points: tuple[Point, ...]
    clip: str
    examples: int | None = None


def _paper_points() -> tuple[Point, ...]:
    steps = [
        Point("max_step", step, "clipped", {"method.max_step": step}) for step in published.ablation_values("max_step")
    ]
    scales = [Point("c", c, "clipped", {"method.c": round(_BATCH * c, 6)}) for c in published.ablation_values("c")]
    return (*steps, *scales, *(_unclipped(point) for point in (*steps, *scales)))


def _quick_points() -> tuple[Point, ...]:
    """Return fewer points, scaled to the larger budget of the digits."""
    eps, c = QUICK_EPS, 2.0
    clip = {"method.clip": [0.5 * eps, 1.75 * eps]}
    steps = [Point("max_step", k * eps, "clipped", clip | {"method.max_step": k * eps}) for k in (1.5, 2.0, 2.5)]
    scales = [Point("c", k * c, "clipped", clip | {"method.c": k * c}) for k in (0.5, 1.0, 4.0)]
    return (*steps, *scales, *(_unclipped(point) for point in (*steps, *scales)))


def _unclipped(point: Point) -> Point:
    return Point(point.setting, point.shown, "unclipped", {**point.values, "method.clip": "none"})


_FULL = Axes(
    {
        eps: f"cifar10-preact-resnet18-atas{'' if format_eps(eps) == '8/255' else f'-eps{round(255 * eps)}'}"
        for eps in published.budgets("cifar10")
    },
    _paper_points(),
    "[4, 14]/255",
)
_QUICK = Axes({QUICK_EPS: "digits-small-cnn-atas"}, _quick_points(), "[0.5, 1.75] eps", QUICK_EXAMPLES)
_QUICK_VALUES = {"training.epochs": 10, "method.eps": QUICK_EPS, "method.max_step": 2 * QUICK_EPS}


class Ablation(TrainingStudy):
    """A table for each setting, with and without the clip; columns are budgets."""

    accepted_options = ("eps", "seeds", "attacks", "padding", "examples", "values", "reuse")

    def trials(self, options: StudyOptions) -> list[Trial]:
        """Return every setting at every selected budget."""
        axes, budgets = self._axes(options)
        cells = itertools.product(options.seeds or (0,), budgets, axes.points, options.padding or (0,))
        return [self._trial(options, eps, point, padding, seed) for seed, eps, point, padding in cells]

    def page(self, options: StudyOptions, store: Store) -> Page:
        """Return a page with a table for each attack, setting and kind of clip."""
        axes, budgets = self._axes(options)
        known, errors = store.by_row(), store.errors_by_row()
        body: list[str] = []
        content: list[dict[str, Any]] = []
        shown: dict[str, Record] = {}
        failed: list[str] = []
        for attack, clip, setting in itertools.product(self._attacks(options), _CLIPS, _NAMES):
            points = [point for point in axes.points if (point.clip, point.setting) == (clip, setting)]
            rows = []
            for point in points:
                for padding in sorted({0, PADDING, *(options.padding or ())}):
                    keys = [self._trial(options, eps, point, padding, 0).row for eps in budgets]
                    records = [known.get(key, []) for key in keys]
                    failed += [error for key in keys for error in errors.get(key, [])]
                    shown |= {record.key: record for group in records for record in group}
                    if any(records) or padding in (options.padding or (0,)):
                        rows += _rows(options, point, padding, budgets, records, attack)
                        content += _json(point, padding, budgets, records, attack)
            body += ["", f"## {display_name(attack)}, {_NAMES[setting]}: {_CLIPS[clip].format(clip=axes.clip)}", ""]
            body += markdown.table([_NAMES[setting], "", *map(format_eps, budgets), "time"], rows)
        return self.build_page(
            options,
            title="ATAS with other step sizes",
            preface=self._preface(options),
            body=body,
            rows=content,
            records=[*shown.values()],
            errors=failed,
        )

    def _axes(self, options: StudyOptions) -> tuple[Axes, list[float]]:
        axes = _QUICK if options.quick else _FULL
        return axes, select_budgets(options.eps, tuple(axes.recipes))

    def _attacks(self, options: StudyOptions) -> tuple[str, ...]:
        return options.attacks or ("autoattack",)

    def _trial(self, options: StudyOptions, eps: float, point: Point, padding: int, seed: int) -> Trial:
        axes, _ = self._axes(options)
        values = {**(_QUICK_VALUES if options.quick else {}), **point.values, **options.values}
        return Trial(
            axes.recipes[eps], values, seed, self._attacks(options), padding, options.examples or axes.examples
        )

    def _preface(self, options: StudyOptions) -> list[str]:
        preface = [
            "Accuracy in percent by budget. Ours: [a, b] is the 95% interval of one run over its test images, (a to b) "
            "the range over seeds; time is that of a training's steps. Difference: ours less the paper's, in points.",
        ]
        if options.quick:
            preface.append(QUICK_NOTE.format("rows"))
        else:
            preface.append(
                "c is written as in the paper, whose gradients are of the mean loss over 128 examples; `method.c` is "
                "128 times that. The paper prints one table for each of gamma/c and c and does not mention the clip."
            )
            preface.append(NOTE)
        return [*preface, markdown.overrides_sentence(options.values)]


def _rows(
    options: StudyOptions,
    point: Point,
    padding: int,
    budgets: Sequence[float],
    records: Sequence[Sequence[Record]],
    attack: str,
) -> list[list[str]]:
    stats = [summarize_seeds(group, attack) for group in records]
    time = markdown.format_training_time([record for group in records for record in group])
    name = format_eps(point.shown) if point.setting == "max_step" else f"{point.shown:g}"
    kind = f", padded by {padding}" if padding else ""
    rows = [[name, f"ours{kind}", *(str(ours or "-") for ours in stats), time]]
    if options.quick:
        return [*rows, ["", "paper", "no such row", *[""] * (len(budgets) - 1), ""]]
    paper = [_published(point, eps, attack) for eps in budgets]
    rows.append(["", "paper", *("-" if value is None else f"{value:.2f}" for value in paper), ""])
    if any(stats):
        gaps = [markdown.format_difference(ours, value) for ours, value in zip(stats, paper, strict=True)]
        rows.append(["", f"difference{kind}", *gaps, ""])
    return rows


def _published(point: Point, eps: float, attack: str) -> float | None:
    return published.ablation(point.setting, point.shown, eps) if attack == "autoattack" else None


def _json(
    point: Point, padding: int, budgets: Sequence[float], records: Sequence[Sequence[Record]], attack: str
) -> list[dict[str, Any]]:
    rows = []
    for eps, group in zip(budgets, records, strict=True):
        ours = summarize_seeds(group, attack)
        rows.append(
            {
                "attack": attack,
                "setting": point.setting,
                "value": point.shown,
                "clip": point.clip,
                "padding": padding,
                "eps": format_eps(eps),
                "ours": None if ours is None else ours.to_json(),
                "paper": _published(point, eps, attack),
                "seeds": [record.seed for record in group],
                "training_seconds": [record.seconds for record in group],
                "runs": [record.key for record in group],
            }
        )
    return rows


STUDY = Ablation("ablation", "ATAS with other gamma/c and c, clipped and unclipped, under AutoAttack")
