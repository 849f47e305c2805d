"""Experiments on the paper's analysis: ASGDBCA and SGDBCA on problems that meet its assumptions.

There are four lists of measurements: regret and gap by the number of steps (`horizons`), both algorithms by the tail of
the gradient norms (`tails`), the printed bounds by the number of examples (`examples`), and the regret as the paper
defines it (`cycle`). docs/theory.md discusses the results.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from atas.errors import UsageError
from atas.paper.theory import bounds, problems
from atas.paper.theory.bounds import Bound
from atas.paper.theory.problems import Array, Constants, Problem, cycle, linear, long_tail, run_sgdbca, saddle, tail

ASGDBCA, SGDBCA = "ASGDBCA", "SGDBCA"
CORRECTED, PRINTED, SHARP, SMOOTH, KNOWN_NORMS = "mended", "printed", "sharp", "smooth", "told"


@dataclass(frozen=True)
class Sizes:
    """The sizes of the experiments."""

    n: int
    repetitions: int
    horizons: tuple[int, ...]
    tail: float  # of the horizons
    tails: tuple[float, ...]
    tail_steps: int
    few: int  # examples of the linear problem; each is visited often
    few_steps: int
    examples: tuple[int, ...]
    example_steps: int
    cycles: tuple[int, ...]


@dataclass(frozen=True)
class RegretMeasurement:
    """One algorithm on one problem with one pair of step sizes. Regrets are sums over the steps; the gap is not."""

    problem: str
    algorithm: str
    rates: str
    """The kind of step sizes: `mended` for the corrected bounds, `printed` by the theorems, `sharp` for ASGDBCA's
    sharper bound, `smooth` for eta_x = 1/(2 L_x), `told` as `mended` with the gradient norms that ASGDBCA met."""
    n: int
    tail: float
    steps: int
    repetitions: int
    regret: float
    """Against comparators that are the same for all repetitions."""
    regret_x: float
    """The maximiser's part of the regret."""
    regret_after: float
    """Against the best comparators of each repetition, on average."""
    regret_after_error: float
    regret_defined: float
    """R(T) as the paper defines it, on average."""
    regret_defined_error: float
    gap: float
    """Gap of the averaged weights, on average."""
    gap_error: float
    weighted: float | None
    """Squared gradients over v-hat, summed over the examples, averaged over the steps."""
    norm_met: float | None
    """G_x,2 of the largest gradients that ASGDBCA met."""
    bound: Bound
    """The bound of the corrected proof at the step sizes that were used."""
    printed: Bound
    """The bound as printed, at the `printed` step sizes."""


@dataclass(frozen=True)
class TheoryResult:
    """All measurements."""

    seed: int
    beta: float
    sizes: Sizes
    horizons: list[RegretMeasurement]
    tails: list[RegretMeasurement]
    examples: list[RegretMeasurement]
    cycle: list[RegretMeasurement]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    def measured_ratios(
        self, problem: str, plain: str = CORRECTED, adaptive: str = CORRECTED
    ) -> list[tuple[float, float]]:
        """Return pairs of a tail and SGDBCA's regret over ASGDBCA's, each with its kind of step sizes."""
        regret = {(row.algorithm, row.rates, row.tail): row.regret for row in self.tails if row.problem == problem}
        tails = [at for algorithm, kind, at in regret if (algorithm, kind) == (ASGDBCA, adaptive)]
        return [(at, regret[SGDBCA, plain, at] / regret[ASGDBCA, adaptive, at]) for at in tails]


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


