"""Collapse of FGSM-RS with and without adaptive steps on the wide network."""

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

_EPS = 8 / 255
_NETWORK = "wrn-28-10"


class Adaptive(FigureStudy):
    """Three trainings: a fixed step of eps, as in the text, the usual fixed step of the table, and adaptive steps."""

    accepted_options = ("networks", "eps", "seeds", "examples", "values", "reuse")
    required_measurements = (Curves.name,)

    def lines(self, options: StudyOptions) -> list[Line]:
        """Return three lines for each selected network and budget, by default WRN-28-10 at 8/255."""
        budgets = (QUICK_EPS,) if options.quick else tuple(published.budgets("cifar10"))
        grid = digits() if options.quick else cifar("cifar10", budgets)
        usual = "2 eps" if options.quick else "1.25 eps"  # as in the recipes
        networks = select("network", options.networks or grid.networks[-1:], grid.networks)
        lines = []
        for net, eps in itertools.product(networks, select_budgets(options.eps or budgets[:1], budgets)):
            panel, measurements = f"{net}, eps {format_eps(eps)}", (Curves(),)
            fixed = self.trial(options, grid, (net, "fgsm-rs", eps), measurements, values={"method.step_size": eps})
            large = self.trial(options, grid, (net, "fgsm-rs", eps), measurements)
            adaptive = self.trial(options, grid, (net, "fgsm-rs-adaptive", eps), (Curves(), Norms()))
            lines += [
                Line(panel, "fgsm-rs, step eps", fixed),
                Line(panel, f"fgsm-rs, step {usual}", large),
                Line(panel, "fgsm-rs, adaptive steps", adaptive),
            ]
        return lines

    def table(self, options: StudyOptions, store: Store) -> Table:
        """Return accuracies and mean steps."""
        return figure_study.curve_table(self.line_records(options, store), _steps, ["mean step", "paper's mean step"])

    def picture(self, options: StudyOptions, store: Store) -> Any:
        """Draw the PGD-10 accuracy on training images by epoch."""
        results = self.line_records(options, store)
        styles = dict(zip(dict.fromkeys(line.name for line, _ in results), _STYLES, strict=True))
        return figure_study.pgd10_figure(results, lambda line: styles[line.name], titles=True)


_STYLES = ((plots.ORANGE, "--"), (plots.RED, ":"), (plots.BLUE, "-"))


def _steps(line: Line, records: Sequence[Record]) -> list[str]:
    recipe, fixed = line.trial.resolved_recipe, None
    if recipe.method.name == "fgsm-rs":
        fixed = recipe.threat.size("step_size", recipe.method.settings.get("step_size"), auto=1.25)
    in_paper = (recipe.model.name, format_eps(recipe.method.eps)) == (_NETWORK, format_eps(_EPS))
    return figure_study.mean_step_cells(line, records, fixed, printed=in_paper)


STUDY = Adaptive(
    "figure-adaptive",
    "FGSM-RS with fixed and with adaptive steps on WRN-28-10: training accuracy under PGD-10 by epoch",
    "FGSM-RS with fixed and with adaptive steps",
    "on WideResNet-28-10, FGSM-RS with a fixed step of 8/255 collapses; with adaptive steps it does not, though their "
    "mean, 10.8/255, is larger. (Its appendix has a step of 10/255 for FGSM-RS, so both are run.)",
    "accuracy under PGD-10 after every epoch, on a fixed slice of the training images; the mean step is over all "
    "images and epochs. Other networks and budgets can be asked for (--networks, --eps), of which the paper says "
    "nothing.",
)
