"""The study of the theory as a page of Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from atas.analysis import _bounds as bounds
from atas.analysis._measurement import SHARP, TOLD, Measurement, Result

PAPERS_RATIOS = {"8/255": 1.4, "12/255": 1.5, "16/255": 1.6}  # of its table of convergence gaps, by eps


def table(result: Result) -> str:
    """One table for each question, with a line that says what was run."""
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
        f"The bounds are equal at a tail of {bounds.even_tail(result.beta):.3f}. The paper's convergence gaps:",
        "",
        *_rows(_PAPERS, _papers(result)),
        "",
        f"## The printed bounds as examples are added, linear problem, T = {sizes.example_steps:,}",
        "",
        *_rows(_EXAMPLES, [_example(row, result.beta) for row in result.examples]),
        "",
        "## The regret as it is defined, theta times x",
        "",
        *_rows(["T", "R(T) as defined", "printed bound", "regret, one comparator", "gap x T"], _cycle(result)),
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
_PAPERS = (
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


def _horizon(row: Measurement) -> list[str]:
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


def _ratios(result: Result) -> list[list[str]]:
    measured = (
        result.measured_ratios("linear"),
        result.measured_ratios("linear", adaptive=SHARP),
        result.measured_ratios("saddle"),
        result.measured_ratios("saddle", TOLD),
    )
    return [
        [
            f"{row[0][0]:.2f}",
            f"{bounds.ratio(row[0][0], result.beta):.3f}",
            f"{bounds.printed_ratio(row[0][0], result.beta):.3f}",
            f"{bounds.sharp_ratio(row[0][0]):.3f}",
            *(f"{found:.3f}" for _, found in row),
        ]
        for row in zip(*measured, strict=True)
    ]


def _papers(result: Result) -> list[list[str]]:
    """Both readings: the value is the tail, or it is the printed ratio of some other tail."""
    beta, found = result.beta, []
    for eps, value in PAPERS_RATIOS.items():
        tails = (value, (value / bounds.printed_ratio(1, beta)) ** 2)
        ratios = [*(bounds.ratio(at, beta) for at in tails), *(bounds.sharp_ratio(at) for at in tails)]
        found.append([eps, f"{value:g}", *(f"{ratio:.3f}" for ratio in ratios)])
    return found


def _example(row: Measurement, beta: float) -> list[str]:
    cells = [row.algorithm, str(row.n), f"{row.regret / row.printed.regret:.2f}"]
    cells.append(f"{row.bound.regret / row.printed.regret:.2f}")
    if row.weighted is None:
        return [*cells, "", "", ""]
    limits = (bounds.weighted_limit(row.n, beta), bounds.printed_weighted_limit(beta))
    return [*cells, f"{row.weighted:.2f}", *(f"{limit:g}" for limit in limits)]


def _cycle(result: Result) -> list[list[str]]:
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
