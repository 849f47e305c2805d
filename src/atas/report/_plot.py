"""Training curves of several runs, one panel each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atas._files import write_atomically
from atas.errors import UsageError
from atas.report._compare import Summary

# Okabe and Ito's colours: told apart by colour-blind readers; line styles differ too.
_CURVES = (("clean", "clean", "#999999", ":"), ("fgsm", "FGSM", "#E69F00", "--"), ("pgd10", "PGD-10", "#0072B2", "-"))
_MARK = "#D55E00"


def plot_curves(runs: Sequence[Summary], path: Path) -> None:
    """Draw the monitor's accuracies by epoch; the moment of a collapse is marked. PNG, SVG or PDF by the name."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("plots need matplotlib; install it with: pip install 'atas[plots]'") from error

    columns = min(len(runs), 3)
    rows = -(-len(runs) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes in grid.flat[len(runs) :]:
        axes.set_visible(False)
    for axes, run in zip(grid.flat, runs, strict=False):
        epochs = [row["epoch"] + 1 for row in run.epochs]
        for key, label, colour, style in _CURVES:
            axes.plot(epochs, [100 * row[key] for row in run.epochs], style, color=colour, label=label, linewidth=1.8)
        if run.collapsed_in:
            axes.axvline(run.collapsed_in, color=_MARK, linewidth=1)
            late = run.collapsed_in > 0.6 * epochs[-1]
            axes.annotate(
                "collapse",
                (run.collapsed_in, 103),
                xytext=(-4 if late else 4, 0),
                textcoords="offset points",
                color=_MARK,
                fontsize=9,
                ha="right" if late else "left",
                va="top",
            )
        what = f"{run.recipe.method.name}, {run.recipe.threat!r}"
        axes.set_title(what if run.name == run.recipe.method.name else f"{run.name}\n{what}", fontsize=11)
        axes.set_xlabel("epoch")
        axes.set_ylim(0, 104)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for row in grid:
        row[0].set_ylabel("accuracy on the probe, %")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(_CURVES), frameon=False)
    kind = path.suffix.removeprefix(".").lower() or "png"
    if kind not in figure.canvas.get_supported_filetypes():
        raise UsageError(f"a plot cannot be written as '{path.suffix}'; use .png, .svg or .pdf")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: figure.savefig(temporary, format=kind, dpi=150))
