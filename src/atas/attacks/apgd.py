"""Auto-PGD: gradient ascent with momentum whose step size follows from the course of the loss."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atas.attacks.losses import LOSSES, attack_loss, correct
from atas.attacks.search import LogitsFunction, Slots, expand_like, random_start, where_write
from atas.core.autograd import input_gradient
from atas.core.dispatch import fast_op
from atas.errors import UsageError
from atas.threat import Threat

# What results and progress files say of each loss: part of their format.
_LOSS_NAMES = {"ce": "cross_entropy", "dlr": "dlr", "t": "targeted_dlr"}
_TARGETED = "t"
_MAX_TARGETS = 9
ALPHA = 0.75  # share of the new step; the rest is the step before
RHO = 0.75  # where no more than this share of a window's steps raised the loss, the step size was too large
# Lengths of the windows after which the step size is looked at, in percent of all iterations: the first, by how much
# each is shorter than the one before, and the shortest.
_FIRST_WINDOW, _WINDOW_DECREASE, _MIN_WINDOW = 22, 3, 6


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
    too. Each evaluation of a randomised model is the mean of `eot_iterations` of them, loss and gradient as well as the
    logits that decide whether the point is misclassified.

    >>> APGD("t").name, APGD("t").num_targets(10), APGD("t").num_targets(3)
    ('apgd-t', 9, 2)
    """

    loss: str = "ce"
    """`ce`, `dlr`, or `t` for the targeted DLR loss."""
    iterations: int = 100
    eot_iterations: int = 1

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise UsageError(f"the loss of APGD is one of {', '.join(LOSSES)}; got '{self.loss}'")
        for name, value in (("iterations", self.iterations), ("eot_iterations", self.eot_iterations)):
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
    def queries_per_step(self) -> int:
        """As many as are averaged."""
        return self.eot_iterations

    @property
    def backward_passes(self) -> int:
        """Each time."""
        return self.eot_iterations

    def num_targets(self, num_classes: int) -> int:
        """The nine most likely other classes, or as many as there are."""
        return min(_MAX_TARGETS, num_classes - 1) if self.loss == _TARGETED else 0

    def settings(self, threat: Threat) -> dict[str, Any]:
        """What to repeat it with; the rest is part of the method."""
        return {"loss": _LOSS_NAMES[self.loss], "iterations": self.iterations, "passes": self.eot_iterations}

    def init_state(self, slots: Slots, threat: Threat, num_classes: int, seed: int) -> APGDState:
        """Allocate what the slots need."""
        return APGDState(self, slots, threat, seed)


