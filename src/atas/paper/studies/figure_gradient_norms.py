"""The tail of gradient norms: a histogram, and the ratio of the bounds for every data set and budget."""

from __future__ import annotations

from typing import Any

from atas.paper import plots, published
from atas.paper.figure_study import FigureStudy, Line, Table, axis_unit, mean, seed_list
from atas.paper.grid import QUICK_EPS, all_cells
from atas.paper.measurements import Norms
from atas.paper.study import StudyOptions
from atas.paper.theory.bounds import both_ratios
from atas.sweeps.store import Store
from atas.sweeps.trial import format_eps

_BETA = 0.5
_KINDS = ("mean", "largest", "last")
_STYLES = {
    ("cifar10", "preact-resnet18"): (plots.BLUE, "-", "o"),
    ("cifar10", "wrn-28-10"): (plots.BLUE, "--", "s"),
    ("cifar100", "preact-resnet18"): (plots.ORANGE, "-", "o"),
    ("cifar100", "wrn-28-10"): (plots.ORANGE, "--", "s"),
    ("imagenet", "resnet18"): (plots.GREEN, "-", "o"),
    ("imagenet", "resnet50"): (plots.GREEN, "--", "s"),
}


class GradientNormsFigure(FigureStudy):
    """The runs of ATAS in the tables; it trains nothing else."""

    accepted_options = ("networks", "eps", "seeds", "examples", "values", "reuse")
    required_measurements = (Norms.name,)

    def lines(self, options: StudyOptions) -> list[Line]:
        """Return ATAS on every data set, network and budget; ImageNet only if its networks are selected."""
        return [
            Line(grid.data, network, self.trial(options, grid, (network, "atas", eps), (Norms(),)))
            for grid, network, eps in all_cells(options)
        ]

    def table(self, options: StudyOptions, store: Store) -> Table:
        """Return the tail by three readings of G, and the ratios of the bounds."""
        lines, rows = [], []
        for line, records in self.line_records(options, store):
            eps = line.trial.resolved_recipe.method.eps
            tails = {kind: [record.observed["norms"]["tail"][kind] for record in records] for kind in _KINDS}
            paper = (
                published.convergence_gap(eps) if (line.panel, line.name) == ("cifar10", "preact-resnet18") else None
            )
            cells = [f"{mean(tails[kind]):.3f}" if records else "-" for kind in _KINDS]
            bounds = [f"{value:.3f}" for value in both_ratios(mean(tails["mean"]), _BETA)] if records else ["-", "-"]
            printed = "-" if paper is None else f"{paper['ratio']:.1f}"
            lines.append([line.panel, line.name, format_eps(eps), *cells, printed, *bounds, seed_list(records)])
            rows.append({"data": line.panel, "network": line.name, "eps": format_eps(eps), "tail": tails})
        header = ["data", "network", "eps", *(f"tail, {kind}" for kind in _KINDS), "paper"]
        note = (
            "Tail: mean G^2 / (mean G)^2 over the training images, G the root of ATAS's moving average v: its mean "
            "over the epochs (as in the picture), the largest, and the last. Ratio of the bounds: as the paper prints "
            "it, tail^(1/2) (1 - beta)^(-1/4), and as it follows from the theorems, with (1 - beta)^(1/4)."
        )
        return Table([*header, "ratio printed", "ratio right", "seeds"], lines, rows, notes=(note,))

    def picture(self, options: StudyOptions, store: Store) -> Any:
        """Draw the histogram of the first run, and the tail by budget."""
        results = self.line_records(options, store)
        figure, grid = plots.panels(1, 2, width=5.2, height=3.9)
        factor, called = axis_unit(QUICK_EPS if options.quick else 8 / 255)
        left, right = grid[0]
        shown = next(((line, records[0]) for line, records in results if records), None)
        plots.placeholder(left, [shown] if shown else [])
        if shown:
            _histogram(left, *shown)
        for data, network in dict.fromkeys((line.panel, line.name) for line, _ in results):
            points = [
                (line.trial.resolved_recipe.method.eps, mean([r.observed["norms"]["tail"]["mean"] for r in records]))
                for line, records in results
                if (line.panel, line.name) == (data, network) and records
            ]
            if points:
                colour, style, marker = _STYLES.get((data, network), (plots.BLUE, "-", "o"))
                x, y = [factor * eps for eps, _ in points], [tail for _, tail in points]
                right.plot(x, y, style, marker=marker, color=colour, label=f"{data}, {network}")
        paper = [(eps, published.convergence_gap(eps)) for eps in published.budgets("cifar10")]
        if not options.quick:
            budgets, known = [factor * eps for eps, _ in paper], [gap["ratio"] for _, gap in paper if gap]
            right.plot(budgets, known, " ", marker="x", color=plots.BLACK, label="paper: cifar10, preact-resnet18")
        right.axhline(1, color=plots.GREY, linewidth=1)
        run = [pair for pair in results if pair[1]] or results
        plots.budget_axis(right, [line.trial.resolved_recipe.method.eps for line, _ in run], factor, called)
        right.set_ylabel("mean G² / (mean G)²")
        right.set_title("how long the tail is (1: all norms equal)", fontsize=11)
        plots.legend(figure, grid[:, 1:], 2)
        return figure


def _histogram(axes: Any, line: Line, record: Any) -> None:
    norms = record.observed["norms"]
    edges, counts = norms["histogram"]["edges"], norms["histogram"]["counts"]
    axes.stairs(counts, edges, fill=True, color=plots.SKY)
    average = norms["average"]["norm"]
    axes.axvline(average, color=plots.RED, linewidth=1.2)
    plots.end_label(axes, average, max(counts), f"mean {average:.2f}", plots.RED)
    axes.set(xlabel="gradient norm G of an example, mean over the epochs", ylabel="training images")
    axes.set_title(f"{line.panel}, {line.name}, eps {format_eps(line.trial.resolved_recipe.method.eps)}", fontsize=11)


STUDY = GradientNormsFigure(
    "figure-gradient-norms",
    "histogram of gradient norms, and how long-tailed they are for every data set, network and eps",
    "Gradient norms and how long their tail is",
    "the histogram of G for ResNet-18 on CIFAR-10 at 8/255, and mean G^2 / (mean G)^2 for all data sets, networks and "
    "budgets. It prints no figures but those that its table of convergence gaps takes from it: 1.4, 1.5 and 1.6 on "
    "CIFAR-10 with ResNet-18.",
    "norms of the summed loss's gradient where each attack starts, remembered by the table's runs of ATAS after "
    "every epoch; the warm-up remembers none. ImageNet is run where its networks are asked for (--networks resnet18).",
)
