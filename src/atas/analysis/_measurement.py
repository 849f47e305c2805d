"""What the study of the theory measured, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from atas.analysis._bounds import Bound

ASGDBCA, SGDBCA = "ASGDBCA", "SGDBCA"
MENDED, PRINTED, SHARP, SMOOTH, TOLD = "mended", "printed", "sharp", "smooth", "told"


@dataclass(frozen=True)
class Sizes:
    """How much is run."""

    n: int
    repetitions: int
    horizons: tuple[int, ...]
    tail: float  # of the horizons
    tails: tuple[float, ...]
    tail_steps: int
    few: int  # examples of the linear problem: with few of them and many steps, each is visited often
    few_steps: int
    examples: tuple[int, ...]
    example_steps: int
    cycles: tuple[int, ...]


@dataclass(frozen=True)
class Measurement:
    """One algorithm on one problem with one pair of step sizes. Regrets are sums over the steps, the gap is not."""

    problem: str
    algorithm: str
    rates: str
    """`mended`: those that suit the mended bounds; `printed`: the theorems'; `sharp`: mended, for the sharper bound of
    ASGDBCA; `smooth`: eta_x = 1/(2 L_x); `told`: mended, with the gradient norms that ASGDBCA met on the way instead of
    the largest that are possible."""
    n: int
    tail: float
    steps: int
    repetitions: int
    regret: float
    """Against comparators that are fixed for all repetitions."""
    regret_x: float
    """The maximiser's part of it."""
    regret_after: float
    """Against those that suit each repetition best, on average."""
    regret_after_error: float
    regret_defined: float
    """R(T) as the paper defines it, on average."""
    regret_defined_error: float
    gap: float
    """Of the averaged weights, on average."""
    gap_error: float
    weighted: float | None
    """Squared gradients over v-hat, summed over the examples, on average over the steps."""
    norm_met: float | None
    """What G_x,2 would be if no gradient were larger than those that ASGDBCA met."""
    bound: Bound
    """By the mended proof, at the step sizes that were used."""
    printed: Bound
    """By the theorem as it stands, which names the `printed` step sizes."""


@dataclass(frozen=True)
class Result:
    """All that was measured."""

    seed: int
    beta: float
    sizes: Sizes
    horizons: list[Measurement]
    tails: list[Measurement]
    examples: list[Measurement]
    cycle: list[Measurement]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def measured_ratios(self, problem: str, plain: str = MENDED, adaptive: str = MENDED) -> list[tuple[float, float]]:
        """SGDBCA's regret over ASGDBCA's on this problem, each with its kind of step sizes: (tail, ratio)."""
        regret = {(row.algorithm, row.rates, row.tail): row.regret for row in self.tails if row.problem == problem}
        tails = [at for algorithm, kind, at in regret if (algorithm, kind) == (ASGDBCA, adaptive)]
        return [(at, regret[SGDBCA, plain, at] / regret[ASGDBCA, adaptive, at]) for at in tails]