class APGDState:
    """APGD under way."""

    def __init__(self, search: APGD, slots: Slots, threat: Threat, seed: int) -> None:
        self._slots, self._threat, self._seed = slots, threat, seed
        self._eot_iterations, self._loss = search.eot_iterations, functools.partial(attack_loss, search.loss)
        self._checkpoints = torch.tensor(checkpoints(search.iterations), device=slots.x.device)
        numbers = torch.zeros(len(slots), dtype=slots.x.dtype, device=slots.x.device)
        self._buffers = APGDBuffers(
            current=torch.zeros_like(slots.x),
            previous=torch.zeros_like(slots.x),
            best_point=torch.zeros_like(slots.x),
            best_gradient=torch.zeros_like(slots.x),
            loss=numbers.clone(),
            best_loss=numbers.clone(),
            checkpoint_loss=numbers.clone(),
            step_size=numbers.clone(),
            increases=torch.zeros_like(slots.iteration),
            halved=torch.zeros_like(slots.done),
        )

    def step(self, model: LogitsFunction) -> None:
        """Evaluate every slot's point, then look at the step size where a window ends, then move on."""
        slots = self._slots
        current = random_start(self._threat, slots, self._seed, slots.target_rank, self._buffers.current)
        loss, gradient, is_correct = self._evaluate(model, current)
        apgd_update(
            self._threat,
            slots,
            self._buffers,
            self._checkpoints,
            self._eot_iterations,
            current,
            loss,
            gradient,
            is_correct,
        )

    def _evaluate(self, model: LogitsFunction, point: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The mean loss over the passes, the sum of its gradients, and whether the mean's prediction is the label."""
        y, target = self._slots.y, self._slots.target

        def total(output: Tensor, y: Tensor) -> Tensor:
            return self._loss(output, y, target).sum()

        gradient, output = input_gradient(model, point, y, total)
        loss = self._loss(output, y, target)
        for _ in range(self._eot_iterations - 1):
            next_gradient, next_output = input_gradient(model, point, y, total)
            gradient, output = gradient + next_gradient, output + next_output
            loss = loss + self._loss(next_output, y, target)
        return loss / self._eot_iterations, gradient, correct(output, y)


@dataclass(frozen=True)
class APGDBuffers:
    """What APGD remembers of each slot."""

    current: Tensor
    """The point to evaluate next."""
    previous: Tensor
    """The point from which the step to it was made."""
    best_point: Tensor
    best_gradient: Tensor
    loss: Tensor
    """At the last point that was evaluated."""
    best_loss: Tensor
    checkpoint_loss: Tensor
    """The best loss when the step size was last looked at."""
    step_size: Tensor
    """Of the next step."""
    increases: Tensor
    """How many steps of this window raised the loss."""
    halved: Tensor
    """Whether the step size was halved when it was last looked at."""


def checkpoints(iterations: int) -> list[int]:
    """For each number of steps made, the length of the window that ends there; 0 where none does.

    >>> [(made, length) for made, length in enumerate(checkpoints(100)) if length]
    [(22, 22), (41, 19), (57, 16), (70, 13), (80, 10), (87, 7), (93, 6), (99, 6)]
    """
    lengths = [0] * (iterations + 1)
    end, length, last = _FIRST_WINDOW, _FIRST_WINDOW, 0
    while (made := -(-end * iterations // 100)) <= iterations:
        if made > last:
            lengths[made], last = made - last, made
        length = max(length - _WINDOW_DECREASE, _MIN_WINDOW)
        end += length
    return lengths


@fast_op
def apgd_update(
    threat: Threat,
    slots: Slots,
    buffers: APGDBuffers,
    table: Tensor,
    eot_iterations: int,
    current: Tensor,
    loss: Tensor,
    gradient: Tensor,
    is_correct: Tensor,
) -> None:
    """Take note of the evaluation of `current` and make a step, in the running slots.

    The gradient is the sum over the passes. Where it is not a number the point stays.
    """
    gradient = gradient.nan_to_num() / eot_iterations
    running, fresh = slots.running(), slots.iteration == 0
    x, last = slots.x, len(table) - 1

    better = fresh | (loss > buffers.best_loss)
    best_loss = torch.where(better, torch.where(loss.isnan(), -torch.inf, loss), buffers.best_loss)
    best_point = torch.where(expand_like(better, x), current, buffers.best_point)
    best_gradient = torch.where(expand_like(better, x), gradient, buffers.best_gradient)

    window = table[slots.iteration.clamp_max(last)]
    looked = window > 0
    increases = torch.where(fresh, 0, buffers.increases + (loss > buffers.loss))
    stuck = ~buffers.halved & (best_loss <= buffers.checkpoint_loss)
    halve = looked & ((increases <= RHO * window) | stuck)
    step_size = torch.where(fresh, 2 * threat.eps, torch.where(halve, buffers.step_size / 2, buffers.step_size))

    here = torch.where(expand_like(halve, x), best_point, current)
    uphill = torch.where(expand_like(halve, x), best_gradient, gradient)
    ahead = threat.ascend(here, uphill, step_size, x)
    mixed = threat.project(here + ALPHA * (ahead - here) + (1 - ALPHA) * (here - buffers.previous), x)

    where_write(buffers.current, torch.where(expand_like(fresh, x), ahead, mixed), running)
    where_write(buffers.previous, here, running)
    where_write(buffers.best_point, best_point, running)
    where_write(buffers.best_gradient, best_gradient, running)
    where_write(buffers.loss, loss, running)
    where_write(buffers.best_loss, best_loss, running)
    where_write(buffers.checkpoint_loss, torch.where(fresh | looked, best_loss, buffers.checkpoint_loss), running)
    where_write(buffers.step_size, step_size, running)
    where_write(buffers.increases, torch.where(looked, 0, increases), running)
    where_write(buffers.halved, fresh | torch.where(looked, halve, buffers.halved), running)
    where_write(slots.point, torch.where(expand_like(is_correct, x), best_point, current), running)
    slots.broken.logical_or_(running & ~is_correct)
    slots.done.logical_or_(running & (slots.iteration >= last))
    slots.iteration.add_(running)
