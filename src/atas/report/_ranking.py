"""Runs against each other on the same images: who leads under the attacks that all were put to, and by how much."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from atas.evaluation import wilson
from atas.report._compare import Summary
from atas.report._words import attacks_of

_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Place:
    """A run's robust accuracy under the common attacks, and its difference to the best with a 95% interval."""

    run: Summary
    right: int
    n: int
    behind: float
    interval: tuple[float, float]

    @property
    def accuracy(self) -> float:
        """Right under every common attack."""
        return self.right / self.n

    @property
    def known_to(self) -> tuple[float, float]:
        """Wilson's 95% interval of the accuracy."""
        return wilson(self.right, self.n)


@dataclass(frozen=True)
class Ranking:
    """Runs from best to worst, and the attacks that all of them were put to."""

    attacks: list[str]
    places: list[Place]


def rank(runs: Sequence[Summary]) -> Ranking | str:
    """The ranking, or the sentence that says why there is none."""
    found = [(run, run.evaluation) for run in runs if run.evaluation is not None]
    if len(found) < 2:
        return "Fewer than two of the runs have been evaluated."
    first = found[0][1]
    if any(one.data != first.data for _, one in found):
        return "The runs were evaluated on different images, so their figures cannot be set against each other."
    if any(one.threat != first.threat for _, one in found):
        budgets = ", ".join(dict.fromkeys(str(one.threat) for _, one in found))
        return f"The runs were evaluated against different threats ({budgets})."
    common = [name for name in attacks_of(first) if all(name in one.correct for _, one in found)]
    if not common:
        return "No attack was run against all of them."
    verdicts = {run.name: torch.stack([one.correct[name] for name in ("clean", *common)]).all(0) for run, one in found}
    ordered = sorted(found, key=lambda pair: -int(verdicts[pair[0].name].sum()))
    best = verdicts[ordered[0][0].name]
    places = []
    for run, one in ordered:
        own = verdicts[run.name]
        places.append(Place(run, int(own.sum()), one.n, int(own.sum() - best.sum()) / one.n, paired(own, best)))
    return Ranking(common, places)


def paired(own: Tensor, other: Tensor) -> tuple[float, float]:
    """The 95% interval of the difference of two accuracies on the same examples (Agresti and Min, 2005).

    >>> low, high = paired(torch.tensor([True] * 60 + [False] * 40), torch.tensor([True] * 50 + [False] * 50))
    >>> round(low, 3), round(high, 3)
    (0.037, 0.159)
    """
    gained, lost, n = int((own & ~other).sum()) + 0.5, int((other & ~own).sum()) + 0.5, len(own) + 2
    difference = (gained - lost) / n
    half = _Z * math.sqrt(gained + lost - (gained - lost) ** 2 / n) / n
    return difference - half, difference + half
