"""Collapse of ATTA with a step of eps beside ATAS, whose mean step is larger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atas.paper import figure_study, plots
from atas.paper.figure_study import FigureStudy, Line, Table
from atas.paper.grid import QUICK_EPS, cifar, digits
from atas.paper.measurements import Curves, Norms
from atas.paper.study import StudyOptions
from atas.sweeps.record import Record
from atas.sweeps.store import Store
from atas.sweeps.trial import format_eps


class AttaAtas(FigureStudy):
    """Two trainings; the one of ATAS is shared with the table."""

    required_measurements = (Curves.name,)

    def lines(self, options: StudyOptions) -> list[Line]:
        """Return both methods at the smallest budget."""
        grid, eps = (digits(), QUICK_EPS) if options.quick else (cifar("cifar10", (8 / 255,)), 8 / 255)
        network = grid.networks[0]
        fixed = self.trial(options, grid, (network, "atta", eps), (Curves(),), values={"method.step_size": eps})
        adaptive = self.trial(options, grid, (network, "atas", eps), (Curves(), Norms()))
        return [Line(network, f"atta, step {format_eps(eps)}", fixed), Line(network, "atas, adaptive step", adaptive)]

    def table(self, options: StudyOptions, store: Store) -> Table:
        """Return accuracies and mean steps."""
        return figure_study.curve_table(self.line_records(options, store), _steps, ["mean step", "paper's mean step"])

    def picture(self, options: StudyOptions, store: Store) -> Any:
        """Draw the PGD-10 accuracy on training images by epoch."""
        return figure_study.pgd10_figure(self.line_records(options, store), _style, titles=False)


def _style(line: Line) -> tuple[str, str]:
    return plots.METHOD_STYLES[line.trial.resolved_recipe.method.name][:2]


def _steps(line: Line, records: Sequence[Record]) -> list[str]:
    return figure_study.mean_step_cells(line, records, line.trial.resolved_recipe.method.settings.get("step_size"))


STUDY = AttaAtas(
    "figure-atta-atas",
    "ATTA at a step of 8/255 against ATAS: training accuracy under PGD-10 by epoch",
    "ATTA with a large step beside ATAS",
    "ATTA with a step of 8/255 collapses; ATAS does not, though its mean step, 9.3/255, is larger. It says neither "
    "for which budget nor for which network; 8/255 and the smaller network are taken here.",
    "accuracy under PGD-10 after every epoch, on a fixed slice of the training images; the mean step of ATAS is over "
    "all images and the epochs after the warm-up.",
)
