"""Consistency: a term of the training loss that keeps predictions alike at both ends of the attack.

    l(x') + weight * ramp(epoch) * distance(f(x'), f(start))

The attack computes the logits at its start anyway, so the term costs no pass. They are constant then, and of the mode
that the method attacks in. With `through="both"` the start is passed through the model once more, in train mode and
with gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from atas.core.arguments import check_arguments
from atas.core.autograd import to_float32
from atas.core.dispatch import fast_op
from atas.errors import UsageError, unknown
from atas.methods.checks import known_epochs

Through: TypeAlias = Literal["trained", "both"]


def squared_probabilities(logits: Tensor, start: Tensor) -> Tensor:
    """Return the squared Euclidean distance of the predictions of each example."""
    return (logits.softmax(1) - start.softmax(1)).square().sum(1)


def squared_logits(logits: Tensor, start: Tensor) -> Tensor:
    """Return the squared Euclidean distance of the logits of each example."""
    return (logits - start).square().sum(1)


def mean_squared_logits(logits: Tensor, start: Tensor) -> Tensor:
    """Return the mean squared difference of the logits of each example."""
    return (logits - start).square().mean(1)


def jensen_shannon(logits: Tensor, start: Tensor) -> Tensor:
    """Return the Jensen-Shannon divergence of the predictions of each example."""
    one, other = logits.log_softmax(1), start.log_softmax(1)
    middle = torch.logaddexp(one, other) - math.log(2)
    return 0.5 * (one.exp() * (one - middle) + other.exp() * (other - middle)).sum(1)


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "probabilities": squared_probabilities,
    "logits": squared_logits,
    "mse": mean_squared_logits,
    "js": jensen_shannon,
}


class Consistency(nn.Module):
    """The distance between the logits at the trained point and at the start of the attack, as part of the loss.

    `distance` is `probabilities` or `logits` (squared, summed over the classes), `mse` (of the logits, their mean over
    the classes) or `js`; the term is the mean over the batch. Logits have no bound: with a method that attacks in eval
    mode, use them with `through="both"`. With `ramp` the weight rises linearly over this share of the training, from
    one part per epoch to all of it; `start_epoch` then needs the number of epochs.

    >>> term = Consistency(2.0, distance="logits")
    >>> float(term(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])))
    10.0
    """

    scale: Tensor

    @check_arguments
    def __init__(
        self, weight: float, *, distance: str = "probabilities", ramp: float = 0.0, through: Through = "trained"
    ) -> None:
        super().__init__()
        if not 0 <= weight < math.inf or not 0 <= ramp <= 1:
            raise UsageError(f"consistency needs weight >= 0 and a ramp in [0, 1]; got {weight=}, {ramp=}")
        if distance not in DISTANCES:
            raise unknown("distance of consistency", distance, list(DISTANCES))
        self.weight, self.distance, self.ramp, self.through = weight, distance, ramp, through
        self.register_buffer("scale", torch.ones(()), persistent=False)  # follows from the epoch

    def start_epoch(self, epoch: int, epochs: int | None) -> None:
        """Set the weight of this epoch."""
        if not self.ramp:
            return
        self.scale.fill_(min(1.0, (epoch + 1) / (self.ramp * known_epochs("consistency with a ramp", epochs))))

    def forward(self, logits: Tensor, start: Tensor) -> Tensor:
        """Return the term of a batch."""
        return self.weight * self.scale * mean_distance(logits, start, self.distance)


@fast_op
def mean_distance(logits: Tensor, start: Tensor, distance: str) -> Tensor:
    """Return the mean distance over a batch."""
    return DISTANCES[distance](to_float32(logits), to_float32(start)).mean()
