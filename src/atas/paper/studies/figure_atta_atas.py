"""Collapse of ATTA with a step of eps beside ATAS, whose mean step is larger."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from atas.paper import figure_study, plots, published
from atas.paper.figure_study import FigureStudy, Line, Table
from atas.paper.grid import QUICK_EPS, cifar, digits
from atas.paper.measurements import Curves, Norms
from atas.paper.study import StudyOptions, select, select_budgets
from atas.sweeps.record import Record
from atas.sweeps.store import Store
from atas.sweeps.trial import format_eps


class AttaAtas(FigureStudy):
    """Two trainings for each network and budget; those of ATAS are shared with the table."""

    accepted_options = ("networks", "eps", "seeds", "examples", "values", "reuse")
    required_measurements = (Curves.name,)

    def lines(self, options: StudyOptions) -> list[Line]:
        """Return both methods, by default on the smaller network at the smallest budget."""
        budgets = (QUICK_EPS,) if options.quick else tuple(published.budgets("cifar10"))
        grid = digits() if options.quick else cifar("cifar10", budgets)
        networks = select("network", options.networks or grid.networks[:1], grid.networks)
        lines = []
        for net, eps in itertools.product(networks, select_budgets(options.eps or budgets[:1], budgets)):
            panel = f"{net}, eps {format_eps(eps)}"
            fixed = self.trial(options, grid, (net, "atta", eps), (Curves(),), values={"method.step_size": eps})
            adaptive = self.trial(options, grid, (net, "atas", eps), (Curves(), Norms()))
            lines += [
                Line(panel, f"atta, step {format_eps(eps)}", fixed),
                Line(panel, "atas, adaptive step", adaptive),
            ]
        return lines

    def table(self, options: StudyOptions, store: Store) -> Table:
        """Return accuracies and mean steps."""
        return figure_study.curve_table(self.line_records(options, store), _steps, ["mean step", "paper's mean step"])

    def picture(self, options: StudyOptions, store: Store) -> Any:
        """Draw the PGD-10 accuracy on training images by epoch."""
        return figure_study.pgd10_figure(self.line_records(options, store), _style, titles=True)


_ASSUMED = ("preact-resnet18", "8/255")  # network and budget of the paper's figure, which it does not name


def _style(line: Line) -> tuple[str, str]:
    return plots.METHOD_STYLES[line.trial.resolved_recipe.method.name][:2]


def _steps(line: Line, records: Sequence[Record]) -> list[str]:
    recipe = line.trial.resolved_recipe
    in_paper = (recipe.model.name, format_eps(recipe.method.eps)) == _ASSUMED
    return figure_study.mean_step_cells(line, records, recipe.method.settings.get("step_size"), printed=in_paper)


STUDY = AttaAtas(
    "figure-atta-atas",
    "ATTA at a step of 8/255 against ATAS: training accuracy under PGD-10 by epoch",
    "ATTA with a large step beside ATAS",
    "ATTA with a step of 8/255 collapses; ATAS does not, though its mean step, 9.3/255, is larger. It says neither "
    "for which budget nor for which network; 8/255 and the smaller network are taken here. Others can be asked for "
    "(--networks, --eps), where ATTA's step is the budget.",
    "accuracy under PGD-10 after every epoch, on a fixed slice of the training images; the mean step of ATAS is over "
    "all images and the epochs after the warm-up.",
)
