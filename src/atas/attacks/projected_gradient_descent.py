"""Projected gradient descent: several steps from one or more random starts."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from atas.attacks.base import as_threat, attack_context, choose_threat, step_settings
from atas.attacks.search import LogitsFunction, Search, Slots, random_start, where_write
from atas.core.arguments import check_arguments, check_count, check_fields
from atas.core.autograd import cross_entropy_sum, input_gradient
from atas.core.dispatch import fast_op
from atas.core.rng import CounterRNG
from atas.errors import UsageError
from atas.threat import Threat

_STEPS_PER_EPS = 5  # the default step is eps/5, so ten steps cross the ball once
_MAX_COUNT = 100_000  # steps or restarts; a larger number is a typing error


@check_arguments
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
    targets: Tensor | int | None = None,
) -> Tensor:
    """Ascend the cross-entropy from a random start (Madry et al., 2018): x(k+1) = P[x(k) + a sgn grad l(x(k))].

    The model runs in eval mode. The start is uniform in the ball, hashed from the seed, the number of the restart and
    the example's index; it depends neither on the batch nor on earlier calls.

    Args:
        model: maps images (N, C, H, W) to logits (N, classes).
        x: images in [0, 1], float.
        y: labels (N,), integers.
        threat: the threat model, such as `atas.Linf(8/255)`.
        steps: number of steps.
        step_size: size of a step in pixel units; by default eps/5.
        restarts: number of random starts.
        seed: another seed gives other starts.
        index: position of each example (N,) in its data set; 0 to N-1 by default.
        targets: the class to push the images towards, or one class per image (N,). The attack then succeeds where the
            model predicts it.

    Returns:
        Adversarial inputs like x: for each example the last iterate of the first restart that fools the model, or of
        the last restart if none does.

    >>> from atas import Linf
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    >>> x, y = torch.rand(2, 1, 4, 4), torch.tensor([0, 2])
    >>> alone = pgd(model, x[1:], y[1:], Linf(8/255), restarts=2, index=torch.tensor([1]))
    >>> torch.allclose(pgd(model, x, y, Linf(8/255), restarts=2)[1:], alone)
    True
    """
    _check_count("steps", steps)
    _check_count("restarts", restarts)
    with attack_context(model, x, y, threat, index, targets) as target:
        size = _resolve_step_size(step_size, threat)

        def run_restart(restart: int) -> Tensor:
            number = torch.full((), restart, dtype=torch.int64, device=x.device)
            point = threat.random_start(target.x, CounterRNG(seed, number, target.index))
            for _ in range(steps):
                point = target.step(point, size)
            return point

        points = run_restart(0)
        for restart in range(1, restarts):
            failed = target.resists(model(points))
            points = torch.where(failed.view(-1, 1, 1, 1), run_restart(restart), points)
        return points


@dataclass(frozen=True)
class PGD:
    """Projected gradient descent from one or more random starts; see `pgd`.

    Paper: "Towards Deep Learning Models Resistant to Adversarial Attacks" (Madry et al., 2018),
    https://arxiv.org/abs/1706.06083.
    Distance: Linf, L2.

    Args:
        threat: the threat model, such as `atas.Linf(8/255)`; a plain number is the eps of Linf. An attack without one
            gets it at the call, or from `atas.evaluate`.
        steps: number of steps (default 10).
        restarts: number of random starts (default 1).
        step_size: size of a step in pixel units (default eps/5).

    Shape:
        - model: maps images (N, C, H, W) in [0, 1] to logits (N, classes)
        - x: (N, C, H, W), float in [0, 1]
        - y: (N,), integers from 0 to classes - 1
        - output: like x; the last iterate of the first restart that fools the model, or of the last restart

    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    >>> x, y = torch.rand(2, 1, 4, 4), torch.tensor([0, 2])
    >>> attack = PGD(8 / 255, steps=20)
    >>> x_adv = attack(model, x, y)
    >>> attack.name, PGD(steps=50, restarts=10).name
    ('pgd20', 'pgd50x10')
    """

    threat: Threat | float | None = None
    _: KW_ONLY
    steps: int = 10
    restarts: int = 1
    step_size: float | None = None
    skips_misclassified: ClassVar[bool] = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "threat", as_threat(self.threat))
        check_fields(self)
        _check_count("steps", self.steps)
        _check_count("restarts", self.restarts)

    @property
    def stages(self) -> tuple[PGDRestart, ...]:
        """One search per restart, each on the examples that earlier restarts did not break."""
        return tuple(PGDRestart(self.steps, restart, self.step_size) for restart in range(self.restarts))

    @property
    def name(self) -> str:
        """The name for `attacks.create`: steps, and restarts if there are several."""
        return f"pgd{self.steps}" + (f"x{self.restarts}" if self.restarts > 1 else "")

    def settings(self, threat: Threat) -> dict[str, Any]:
        """Return the steps, their size, and the starts."""
        return {
            "steps": self.steps,
            **step_settings(_resolve_step_size(self.step_size, threat)),
            "restarts": self.restarts,
            "start": "uniform in the ball",
        }

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        threat: Threat | None = None,
        *,
        seed: int = 0,
        index: Tensor | None = None,
        targets: Tensor | int | None = None,
    ) -> Tensor:
        """Return the last iterates, the worst over the restarts."""
        return pgd(
            model, x, y, choose_threat(self, threat), self.steps, self.step_size, self.restarts, seed, index, targets
        )


@dataclass(frozen=True)
class PGDRestart:
    """PGD from one random start, in slots. Only the last iterate counts, not the points before it."""

    iterations: int = 10
    restart: int = 0
    step_size: float | None = None
    queries_per_step: ClassVar[int] = 1
    backward_passes: ClassVar[int] = 1

    @property
    def name(self) -> str:
        """The same for all restarts."""
        return f"pgd{self.iterations}"

    @property
    def steps(self) -> int:
        """The number of iterations."""
        return self.iterations

    def num_targets(self, num_classes: int) -> int:
        """Return 0: the search is untargeted."""
        return 0

    def settings(self, threat: Threat) -> dict[str, Any]:
        """Return the settings of PGD with one start, and the number of the restart."""
        return PGD(steps=self.iterations, step_size=self.step_size).settings(threat) | {"restart": self.restart}

    def extends(self, other: Search) -> bool:
        """Return whether the other search makes exactly the first steps of this one."""
        same = isinstance(other, PGDRestart) and (other.restart, other.step_size) == (self.restart, self.step_size)
        return same and other.steps < self.steps

    def init_state(self, slots: Slots, threat: Threat, num_classes: int, seed: int) -> PGDState:
        """Allocate the state of the slots."""
        return PGDState(self, slots, threat, seed)


class PGDState:
    """The state of PGD: the current iterate is the slot's `point`."""

    def __init__(self, search: PGDRestart, slots: Slots, threat: Threat, seed: int) -> None:
        self._slots, self._threat, self._seed = slots, threat, seed
        self._iterations, self._size = search.iterations, _resolve_step_size(search.step_size, threat)
        self._restart = torch.full((), search.restart, dtype=torch.int64, device=slots.x.device)

    def step(self, model: LogitsFunction) -> None:
        """Make one step in every running slot."""
        slots = self._slots
        current = random_start(self._threat, slots, self._seed, self._restart, slots.point)
        gradient, _ = input_gradient(model, current, slots.y, descend if slots.targeted else cross_entropy_sum)
        pgd_update(self._threat, slots, current, gradient, self._size, self._iterations)


def descend(logits: Tensor, y: Tensor) -> Tensor:
    """Return minus the summed cross-entropy of the target classes."""
    return -cross_entropy_sum(logits, y)


@fast_op
def pgd_update(threat: Threat, slots: Slots, current: Tensor, gradient: Tensor, size: float, iterations: int) -> None:
    """Make a projected ascent step in the running slots. A NaN in the gradient counts as 0."""
    running = slots.running()
    where_write(slots.point, threat.ascend(current, gradient.nan_to_num(), size, slots.x), running)
    slots.iteration.add_(running)
    slots.done.logical_or_(running & (slots.iteration >= iterations))


def _resolve_step_size(step_size: float | None, threat: Threat) -> float:
    return threat.eps / _STEPS_PER_EPS if step_size is None else threat.check_size("step_size", step_size)


def _check_count(name: str, value: int) -> None:
    if check_count(name, value) > _MAX_COUNT:
        raise UsageError(f"{name} of PGD must be at most {_MAX_COUNT:,}; got {value:,}")
