"""ELLE: FGSM with a penalty on the curvature of the loss, without second derivatives.

A training step on image x with label y (Abad Rocamora et al., "Efficient Local Linearity Regularization to Overcome
Catastrophic Overfitting", 2024) is

    x1 = x + eps sgn grad l(x)                              neither clipped nor clamped to [0, 1]
    xa, xb uniform in the ball around x, not clamped, and xc = (1 - u) xa + u xb with u uniform in (0, 1)
    R  = mean of (l(xc) - (1 - u) l(xa) - u l(xb))^2        zero where the loss is linear
    one SGD step on l(x1, y) + lambda R                     xa, xb and xc in one pass; all passes in train mode
    lambda <- 4000 if R > mean + 2 std of all earlier R, and more than two are known; else 0.99 lambda

The last line is ELLE-A, the adaptive form and the default here: lambda is 0 until R jumps, as it does when a collapse
begins. ELLE has a constant lambda. The released code calls the optimiser twice for each batch, and makes another pass
in train mode for its log, where the paper has one update and no such pass; this file follows the paper in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atas.core.autograd import freeze, input_gradient, to_float32
from atas.core.dispatch import fast_op
from atas.core.rng import Stream
from atas.data.loader import Batch
from atas.errors import UsageError
from atas.methods.base import CommonArgs, Method, StepOutput
from atas.methods.update import Update
from atas.threat import Linf, Threat


def default_weight(threat: Threat, adaptive: bool) -> float:
    """Return the authors' lambda for Linf: the constant one, by budget, or the one that a jump of R switches on."""
    if not isinstance(threat, Linf):
        raise UsageError("ELLE has a default weight for Linf alone; set weight for this norm")
    if adaptive:
        return 4000.0
    levels = round(255 * threat.eps)
    return 1000.0 if levels < 10 else 5000.0 if levels < 22 else 10000.0


class ELLE(Method):
    """FGSM with local linearity regularisation: ELLE-A, or ELLE with `adaptive=False`.

    `weight` is lambda, with `adaptive` what a jump sets it to; `decay` is its factor after every other step, and
    `sensitivity` how many standard deviations make a jump. `penalty_weight` is lambda now.
    """

    weight_perturbations = ("ascent", "momentum")
    penalty_weight: Tensor
    seen: Tensor
    mean: Tensor
    squares: Tensor

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        adaptive: bool = True,
        weight: float | Literal["auto"] = "auto",
        decay: float = 0.99,
        sensitivity: float = 2.0,
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        self.weight = default_weight(threat, adaptive) if weight == "auto" else weight
        if not (0 <= self.weight < math.inf and 0 <= decay <= 1 and sensitivity >= 0):
            given = f"weight={self.weight}, {decay=}, {sensitivity=}"
            raise UsageError(f"ELLE needs weight >= 0, decay in [0, 1] and sensitivity >= 0; got {given}")
        self.adaptive, self.decay, self.sensitivity = adaptive, decay, sensitivity
        first = {"penalty_weight": 0.0 if adaptive else float(self.weight), "seen": 0.0, "mean": 0.0, "squares": 0.0}
        for name, value in first.items():
            self.register_buffer(name, torch.tensor(value, device=common.get("device")))

    def training_step(self, model: nn.Module, update: Update, batch: Batch) -> StepOutput:
        """Update the weights with the loss at the FGSM point and the penalty."""
        x, y, index = batch.x, batch.y, batch.index
        with freeze(model):
            gradient, _ = input_gradient(model, x, y, self.attack_loss)
        inputs = self.threat.step(x, gradient, self.threat.eps * self.step_scale)
        points, part = self._triplets(x, index)
        errors = torch.zeros(())

        def objective() -> tuple[Tensor, Tensor]:
            nonlocal errors
            logits = model(inputs)
            loss = self.loss(logits, y, index)
            errors = squared_errors(model(points), self.checks.labels(y, logits.shape[1]), part)
            return loss + self.penalty_weight * errors.sum() / max(len(x), 1), logits

        loss, logits, _ = self.minimize(model, update, objective)
        if self.adaptive:
            self._adapt(*update.total(errors.sum(), torch.ones_like(errors).sum()))
        return StepOutput(loss.detach(), inputs, logits.detach())

    def _triplets(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return xa, xb and xc, one after the other, and u."""
        first, second = (x + self.threat.sample(self.rng(index, k), x.shape[1:]).to(x.dtype) for k in (0, 1))
        part = self.rng(index, 2).uniform(Stream.START).to(x.dtype)
        weight = part.view(-1, 1, 1, 1)
        return torch.cat([first, second, (1 - weight) * first + weight * second]), part

    def _adapt(self, total: Tensor, count: Tensor) -> None:
        """Set lambda for the next step, and add R to what is known of earlier ones (Welford's algorithm)."""
        error = (total / count).to(self.mean.dtype)
        deviation = (self.squares / self.seen.clamp_min(1)).sqrt()
        jumps = (self.seen > 2) & (error > self.mean + self.sensitivity * deviation)
        self.penalty_weight.copy_(torch.where(jumps, self.weight, self.decay * self.penalty_weight))
        self.seen += 1
        difference = error - self.mean
        self.mean += difference / self.seen
        self.squares += difference * (error - self.mean)


@fast_op
def squared_errors(logits: Tensor, y: Tensor, part: Tensor) -> Tensor:
    """Return, for each triplet, how far the loss at its point between is from the line between its ends, squared."""
    first, second, between = F.cross_entropy(to_float32(logits), y.repeat(3), reduction="none").view(3, len(y))
    return (between - (1 - part) * first - part * second).square()
