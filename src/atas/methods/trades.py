"""TRADES: cross-entropy on clean images plus divergence between clean and adversarial predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atas.core.autograd import freeze, input_gradient, set_mode, to_float32
from atas.core.rng import Stream
from atas.core.validation import check_logits
from atas.data.loader import Batch
from atas.errors import UsageError
from atas.methods.base import CommonArgs, Method, StepOutput
from atas.methods.step_warnings import warn_of_steps
from atas.methods.update import Update
from atas.threat import Size, Threat

_START_NOISE = 0.001


class TRADES(Method):
    """TRADES (Zhang et al., 2019): l(x, y) + beta KL(f(x) || f(x')).

    x' maximises the same divergence in ten steps of eps/4, from x + 0.001 N(0, 1), in eval mode.
    """

    attack_mode = "eval"
    weight_perturbations = ("ascent", "momentum")

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        beta: float = 6.0,
        steps: int = 10,
        step_size: Size | None = None,
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        if steps < 1 or beta < 0:
            raise UsageError(f"TRADES needs steps >= 1 and beta >= 0; got steps={steps}, beta={beta}")
        self.beta, self.steps = beta, steps
        self.step_size = threat.size("step_size", step_size, auto=0.25)
        self.settings_warning = warn_of_steps(threat, self.step_size, steps)

    def training_step(self, model: nn.Module, update: Update, batch: Batch) -> StepOutput:
        """Update the weights with both terms."""
        x, y = batch.x, batch.y
        with set_mode(model, training=False), freeze(model):
            inputs = self._attack(model, x, batch.index).detach()

        def objective() -> tuple[Tensor, Tensor]:
            clean, logits = model(x), model(inputs)
            loss = self.loss(clean, y, batch.index) + self.beta / max(len(x), 1) * divergence(logits, clean)
            return loss, logits

        loss, logits, _ = self.minimize(model, update, objective)
        return StepOutput(loss.detach(), inputs, logits.detach())

    def _attack(self, model: nn.Module, x: Tensor, index: Tensor) -> Tensor:
        with torch.no_grad():
            clean = check_logits(model(x), len(x))
        noise = self.rng(index).normal(Stream.START, x.shape[1:]).to(x.dtype)
        point = x + _START_NOISE * noise
        for _ in range(self.steps):
            gradient, _ = input_gradient(model, point, clean, divergence)
            point = self.threat.ascend(point, gradient, self.step_size * self.step_scale, x)
        return point


def divergence(logits: Tensor, reference: Tensor) -> Tensor:
    """Return KL(reference || logits), summed over the batch."""
    expected = to_float32(reference).softmax(1)
    # A probability of zero (margins above 103 in float32) adds nothing; the derivative of its logarithm would be NaN.
    vanishes = expected == 0
    expected = torch.where(vanishes, 1.0, expected)
    terms = F.kl_div(to_float32(logits).log_softmax(1), expected, reduction="none")
    return torch.where(vanishes, 0.0, terms).sum()
