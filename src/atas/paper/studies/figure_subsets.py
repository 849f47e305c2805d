"""Collapse of single-step training on examples with small or with large gradient norms."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from atas import data
from atas.paper import figure_study, plots, published
from atas.paper.figure_study import FigureStudy, Line, LineRecords, Table, entries, mean
from atas.paper.grid import QUICK_EPS
from atas.paper.measurements import DECILES, Curves, RobustLoss
from atas.paper.study import StudyOptions, select, select_budgets
from atas.paper.subsets import NormSubset, equal_epochs, quick_values, ranking_trial, subset_grid
from atas.sweeps import markdown
from atas.sweeps.record import Record
from atas.sweeps.store import Store
from atas.sweeps.trial import Trial, format_eps
from atas.training.data import load_data

_SUBSETS = ((1, 2), (1, 3), (1, 4), (7, 10), (8, 10), (9, 10))
_STYLES = dict(zip(_SUBSETS, plots.SERIES_STYLES, strict=True))


@dataclass(frozen=True)
class Setting:
    """A panel: a method, a budget and a step."""

    method: str
    eps: float
    step: float

    def __str__(self) -> str:
        return f"{self.method}, eps {format_eps(self.eps)}, step {format_eps(self.step)}"


_SETTINGS = tuple(
    Setting(method, eps / 255, step / 255)
    for method, eps, step in (
        ("fgsm-rs", 8, 10),
        ("fgsm-rs", 8, 14),
        ("fgsm-rs", 12, 12),
        ("fgsm-rs", 12, 15),
        ("atta", 12, 15),
        ("atta", 12, 18),
    )
)
_QUICK = tuple(
    Setting(method, QUICK_EPS, step * QUICK_EPS) for method, step in (("fgsm-rs", 1), ("fgsm-rs", 2), ("atta", 1))
)


class Subsets(FigureStudy):
    """Two runs that rank the training images, then a run for each subset and setting."""

    accepted_options = ("methods", "eps", "seeds", "examples", "values", "reuse")
    required_measurements = (Curves.name,)
    quick_subsets: tuple[tuple[int, int], ...] = ((1, 2), (1, 4), (7, 10), (9, 10))
    """First and last decile of each subset in the quick form."""

    def dependencies(self, options: StudyOptions) -> list[Trial]:
        """Return the runs that rank the images."""
        return [ranking_trial(self, options, method) for method in self._methods(options)]

    def lines(self, options: StudyOptions) -> list[Line]:
        """Return all subsets in every selected panel."""
        known = _QUICK if options.quick else _SETTINGS
        budgets = select_budgets(options.eps, tuple(dict.fromkeys(setting.eps for setting in known)))
        settings = [s for s in known if s.method in self._methods(options) and s.eps in budgets]
        ranks = dict(zip(self._methods(options), self.dependencies(options), strict=True))
        parts = itertools.product(settings, self.quick_subsets if options.quick else _SUBSETS)
        return [self._line(options, setting, NormSubset(ranks[setting.method], *ends)) for setting, ends in parts]

    def table(self, options: StudyOptions, store: Store) -> Table:
        """Return accuracies of each subset, and the share of each class in each decile."""
        results = self.line_records(options, store)
        table = figure_study.curve_table(results, _extra_cells, ["all images, last", "iterations"])
        pairs = zip(table.rows, results, strict=True)
        rows = [row | {"pgd10_percent_of_all_images": _accuracy_on_all(*pair)} for row, pair in pairs]
        return replace(table, rows=rows, notes=self._shares(options, store))

    def picture(self, options: StudyOptions, store: Store) -> Any:
        """Draw a panel for each setting; lines of small norms are solid, those of large norms dashed."""
        figure, grid = figure_study.two_column_figure(self.line_records(options, store), _draw_panel, sharey=True)
        for row in grid:
            row[0].set_ylim(bottom=plots.PERCENT_BOTTOM)  # shared, so only now: all is drawn
            row[0].set_ylabel("PGD-10 accuracy, %")
        plots.legend(figure, grid, len(_SUBSETS))
        return figure

    def _methods(self, options: StudyOptions) -> list[str]:
        return select("method", options.methods, ("fgsm-rs", "atta"))

    def _line(self, options: StudyOptions, setting: Setting, subset: NormSubset) -> Line:
        """Return the line with the number of epochs whose iterations come nearest to those on all images."""
        grid = subset_grid(options)
        cell = (grid.networks[0], setting.method, setting.eps)
        values = {"method.step_size": setting.step, **quick_values(options)}
        trial = self.trial(options, grid, cell, (Curves(), RobustLoss()), values=values)
        training, count = trial.resolved_recipe.training, _num_images(trial)
        epochs = equal_epochs(count, round(subset.share * count), training.batch_size, training.epochs)
        trial = replace(trial, values={**trial.values, "training.epochs": epochs}, subset=subset)
        return Line(str(setting), str(subset), trial)

    def _shares(self, options: StudyOptions, store: Store) -> list[str]:
        notes = []
        for method, trial in zip(self._methods(options), self.dependencies(options), strict=True):
            record = store.record(trial)
            if record is None or DECILES not in record.observed:
                continue
            shares = [[100 * share for share in row] for row in record.observed[DECILES]["class_shares"]]
            header = ["subset", *(f"class {number}" for number in range(len(shares[0])))]
            rows = [[f"D_{n}^{n}", *(f"{share:.1f}" for share in row)] for n, row in enumerate(shares, 1)]
            least, most = min(map(min, shares)), max(map(max, shares))
            paper = (
                "" if options.quick else " (the paper: {:.2f} and {:.2f})".format(*published.class_share_of_subsets())
            )
            notes += [
                f"Shares of the classes, in percent, as {method} with a step of "
                f"{format_eps(trial.resolved_recipe.method.settings['max_step'])} ranks the images: least {least:.2f}, "
                f"most {most:.2f}{paper}.",
                "\n".join(markdown.table(header, rows, left=1)),
            ]
        return notes


def _draw_panel(axes: Any, name: str, results: LineRecords) -> None:
    figure_study.draw_curves(axes, results, "pgd10", _style, scale=100, share=True)


def _style(line: Line) -> tuple[str, str]:
    subset = line.trial.subset
    assert isinstance(subset, NormSubset)
    return _STYLES[subset.first, subset.last]


def _extra_cells(line: Line, records: Sequence[Record]) -> list[str]:
    """Return the accuracy of the final weights on all training images, and the number of iterations."""
    whole = _accuracy_on_all(line, records)
    return [f"{mean(whole):.1f}" if whole else "-", _iterations(line)]


def _accuracy_on_all(line: Line, records: Sequence[Record]) -> list[float]:
    return [100 * entry["right"] / entry["n"] for entry in entries(line, records, RobustLoss)]


def _num_images(trial: Trial) -> int:
    """Return the number of training images, of which data whose size is not fixed is read."""
    recipe = trial.resolved_recipe
    return data.num_train_images(recipe.data.name) or len(load_data(recipe).train)


def _iterations(line: Line) -> str:
    recipe, subset = line.trial.resolved_recipe, line.trial.subset
    assert subset is not None
    images = round(subset.share * _num_images(line.trial))
    return str(recipe.training.epochs * -(-images // recipe.training.batch_size))


STUDY = Subsets(
    "figure-subsets",
    "training on subsets with small or large gradient norms, FGSM-RS and ATTA: which ones collapse",
    "Training on subsets by gradient norm",
    "for each subset, a larger step makes a collapse more likely; at a fixed step, subsets with small gradient norms "
    "collapse less. ATTA at 12/255 with steps of 15/255 and 18/255 collapses on D_7^10, D_8^10 and D_9^10, not on "
    "D_1^2, D_1^3 and D_1^4. Classes are balanced in all subsets. Of FGSM-RS it names 8/255 with 10/255 alone.",
    "images are ranked by the gradient norm at the start of the attack, averaged over the epochs of a run on all of "
    "them at 8/255 (FGSM-RS with 10/255, ATTA with 4/255). D_i^j has the i-th to the j-th tenth. Each training has as "
    "many iterations as one on all images, to the nearest epoch; ATTA resets its memory every ten of its epochs, "
    "which are shorter then. PGD-10 accuracy is after every epoch, on a fixed slice of all training images, and of "
    "the final weights on all of them.",
)
