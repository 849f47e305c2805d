"""SORA: steps as long as the loss has been linear.

K is a running measure of how well the gradient at the start of the attack predicts the one at its end. From the start
x0 = U, uniform in the ball, a training step on image x with label y is

    x1 = x0 + a r sgn g,   g = grad l(x0)          a = 2 eps min(1, 0.02 / (1 - K)); r uniform in (0, 1) per pixel
    one SGD step on l(x1, y), whose backward pass also gives g1, the gradient with respect to x1
    k  = mean over the batch of (g1 . sgn g) / |g|_1            1 for a linear loss, below 0 behind a peak
    K <- 0.95 K + 0.05 min(max(k, -1), 1)                       K = 0.99 at first

x1 is clamped to [0, 1], but may leave the ball. All passes run in train mode. The method is of the paper "SORA" (2026,
arXiv 2606.00738). For L2 the direction is g / |g|_2, and k is relative to |g|_2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from atas.core.autograd import freeze, input_gradient
from atas.core.dispatch import fast_op
from atas.core.rng import CounterRNG, Stream
from atas.data.loader import Batch
from atas.errors import UsageError
from atas.methods.base import CommonArgs, Method, StepOutput
from atas.methods.step_warnings import warn_of_adaptive_steps
from atas.methods.update import Update
from atas.threat import Size, Threat

_TINY = 1e-12  # keeps k finite where the gradient is zero; k is zero there
_FIRST = 0.99


class SORA(Method):
    """FGSM with a random start, whose longest step follows the linearity of the loss.

    `max_step` bounds the step, `curvature` is the 1 - K up to which it is that long, and `decay` is that of K, the
    buffer `linearity`.
    """

    weight_perturbations = ("ascent", "momentum")
    linearity: Tensor

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        max_step: Size = "auto",
        curvature: float = 0.02,
        decay: float = 0.95,
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        if not (curvature > 0 and 0 <= decay < 1):
            raise UsageError(f"SORA needs curvature > 0 and decay in [0, 1); got {curvature} and {decay}")
        self.curvature, self.decay = curvature, decay
        self.max_step = threat.size("max_step", max_step, auto=2.0)
        self.settings_warning = warn_of_adaptive_steps(threat, self.max_step)
        self.register_buffer("linearity", torch.tensor(_FIRST, device=common.get("device")))

    def training_step(self, model: nn.Module, update: Update, batch: Batch) -> StepOutput:
        """Attack and update; measure the linearity by the gradients that both have computed."""
        x, y, index = batch.x, batch.y, batch.index
        start = self.threat.random_start(x, self.rng(index))
        with freeze(model):
            gradient, _ = input_gradient(model, start, y, self.attack_loss)
        size = self.max_step * torch.clamp(self.curvature / (1 - self.linearity), max=1.0) * self.step_scale
        inputs = random_part_of_step(self.threat, start, gradient, size, self.rng(index, 1)).requires_grad_(True)

        def objective() -> tuple[Tensor, Tensor]:
            logits = model(inputs)
            return self.loss(logits, y, index), logits

        loss, logits, (at_end,) = self.minimize(model, update, objective, inputs)
        agreement = agreement_of_gradients(self.threat, gradient, at_end * len(x))  # of a sum; the loss is a mean
        total, count = update.total(agreement.sum(), torch.ones_like(agreement).sum())
        measured = (total / count).clamp(-1, 1).to(self.linearity.dtype)
        self.linearity.copy_(self.decay * self.linearity + (1 - self.decay) * measured)
        return StepOutput(loss.detach(), inputs.detach(), logits.detach())


@fast_op
def random_part_of_step(threat: Threat, start: Tensor, gradient: Tensor, size: Tensor, rng: CounterRNG) -> Tensor:
    """Go a random part of a step in each pixel, and stay in [0, 1]."""
    step = threat.step(torch.zeros_like(start), gradient, size)
    return (start + rng.uniform(Stream.START, start.shape[1:]).to(start.dtype) * step).clamp(0, 1)


@fast_op
def agreement_of_gradients(threat: Threat, at_start: Tensor, at_end: Tensor) -> Tensor:
    """Return, for each example, the slope of the loss at the end along the step, relative to that at the start."""
    direction = threat.step(torch.zeros_like(at_start), at_start, 1.0).flatten(1)
    slopes = [(direction * gradient.flatten(1)).sum(1) for gradient in (at_start, at_end)]
    return slopes[1] / slopes[0].clamp_min(_TINY)
