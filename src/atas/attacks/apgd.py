"""Auto-PGD: gradient ascent with momentum and a step size that adapts to the loss."""

from __future__ import annotations

import functools
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from atas.attacks.base import SearchAttack, as_threat
from atas.attacks.losses import LOSSES, goal_loss, resists
from atas.attacks.search import LogitsFunction, Slots, expand_like, random_start, where_write
from atas.core.arguments import check_count, check_fields
from atas.core.autograd import input_gradient
from atas.core.dispatch import fast_op
from atas.errors import UsageError
from atas.threat import Threat

# The names of the losses in results and progress files, whose format they belong to.
_LOSS_NAMES = {"ce": "cross_entropy", "dlr": "dlr", "t": "targeted_dlr"}
_TARGETED = "t"
_MAX_TARGETS = 9
ALPHA = 0.75  # weight of the new step; the rest is momentum
RHO = 0.75  # halve the step size if at most this fraction of a window's steps raised the loss
# Windows between the checkpoints of the step size, in percent of all iterations: length of the first, decrease from one
# to the next, and minimum length.
_FIRST_WINDOW, _WINDOW_DECREASE, _MIN_WINDOW = 22, 3, 6


@dataclass(frozen=True)
class APGD(SearchAttack):
    """Auto-PGD: gradient ascent with momentum and a step size that adapts to the loss.

    Paper: "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free attacks" (Croce and
    Hein, 2020, algorithm 1), https://arxiv.org/abs/2003.01690.
    Distance: Linf, L2.

    The step size starts at 2 eps. The first checkpoint is after 22% of the steps; later windows are shorter. At a
    checkpoint the step size is halved, and the search returns to the best point, under one of two conditions: at most
    three quarters of the window's steps raised the loss, or the step size was not halved at the last checkpoint and the
    best loss has not risen since. Each step but the first is mixed with the previous one, three to one.

    As in the authors' code, exactly three quarters also halve the step size, the second condition does not apply at the
    first checkpoint, and after a return the next loss is compared with the last evaluated one.

    An iteration evaluates a point and then moves, so there is one iteration more than steps. For a stochastic model,
    loss, gradient and logits are means over `eot_iterations` passes.

    Args:
        threat: the threat model, such as `atas.Linf(8/255)`; a plain number is the eps of Linf. An attack without one
            gets it at the call, or from `atas.evaluate`.
        loss: `ce` (the default), `dlr`, or `t` for the targeted DLR loss, once for each of at most nine targets.
        iterations: number of steps (default 100).
        eot_iterations: passes to average at each step (default 1).

    Shape:
        - model: maps images (N, C, H, W) in [0, 1] to logits (N, classes)
        - x: (N, C, H, W), float in [0, 1]
        - y: (N,), integers from 0 to classes - 1
        - output: like x; the image itself if it is misclassified already or the search does not succeed

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    >>> x, y = torch.rand(2, 1, 4, 4), torch.tensor([0, 2])
    >>> attack = APGD(8 / 255, loss="dlr", iterations=20)
    >>> x_adv = attack(model, x, y)
    >>> APGD(loss="t").name, APGD(loss="t").num_targets(10), APGD(loss="t").num_targets(3)
    ('apgd-t', 9, 2)
    """

    threat: Threat | float | None = None
    _: KW_ONLY
    loss: str = "ce"
    iterations: int = 100
    eot_iterations: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "threat", as_threat(self.threat))
        check_fields(self)
        if self.loss not in LOSSES:
            raise UsageError(f"the loss of APGD must be one of {', '.join(LOSSES)}; got '{self.loss}'")
        for name, value in (("iterations", self.iterations), ("eot_iterations", self.eot_iterations)):
            check_count(name, value)

    @property
    def name(self) -> str:
        """`apgd-ce`, `apgd-dlr` or `apgd-t`."""
        return f"apgd-{self.loss}"

    @property
    def steps(self) -> int:
        """One evaluation of the start and one after each step."""
        return self.iterations + 1

    @property
    def queries_per_step(self) -> int:
        """The number of passes to average."""
        return self.eot_iterations

    @property
    def backward_passes(self) -> int:
        """One per forward pass."""
        return self.eot_iterations

    def num_targets(self, num_classes: int) -> int:
        """Return the number of targets: the nine likeliest other classes, or all if there are fewer."""
        return min(_MAX_TARGETS, num_classes - 1) if self.loss == _TARGETED else 0

    def settings(self, threat: Threat) -> dict[str, Any]:
        """Return the settings; all else is fixed by the algorithm."""
        return {"loss": _LOSS_NAMES[self.loss], "iterations": self.iterations, "passes": self.eot_iterations}

    def init_state(self, slots: Slots, threat: Threat, num_classes: int, seed: int) -> APGDState:
        """Allocate the state of the slots."""
        return APGDState(self, slots, threat, seed)


