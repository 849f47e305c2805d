"""FGSM with gradient alignment: a regulariser that keeps the loss locally linear."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atas.core.autograd import freeze, gradient_penalty, input_gradient
from atas.core.dispatch import fast_op
from atas.core.validation import explain_second_derivative
from atas.data.loader import Batch
from atas.errors import UsageError
from atas.methods.base import CommonArgs, Method, StepOutput
from atas.methods.update import Update
from atas.threat import Linf, Threat


def default_weight(eps: float) -> float:
    """Return the authors' weight for CIFAR-10: 0.2 at 8/255, ten times as much at 16/255."""
    return 0.02 * math.exp(eps * 255 * math.log(10) / 8)


class FGSMGA(Method):
    """GradAlign (Andriushchenko and Flammarion, 2020).

    l(P[x + eps sgn g]) + lambda (1 - cos(g, g')), where g is the gradient at x and g' the gradient at a random
    point of the ball. The weights are trained through g' (second order); g is constant. All passes run in train mode.
    As in the authors' code, the random point is not clamped to [0, 1], and examples with zero gradient are excluded
    from the mean.
    """

    compilable = False
    weight_perturbations = ("ascent", "momentum")
    needs_second_derivative = True

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        weight: float | Literal["auto"] = "auto",
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        if weight == "auto":
            if not isinstance(threat, Linf):
                raise UsageError("gradient alignment has a default weight for Linf alone; set weight for this norm")
            weight = default_weight(threat.eps)
        if not 0 <= weight < math.inf:
            raise UsageError(f"weight must be a number that is not negative; got {weight}")
        self.weight = weight

    def training_step(self, model: nn.Module, update: Update, batch: Batch) -> StepOutput:
        """Update the weights with the loss at the FGSM point and the misalignment of the gradients."""
        x, y = batch.x, batch.y
        with freeze(model):
            gradient, _ = input_gradient(model, x, y, self.attack_loss)
        inputs = self.threat.ascend(x, gradient, self.threat.eps * self.step_scale, x)
        noise = self.threat.sample(self.rng(batch.index), x.shape[1:]).to(x.dtype)
        aligned = functools.partial(misalignment, gradient)

        def misaligned() -> Tensor:
            with explain_second_derivative("gradient alignment"):
                return self.weight * gradient_penalty(model, x + noise, y, self.attack_loss, aligned)

        with self.perturbed_weights(model, update, lambda: misaligned() + self.loss(model(inputs), y, batch.index)):
            penalty = misaligned()
            with explain_second_derivative("gradient alignment"):
                update.backward(penalty)
            logits = model(inputs)
            loss = self.loss(logits, y, batch.index)
            update.backward(loss)
        update.apply()
        return StepOutput((loss + penalty).detach(), inputs, logits.detach())


@fast_op
def misalignment(first: Tensor, second: Tensor) -> Tensor:
    """Return one minus the mean cosine over examples with nonzero gradients, or zero if there are none."""
    first, second = first.flatten(1), second.flatten(1)
    sizes = [gradient.detach().abs().amax(1, keepdim=True) for gradient in (first, second)]
    counted = ((sizes[0] > 0) & (sizes[1] > 0)).squeeze(1)
    # The cosine does not depend on the scale. With a largest entry of one, no square leaves the range of float32.
    # Replacing zero gradients by a constant keeps the derivative of their norm out of the graph.
    first = torch.where(counted[:, None], first / torch.where(sizes[0] > 0, sizes[0], 1.0), 1.0)
    second = torch.where(counted[:, None], second / torch.where(sizes[1] > 0, sizes[1], 1.0), 1.0)
    misaligned = torch.where(counted, 1 - F.cosine_similarity(first, second), 0.0)
    return misaligned.sum() / counted.sum().clamp_min(1)
