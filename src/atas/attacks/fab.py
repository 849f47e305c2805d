"""FAB, the fast adaptive boundary attack, towards a target class.

FAB searches for the adversarial input closest to the image (Croce and Hein, 2020, "Minimally distorted adversarial
examples with a fast adaptive boundary attack"). An iteration linearises the target's logit minus the label's and moves
slightly beyond its zero: a weighted mean of the shortest ways from the current point and, with a small weight, from the
image. If the model is wrong there, the search steps back towards the image.

An iteration evaluates the model twice: forward and backward at its first point, and forward at its last point. If the
last point is not adversarial, the next iteration starts there, and one evaluation could serve both. But near the
boundary almost every last point is adversarial, and its backward pass would be wasted.

The closest adversarial input of all iterations satisfies the threat model if and only if any of them does, so an
example is broken as soon as one does.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from atas.attacks.base import SearchAttack, as_threat
from atas.attacks.losses import goal_margin, resists, target_margin
from atas.attacks.search import LogitsFunction, Slots, expand_like, where_write
from atas.core.arguments import check_count, check_fields
from atas.core.autograd import input_gradient
from atas.core.dispatch import fast_op
from atas.errors import UsageError
from atas.threat import L2, Linf, Threat

_MAX_TARGETS = 9
MIN_LENGTH = 1e-8  # lower bound of a divisor


@dataclass(frozen=True)
class FAB(SearchAttack):
    """FAB as in AutoAttack: from the image itself, once for each of at most nine targets.

    Paper: "Minimally distorted Adversarial Examples with a Fast Adaptive Boundary Attack" (Croce and Hein, 2020),
    https://arxiv.org/abs/1907.02044.
    Distance: Linf, L2.

    Args:
        threat: the threat model, such as `atas.Linf(8/255)`; a plain number is the eps of Linf. An attack without one
            gets it at the call, or from `atas.evaluate`.
        iterations: number of iterations for each target (default 100).
        eta: how far a step goes beyond the linearised boundary (default 1.05).
        beta: fraction of the perturbation that a step back keeps (default 0.9).
        alpha_max: maximum weight of the step from the image (default 0.1).

    Shape:
        - model: maps images (N, C, H, W) in [0, 1] to logits (N, classes)
        - x: (N, C, H, W), float in [0, 1]
        - y: (N,), integers from 0 to classes - 1
        - output: like x; the image itself if it is misclassified already or the search does not succeed

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    >>> x, y = torch.rand(2, 1, 4, 4), torch.tensor([0, 2])
    >>> attack = FAB(8 / 255, iterations=20)
    >>> x_adv = attack(model, x, y)
    >>> FAB().settings(Linf(8 / 255))["iterations"]
    100
    """

    threat: Threat | float | None = None
    _: KW_ONLY
    iterations: int = 100
    eta: float = 1.05
    beta: float = 0.9
    alpha_max: float = 0.1
    name: ClassVar[str] = "fab-t"
    queries_per_step: ClassVar[int] = 2
    backward_passes: ClassVar[int] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "threat", as_threat(self.threat))
        check_fields(self)
        check_count("iterations", self.iterations)

    @property
    def steps(self) -> int:
        """The number of iterations."""
        return self.iterations

    def num_targets(self, num_classes: int) -> int:
        """Return the number of targets: the nine likeliest other classes, or all if there are fewer."""
        return min(_MAX_TARGETS, num_classes - 1)

    def settings(self, threat: Threat) -> dict[str, Any]:
        """Return the parameters of the paper; nothing is random."""
        return {
            "iterations": self.iterations,
            "eta": self.eta,
            "beta": self.beta,
            "alpha_max": self.alpha_max,
            "restarts": 1,
            "start": "image",
        }

    def init_state(self, slots: Slots, threat: Threat, num_classes: int, seed: int) -> FABState:
        """Allocate the state of the slots; the seed has no effect."""
        if not isinstance(threat.unmasked, Linf | L2):
            raise UsageError(f"{self.name} supports the norms linf and l2; got {threat!r}")
        return FABState(self, slots, threat)


class FABState:
    """The state of FAB."""

    def __init__(self, search: FAB, slots: Slots, threat: Threat) -> None:
        self._search, self._slots, self._threat = search, slots, threat
        self._current = torch.zeros_like(slots.x)
        self.closest = torch.zeros(len(slots), dtype=slots.x.dtype, device=slots.x.device)
        """Distance of each slot's closest adversarial input so far; infinite before the first."""

    def step(self, model: LogitsFunction) -> None:
        """Move every running slot to its linearised boundary, and evaluate the model there."""
        slots, threat, search = self._slots, self._threat, self._search

        def lead(output: Tensor) -> Tensor:
            if slots.targeted:
                return -goal_margin(output, slots.y, targeted=True)
            return target_margin(output, slots.y, slots.target)

        current = torch.where(expand_like(slots.iteration == 0, slots.x), slots.x, self._current)

        def total(output: Tensor, y: Tensor) -> Tensor:
            return lead(output).sum()

        gradient, output = input_gradient(model, current, slots.y, total)
        margin = lead(output)
        ball, gradient = threat.unmasked, threat.restrict(gradient)
        ahead = boundary_step(ball, current, slots.x, gradient, margin, search.eta, search.alpha_max)
        ahead = threat.hold(ahead, slots.x)
        with torch.no_grad():
            is_correct = resists(model(ahead), slots.y, targeted=slots.targeted)
        fab_update(search, ball, slots, self._current, self.closest, ahead, is_correct)


