"""Styles and axes of the figures, in a palette that colour-blind readers can distinguish."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from atas._utils.plotting import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, new_figure, style_axes
from atas.errors import UsageError

METHOD_STYLES = {
    "atas": (BLUE, "-", "o"),
    "atta": (ORANGE, "-", "s"),
    "fgsm-rs": (RED, "--", "^"),
    "fgsm-rs-adaptive": (BLUE, "-", "o"),
    "fgsm-ga": (GREEN, "-.", "D"),
    "ssat": (PURPLE, ":", "v"),
    "free": (SKY, "--", "<"),
    "yopo": (GREY, "-.", ">"),
    "pgd": (BLACK, ":", "*"),
}
SERIES_STYLES = ((BLUE, "-"), (SKY, "-"), (GREEN, "-"), (ORANGE, "--"), (RED, "--"), (PURPLE, "--"))
PERCENT_BOTTOM = -2  # where an axis of percentages begins, so that a line at 0 can be seen
_WIDTH, _HEIGHT = 4.6, 3.5  # of a panel, in inches
_LABEL_WIDTH = 1.5


def require_matplotlib() -> None:
    """Raise UsageError if matplotlib is missing, before anything is trained."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "figures need matplotlib; install it with: pip install 'atas[plots]', or pass --no-pictures and draw later"
        ) from error


def panels(rows: int, columns: int, width: float = _WIDTH, height: float = _HEIGHT, **options: Any) -> tuple[Any, Any]:
    """Return a figure and its grid of axes."""
    figure = new_figure(max(width * columns, 5.0), height * rows + 0.4)
    grid = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in grid.flat:
        style_axes(axes)
    return figure, grid


def math_label(name: str) -> str:
    """Return the name of a subset as a formula; other names stay.

    >>> math_label("D_7^10"), math_label("atas")
    ('$D_{7}^{10}$', 'atas')
    """
    return re.sub(r"D_(\d+)\^(\d+)", r"$D_{\1}^{\2}$", name)


def epoch_axis(axes: Any, label: str = "epoch") -> None:
    """Label a horizontal axis with whole epochs."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(label)


def budget_axis(axes: Any, values: Iterable[float], factor: float, called: str) -> None:
    """Label a horizontal axis with these budgets, in the unit `called`."""
    axes.set_xticks(sorted({round(factor * eps, 3) for eps in values}))
    axes.set_xlabel(f"budget eps, {called}")


def legend(figure: Any, grid: Any, columns: int = 4) -> None:
    """Draw one legend below all panels, with each label once and as many columns as fit."""
    columns = max(2, min(columns, int(figure.get_figwidth() / _LABEL_WIDTH)))
    entries: dict[str, Any] = {}
    for axes in grid.flat:
        handles, labels = axes.get_legend_handles_labels()
        entries |= {label: handle for handle, label in zip(handles, labels, strict=True) if label not in entries}
    if entries:
        figure.legend(
            entries.values(), entries.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
        )


def end_label(axes: Any, x: float, y: float, text: str, colour: str) -> None:
    """Label the end of a line."""
    axes.annotate(text, (x, y), xytext=(4, 0), textcoords="offset points", color=colour, fontsize=9, va="center")


def placeholder(axes: Any, results: Sequence[Any]) -> None:
    """Write "not run yet" into a panel without results."""
    if not results:
        axes.text(0.5, 0.5, "not run yet", transform=axes.transAxes, ha="center", va="center", color=GREY)
