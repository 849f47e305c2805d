"""Accuracy under AutoAttack by budget, for every data set and network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from atas.paper import plots, published
from atas.paper.figure_study import FigureStudy, Line, LineRecords, Table, axis_unit, seed_list, two_column_figure
from atas.paper.grid import METHODS, Grid, all_cells
from atas.paper.study import StudyOptions, select
from atas.sweeps.markdown import format_difference
from atas.sweeps.record import summarize_seeds
from atas.sweeps.store import Store
from atas.sweeps.trial import format_eps

ATTACK = "autoattack"
_QUICK_EXAMPLES = 16
_OFFSET = 0.015  # of the smallest budget, so that intervals do not hide each other
_QUICK_METHODS = ("fgsm-rs", "atta", "atas")


class Budgets(FigureStudy):
    """The runs of the tables; nothing else is trained."""

    accepted_options = ("methods", "networks", "eps", "seeds", "examples", "values", "reuse")

    def lines(self, options: StudyOptions) -> list[Line]:
        """Return all cells of all tables."""
        methods = select("method", options.methods, _QUICK_METHODS if options.quick else METHODS)
        return [
            Line(f"{grid.data}, {network}", method, self.trial(options, grid, (network, method, eps), (), (ATTACK,)))
            for grid, network, eps in ((_fewer(grid), network, eps) for grid, network, eps in all_cells(options))
            for method in methods
            if grid.cell(network, method, eps) is not None
        ]

    def table(self, options: StudyOptions, store: Store) -> Table:
        """Return our accuracies, the paper's, and the differences."""
        lines, rows = [], []
        for line, records in self.line_records(options, store):
            eps, ours, paper = (
                line.trial.resolved_recipe.method.eps,
                summarize_seeds(records, ATTACK),
                _published(line),
            )
            printed = "-" if paper is None else f"{paper:.2f}"
            shown = [str(ours or "-"), printed, format_difference(ours, paper)]
            lines.append([line.panel, line.name, format_eps(eps), *shown, seed_list(records)])
            known = None if ours is None else ours.to_json()
            rows.append(
                {"panel": line.panel, "method": line.name, "eps": format_eps(eps), "ours": known, "paper": paper}
            )
        header = ["data, network", "method", "eps", "ours", "paper", "difference", "seeds"]
        return Table(header, lines, rows)

    def picture(self, options: StudyOptions, store: Store) -> Any:
        """Draw a panel for each data set and network."""
        results = self.line_records(options, store)
        figure, grid = two_column_figure(results, _draw_panel, width=5.0, height=3.8)
        plots.legend(figure, grid, 5)
        return figure


def _fewer(grid: Grid) -> Grid:
    """Return a grid with fewer images in the quick form, which has several budgets."""
    return grid if grid.examples is None else replace(grid, examples=_QUICK_EXAMPLES)


def _published(line: Line) -> float | None:
    data, _, network = line.panel.partition(", ")
    paper = published.lookup(data, network, line.trial.resolved_recipe.method.eps, line.name)
    return None if paper is None else paper.accuracy(ATTACK)


def _draw_panel(axes: Any, name: str, results: LineRecords) -> None:
    """Draw our accuracies as lines with intervals and the paper's as open markers, shifted a little by method."""
    methods = list(dict.fromkeys(line.name for line, _ in results))
    smallest = min(line.trial.resolved_recipe.method.eps for line, _ in results)
    for number, method in enumerate(methods):
        colour, style, marker = plots.METHOD_STYLES[method]
        own = [(line, summarize_seeds(records, ATTACK)) for line, records in results if line.name == method]
        aside = _OFFSET * smallest * (number - (len(methods) - 1) / 2)
        positions = [axis_unit(smallest)[0] * (line.trial.resolved_recipe.method.eps + aside) for line, _ in own]
        ours = [(x, known) for x, (_, known) in zip(positions, own, strict=True) if known is not None]
        if ours:
            x = [x for x, _ in ours]
            axes.plot(x, [known.value for _, known in ours], style, marker=marker, color=colour, label=method)
            axes.vlines(x, [known.low for _, known in ours], [known.high for _, known in ours], color=colour)
        points = [
            (x, y) for x, y in zip(positions, [_published(line) for line, _ in own], strict=True) if y is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), " ", marker=marker, color=colour, fillstyle="none")
            axes.plot([], [], " ", marker="o", color=plots.GREY, fillstyle="none", label="paper")
    budgets = [line.trial.resolved_recipe.method.eps for line, _ in results]
    plots.budget_axis(axes, budgets, *axis_unit(budgets[0]))
    axes.set_ylabel("AutoAttack accuracy, test images, %")
    axes.set_ylim(bottom=-1)


STUDY = Budgets(
    "figure-budgets",
    "accuracy under AutoAttack against eps for every data set, network and method, ours beside the paper's",
    "Accuracy under AutoAttack against the budget",
    "ATAS has the highest accuracy under AutoAttack of all fast methods, at every budget, on every data set and "
    "network; its figures are those of the tables.",
    "the runs of the tables, on the images as they are; some of the paper's may be of images padded to 40 x 40. "
    "ImageNet is run where its networks are asked for (--networks resnet18).",
)
