"""FGSM-PCO: training between the attack of this epoch and the one before, by how certain the model is.

A perturbation d is kept for every training example. A training step on an image x with label y is

    z0 = f(x + d),  g = gradient of l(z0, t) with respect to x      t: 0.6 for the true class; x + d may leave [0, 1]
    x1 = P[x + d + a sgn g],  d1 = x1 - x                           a = eps
    k  = 1 - softmax(z0)[y]                                         large where the label is doubtful
    xm = k (x + d) + (1 - k) (x + 1.5 d1)                           may leave the ball, by half of eps, and [0, 1]
    one SGD step on l(f(xm), t) + lambda |MSE(f(x1), z0) - MSE(f(x1), f(xm))|
    d <- d1

Gradients go through all three passes, and through k. MSE is the mean over the batch and the classes. d starts as random
corners of the ball and is never reset. All passes run in train mode. Wang et al., "Preventing Catastrophic Overfitting
in Fast Adversarial Training: A Bi-level Optimization Perspective", ECCV 2024; this follows the released code, which
keeps the graph of z0. Here the start is passed once more, to the same logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from atas.core.autograd import input_gradient, keep_statistics, to_float32
from atas.core.dispatch import fast_op
from atas.data.loader import Batch
from atas.errors import UsageError
from atas.methods.base import CommonArgs, Method, StepOutput
from atas.methods.consistency import mean_squared_logits
from atas.methods.prior import Frame, PriorPerturbation
from atas.methods.step_warnings import warn_of_steps
from atas.methods.update import Update
from atas.methods.weight_perturbation import FORMS
from atas.threat import Size, Threat


class FGSMPCO(PriorPerturbation):
    """FGSM with prior perturbations, current ones, and both together (FGSM-PCO, 2024).

    `smoothing` is the share of the probability that goes to the other classes, in attack and loss, `weight` is lambda,
    and `stretch` the factor 1.5. With `frame="image"`, d follows crop and flip, as in ATTA and ATAS. A pixel takes one
    byte (`dtype`). Cost: four forward passes, a backward pass to the input, three to the weights.
    """

    weight_perturbations = FORMS
    perturb = Method.perturb  # what the weights are trained on depends on them

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        step_size: Size = "auto",
        smoothing: float = 0.4,
        weight: float = 10.0,
        stretch: float = 1.5,
        frame: Frame = "view",
        dtype: torch.dtype | Literal["auto"] = "auto",
        **common: Unpack[CommonArgs],
    ) -> None:
        self.check_own_parts(common)
        super().__init__(threat, examples, shape, smoothing=smoothing, frame=frame, dtype=dtype, **common)
        if not (0 <= weight < math.inf and 0 <= stretch < math.inf):
            raise UsageError(f"FGSMPCO needs weight >= 0 and stretch >= 0; got {weight=}, {stretch=}")
        self.weight, self.stretch = weight, stretch
        self.step_size = threat.size("step_size", step_size, auto=1.0)
        self.settings_warning = warn_of_steps(threat, self.step_size)
        self.reset(0)

    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """Take one step from the stored perturbation, and store where it leads."""
        start = self.start(batch)
        with keep_statistics(model):  # they see the start in the pass that the weights are trained through
            gradient, _ = input_gradient(model, start, batch.y, self.attack_loss)
        reached = self.threat.ascend(start, gradient, self.step_size * self.step_scale, batch.x)
        self.memory.store(batch.index, self.view_of(batch), reached - batch.x)
        return reached

    def training_step(self, model: nn.Module, update: Update, batch: Batch) -> StepOutput:
        """Attack, then update the weights with the loss at the mixed inputs and the term of all three passes."""
        start, inputs = self.start(batch), batch.x
        reached, gradients = self._attack_with_gradients(model, update, batch)

        def objective() -> tuple[Tensor, Tensor]:
            nonlocal inputs
            before = model(start)
            inputs = mixed_inputs(batch.x, start, reached, before, batch.y, self.stretch)
            logits, after = model(inputs), model(reached)
            gaps = gaps_of_distances(logits, before, after)
            (total,) = update.total(gaps.sum())  # its sign is that of all processes
            term = total.sign() * gaps.sum() / max(len(gaps), 1)
            return self.loss(logits, batch.y, batch.index) + self.weight * term, logits

        loss, logits, _ = self.minimize(model, update, objective, attack_gradients=gradients)
        return StepOutput(loss.detach(), inputs.detach(), logits.detach())


@fast_op
def mixed_inputs(x: Tensor, start: Tensor, reached: Tensor, before: Tensor, y: Tensor, stretch: float) -> Tensor:
    """Return points between the start and the stretched end of the attack, near the start where the label's
    probability there is small."""
    probabilities = to_float32(before).softmax(1)
    is_label = y[:, None] == torch.arange(probabilities.shape[1], device=y.device)
    doubt = (1 - torch.where(is_label, probabilities, 0.0).sum(1)).clamp(0, 1).to(x.dtype)[:, None, None, None]
    return doubt * start + (1 - doubt) * (x + stretch * (reached - x))


@fast_op
def gaps_of_distances(logits: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Return, for each example, how much further the logits after the attack are from those before than from those at
    the mixed inputs."""
    logits, before, after = to_float32(logits), to_float32(before), to_float32(after)
    return mean_squared_logits(after, before) - mean_squared_logits(after, logits)
