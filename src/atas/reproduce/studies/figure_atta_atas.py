"""ATTA with a step of eps against ATAS, whose mean step is larger: which one collapses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atas.reproduce import curves, plots
from atas.reproduce.figure_study import FigureStudy, Line, Table
from atas.reproduce.grid import QUICK_EPS, cifar, digits
from atas.reproduce.observations import Curves, Norms
from atas.reproduce.record import Record
from atas.reproduce.store import Store
from atas.reproduce.study import Request
from atas.reproduce.trial import level


class AttaAtas(FigureStudy):
    """Two trainings, that of ATAS is the table's."""

    needs = (Curves.name,)

    def lines(self, request: Request) -> list[Line]:
        """Both methods at the smallest budget."""
        grid, eps = (digits(), QUICK_EPS) if request.quick else (cifar("cifar10", (8 / 255,)), 8 / 255)
        network = grid.networks[0]
        fixed = self.trial(request, grid, (network, "atta", eps), (Curves(),), values={"method.step_size": eps})
        adaptive = self.trial(request, grid, (network, "atas", eps), (Curves(), Norms()))
        return [Line(network, f"atta, step {level(eps)}", fixed), Line(network, "atas, adaptive step", adaptive)]

    def table(self, request: Request, store: Store) -> Table:
        """Accuracies and mean steps."""
        return curves.accuracies(self.found(request, store), _steps, ["mean step", "paper's mean step"])

    def picture(self, request: Request, store: Store) -> Any:
        """PGD-10 accuracy on training images by epoch."""
        figure, grid = plots.panels(1, 1, width=6.0, height=3.9)
        axes = grid[0, 0]
        found = self.found(request, store)
        curves.draw(axes, found, "pgd10", lambda line: plots.METHODS[line.trial.settings.method.name][:2], scale=100)
        axes.set_ylabel("PGD-10 accuracy on training images, %")
        axes.set_ylim(bottom=plots.BELOW_NOTHING)
        plots.legend(figure, grid)
        return figure


def _steps(line: Line, records: Sequence[Record]) -> list[str]:
    return curves.mean_steps(line, records, line.trial.settings.method.settings.get("step_size"))


STUDY = AttaAtas(
    "figure-atta-atas",
    "ATTA at a step of 8/255 against ATAS: training accuracy under PGD-10 by epoch",
    "ATTA with a large step beside ATAS",
    "ATTA with a step of 8/255 collapses; ATAS does not, though its mean step, 9.3/255, is larger. It says neither "
    "for which budget nor for which network; 8/255 and the smaller network are taken here.",
    "accuracy under PGD-10 after every epoch, on a fixed slice of the training images; the mean step of ATAS is over "
    "all images and the epochs after the warm-up.",
)