@fast_op
def fab_update(
    search: FAB, threat: Threat, slots: Slots, current: Tensor, closest: Tensor, ahead: Tensor, is_correct: Tensor
) -> None:
    """Record adversarial points in the running slots, and step back from them towards the image."""
    running, x = slots.running(), slots.x
    distance, before = threat.distance(ahead, x), torch.where(slots.iteration == 0, torch.inf, closest)
    inside = ~is_correct & (distance <= threat.eps)
    # A point inside the ball counts even if an earlier one was closer: the verifier rejected that one.
    is_new = inside | (~is_correct & (distance < before))
    where_write(closest, torch.where(is_correct, before, torch.minimum(before, distance)), running)
    where_write(current, torch.where(expand_like(is_correct, x), ahead, x + search.beta * (ahead - x)), running)
    where_write(slots.point, ahead, running & is_new)
    slots.broken.logical_or_(running & inside)
    slots.iteration.add_(running)
    slots.done.logical_or_(running & (slots.iteration >= search.iterations))


@fast_op
def boundary_step(
    threat: Threat, point: Tensor, x: Tensor, gradient: Tensor, margin: Tensor, eta: float, alpha_max: float
) -> Tensor:
    """Return the next point: the mean of eta times the steps to the linearised boundary from the point and the image.

    The step from the image has the weight |step from point| / (|step from point| + |step from image|), at most
    alpha_max.
    """
    from_point, from_x, normal = (images.permute(0, 2, 3, 1).flatten(1) for images in (point, x, gradient.nan_to_num()))
    margin = margin.to(x.dtype).nan_to_num()
    margin_at_x = (margin + (normal * (from_x - from_point)).sum(1)).nan_to_num()
    change = to_boundary(
        torch.cat([from_point, from_x]),
        torch.cat([normal, normal]),
        torch.cat([margin, margin_at_x]),
        euclidean=isinstance(threat, L2),
    )
    length = threat.distance(change, torch.zeros_like(change)).clamp_min(MIN_LENGTH)
    (change_point, change_x), (length_point, length_x) = change.chunk(2), length.chunk(2)
    alpha = (length_point / (length_point + length_x)).clamp_max(alpha_max)[:, None]
    ahead = (from_point + eta * change_point) * (1 - alpha) + (from_x + eta * change_x) * alpha
    channels, height, width = x.shape[1:]
    ahead = ahead.clamp(0, 1).view(-1, height, width, channels).permute(0, 3, 1, 2)
    return ahead.clone(memory_format=torch.contiguous_format)  # as in core.autograd.contiguous


def to_boundary(point: Tensor, normal: Tensor, value: Tensor, *, euclidean: bool) -> Tensor:
    """Return the smallest change of each point that makes a linear function zero and keeps the point in [0, 1].

    The function is `value` at the point and has the gradient `normal`. If it has no zero in [0, 1], the change leads to
    the corner where it is closest to zero. A coordinate that the function does not depend on does not change.

    Every coordinate moves so that the function approaches zero, with speed 1 (Linf) or |normal| (L2), until it reaches
    its bound: change = min(t * speed, room) for one t. The function then falls by the sum of
    min(t * speed * |normal|, room * |normal|), which is concave in t: it is the minimum of linear functions, of which
    the k-th has the first k coordinates, in the order in which they reach their bounds, at their bounds and the others
    moving. So it equals |value| at the largest t at which one of these linear functions does, and no search is needed.

    Args:
        point: coordinates in [0, 1], one point per row.
        normal: gradient of each row's function.
        value: value of each row's function at its point.
        euclidean: minimise the L2 norm of the change; otherwise the Linf norm.

    >>> point, normal = torch.tensor([[0.5, 0.1]]), torch.tensor([[1.0, 1.0]])
    >>> to_boundary(point, normal, torch.tensor([0.4]), euclidean=False)
    tensor([[-0.3000, -0.1000]])
    """
    scale = normal.abs().amax(1, keepdim=True)
    scale = torch.where(scale > 0, scale, 1)
    value = value[:, None] / scale
    normal = normal / scale * value.sign()
    slope = normal.abs()
    room = torch.where(normal > 0, point, 1 - point)
    speed = slope if euclidean else torch.ones_like(slope)

    order = torch.where(slope > 0, room / speed, torch.inf).argsort(1)
    ended = (slope * room).gather(1, order)
    ended = ended.cumsum(1) - ended
    rate = (slope * speed).gather(1, order).flip(1).cumsum(1).flip(1)
    t = torch.where(rate > 0, (value.abs() - ended) / rate, 0).amax(1, keepdim=True)
    t = t.clamp_max(torch.finfo(t.dtype).max)
    return -normal.sign() * torch.minimum(t * speed, room)
