"""The loss around easy and hard training examples while FGSM-RS collapses."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from atas.analysis.surface import peak
from atas.reproduce import plots
from atas.reproduce.curves import falls
from atas.reproduce.figure_study import FigureStudy, Line, Table
from atas.reproduce.figures import collapsed
from atas.reproduce.observations import Curves, Surfaces
from atas.reproduce.ranking import EPS, grid_of, ranking
from atas.reproduce.record import Record
from atas.reproduce.store import Store
from atas.reproduce.study import Request
from atas.reproduce.trial import Trial, level

_STEP = 14 / 255
_QUICK_EPS, _QUICK_EPOCHS = 0.39, 40  # where the digits' FGSM-RS collapses, and how long that takes
_QUICK_IMAGES, _QUICK_POINTS = 60, 6
_COLUMNS = 5
_TENTHS = ("1", "10")


class LossSurface(FigureStudy):
    """The run that ranks, shared with figure-subsets, and one with a step that is too large."""

    needs = (Surfaces.name, Curves.name)

    def before(self, request: Request) -> list[Trial]:
        """The ranking."""
        return [ranking(self, request, "fgsm-rs")]

    def lines(self, request: Request) -> list[Line]:
        """The run that collapses."""
        grid, quick = grid_of(request), request.quick
        step, eps = (2 * _QUICK_EPS, _QUICK_EPS) if quick else (_STEP, EPS)
        (ranks,) = self.before(request)
        surfaces = Surfaces(ranks, _QUICK_IMAGES, _QUICK_POINTS) if quick else Surfaces(ranks)
        cell = (grid.networks[0], "fgsm-rs", eps)
        values = {"method.step_size": step} | ({"training.epochs": _QUICK_EPOCHS} if quick else {})
        trial = self.trial(request, grid, cell, (surfaces, Curves()), values=values)
        return [Line(grid.networks[0], f"fgsm-rs, step {level(step)}", trial)]

    def table(self, request: Request, store: Store) -> Table:
        """For each moment and subset: the loss at the image, at FGSM's point, the largest, and where that is."""
        lines, rows = [], []
        ((line, records),) = self.found(request, store)
        for record in records:
            seen = record.observed[Surfaces.name]
            for moment in seen["moments"]:
                for tenth in _TENTHS:
                    grid = torch.tensor(moment[tenth])
                    values = [float(grid[0, 0]), float(grid[-1, 0]), float(grid[:, 0].max()), peak(grid)]
                    lines.append([_when(moment, seen), f"D_{tenth}^{tenth}", *(f"{v:.3f}" for v in values[:3])])
                    lines[-1] += [f"{values[3]:.1f} eps", str(record.seed)]
                    rows.append({"step": moment["step"], "tenth": int(tenth), "surface": moment[tenth]})
        header = ["epoch", "subset", "loss at the image", "at eps v1", "largest along v1", "found at", "seed"]
        fallen = [f"{collapsed([epoch])}, seed {r.seed}" for r, epoch in zip(records, falls(records), strict=True)]
        notes = [f"{line.name}, collapse found by the monitor: {'; '.join(fallen) or 'not run yet'}."]
        counts = sorted({record.observed[Surfaces.name]["n"] for record in records})
        notes += [f"Means over {n:,} images of each subset." for n in counts]
        return Table(header, lines, rows, notes=notes)

    def picture(self, request: Request, store: Store) -> Any:
        """A row for each subset, a column for each moment around the distortion; of the first seed."""
        ((line, records),) = self.found(request, store)
        moments = _around(records[0]) if records else []
        figure, grid = plots.panels(2, max(1, len(moments)), width=2.5, height=2.5, sharex=True, sharey=True)
        plots.waiting(grid[0, 0], moments)
        images = []
        for column, moment in enumerate(moments):
            for row, tenth in enumerate(_TENTHS):
                images.append(_cell(grid[row, column], torch.tensor(moment[tenth])))
            grid[0, column].set_title(f"epoch {_when(moment, records[0].observed[Surfaces.name])}", fontsize=11)
            grid[1, column].set_xlabel("v1 (adversarial), eps")
        for row, tenth in enumerate(_TENTHS):
            what = "smallest" if tenth == "1" else "largest"
            grid[row, 0].set_ylabel(f"{what} tenth of norms\nv2 (random), eps")
            if moments:
                _same_scale(images[row::2])
                figure.colorbar(images[row], ax=grid[row], label="mean loss")
        figure.suptitle(f"{line.name}, {line.panel}; circle: largest loss of the plane", fontsize=11)
        return figure


def _when(moment: dict[str, Any], seen: dict[str, Any]) -> str:
    return f"{moment['step'] / seen['steps_an_epoch']:.2f}"


def _around(record: Record) -> list[dict[str, Any]]:
    """The moments about the last at which the hard subset's loss came to be largest inside of the ball; where it does
    not, some at equal distances."""
    moments: list[dict[str, Any]] = record.observed[Surfaces.name]["moments"]
    bent = [peak(torch.tensor(moment["10"])) < 1 for moment in moments]
    turns = [number for number, (before, now) in enumerate(itertools.pairwise(bent), 1) if now and not before]
    if not turns:
        columns = min(_COLUMNS, len(moments))
        return [moments[round(number * (len(moments) - 1) / max(columns - 1, 1))] for number in range(columns)]
    first = min(max(turns[-1] - _COLUMNS // 2, 0), max(len(moments) - _COLUMNS, 0))
    return moments[first : first + _COLUMNS]


def _cell(axes: Any, surface: torch.Tensor) -> Any:
    """A surface with v1 to the right and v2 upwards."""
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
