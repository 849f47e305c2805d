"""The robust training loss of every method by epoch."""

from __future__ import annotations

import itertools
from typing import Any

from atas.paper import figure_study, plots, published
from atas.paper.figure_study import FigureStudy, Line, LineRecords, Table, mean, seed_list
from atas.paper.grid import METHODS, QUICK_EPS, cifar, digits
from atas.paper.measurements import Curves
from atas.paper.study import StudyOptions, select, select_budgets
from atas.sweeps.markdown import format_collapse_epochs
from atas.sweeps.store import Store
from atas.sweeps.trial import format_eps

_TOP = 1.1  # the largest loss that is drawn, as a multiple of the first epoch's
_BOTTOM = 0.95  # where the axis begins, as a multiple of the smallest loss


class Convergence(FigureStudy):
    """The runs of the CIFAR-10 table; it trains nothing else."""

    accepted_options = ("methods", "networks", "eps", "seeds", "examples", "values", "reuse")
    required_measurements = (Curves.name,)

    def lines(self, options: StudyOptions) -> list[Line]:
        """Return every method, with a panel for each network and budget."""
        grid = digits() if options.quick else cifar("cifar10", tuple(published.budgets("cifar10")))
        cells = itertools.product(
            select("network", options.networks, grid.networks),
            select_budgets(options.eps, (QUICK_EPS,) if options.quick else grid.budgets),
            select("method", options.methods, METHODS),
        )
        return [
            Line(f"{net}, eps {format_eps(eps)}", method, self.trial(options, grid, (net, method, eps), (Curves(),)))
            for net, eps, method in cells
        ]

    def table(self, options: StudyOptions, store: Store) -> Table:
        """Return the loss of the last epoch under PGD-10 and the method's own training loss."""
        lines, rows = [], []
        for line, records in self.line_records(options, store):
            curves = {
                name: [figure_study.metric_curve(record, name) for record in records] for name in ("pgd10_loss", "loss")
            }
            cells = [f"{mean([curve[-1] for curve in group]):.3f}" if group else "-" for group in curves.values()]
            lines.append(
                [
                    line.panel,
                    line.name,
                    *cells,
                    format_collapse_epochs(figure_study.collapse_epochs(records)),
                    seed_list(records),
                ]
            )
            rows.append({"panel": line.panel, "method": line.name, "by_epoch": curves})
        return Table(["panel", "method", "loss under PGD-10", "own loss", "collapse", "seeds"], lines, rows)

    def picture(self, options: StudyOptions, store: Store) -> Any:
        """Draw a panel for each network and budget."""
        figure, grid = figure_study.two_column_figure(self.line_records(options, store), _draw_panel)
        plots.legend(figure, grid, 8)
        return figure


def _draw_panel(axes: Any, name: str, results: LineRecords) -> None:
    figure_study.draw_curves(axes, results, "pgd10_loss", lambda line: plots.METHOD_STYLES[line.name][:2], share=True)
    losses = [figure_study.metric_curve(record, "pgd10_loss") for _, records in results for record in records]
    if losses:  # the losses of a collapsed run are far larger, and matplotlib's margin is a share of the range
        axes.set_ylim(_BOTTOM * min(map(min, losses)), _TOP * max(loss[0] for loss in losses))
    axes.set_ylabel("training loss under PGD-10")


STUDY = Convergence(
    "figure-convergence",
    "robust training loss under PGD-10 of all methods, both networks, eps 8, 12 and 16/255",
    "Robust training loss under PGD-10",
    "ATAS has the smallest robust training loss of the fast methods at the end of training; curves are smoothed, and "
    "no figures are printed.",
    "cross-entropy under PGD-10 after every epoch, on a fixed slice of the training images, not smoothed; that of a "
    "collapsed run leaves the picture. Methods differ in their numbers of epochs, so the training is counted in "
    "percent. Own loss: the mean over the last epoch of what the method trained on.",
)
