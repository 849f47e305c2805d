"""Losses and margins of attacks: functions of logits with one value per example.

The losses `cross_entropy`, `dlr` and `targeted_dlr` are maximised; they grow as the model moves away from the label.
The difference of logits ratio (Croce and Hein, 2020, equations 6 and 7) divides a difference of two logits by another,
so it does not depend on the scale and offset of the logits. The cross-entropy and its gradient vanish where a model is
very confident.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from atas.core.autograd import to_float32
from atas.core.dispatch import fast_op

DIVISION_EPSILON = 1e-12


@fast_op
def correct(logits: Tensor, y: Tensor) -> Tensor:
    """Return whether each prediction is the label; logits with a NaN are never correct.

    >>> import torch
    >>> correct(torch.tensor([[2.0, 1.0], [2.0, 1.0], [float("nan"), 1.0]]), torch.tensor([0, 1, 0])).tolist()
    [True, False, False]
    """
    return (logits.argmax(1) == y) & ~logits.isnan().any(1)


def resists(logits: Tensor, y: Tensor, *, targeted: bool) -> Tensor:
    """Return whether an attack has failed: the prediction is the label, or with `targeted` is not the class `y`.

    A prediction with a NaN is no class.

    >>> import torch
    >>> logits = torch.tensor([[2.0, 1.0], [float("nan"), 1.0]])
    >>> resists(logits, torch.tensor([0, 1]), targeted=False).tolist()
    [True, False]
    >>> resists(logits, torch.tensor([0, 1]), targeted=True).tolist()
    [False, True]
    """
    is_class = correct(logits, y)
    return ~is_class if targeted else is_class


def cross_entropy(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """Return the cross-entropy of each example; the target has no effect.

    >>> cross_entropy(torch.zeros(1, 4), torch.tensor([2]), torch.tensor([2])).exp().tolist()
    [4.0]
    """
    return F.cross_entropy(to_float32(logits), y, reduction="none")


def dlr(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """Return the largest other logit minus the label's, divided by the largest minus the third largest logit.

    With two classes there is no third logit, and the loss is the difference alone. The target has no effect.

    >>> dlr(torch.tensor([[6.0, 5.0, 4.0, 0.0]]), torch.tensor([0]), torch.tensor([0])).tolist()
    [-0.5]
    """
    logits = to_float32(logits)
    difference = logits.scatter(1, y.unsqueeze(1), -torch.inf).amax(1) - _pick(logits, y)
    if logits.shape[1] == 2:
        return difference
    first, _, third = logits.topk(3).values.unbind(1)
    return difference / (first - third + DIVISION_EPSILON)


def targeted_dlr(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """Return the target's logit minus the label's, divided by the largest minus the mean of the third and fourth.

    With three classes the mean is over the second and third logit. (The third alone would make the loss -1, with a zero
    gradient, wherever the target comes last.) With two classes the loss is the difference alone.

    >>> targeted_dlr(torch.tensor([[6.0, 5.0, 3.0, 1.0]]), torch.tensor([0]), torch.tensor([1])).tolist()
    [-0.25]
    """
    logits = to_float32(logits)
    difference = _pick(logits, target) - _pick(logits, y)
    if logits.shape[1] == 2:
        return difference
    largest = logits.topk(min(4, logits.shape[1])).values
    return difference / (largest[:, 0] - largest[:, -2:].mean(1) + DIVISION_EPSILON)


@fast_op
def margin(logits: Tensor, y: Tensor) -> Tensor:
    """Return the label's logit minus the largest other logit."""
    logits, label = to_float32(logits), y.unsqueeze(1)
    return logits.gather(1, label).squeeze(1) - logits.scatter(1, label, -torch.inf).amax(1)


@fast_op
def target_margin(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """Return the target's logit minus the label's."""
    both = to_float32(logits).gather(1, torch.stack([target, y], 1))
    return both[:, 0] - both[:, 1]


Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits, labels, targets to one value per example

LOSSES: dict[str, Loss] = {"ce": cross_entropy, "dlr": dlr, "t": targeted_dlr}


@fast_op
def attack_loss(kind: str, logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """Return the loss of a name in `LOSSES`."""
    return LOSSES[kind](logits, y, target)


def goal_loss(kind: str, logits: Tensor, y: Tensor, target: Tensor, *, targeted: bool) -> Tensor:
    """Return what an attack maximises: the loss away from the label `y`, or with `targeted` towards the class `y`.

    Towards a class it is the loss of that class with the other sign, so it is positive for `dlr` and `t` if and only if
    the class is predicted.

    >>> goal_loss("dlr", torch.tensor([[6.0, 5.0, 4.0, 0.0]]), *torch.tensor([[0], [0]]), targeted=True).tolist()
    [0.5]
    """
    if not targeted:
        return attack_loss(kind, logits, y, target)
    if kind == "t":
        strongest_other = logits.detach().scatter(1, y.unsqueeze(1), -torch.inf).argmax(1)
        return attack_loss(kind, logits, strongest_other, y)
    return -attack_loss(kind, logits, y, y)


def goal_margin(logits: Tensor, y: Tensor, *, targeted: bool) -> Tensor:
    """Return how far an attack is from success: the margin of the label, or minus that of the class `y`."""
    return -margin(logits, y) if targeted else margin(logits, y)


def _pick(logits: Tensor, classes: Tensor) -> Tensor:
    return logits.gather(1, classes.unsqueeze(1)).squeeze(1)
