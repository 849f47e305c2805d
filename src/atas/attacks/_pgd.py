"""Projected gradient descent: several steps from a random start, from several starts if need be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from atas.attacks._attack import step_settings
from atas.attacks._lanes import Lanes, Logits, Search, started, write
from atas.attacks._logits import correct
from atas.attacks._setting import attacking
from atas.checks import checked_logits
from atas.errors import UsageError
from atas.fusing import fusable
from atas.noise import Draw
from atas.passes import cross_entropy_sum, input_gradient
from atas.threat import Threat

_STEPS_ACROSS = 5  # the default step is eps/5, so ten steps cross the ball once

_MOST = 100_000  # steps or restarts; beyond is a slip of the keyboard


def pgd(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    steps: int = 10,
    step_size: float | None = None,
    restarts: int = 1,
    seed: int = 0,
    index: Tensor | None = None,
) -> Tensor:
    """Steps up the cross-entropy from a random start (Madry et al., 2018): x(k+1) = P[x(k) + a sgn grad l(x(k))].

    The model runs in eval mode. The start is uniform in the ball, hashed from the seed, the number of the restart and
    the example's index, so it depends neither on the batch nor on earlier calls.

    Args:
        model: maps images (N, C, H, W) to logits (N, classes).
        x: images in [0, 1], float.
        y: labels (N,), integers.
        threat: the ball to stay in, such as `atas.Linf(8/255)`.
        steps: how many steps.
        step_size: size of a step in pixel units; eps/5 if not given.
        restarts: how many starts to try.
        seed: another seed gives other starts.
        index: number of each example (N,) in its data set; 0 to N-1 if not given.

    Returns:
        Adversarial inputs like x: for each example the last iterate of the first restart that fools the model there,
        or of the last restart where none does.

    >>> from atas import Linf
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    >>> x, y = torch.rand(2, 1, 4, 4), torch.tensor([0, 2])
    >>> alone = pgd(model, x[1:], y[1:], Linf(8/255), restarts=2, index=torch.tensor([1]))
    >>> torch.allclose(pgd(model, x, y, Linf(8/255), restarts=2)[1:], alone)
    True
    """
    _check_count("steps", steps)
    _check_count("restarts", restarts)
    size = _size(step_size, threat)
    if index is None:
        index = torch.arange(len(x), device=x.device)
    with attacking(model, x, y, threat, index) as target:

        def attempt(restart: int) -> Tensor:
            number = torch.full((), restart, dtype=torch.int64, device=x.device)
            point = threat.random_start(target.x, Draw(seed, number, index.long()))
            for _ in range(steps):
                point = target.ascend(point, size)
            return point

        found = attempt(0)
        for restart in range(1, restarts):
            holds = correct(checked_logits(model(found), len(x)), target.y)
            found = torch.where(holds.view(-1, 1, 1, 1), attempt(restart), found)
        return found


@dataclass(frozen=True)
class PGD:
    """`pgd` as an attack of an evaluation.

    >>> PGD(steps=50, restarts=10).name
    'pgd50x10'
    """

    steps: int = 10
    restarts: int = 1
    step_size: float | None = None
    counts_clean: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_count("steps", self.steps)
        _check_count("restarts", self.restarts)

    @property
    def stages(self) -> tuple[Start, ...]:
        """One start after the other, each for the examples that held before: the worst over the restarts."""
        return tuple(Start(self.steps, restart, self.step_size) for restart in range(self.restarts))

    @property
    def name(self) -> str:
        """The name that makes it: steps, then restarts where there are several."""
        return f"pgd{self.steps}" + (f"x{self.restarts}" if self.restarts > 1 else "")

    def settings(self, threat: Threat) -> dict[str, Any]:
        """Steps, their size, and the starts."""
        return {
            "steps": self.steps,
            **step_settings(_size(self.step_size, threat)),
            "restarts": self.restarts,
            "start": "uniform in the ball",
        }

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, seed: int = 0, index: Tensor | None = None
    ) -> Tensor:
        """Adversarial inputs: last iterates, the worst over the restarts."""
        return pgd(model, x, y, threat, self.steps, self.step_size, self.restarts, seed, index)


@dataclass(frozen=True)
class Start:
    """PGD from one random start, in lanes. Only the last iterate counts, whatever the model says on the way."""

    iterations: int = 10
    restart: int = 0
    step_size: float | None = None
    evaluations: ClassVar[int] = 1
    gradients: ClassVar[int] = 1

    @property
    def name(self) -> str:
        """The same for all restarts."""
        return f"pgd{self.iterations}"

    @property
    def steps(self) -> int:
        """One iteration a step."""
        return self.iterations

    def targets(self, classes: int) -> int:
        """Any other class will do."""
        return 0

    def settings(self, threat: Threat) -> dict[str, Any]:
        """Those of a single start, and its number."""
        return PGD(self.iterations, 1, self.step_size).settings(threat) | {"restart": self.restart}

    def goes_on_from(self, other: Search) -> bool:
        """Whether the first steps of this are all the steps of the other."""
        same = isinstance(other, Start) and (other.restart, other.step_size) == (self.restart, self.step_size)
        return same and other.steps < self.steps

    def begin(self, lanes: Lanes, threat: Threat, classes: int, seed: int) -> Ascent:
        """Allocate what the lanes need."""
        return Ascent(self, lanes, threat, seed)


class Ascent:
    """PGD under way. Where each lane is at is the lane's `point`."""

    def __init__(self, search: Start, lanes: Lanes, threat: Threat, seed: int) -> None:
        self._lanes, self._threat, self._seed = lanes, threat, seed
        self._iterations, self._size = search.iterations, _size(search.step_size, threat)
        self._restart = torch.full((), search.restart, dtype=torch.int64, device=lanes.x.device)

    def step(self, logits: Logits) -> None:
        """One step up the cross-entropy of every lane."""
        lanes = self._lanes
        current = started(self._threat, lanes, self._seed, self._restart, lanes.point)
        gradient, _ = input_gradient(logits, current, lanes.y, cross_entropy_sum)
        _move(self._threat, lanes, current, gradient, self._size, self._iterations)


@fusable
def _move(threat: Threat, lanes: Lanes, current: Tensor, gradient: Tensor, size: float, iterations: int) -> None:
    """Go up the gradient, in the lanes that move. Where it is not a number the point stays."""
    moving = lanes.moving()
    write(lanes.point, threat.ascend(current, gradient.nan_to_num(), size, lanes.x), moving)
    lanes.clock.add_(moving)
    lanes.done.logical_or_(moving & (lanes.clock >= iterations))


def _size(step_size: float | None, threat: Threat) -> float:
    return threat.eps / _STEPS_ACROSS if step_size is None else threat.size("step_size", step_size)


def _check_count(name: str, value: int) -> None:
    if value < 1:
        raise UsageError(f"{name} must be at least 1; got {value}")
    if value > _MOST:
        raise UsageError(f"{name} of PGD must be at most {_MOST:,}; got {value:,}, which would never end")
