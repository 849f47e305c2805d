"""MART: training that counts misclassified images more.

x' maximises l in ten projected steps of eps/4 from x + 0.001 N(0, 1), in eval mode. With p = softmax f(x) and
q = softmax f(x'), both in train mode and with gradients, and k the most likely class of q besides y:

    margin = -log(1.0001 - q_k + 1e-12)                     grows with the strongest wrong class
    doubt  = 1.0000001 - p_y                                near 0 where the clean image is classified with certainty
    loss   = l(x', y) + mean of [margin + beta doubt KL(p || q)]

Wang et al., "Improving Adversarial Robustness Requires Revisiting Misclassified Examples", ICLR 2020. The constants are
those of the authors' code. It takes steps of 0.007 at a budget of 0.031; beta is 5 in its script.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from atas.core.autograd import freeze, input_gradient, set_mode, to_float32
from atas.core.rng import Stream
from atas.data.loader import Batch
from atas.errors import UsageError
from atas.methods.base import CommonArgs, Method, StepOutput
from atas.methods.step_warnings import warn_of_steps
from atas.methods.update import Update
from atas.threat import Size, Threat

_START_NOISE = 0.001


class MART(Method):
    """Misclassification-aware adversarial training (Wang et al., 2020).

    `beta` is the weight of the divergence, `step_size` eps/4 by default. Cost: `steps` + 2 forward passes, `steps`
    backward passes to the input, and one through both training passes.
    """

    attack_mode = "eval"
    weight_perturbations = ("ascent", "momentum")

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        beta: float = 5.0,
        steps: int = 10,
        step_size: Size = "auto",
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        if steps < 1 or beta < 0:
            raise UsageError(f"MART needs steps >= 1 and beta >= 0; got steps={steps}, beta={beta}")
        self.beta, self.steps = beta, steps
        self.step_size = threat.size("step_size", step_size, auto=0.25)
        self.settings_warning = warn_of_steps(threat, self.step_size, steps)

    def training_step(self, model: nn.Module, update: Update, batch: Batch) -> StepOutput:
        """Attack, then update the weights with the three terms."""
        with set_mode(model, training=False), freeze(model):
            inputs = self._attack(model, batch).detach()

        def objective() -> tuple[Tensor, Tensor]:
            clean, logits = model(batch.x), model(inputs)
            terms = misclassification_terms(logits, clean, batch.y, self.beta) / max(len(inputs), 1)
            return self.loss(logits, batch.y, batch.index) + terms, logits

        loss, logits, _ = self.minimize(model, update, objective)
        return StepOutput(loss.detach(), inputs, logits.detach())

    def _attack(self, model: nn.Module, batch: Batch) -> Tensor:
        noise = self.rng(batch.index).normal(Stream.START, batch.x.shape[1:]).to(batch.x.dtype)
        point = batch.x + _START_NOISE * noise
        for _ in range(self.steps):
            gradient, _ = input_gradient(model, point, batch.y, self.attack_loss)
            point = self.threat.ascend(point, gradient, self.step_size * self.step_scale, batch.x)
        return point


def misclassification_terms(logits: Tensor, clean: Tensor, y: Tensor, beta: float) -> Tensor:
    """Return the margin and the weighted divergence, summed over the batch."""
    predicted, log_expected = to_float32(logits).softmax(1), to_float32(clean).log_softmax(1)
    expected = log_expected.exp()
    labels = (y[:, None] == torch.arange(predicted.shape[1], device=y.device)).to(predicted.dtype)
    largest_wrong = (predicted * (1 - labels)).amax(1)
    margin = -torch.log(1.0001 - largest_wrong + 1e-12)
    doubt = 1.0000001 - (expected * labels).sum(1)
    divergence = (expected * (log_expected - torch.log(predicted + 1e-12))).sum(1)
    return (margin + beta * doubt * divergence).sum()
