"""Losses that attacks climb: one number an example, greater where the model is further from the label.

The difference of logits ratio (Croce and Hein, 2020, equations 6 and 7) divides a difference of two logits by another,
so it changes neither with the scale of the logits nor with their offset: cross-entropy vanishes, and with it its
gradient, where a model is very sure.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from atas.passes import full

_NO_DIVISION_BY_ZERO = 1e-12


def cross_entropy(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """Of each example; it has no use for a target.

    >>> cross_entropy(torch.zeros(1, 4), torch.tensor([2]), torch.tensor([2])).exp().tolist()
    [4.0]
    """
    return F.cross_entropy(full(logits), y, reduction="none")


def dlr(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """The best other logit minus the label's, over the greatest minus the third greatest; no use for a target.

    Two classes have no third logit: there it is the difference alone.

    >>> dlr(torch.tensor([[6.0, 5.0, 4.0, 0.0]]), torch.tensor([0]), torch.tensor([0])).tolist()
    [-0.5]
    """
    logits = full(logits)
    margin = logits.scatter(1, y.unsqueeze(1), -torch.inf).amax(1) - _of(logits, y)
    if logits.shape[1] == 2:
        return margin
    first, _, third = logits.topk(3).values.unbind(1)
    return margin / (first - third + _NO_DIVISION_BY_ZERO)


def targeted_dlr(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """The target's logit minus the label's, over the greatest minus the mean of the third and fourth greatest.

    Three classes have no fourth logit: there it is the mean of the second and third. (The third alone would make the
    loss -1 wherever the target comes last, and its gradient zero.) With two classes it is the difference alone.

    >>> targeted_dlr(torch.tensor([[6.0, 5.0, 3.0, 1.0]]), torch.tensor([0]), torch.tensor([1])).tolist()
    [-0.25]
    """
    logits = full(logits)
    margin = _of(logits, target) - _of(logits, y)
    if logits.shape[1] == 2:
        return margin
    greatest = logits.topk(min(4, logits.shape[1])).values
    return margin / (greatest[:, 0] - greatest[:, -2:].mean(1) + _NO_DIVISION_BY_ZERO)


def _of(logits: Tensor, classes: Tensor) -> Tensor:
    return logits.gather(1, classes.unsqueeze(1)).squeeze(1)
