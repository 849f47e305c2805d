"""The study of the theory as a figure of six panels; letters are those of docs/theory.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from atas._plots import BLUE, GREEN, GREY, ORANGE, RED, new_figure, plain, save_figure
from atas.analysis import _bounds as bounds
from atas.analysis._measurement import ASGDBCA, MENDED, SGDBCA, SHARP, TOLD, Measurement, Result

_LEGEND: dict[str, Any] = {"fontsize": 9, "frameon": False}


def plot(result: Result, path: Path) -> None:
    """Draw the study. PNG, SVG or PDF by the name."""
    figure = new_figure(14.5, 9)
    figure.set_layout_engine("constrained", hspace=0.06, wspace=0.04)
    grid = figure.subplots(2, 3)
    _horizons(grid[0, 0], result, ASGDBCA)
    _horizons(grid[0, 1], result, SGDBCA)
    _ratio(grid[0, 2], result)
    _weighted(grid[1, 0], result)
    _printed(grid[1, 1], result)
    _cycle(grid[1, 2], result)
    for axes in grid.flat:
        plain(axes)
    # The two algorithms are compared by eye, and the legends have room above the curves.
    low = min(axes.get_ylim()[0] for axes in grid[0, :2])
    for axes in grid[0, :2]:
        axes.set_ylim(low, 200)
    save_figure(figure, path)


def _horizons(axes: Any, result: Result, algorithm: str) -> None:
    rows = [row for row in result.horizons if row.algorithm == algorithm and row.rates == MENDED]
    steps = [row.steps for row in rows]
    axes.plot(steps, [row.bound.gap / row.steps for row in rows], "--", color=GREY, label="bound of the gap, mended")
    for label, colour, marker, values in (
        ("R(T)/T as the paper defines it", RED, "s", [row.regret_defined / row.steps for row in rows]),
        ("regret/T, best comparators in hindsight", BLUE, "o", [row.regret_after / row.steps for row in rows]),
        ("gap of the averaged weights", GREEN, "^", [row.gap for row in rows]),
    ):
        axes.plot(steps, values, marker=marker, color=colour, label=label, linewidth=1.8, markersize=5)
    axes.set(xscale="log", yscale="log", xlabel="steps T", ylabel="loss")
    axes.set_title(f"{algorithm}, saddle problem\nLemma 4.1 holds: the gap is below regret/T", fontsize=11)
    axes.legend(loc="upper right", **_LEGEND)


def _ratio(axes: Any, result: Result) -> None:
    beta = result.beta
    last = max(row.tail for row in result.tails)
    tails = np.linspace(1, last, 100)
    axes.plot(tails, [bounds.printed_ratio(at, beta) for at in tails], "--", color=RED, label="bounds, as printed")
    axes.plot(tails, [bounds.ratio(at, beta) for at in tails], "-", color=GREY, label="bounds, mended", linewidth=1.8)
    axes.plot(tails, [bounds.sharp_ratio(at) for at in tails], ":", color="black", label="bounds, mended and sharper")
    for label, marker, colour, found in (
        ("linear problem", "o", BLUE, result.measured_ratios("linear")),
        ("linear, steps of the sharper bound", "x", BLUE, result.measured_ratios("linear", adaptive=SHARP)),
        ("saddle problem", "^", GREEN, result.measured_ratios("saddle")),
        ("saddle, SGDBCA told the norms", "v", ORANGE, result.measured_ratios("saddle", TOLD)),
    ):
        axes.plot(*zip(*found, strict=True), marker, color=colour, label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.text(last, 1.02, "above: ASGDBCA is better", ha="right", va="bottom", fontsize=9)
    axes.set(xlabel="tail of the norms: mean G² / (mean G)²", ylabel="SGDBCA / ASGDBCA")
    axes.set_ylim(0.7, 1.6 * axes.get_ylim()[1])
    axes.set_title("(a) regret of SGDBCA over that of ASGDBCA\nthe factor of β was upside down", fontsize=11)
    axes.legend(loc="upper left", **_LEGEND)


def _weighted(axes: Any, result: Result) -> None:
    rows, beta = _examples(result, ASGDBCA), result.beta
    n = [row.n for row in rows]
    axes.plot(n, [bounds.weighted_limit(row.n, beta) for row in rows], "--", color=GREY, label="limit: n/(1 - β)")
    axes.plot(n, [row.weighted for row in rows], "o-", color=BLUE, label="measured, mean over the steps")
    axes.axhline(bounds.printed_weighted_limit(beta), color=RED, linestyle="--", label="limit as printed: 1/(1 - β)")
    _by_examples(axes, n)
    axes.set_ylabel("Σ |g|² / v̂")
    axes.set_title("(b) squared gradients over v̂, linear problem\nthe sum has n terms", fontsize=11)
    axes.legend(loc="upper left", **_LEGEND)


def _printed(axes: Any, result: Result) -> None:
    for algorithm, colour, style, size in ((SGDBCA, ORANGE, "s-", 8), (ASGDBCA, BLUE, "o--", 4)):
        rows = _examples(result, algorithm)
        shares = [row.regret / row.printed.regret for row in rows]
        axes.plot([row.n for row in rows], shares, style, color=colour, markersize=size, label=f"regret of {algorithm}")
    n = [row.n for row in rows]
    axes.plot(n, [row.bound.regret / row.printed.regret for row in rows], "--", color=GREY, label="bound, mended")
    axes.axhline(1, color=RED, linestyle="--", label="bound, as printed")
    _by_examples(axes, n)
    axes.set_ylabel("in units of the printed bound")
    axes.set_title(
        "(d) the theorems at their own step sizes, linear problem\nthe regret is n/2 times the bound", fontsize=11
    )
    axes.legend(loc="upper left", **_LEGEND)


def _cycle(axes: Any, result: Result) -> None:
    rows = result.cycle
    steps = [row.steps for row in rows]
    axes.plot(steps, [row.regret_defined for row in rows], "s-", color=RED, label="R(T) as the paper defines it")
    axes.plot(steps, [row.printed.regret for row in rows], "--", color=GREY, label="bound, as printed and mended")
    axes.plot(steps, [row.regret for row in rows], "o-", color=BLUE, label="regret against one comparator")
    axes.set(xscale="log", yscale="log", xlabel="steps T", ylabel="sum over the steps")
    axes.set_title("(e) one example, θ times x\nR(T) grows like T, its bound like √T", fontsize=11)
    axes.legend(loc="upper left", **_LEGEND)


def _by_examples(axes: Any, n: list[int]) -> None:
    axes.set(xscale="log", yscale="log", xlabel="examples n")
    axes.set_xticks(n, [str(value) for value in n])
    low, high = np.log2(axes.get_ylim())
    heights = 2.0 ** np.arange(np.ceil(low), np.floor(high) + 1)
    axes.set_yticks(heights, [f"{value:g}" for value in heights])
    axes.minorticks_off()


def _examples(result: Result, algorithm: str) -> list[Measurement]:
    return [row for row in result.examples if row.algorithm == algorithm]