class APGDState:
    """The state of APGD."""

    def __init__(self, search: APGD, slots: Slots, threat: Threat, seed: int) -> None:
        self._slots, self._threat, self._seed = slots, threat, seed
        self._eot_iterations, self._loss = (
            search.eot_iterations,
            functools.partial(goal_loss, search.loss, targeted=slots.targeted),
        )
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
        """Evaluate every running slot's point, adapt the step size at checkpoints, and move."""
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
        """Return the mean loss over the passes, the sum of the gradients, and whether the mean logits resist."""
        y, target = self._slots.y, self._slots.target

        def total(output: Tensor, y: Tensor) -> Tensor:
            return self._loss(output, y, target).sum()

        gradient, output = input_gradient(model, point, y, total)
        loss = self._loss(output, y, target)
        for _ in range(self._eot_iterations - 1):
            next_gradient, next_output = input_gradient(model, point, y, total)
            gradient, output = gradient + next_gradient, output + next_output
            loss = loss + self._loss(next_output, y, target)
        return loss / self._eot_iterations, gradient, resists(output, y, targeted=self._slots.targeted)


@dataclass(frozen=True)
class APGDBuffers:
    """The values of APGD for each slot."""

    current: Tensor
    """The point to evaluate next."""
    previous: Tensor
    """The point before it."""
    best_point: Tensor
    best_gradient: Tensor
    loss: Tensor
    """The loss at the last evaluated point."""
    best_loss: Tensor
    checkpoint_loss: Tensor
    """The best loss at the last checkpoint."""
    step_size: Tensor
    """The size of the next step."""
    increases: Tensor
    """The number of steps of this window that raised the loss."""
    halved: Tensor
    """Whether the step size was halved at the last checkpoint."""


def checkpoints(iterations: int) -> list[int]:
    """Return, for each number of steps, the length of the window that ends there, or 0.

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
    """Record the evaluation of `current` and make a step, in the running slots.

    The gradient is the sum over the passes. A NaN in it counts as 0.
    """
    gradient = gradient.nan_to_num() / eot_iterations
    running, fresh = slots.running(), slots.iteration == 0
    x, last = slots.x, len(table) - 1

    better = fresh | (loss > buffers.best_loss)
    best_loss = torch.where(better, torch.where(loss.isnan(), -torch.inf, loss), buffers.best_loss)
    best_point = torch.where(expand_like(better, x), current, buffers.best_point)
    best_gradient = torch.where(expand_like(better, x), gradient, buffers.best_gradient)

    window = table[slots.iteration.clamp_max(last)]
    at_checkpoint = window > 0
    increases = torch.where(fresh, 0, buffers.increases + (loss > buffers.loss))
    stuck = ~buffers.halved & (best_loss <= buffers.checkpoint_loss)
    halve = at_checkpoint & ((increases <= RHO * window) | stuck)
    step_size = torch.where(fresh, 2 * threat.eps, torch.where(halve, buffers.step_size / 2, buffers.step_size))

    origin = torch.where(expand_like(halve, x), best_point, current)
    direction = torch.where(expand_like(halve, x), best_gradient, gradient)
    ahead = threat.ascend(origin, direction, step_size, x)
    mixed = threat.project(origin + ALPHA * (ahead - origin) + (1 - ALPHA) * (origin - buffers.previous), x)

    where_write(buffers.current, torch.where(expand_like(fresh, x), ahead, mixed), running)
    where_write(buffers.previous, origin, running)
    where_write(buffers.best_point, best_point, running)
    where_write(buffers.best_gradient, best_gradient, running)
    where_write(buffers.loss, loss, running)
    where_write(buffers.best_loss, best_loss, running)
    where_write(
        buffers.checkpoint_loss, torch.where(fresh | at_checkpoint, best_loss, buffers.checkpoint_loss), running
    )
    where_write(buffers.step_size, step_size, running)
    where_write(buffers.increases, torch.where(at_checkpoint, 0, increases), running)
    where_write(buffers.halved, fresh | torch.where(at_checkpoint, halve, buffers.halved), running)
    where_write(slots.point, torch.where(expand_like(is_correct, x), best_point, current), running)
    slots.broken.logical_or_(running & ~is_correct)
    slots.done.logical_or_(running & (slots.iteration >= last))
    slots.iteration.add_(running)
