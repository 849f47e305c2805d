"""Auto-PGD: gradient ascent with momentum whose step size follows from the course of the loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atas.attacks._lanes import Lanes, Logits, started, wide, write
from atas.attacks._logits import correct
from atas.attacks._losses import cross_entropy, dlr, targeted_dlr
from atas.errors import UsageError
from atas.fusing import fusable
from atas.passes import input_gradient
from atas.threat import Threat

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits, labels, targets to one number an example

_LOSSES: dict[str, Loss] = {"ce": cross_entropy, "dlr": dlr, "t": targeted_dlr}
_TARGETED = "t"
_MOST_TARGETS = 9
_MOMENTUM = 0.75  # share of the new step; the rest is the step before
_RISES = 0.75  # where no more than this share of a window's steps raised the loss, the step size was too large
# Lengths of the windows after which the step size is looked at, in percent of all iterations: the first, by how much
# each is shorter than the one before, and the shortest.
_FIRST, _SHORTER, _SHORTEST = 22, 3, 6


@dataclass(frozen=True)
class APGD:
    """Auto-PGD (Croce and Hein, 2020, "Reliable evaluation of adversarial robustness", algorithm 1).

    The step size begins at 2 eps. It is looked at after 22% of the steps and then after ever shorter windows. It is
    halved, and the search goes back to the best point so far, where at most three steps in four of that window raised
    the loss, or where it was not halved the last time and the best loss is the same as then. Each step but the first is
    mixed with the one before, three to one.

    As in the authors' code, exactly three steps in four are reason to halve too, the second reason does not count the
    first time, and after a return the next loss is compared with the last one that was evaluated.

    An iteration here evaluates a point and then moves, so there is one more of them than steps: the start is evaluated
    too. Each evaluation of a randomised model is the mean of `passes` of them, loss and gradient as well as the logits
    that decide whether the point is misclassified.

    >>> APGD("t").name, APGD("t").targets(classes=10), APGD("t").targets(classes=3)
    ('apgd-t', 9, 2)
    """

    loss: str = "ce"
    """`ce`, `dlr`, or `t` for the targeted DLR loss."""
    iterations: int = 100
    passes: int = 1

    def __post_init__(self) -> None:
        if self.loss not in _LOSSES:
            raise UsageError(f"the loss of APGD is one of {', '.join(_LOSSES)}; got '{self.loss}'")
        for name, value in (("iterations", self.iterations), ("passes", self.passes)):
            if value < 1:
                raise UsageError(f"{name} must be at least 1; got {value}")

    @property
    def name(self) -> str:
        """`apgd-ce`, `apgd-dlr` or `apgd-t`."""
        return f"apgd-{self.loss}"

    @property
    def steps(self) -> int:
        """One evaluation for the start and one after each step."""
        return self.iterations + 1

    @property
    def evaluations(self) -> int:
        """As many as are averaged."""
        return self.passes

    @property
    def gradients(self) -> int:
        """Each time."""
        return self.passes

    def targets(self, classes: int) -> int:
        """The nine most likely other classes, or as many as there are."""
        return min(_MOST_TARGETS, classes - 1) if self.loss == _TARGETED else 0

    def settings(self, threat: Threat) -> dict[str, Any]:
        """What to repeat it with; the rest is part of the method."""
        return {"loss": _LOSSES[self.loss].__name__, "iterations": self.iterations, "passes": self.passes}

    def begin(self, lanes: Lanes, threat: Threat, classes: int, seed: int) -> Ascent:
        """Allocate what the lanes need."""
        return Ascent(self, lanes, threat, seed)


class Ascent:
    """APGD under way."""

    def __init__(self, search: APGD, lanes: Lanes, threat: Threat, seed: int) -> None:
        self._lanes, self._threat, self._seed = lanes, threat, seed
        self._passes, self._loss = search.passes, functools.partial(_losses, search.loss)
        self._windows = torch.tensor(windows(search.iterations), device=lanes.x.device)
        numbers = torch.zeros(len(lanes), dtype=lanes.x.dtype, device=lanes.x.device)
        self._climb = Climb(
            current=torch.zeros_like(lanes.x),
            previous=torch.zeros_like(lanes.x),
            best_point=torch.zeros_like(lanes.x),
            best_gradient=torch.zeros_like(lanes.x),
            loss=numbers.clone(),
            best_loss=numbers.clone(),
            checked_loss=numbers.clone(),
            size=numbers.clone(),
            rises=torch.zeros_like(lanes.clock),
            halved=torch.zeros_like(lanes.done),
        )

    def step(self, logits: Logits) -> None:
        """Evaluate every lane's point, then look at the step size where a window ends, then move on."""
        lanes = self._lanes
        current = started(self._threat, lanes, self._seed, lanes.rank, self._climb.current)
        loss, gradient, right = self._evaluate(logits, current)
        _move(self._threat, lanes, self._climb, self._windows, self._passes, current, loss, gradient, right)

    def _evaluate(self, logits: Logits, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The mean loss over the passes, the sum of its gradients, and whether the mean's prediction is the label."""
        y, target = self._lanes.y, self._lanes.target

        def total(output: Tensor, y: Tensor) -> Tensor:
            return self._loss(output, y, target).sum()

        gradient, output = input_gradient(logits, point, y, total)
        loss = self._loss(output, y, target)
        for _ in range(self._passes - 1):
            next_gradient, next_output = input_gradient(logits, point, y, total)
            gradient, output = gradient + next_gradient, output + next_output
            loss = loss + self._loss(next_output, y, target)
        return loss / self._passes, gradient, correct(output, y)


@dataclass(frozen=True)
class Climb:
    """What APGD remembers of each lane."""

    current: Tensor
    """The point to evaluate next."""
    previous: Tensor
    """The point from which the step to it was made."""
    best_point: Tensor
    best_gradient: Tensor
    loss: Tensor
    """At the last point that was evaluated."""
    best_loss: Tensor
    checked_loss: Tensor
    """The best loss when the step size was last looked at."""
    size: Tensor
    """Of the next step."""
    rises: Tensor
    """How many steps of this window raised the loss."""
    halved: Tensor
    """Whether the step size was halved when it was last looked at."""


def windows(iterations: int) -> list[int]:
    """For each number of steps made, the length of the window that ends there; 0 where none does.

    >>> [(made, length) for made, length in enumerate(windows(100)) if length]
    [(22, 22), (41, 19), (57, 16), (70, 13), (80, 10), (87, 7), (93, 6), (99, 6)]
    """
    lengths = [0] * (iterations + 1)
    end, length, last = _FIRST, _FIRST, 0
    while (made := -(-end * iterations // 100)) <= iterations:
        if made > last:
            lengths[made], last = made - last, made
        length = max(length - _SHORTER, _SHORTEST)
        end += length
    return lengths


@fusable
def _losses(kind: str, logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    return _LOSSES[kind](logits, y, target)


@fusable
def _move(
    threat: Threat,
    lanes: Lanes,
    climb: Climb,
    table: Tensor,
    passes: int,
    current: Tensor,
    loss: Tensor,
    gradient: Tensor,
    right: Tensor,
) -> None:
    """Take note of the evaluation of `current` and make a step, in the lanes that move.

    The gradient is the sum over the passes. Where it is not a number the point stays.
    """
    gradient = gradient.nan_to_num() / passes
    moving, fresh = lanes.moving(), lanes.clock == 0
    x, last = lanes.x, len(table) - 1

    better = fresh | (loss > climb.best_loss)
    best_loss = torch.where(better, torch.where(loss.isnan(), -torch.inf, loss), climb.best_loss)
    best_point = torch.where(wide(better, x), current, climb.best_point)
    best_gradient = torch.where(wide(better, x), gradient, climb.best_gradient)

    window = table[lanes.clock.clamp_max(last)]
    looked = window > 0
    rises = torch.where(fresh, 0, climb.rises + (loss > climb.loss))
    stuck = ~climb.halved & (best_loss <= climb.checked_loss)
    halve = looked & ((rises <= _RISES * window) | stuck)
    size = torch.where(fresh, 2 * threat.eps, torch.where(halve, climb.size / 2, climb.size))

    here = torch.where(wide(halve, x), best_point, current)
    uphill = torch.where(wide(halve, x), best_gradient, gradient)
    ahead = threat.ascend(here, uphill, size, x)
    mixed = threat.project(here + _MOMENTUM * (ahead - here) + (1 - _MOMENTUM) * (here - climb.previous), x)

    write(climb.current, torch.where(wide(fresh, x), ahead, mixed), moving)
    write(climb.previous, here, moving)
    write(climb.best_point, best_point, moving)
    write(climb.best_gradient, best_gradient, moving)
    write(climb.loss, loss, moving)
    write(climb.best_loss, best_loss, moving)
    write(climb.checked_loss, torch.where(fresh | looked, best_loss, climb.checked_loss), moving)
    write(climb.size, size, moving)
    write(climb.rises, torch.where(looked, 0, rises), moving)
    write(climb.halved, fresh | torch.where(looked, halve, climb.halved), moving)
    write(lanes.point, torch.where(wide(right, x), best_point, current), moving)
    lanes.broken.logical_or_(moving & ~right)
    lanes.done.logical_or_(moving & (lanes.clock >= last))
    lanes.clock.add_(moving)
