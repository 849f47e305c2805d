"""Accuracy over the seeds of one recipe: mean, range and standard deviation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atas.evaluation.result import WORST, Evaluation


@dataclass(frozen=True)
class SeedStats:
    """An accuracy in percent: of one run with its 95% interval, or the mean of several runs with their range."""

    value: float
    low: float
    high: float
    runs: int
    n: int
    deviation: float | None = None
    """The standard deviation of several runs."""

    @classmethod
    def of(cls, values: Sequence[float], interval: Sequence[float], n: int) -> SeedStats:
        """Return the statistics of accuracies in percent; `interval` is that of the first, in percent too."""
        if len(values) == 1:
            return cls(values[0], interval[0], interval[1], 1, n)
        return cls(statistics.fmean(values), min(values), max(values), len(values), n, statistics.stdev(values))

    def __str__(self) -> str:
        if self.runs > 1:
            return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"
        return f"{self.value:.2f} [{self.low:.1f}, {self.high:.1f}]"

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        spread = "range over seeds" if self.runs > 1 else "95% interval"
        ends = {"low": self.low, "high": self.high, "spread": spread}
        return {"percent": self.value, **ends, "runs": self.runs, "n": self.n}

    def to_shares(self) -> dict[str, Any]:
        """Return plain values as shares of one, as an evaluation has them."""
        ends = ("min", "max") if self.runs > 1 else ("low", "high")
        values = {"mean": self.value / 100, ends[0]: self.low / 100, ends[1]: self.high / 100}
        values |= {} if self.deviation is None else {"sd": self.deviation / 100}
        return values | {"seeds": self.runs, "n": self.n}


def stats_by_attack(results: Sequence[Evaluation]) -> dict[str, SeedStats]:
    """Return the statistics for each attack, over the results that have it. The worst case, last, is left out if the
    results have different attacks."""
    names = list(dict.fromkeys(name for result in results for name in result.accuracy if name != WORST))
    same = len({frozenset(result.accuracy) for result in results}) == 1
    return {name: stats_under(name, results) for name in [*names, *([WORST] if same else [])]}


def stats_under(attack: str, results: Sequence[Evaluation]) -> SeedStats:
    """Return the statistics under one attack, over the results that have it."""
    attacked = [result for result in results if attack in result.accuracy]
    interval = [100 * end for end in attacked[0].interval[attack]]
    return SeedStats.of([100 * result.accuracy[attack] for result in attacked], interval, attacked[0].n)
