"""Draw AutoAttack accuracy against seconds of training, ours beside the published figures.

    python benchmarks/record_figure.py --out results/record/seconds.png

Ours are records of CIFAR-10, PreActResNet-18, eps 8/255 with AutoAttack on all test images: one point per recipe, the
mean over its seeds, with their range as a bar. Seconds are those of the training steps, from records that had the GPU
for themselves. Where no run of a recipe of atas-plus had, they are its number of steps times the time of one
(results/speed/pieces.json), and the star is hollow. The published figures (results/record/published.json) are of
another GPU, so the seconds of the two are not of one machine.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from atas._utils.plotting import BLUE, GREY, ORANGE, RED, new_figure, save_figure, style_axes
from atas.sweeps import Record

RECORD = Path("results/record")
PIECES = Path("results/speed/pieces.json")
RUNS = (Path("results/cifar10/runs"), RECORD / "runs")
NAMES = {"atas": "ATAS", "atta": "ATTA", "fgsm-rs": "FGSM-RS", "fgsm-ga": "FGSM-GA", "pgd": "PGD-10"}
LABELLED = {"NuAT", "LIET", "N-FGSM", "GradAlign", "FGSM-RS", "PGD-AT, averaged", "PGD-AT, last epoch"}
TICKS = (10, 30, 100, 300, 1_000, 3_000, 10_000)
TEST_IMAGES = 10_000


@dataclass(frozen=True)
class Point:
    """The runs of one recipe."""

    label: str
    accuracy: list[float]
    seconds: list[float]
    is_timed: bool

    def line(self) -> str:
        """Return a line of text with the mean and range of both."""
        a, s = self.accuracy, self.seconds
        times = f"({min(s):.1f} to {max(s):.1f}, {len(s)} timed)" if self.is_timed else "(steps x time of a step)"
        accuracies = f"{len(a)} seeds   AutoAttack {mean(a):.2f} ({min(a):.2f} to {max(a):.2f})"
        return f"{self.label:24} {accuracies}   {mean(s):.1f} s {times}"


def read_points() -> dict[str, Point]:
    """Return one point per recipe, with `-plus-` in the name of those of atas-plus."""
    groups: dict[str, list[Record]] = {}
    for folder in RUNS:
        for path in sorted(folder.glob("*.json")):
            record = Record.load(path)
            if _is_wanted(record):
                groups.setdefault(record.trial["recipe"], []).append(record)
    return {recipe: _point(recipe, records) for recipe, records in groups.items()}


def _is_wanted(record: Record) -> bool:
    """Return whether a record is of a recipe as it is, on all test images under AutoAttack."""
    trial, values = record.trial, set(record.trial["values"])
    whole = record.n == TEST_IMAGES and not (trial["padding"] or trial["held_out"] or trial["part"])
    plain = values <= {"method.eps"} and trial["network"] == "preact-resnet18" and trial["eps"] == "8/255"
    known = trial["method"] in NAMES or trial["method"] == "atas-plus"
    return whole and plain and known and "autoattack" in record.attacks


def _point(recipe: str, records: list[Record]) -> Point:
    first = records[0]
    label = NAMES.get(first.trial["method"]) or f"atas-plus, {first.training['epochs']} epochs"
    timed = [record.seconds for record in records if record.seconds is not None]
    milliseconds = json.loads(PIECES.read_text())["rows"]["atas-plus"]["milliseconds"]
    steps = first.training["last_epoch"]["updates"]
    accuracy = [100 * record.attacks["autoattack"]["accuracy"] for record in records]
    return Point(label, accuracy, timed or [steps * milliseconds / 1000], bool(timed))


def draw(points: dict[str, Point], published: dict[str, Any], path: Path) -> None:
    """Draw all points on a logarithmic axis of seconds."""
    figure = new_figure(7.5, 4.6)
    axes = figure.add_subplot()
    for row in published["rows"]:
        several = row["steps"] > 1
        axes.plot(row["seconds"], row["autoattack"], "D" if several else "o", color=RED if several else GREY, ms=5)
        if row["method"] in LABELLED:
            right = row["method"] in ("NuAT", "PGD-AT, last epoch")  # where other points lie to the left
            _label(axes, row["method"], row["seconds"], row["autoattack"], left=not right)
    for recipe, point in points.items():
        x, y = mean(point.seconds), mean(point.accuracy)
        bars = [[y - min(point.accuracy)], [max(point.accuracy) - y]]
        plus = "-plus-" in recipe
        marker, colour, size = ("*", ORANGE, 12) if plus else ("s", BLUE, 6)
        inside = colour if point.is_timed else "white"
        axes.errorbar(x, y, yerr=bars, fmt=marker, color=colour, ms=size, mfc=inside)
        _label(axes, point.label, x, y)
    axes.set_xscale("log")
    axes.set_xlim(8, 30_000)
    axes.set_xticks(TICKS, [f"{tick:,}" for tick in TICKS])
    axes.minorticks_off()
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("AutoAttack accuracy (%), CIFAR-10, 8/255")
    markers = [
        ("*", ORANGE, "atas-plus, here (one H200; hollow: steps x time of a step)"),
        ("s", BLUE, "the paper's methods, here (one H200, 30 epochs)"),
        ("o", GREY, "published, one step (100 epochs, a GPU that is not named)"),
        ("D", RED, "published, ten steps"),
    ]
    for marker, colour, text in markers:
        axes.plot([], [], marker, color=colour, label=text)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, fontsize=7.5, columnspacing=1, frameon=False)
    style_axes(axes)
    save_figure(figure, path)


def _label(axes: Any, text: str, x: float, y: float, left: bool = False) -> None:
    offset, side = ((-7, 3), "right") if left else ((7, 4), "left")
    axes.annotate(text, (x, y), textcoords="offset points", xytext=offset, ha=side, fontsize=8)


def main() -> None:
    """Print the points and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RECORD / "seconds.png", help="PNG, SVG or PDF")
    chosen = parser.parse_args()
    points = read_points()
    for point in points.values():
        print(point.line())
    draw(points, json.loads((RECORD / "published.json").read_text()), chosen.out)


if __name__ == "__main__":
    main()
