"""The loss around easy and hard training examples while FGSM-RS collapses."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from atas.paper import plots
from atas.paper.figure_study import FigureStudy, Line, Table, collapse_epochs, entries
from atas.paper.losses import peak_position
from atas.paper.measurements import Curves, LossSurfaces
from atas.paper.study import StudyOptions
from atas.paper.subsets import EPS, ranking_trial, subset_grid
from atas.sweeps.markdown import format_collapse_epochs
from atas.sweeps.store import Store
from atas.sweeps.trial import Trial, format_eps

_STEP = 14 / 255
_QUICK_EPS, _QUICK_EPOCHS = 0.39, 40  # where the digits' FGSM-RS collapses, and how long that takes
_QUICK_IMAGES, _QUICK_POINTS = 60, 6
_COLUMNS = 5
_DECILES = ("1", "10")


class LossSurface(FigureStudy):
    """The ranking run, shared with figure-subsets, and a run whose step is too large."""

    required_measurements = (LossSurfaces.name, Curves.name)

    def dependencies(self, options: StudyOptions) -> list[Trial]:
        """Return the run that ranks the images."""
        return [ranking_trial(self, options, "fgsm-rs")]

    def lines(self, options: StudyOptions) -> list[Line]:
        """Return the run that collapses."""
        grid, quick = subset_grid(options), options.quick
        step, eps = (2 * _QUICK_EPS, _QUICK_EPS) if quick else (_STEP, EPS)
        (ranks,) = self.dependencies(options)
        surfaces = LossSurfaces(ranks, _QUICK_IMAGES, _QUICK_POINTS) if quick else LossSurfaces(ranks)
        cell = (grid.networks[0], "fgsm-rs", eps)
        values = {"method.step_size": step} | ({"training.epochs": _QUICK_EPOCHS} if quick else {})
        trial = self.trial(options, grid, cell, (surfaces, Curves()), values=values)
        return [Line(grid.networks[0], f"fgsm-rs, step {format_eps(step)}", trial)]

    def table(self, options: StudyOptions, store: Store) -> Table:
        """Return for each step and subset the loss at the image, at FGSM's point, the largest, and its position."""
        lines, rows = [], []
        ((line, records),) = self.line_records(options, store)
        surfaces = entries(line, records, LossSurfaces)
        for record, seen in zip(records, surfaces, strict=True):
            for moment in seen["moments"]:
                for tenth in _DECILES:
                    grid = torch.tensor(moment[tenth])
                    values = [float(grid[0, 0]), float(grid[-1, 0]), float(grid[:, 0].max()), peak_position(grid)]
                    lines.append([_epoch_text(moment, seen), f"D_{tenth}^{tenth}", *(f"{v:.3f}" for v in values[:3])])
                    lines[-1] += [f"{values[3]:.1f} eps", str(record.seed)]
                    rows.append({"step": moment["step"], "tenth": int(tenth), "surface": moment[tenth]})
        header = ["epoch", "subset", "loss at the image", "at eps v1", "largest along v1", "found at", "seed"]
        collapses = [
            f"{format_collapse_epochs([epoch])}, seed {r.seed}"
            for r, epoch in zip(records, collapse_epochs(records), strict=True)
        ]
        notes = [f"{line.name}, collapse found by the monitor: {'; '.join(collapses) or 'not run yet'}."]
        counts = sorted({entry["n"] for entry in surfaces})
        notes += [f"Means over {n:,} images of each subset." for n in counts]
        return Table(header, lines, rows, notes=notes)

    def picture(self, options: StudyOptions, store: Store) -> Any:
        """Draw a row for each subset and a column for each step around the distortion, for the first seed."""
        ((line, records),) = self.line_records(options, store)
        surfaces = entries(line, records[:1], LossSurfaces)
        moments = _around(surfaces[0]["moments"]) if surfaces else []
        figure, grid = plots.panels(2, max(1, len(moments)), width=2.5, height=2.5, sharex=True, sharey=True)
        plots.placeholder(grid[0, 0], moments)
        images = []
        for column, moment in enumerate(moments):
            for row, tenth in enumerate(_DECILES):
                images.append(_cell(grid[row, column], torch.tensor(moment[tenth])))
            grid[0, column].set_title(f"epoch {_epoch_text(moment, surfaces[0])}", fontsize=11)
            grid[1, column].set_xlabel("v1 (adversarial), eps")
        for row, tenth in enumerate(_DECILES):
            what = "smallest" if tenth == "1" else "largest"
            grid[row, 0].set_ylabel(f"{what} tenth of norms\nv2 (random), eps")
            if moments:
                _same_scale(images[row::2])
                figure.colorbar(images[row], ax=grid[row], label="mean loss")
        figure.suptitle(f"{line.name}, {line.panel}; circle: largest loss of the plane", fontsize=11)
        return figure


def _epoch_text(moment: dict[str, Any], seen: dict[str, Any]) -> str:
    return f"{moment['step'] / seen['steps_an_epoch']:.2f}"


def _around(moments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the moments around the last one at which the peak of the hard subset moves inside the ball.

    If it never moves, return moments at equal distances.
    """
    bent = [peak_position(torch.tensor(moment["10"])) < 1 for moment in moments]
    turns = [number for number, (before, now) in enumerate(itertools.pairwise(bent), 1) if now and not before]
    if not turns:
        columns = min(_COLUMNS, len(moments))
        return [moments[round(number * (len(moments) - 1) / max(columns - 1, 1))] for number in range(columns)]
    first = min(max(turns[-1] - _COLUMNS // 2, 0), max(len(moments) - _COLUMNS, 0))
    return moments[first : first + _COLUMNS]


def _cell(axes: Any, surface: torch.Tensor) -> Any:
    """Draw a surface with v1 to the right and v2 upwards."""
    axes.grid(False)
    losses, scale = surface.T.numpy(), torch.linspace(0, 1, len(surface)).numpy()
    image = axes.imshow(losses, origin="lower", extent=(0, 1, 0, 1), cmap="cividis", interpolation="bicubic")
    axes.contour(scale, scale, losses, levels=6, colors="white", linewidths=0.6, alpha=0.7)
    a, b = divmod(int(surface.argmax()), len(surface))
    axes.set(xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
    axes.plot(scale[a], scale[b], "o", color=plots.RED, fillstyle="none", markersize=8, clip_on=False)
    return image


def _same_scale(images: list[Any]) -> None:
    low = min(image.get_clim()[0] for image in images)
    high = max(image.get_clim()[1] for image in images)
    for image in images:
        image.set_clim(low, high)


STUDY = LossSurface(
    "figure-loss-surface",
    "the loss around the examples with the smallest and largest gradient norms while FGSM-RS collapses",
    "The loss around training images while FGSM-RS collapses",
    "as FGSM-RS with a step of 14/255 collapses, the surface of the subset with the largest gradient norms is "
    "distorted first, with its largest loss in the middle of the ball; that of the smallest is less distorted. No "
    "figures are printed.",
    "the mean loss at x + eps (a v1 + b v2), a and b from 0 to 1: v1 is the sign of the image's gradient, v2 has "
    "random signs. Weights are kept four times an epoch, of the four epochs before the monitor finds a collapse and "
    "half of one after; where it finds none, of the last four. The picture has the moments about the last at which the "
    "loss of the subset with the largest norms came to be largest inside of the ball, along v1, or, where it did not, "
    "some at equal distances. Images are ranked by a run of FGSM-RS with a step of 10/255.",
)
