"""The paper's analysis put to the test: ASGDBCA and SGDBCA on problems that meet its assumptions.

Four questions, a list of measurements each: how regret and gap fall with the number of steps (`horizons`); how the two
algorithms compare as the tail of the gradient norms grows (`tails`); what becomes of the printed bounds as the number
of examples grows (`examples`); and whether the regret as the paper defines it can be bounded at all (`cycle`).
docs/theory.md says what to make of the answers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from atas._files import write_text
from atas.analysis import _bounds as bounds
from atas.analysis._ascent import ascend
from atas.analysis._measurement import (
    ASGDBCA,
    MENDED,
    PRINTED,
    SGDBCA,
    SHARP,
    SMOOTH,
    TOLD,
    Measurement,
    Result,
    Sizes,
)
from atas.analysis._saddle import Array, Constants, Problem, cycle, linear, long_tail, saddle, tail
from atas.analysis._theory_plot import plot
from atas.analysis._theory_table import table
from atas.environment import describe
from atas.errors import UsageError

__all__ = ["FULL", "QUICK", "Measurement", "Result", "Sizes", "plot", "run", "study", "table"]

FULL = Sizes(
    n=32,
    repetitions=16,
    horizons=(100, 300, 1_000, 3_000, 10_000, 30_000),
    tail=2.0,
    tails=(1.0, 1.2, 1.4, 1.6, 2.0, 3.0, 4.0),
    tail_steps=6_000,
    few=8,
    few_steps=20_000,
    examples=(1, 2, 4, 8, 16, 32, 64),
    example_steps=10_000,
    cycles=(10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000),
)
QUICK = Sizes(
    n=8,
    repetitions=8,
    horizons=(30, 100, 300, 1_000),
    tail=2.0,
    tails=(1.0, 1.5, 2.0, 3.0),
    tail_steps=1_000,
    few=4,
    few_steps=2_000,
    examples=(1, 2, 4, 8, 16),
    example_steps=1_000,
    cycles=(10, 30, 100, 300, 1_000),
)


def study(*, quick: bool = False, seed: int = 0, beta: float = 0.5, sizes: Sizes | None = None) -> Result:
    """Measure everything, in some seconds if `quick`, else in a minute or two; the same seed gives the same figures."""
    if not 0 <= beta < 1:
        raise UsageError(f"beta must be at least 0 and less than 1; got {beta}")
    size = sizes or (QUICK if quick else FULL)
    bench = _Bench(seed, beta, size.repetitions)

    main = saddle(long_tail(size.n, size.tail), seed=seed)
    kinds = [(ASGDBCA, MENDED), (SGDBCA, MENDED), (ASGDBCA, SHARP), (SGDBCA, SMOOTH)]
    horizons = [bench.measure("saddle", main, *kind, steps) for kind in kinds for steps in size.horizons]

    tails = []
    for ratio in size.tails:
        attained = linear(long_tail(size.few, ratio))
        for kind in ((ASGDBCA, MENDED), (ASGDBCA, SHARP), (SGDBCA, MENDED)):
            tails.append(bench.measure("linear", attained, *kind, size.few_steps))
        problem = saddle(long_tail(size.n, ratio), seed=seed)
        adaptive = bench.measure("saddle", problem, ASGDBCA, MENDED, size.tail_steps)
        plain = bench.measure("saddle", problem, SGDBCA, MENDED, size.tail_steps)
        # The largest gradients that are possible are never met here; what if SGDBCA knew?
        told = bench.measure("saddle", problem, SGDBCA, TOLD, size.tail_steps, adaptive.norm_met)
        tails += [adaptive, plain, told]

    examples = [
        bench.measure("linear", linear(np.ones(n)), algorithm, PRINTED, size.example_steps)
        for algorithm in (ASGDBCA, SGDBCA)
        for n in size.examples
    ]
    cycles = [bench.measure("cycle", cycle(), SGDBCA, PRINTED, steps) for steps in size.cycles]
    return Result(seed, beta, size, horizons, tails, examples, cycles)


@dataclass(frozen=True)
class _Bench:
    """What all measurements share."""

    seed: int
    beta: float
    repetitions: int

    def measure(
        self, name: str, problem: Problem, algorithm: str, kind: str, steps: int, norm: float | None = None
    ) -> Measurement:
        """Run an algorithm with step sizes of this kind; `norm` is the G_x,2 that it is told, if not the true one."""
        of, beta = problem.constants, self.beta if algorithm == ASGDBCA else None
        rates = _rates(of, steps, beta, kind)
        if norm is not None:
            rates = bounds.Rates(rates.theta, rates.x * of.gradient_x / norm)
        repetitions = self.repetitions if of.n > 1 else 1  # with one example to pick there is no chance
        draw = np.random.default_rng([self.seed, steps])  # the same start and the same picks for every algorithm
        theta, x = _start(name, problem, repetitions, draw)
        found = ascend(problem, draw.integers(of.n, size=(steps, repetitions)), rates, beta, theta, x)
        after, defined, gap = (_mean(values) for values in (found.regret_after, found.regret_defined, found.gap))
        return Measurement(
            problem=name,
            algorithm=algorithm,
            rates=kind,
            n=of.n,
            tail=tail(of.norms),
            steps=steps,
            repetitions=repetitions,
            regret=found.regret,
            regret_x=found.regret_x,
            regret_after=after[0],
            regret_after_error=after[1],
            regret_defined=defined[0],
            regret_defined_error=defined[1],
            gap=gap[0],
            gap_error=gap[1],
            weighted=found.weighted,
            norm_met=None if beta is None else float(np.sqrt(np.mean(np.sum(found.peak, axis=1)))),
            bound=_bound(of, steps, rates, beta, kind),
            printed=bounds.printed_bound(of, steps, beta),
        )


def _rates(of: Constants, steps: int, beta: float | None, kind: str) -> bounds.Rates:
    if kind == SMOOTH:
        return bounds.smooth_rates(of, steps)
    if kind == SHARP:
        return bounds.sharp_rates(of, steps)
    return (bounds.printed_rates if kind == PRINTED else bounds.rates)(of, steps, beta)


def _bound(of: Constants, steps: int, rates: bounds.Rates, beta: float | None, kind: str) -> bounds.Bound:
    if kind == SMOOTH:
        return bounds.smooth_bound(of, steps, rates)
    if kind == SHARP and beta is not None:
        return bounds.sharp_bound(of, steps, rates, beta)
    return bounds.bound(of, steps, rates, beta)


def _start(name: str, problem: Problem, repetitions: int, draw: np.random.Generator) -> tuple[Array, Array]:
    """Perturbations uniform in their box, as ATAS begins; where the worst case is wanted, in the wrong corner."""
    theta = np.zeros((repetitions, len(problem.slope)))
    shape = (repetitions, *problem.direction.shape)
    if name == "saddle":
        return theta, draw.uniform(-problem.eps, problem.eps, shape)
    if name == "linear":
        return theta, np.broadcast_to(-problem.answer(problem.solution), shape)
    return theta + problem.radius / 2, np.zeros(shape)


def _mean(values: Array) -> tuple[float, float]:
    """Mean and standard error."""
    error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0
    return float(np.mean(values)), error


def run(folder: Path, quick: bool) -> tuple[Path, ...]:
    """Write theory.json, theory.md, theory.png and theory.svg."""
    result = study(quick=quick)
    folder.mkdir(parents=True, exist_ok=True)
    found = {"environment": describe(torch.device("cpu")), **result.to_json()}
    files = tuple(folder / f"theory.{kind}" for kind in ("json", "md", "png", "svg"))
    write_text(files[0], json.dumps(found, indent=1) + "\n")
    write_text(files[1], table(result))
    for picture in files[2:]:
        plot(result, picture)
    return files
