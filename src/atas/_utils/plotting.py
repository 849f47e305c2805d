"""Colours, figures without a window and how they are saved. Matplotlib is optional."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from atas._utils.files import write_atomically
from atas.errors import UsageError

# Okabe and Ito's palette, which colour-blind readers can tell apart. Line styles or markers differ as well.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, BLACK, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#000000",
    "#777777",
)

_NO_DATE = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


def new_figure(width: float, height: float) -> Any:
    """Create an empty figure of this size in inches."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("plots need matplotlib; install it with: pip install 'atas[plots]'") from error

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style_axes(axes: Any) -> None:
    """Give axes a light grid and no frame."""
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as PNG, SVG or PDF, by the suffix of the path. Equal figures give equal files."""
    kind = path.suffix.removeprefix(".").lower() or "png"
    if kind not in figure.canvas.get_supported_filetypes():
        raise UsageError(f"a plot cannot be written as '{path.suffix}'; use .png, .svg or .pdf")
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(temporary: Path) -> None:
        from matplotlib import rc_context

        with rc_context({"svg.hashsalt": path.stem}):
            figure.savefig(temporary, format=kind, dpi=150, metadata=_NO_DATE.get(kind))

    write_atomically(path, write)