def run_experiment(
    *, quick: bool = False, seed: int = 0, beta: float = 0.5, sizes: Sizes | None = None
) -> TheoryResult:
    """Run all experiments: in seconds if `quick`, else in a minute or two. Equal seeds give equal results."""
    if not 0 <= beta < 1:
        raise UsageError(f"beta must be at least 0 and less than 1; got {beta}")
    size = sizes or (QUICK if quick else FULL)
    bench = _Experiment(seed, beta, size.repetitions)

    main = saddle(long_tail(size.n, size.tail), seed=seed)
    kinds = [(ASGDBCA, CORRECTED), (SGDBCA, CORRECTED), (ASGDBCA, SHARP), (SGDBCA, SMOOTH)]
    horizons = [bench.measure("saddle", main, *kind, steps) for kind in kinds for steps in size.horizons]

    tails = []
    for ratio in size.tails:
        attained = linear(long_tail(size.few, ratio))
        for kind in ((ASGDBCA, CORRECTED), (ASGDBCA, SHARP), (SGDBCA, CORRECTED)):
            tails.append(bench.measure("linear", attained, *kind, size.few_steps))
        problem = saddle(long_tail(size.n, ratio), seed=seed)
        adaptive = bench.measure("saddle", problem, ASGDBCA, CORRECTED, size.tail_steps)
        plain = bench.measure("saddle", problem, SGDBCA, CORRECTED, size.tail_steps)
        # The largest possible gradients never occur here, so SGDBCA also runs with the norms that do.
        known = bench.measure("saddle", problem, SGDBCA, KNOWN_NORMS, size.tail_steps, adaptive.norm_met)
        tails += [adaptive, plain, known]

    examples = [
        bench.measure("linear", linear(np.ones(n)), algorithm, PRINTED, size.example_steps)
        for algorithm in (ASGDBCA, SGDBCA)
        for n in size.examples
    ]
    cycles = [bench.measure("cycle", cycle(), SGDBCA, PRINTED, steps) for steps in size.cycles]
    return TheoryResult(seed, beta, size, horizons, tails, examples, cycles)


@dataclass(frozen=True)
class _Experiment:
    """The settings that all measurements share."""

    seed: int
    beta: float
    repetitions: int

    def measure(
        self, name: str, problem: Problem, algorithm: str, kind: str, steps: int, norm: float | None = None
    ) -> RegretMeasurement:
        """Run an algorithm with step sizes of this kind; `norm` replaces the true G_x,2."""
        of, beta = problem.constants, self.beta if algorithm == ASGDBCA else None
        rates = _step_sizes(of, steps, beta, kind)
        if norm is not None:
            rates = problems.StepSizes(rates.theta, rates.x * of.gradient_x / norm)
        repetitions = self.repetitions if of.n > 1 else 1  # with one example nothing is random
        draw = np.random.default_rng([self.seed, steps])  # every algorithm gets the same start and order
        theta, x = _start(name, problem, repetitions, draw)
        outcome = run_sgdbca(problem, draw.integers(of.n, size=(steps, repetitions)), rates, beta, theta, x)
        after, defined, gap = (_mean(values) for values in (outcome.regret_after, outcome.regret_defined, outcome.gap))
        return RegretMeasurement(
            problem=name,
            algorithm=algorithm,
            rates=kind,
            n=of.n,
            tail=tail(of.norms),
            steps=steps,
            repetitions=repetitions,
            regret=outcome.regret,
            regret_x=outcome.regret_x,
            regret_after=after[0],
            regret_after_error=after[1],
            regret_defined=defined[0],
            regret_defined_error=defined[1],
            gap=gap[0],
            gap_error=gap[1],
            weighted=outcome.weighted,
            norm_met=None if beta is None else float(np.sqrt(np.mean(np.sum(outcome.peak, axis=1)))),
            bound=_bound(of, steps, rates, beta, kind),
            printed=bounds.printed_bound(of, steps, beta),
        )


def _step_sizes(of: Constants, steps: int, beta: float | None, kind: str) -> problems.StepSizes:
    if kind == SMOOTH:
        return bounds.smooth_step_sizes(of, steps)
    if kind == SHARP:
        return bounds.sharp_step_sizes(of, steps)
    return (bounds.printed_step_sizes if kind == PRINTED else bounds.step_sizes)(of, steps, beta)


def _bound(of: Constants, steps: int, rates: problems.StepSizes, beta: float | None, kind: str) -> bounds.Bound:
    if kind == SMOOTH:
        return bounds.smooth_bound(of, steps, rates)
    if kind == SHARP and beta is not None:
        return bounds.sharp_bound(of, steps, rates, beta)
    return bounds.bound(of, steps, rates, beta)


def _start(name: str, problem: Problem, repetitions: int, draw: np.random.Generator) -> tuple[Array, Array]:
    """Return the start: perturbations uniform in their box, as in ATAS, or the worst corner of a linear problem."""
    theta = np.zeros((repetitions, len(problem.slope)))
    shape = (repetitions, *problem.direction.shape)
    if name == "saddle":
        return theta, draw.uniform(-problem.eps, problem.eps, shape)
    if name == "linear":
        return theta, np.broadcast_to(-problem.best_response(problem.solution), shape)
    return theta + problem.radius / 2, np.zeros(shape)


def _mean(values: Array) -> tuple[float, float]:
    """Return the mean and its standard error."""
    error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0
    return float(np.mean(values)), error
