"""Training curves of several runs, one panel each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atas._plots import BLUE, ORANGE, RED, new_figure, plain, save_figure
from atas.report._compare import Summary

_CURVES = (("clean", "clean", "#999999", ":"), ("fgsm", "FGSM", ORANGE, "--"), ("pgd10", "PGD-10", BLUE, "-"))


def plot_curves(runs: Sequence[Summary], path: Path) -> None:
    """Draw the monitor's accuracies by epoch; the moment of a collapse is marked. PNG, SVG or PDF by the name."""
    columns = min(len(runs), 3)
    rows = -(-len(runs) // columns)
    figure = new_figure(4.2 * columns, 3.2 * rows + 0.5)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes in grid.flat[len(runs) :]:
        axes.set_visible(False)
    for axes, run in zip(grid.flat, runs, strict=False):
        epochs = [row["epoch"] + 1 for row in run.epochs]
        for key, label, colour, style in _CURVES:
            axes.plot(epochs, [100 * row[key] for row in run.epochs], style, color=colour, label=label, linewidth=1.8)
        if run.collapsed_in:
            axes.axvline(run.collapsed_in, color=RED, linewidth=1)
            late = run.collapsed_in > 0.6 * epochs[-1]
            axes.annotate(
                "collapse",
                (run.collapsed_in, 103),
                xytext=(-4 if late else 4, 0),
                textcoords="offset points",
                color=RED,
                fontsize=9,
                ha="right" if late else "left",
                va="top",
            )
        what = f"{run.recipe.method.name}, {run.recipe.threat!r}"
        axes.set_title(what if run.name == run.recipe.method.name else f"{run.name}\n{what}", fontsize=11)
        axes.set_xlabel("epoch")
        axes.set_ylim(0, 104)
        plain(axes)
    for row in grid:
        row[0].set_ylabel("accuracy on the probe, %")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(_CURVES), frameon=False)
    save_figure(figure, path)
