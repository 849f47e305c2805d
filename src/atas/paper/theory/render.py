"""The regret study as a Markdown page and a figure of six panels; letters refer to docs/theory.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atas._utils.environment import environment_info
from atas._utils.files import write_text
from atas._utils.plotting import BLUE, GREEN, GREY, ORANGE, RED, new_figure, save_figure, style_axes
from atas.paper import published
from atas.paper.theory import bounds
from atas.paper.theory.experiment import (
    ASGDBCA,
    CORRECTED,
    KNOWN_NORMS,
    SGDBCA,
    SHARP,
    RegretMeasurement,
    Sizes,
    TheoryResult,
    run_experiment,
)
from atas.sweeps.trial import format_eps


def table(result: TheoryResult) -> str:
    """Return the page, with a table for each experiment."""
    sizes = result.sizes
    runs = f"{sizes.repetitions} repetitions, seed {result.seed}, beta {result.beta:g}"
    lines = [
        "# The theory, measured",
        "",
        f"ASGDBCA and SGDBCA on problems that meet the paper's assumptions; {runs}; mean ± standard error.",
        "Regrets and bounds are sums over T steps.",
        "",
        f"## A saddle problem, {sizes.n} examples, tail {sizes.tail:g}",
        "",
        *_rows(_HORIZONS, [_horizon(row) for row in result.horizons]),
        "",
        "## Regret of SGDBCA over that of ASGDBCA",
        "",
        f"Linear problem: n = {sizes.few}, T = {sizes.few_steps:,}; saddle problem: n = {sizes.n}, "
        f"T = {sizes.tail_steps:,}.",
        "",
        *_rows(_RATIOS, _ratios(result)),
        "",
        f"The bounds are equal at a tail of {bounds.break_even_tail(result.beta):.3f}. The paper's convergence gaps:",
        "",
        *_rows(_PUBLISHED, _published(result)),
        "",
        f"## The printed bounds as examples are added, linear problem, T = {sizes.example_steps:,}",
        "",
        *_rows(_EXAMPLES, [_example(row, result.beta) for row in result.examples]),
        "",
        "## The regret as it is defined, theta times x",
        "",
        *_rows(["T", "R(T) as defined", "printed bound", "regret, one comparator", "gap x T"], _cycle_rows(result)),
    ]
    return "\n".join(lines) + "\n"


_HORIZONS = ("algorithm", "eta_x", "T", "gap x T", "regret", "in hindsight", "R(T) as defined", "gap bound", "bound")
_RATIOS = (
    "tail",
    "bounds",
    "as printed",
    "sharp",
    "linear",
    "linear, sharp",
    "saddle",
    "saddle, SGDBCA told the norms",
)
_PUBLISHED = (
    "eps",
    "ratio",
    "right, if a tail",
    "right, if the printed formula",
    "sharp, if a tail",
    "sharp, if the formula",
)
_EXAMPLES = (
    "algorithm",
    "n",
    "regret / printed",
    "mended / printed",
    "sum of squared g / v-hat",
    "limit",
    "printed limit",
)


def _horizon(row: RegretMeasurement) -> list[str]:
    return [
        row.algorithm,
        row.rates,
        f"{row.steps:,}",
        f"{row.steps * row.gap:.2f} ± {row.steps * row.gap_error:.2f}",
        f"{row.regret:.2f}",
        f"{row.regret_after:.2f} ± {row.regret_after_error:.2f}",
        f"{row.regret_defined:.2f} ± {row.regret_defined_error:.2f}",
        f"{row.bound.gap:.0f}",
        f"{row.bound.regret:.0f}",
    ]


def _ratios(result: TheoryResult) -> list[list[str]]:
    measured = (
        result.measured_ratios("linear"),
        result.measured_ratios("linear", adaptive=SHARP),
        result.measured_ratios("saddle"),
        result.measured_ratios("saddle", KNOWN_NORMS),
    )
    return [
        [
            f"{row[0][0]:.2f}",
            f"{bounds.ratio(row[0][0], result.beta):.3f}",
            f"{bounds.printed_ratio(row[0][0], result.beta):.3f}",
            f"{bounds.sharp_ratio(row[0][0]):.3f}",
            *(f"{ratio:.3f}" for _, ratio in row),
        ]
        for row in zip(*measured, strict=True)
    ]


def _published(result: TheoryResult) -> list[list[str]]:
    """Return both readings of the published value: as the tail, and as the printed ratio of another tail."""
    beta, rows = result.beta, []
    for eps in published.budgets("cifar10"):
        gap = published.convergence_gap(eps)
        assert gap is not None
        value = gap["ratio"]
        tails = (value, (value / bounds.printed_ratio(1, beta)) ** 2)
        ratios = [*(bounds.ratio(at, beta) for at in tails), *(bounds.sharp_ratio(at) for at in tails)]
        rows.append([format_eps(eps), f"{value:g}", *(f"{ratio:.3f}" for ratio in ratios)])
    return rows


def _example(row: RegretMeasurement, beta: float) -> list[str]:
    cells = [row.algorithm, str(row.n), f"{row.regret / row.printed.regret:.2f}"]
    cells.append(f"{row.bound.regret / row.printed.regret:.2f}")
    if row.weighted is None:
        return [*cells, "", "", ""]
    limits = (bounds.weighted_limit(row.n, beta), bounds.printed_weighted_limit(beta))
    return [*cells, f"{row.weighted:.2f}", *(f"{limit:g}" for limit in limits)]


def _cycle_rows(result: TheoryResult) -> list[list[str]]:
    return [
        [
            f"{row.steps:,}",
            f"{row.regret_defined:.1f}",
            f"{row.printed.regret:.1f}",
            f"{row.regret:.2f}",
            f"{row.steps * row.gap:.2f}",
        ]
        for row in result.cycle
    ]


def _rows(head: Sequence[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]


_LEGEND: dict[str, Any] = {"fontsize": 9, "frameon": False}


def draw(result: TheoryResult) -> Any:
    """Draw the study."""
    figure = new_figure(14.5, 9)
    figure.set_layout_engine("constrained", hspace=0.06, wspace=0.04)
    grid = figure.subplots(2, 3)
    _plot_horizons(grid[0, 0], result, ASGDBCA)
    _plot_horizons(grid[0, 1], result, SGDBCA)
    _plot_ratio(grid[0, 2], result)
    _plot_weighted(grid[1, 0], result)
    _plot_printed(grid[1, 1], result)
    _plot_cycle(grid[1, 2], result)
    for axes in grid.flat:
        style_axes(axes)
    # Both algorithms get the same scale, with space for the legends above the curves.
    low = min(axes.get_ylim()[0] for axes in grid[0, :2])
    for axes in grid[0, :2]:
        axes.set_ylim(low, 200)
    return figure


def _plot_horizons(axes: Any, result: TheoryResult, algorithm: str) -> None:
    rows = [row for row in result.horizons if row.algorithm == algorithm and row.rates == CORRECTED]
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


def _plot_ratio(axes: Any, result: TheoryResult) -> None:
    beta = result.beta
    last = max(row.tail for row in result.tails)
    tails = np.linspace(1, last, 100)
    axes.plot(tails, [bounds.printed_ratio(at, beta) for at in tails], "--", color=RED, label="bounds, as printed")
    axes.plot(tails, [bounds.ratio(at, beta) for at in tails], "-", color=GREY, label="bounds, mended", linewidth=1.8)
    axes.plot(tails, [bounds.sharp_ratio(at) for at in tails], ":", color="black", label="bounds, mended and sharper")
    for label, marker, colour, points in (
        ("linear problem", "o", BLUE, result.measured_ratios("linear")),
        ("linear, steps of the sharper bound", "x", BLUE, result.measured_ratios("linear", adaptive=SHARP)),
        ("saddle problem", "^", GREEN, result.measured_ratios("saddle")),
        ("saddle, SGDBCA told the norms", "v", ORANGE, result.measured_ratios("saddle", KNOWN_NORMS)),
    ):
        axes.plot(*zip(*points, strict=True), marker, color=colour, label=label)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.text(last, 1.02, "above: ASGDBCA is better", ha="right", va="bottom", fontsize=9)
    axes.set(xlabel="tail of the norms: mean G² / (mean G)²", ylabel="SGDBCA / ASGDBCA")
    axes.set_ylim(0.7, 1.6 * axes.get_ylim()[1])
    axes.set_title("(a) regret of SGDBCA over that of ASGDBCA\nthe factor of β was upside down", fontsize=11)
    axes.legend(loc="upper left", **_LEGEND)


def _plot_weighted(axes: Any, result: TheoryResult) -> None:
    rows, beta = _examples(result, ASGDBCA), result.beta
    n = [row.n for row in rows]
    axes.plot(n, [bounds.weighted_limit(row.n, beta) for row in rows], "--", color=GREY, label="limit: n/(1 - β)")
    axes.plot(n, [row.weighted for row in rows], "o-", color=BLUE, label="measured, mean over the steps")
    axes.axhline(bounds.printed_weighted_limit(beta), color=RED, linestyle="--", label="limit as printed: 1/(1 - β)")
    _by_examples(axes, n)
    axes.set_ylabel("Σ |g|² / v̂")
    axes.set_title("(b) squared gradients over v̂, linear problem\nthe sum has n terms", fontsize=11)
    axes.legend(loc="upper left", **_LEGEND)


def _plot_printed(axes: Any, result: TheoryResult) -> None:
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


def _plot_cycle(axes: Any, result: TheoryResult) -> None:
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


def _examples(result: TheoryResult, algorithm: str) -> list[RegretMeasurement]:
    return [row for row in result.examples if row.algorithm == algorithm]


def write_results(folder: Path, quick: bool, sizes: Sizes | None = None) -> tuple[Path, ...]:
    """Run the study and write theory.json, theory.md, theory.png and theory.svg."""
    result = run_experiment(quick=quick, sizes=sizes)
    folder.mkdir(parents=True, exist_ok=True)
    document = {"environment": environment_info(torch.device("cpu")), **result.to_json()}
    files = tuple(folder / f"theory.{kind}" for kind in ("json", "md", "png", "svg"))
    write_text(files[0], json.dumps(document, indent=1) + "\n")
    write_text(files[1], table(result))
    figure = draw(result)
    for picture in files[2:]:
        save_figure(figure, picture)
    return files
