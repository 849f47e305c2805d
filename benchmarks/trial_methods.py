"""Forms of ATAS+ that were tried for the record and are no part of the library, for recipes of benchmarks/record.py.

[method]
name = "benchmarks.trial_methods:StaleATAS"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from atas.core.augment import View
from atas.core.autograd import to_float32
from atas.data.loader import Batch
from atas.methods import ATASPlus
from atas.methods.atas import ATASArgs, adaptive_step_and_store
from atas.methods.base import StepOutput
from atas.methods.update import Update
from atas.threat import Threat


class MarginATAS(ATASPlus):
    """The attack climbs the margin between the best other class and the true one, instead of the cross-entropy."""

    def attack_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the summed margin."""
        logits = to_float32(logits)
        is_true = y[:, None] == torch.arange(logits.shape[1], device=y.device)
        others = logits.masked_fill(is_true, -torch.inf).amax(1)
        return (others - logits.masked_fill(~is_true, 0).sum(1)).sum()


class HalfATAS(ATASPlus):
    """Only a random half of each batch is attacked; the others are trained on at their stored perturbations."""

    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the inputs of both halves."""
        half = len(batch.x) // 2
        assert isinstance(batch.view, View)
        first, second = (
            Batch(batch.x[part], batch.y[part], batch.index[part], _part_of(batch.view, part))
            for part in (slice(half), slice(half, None))
        )
        stored = self.load_start(second.x, second.index, second.view)
        return torch.cat([super().attack(model, first), stored.to(batch.x.dtype)])


class StaleATAS(ATASPlus):
    """Trained on the stored perturbations; the same backward pass gives the input gradient that moves them for the next
    epoch, so there is no attack pass. From epoch `fresh_from` on, a step is that of ATAS+."""

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        classes: int,
        fresh_from: int = 10**6,
        **how: Unpack[ATASArgs],
    ) -> None:
        super().__init__(threat, examples, shape, classes=classes, **how)
        self.fresh_from = fresh_from

    @property
    def perturbs_weights(self) -> bool:
        """Whether the steps of this epoch attack; the name by which engines know that a step changes."""
        return self.current_epoch >= self.fresh_from

    def training_step(self, model: nn.Module, update: Update, batch: Batch) -> StepOutput:
        """Train at the stored perturbations, then move them."""
        if self.perturbs_weights:
            return super().training_step(model, update, batch)
        start = self.load_start(batch.x, batch.index, batch.view).detach().requires_grad_(True)

        def objective() -> tuple[Tensor, Tensor]:
            logits = model(start)
            return self.loss(logits, batch.y, batch.index), logits

        loss, logits, (gradient,) = self.minimize(model, update, objective, start)
        inputs = start.detach()
        adaptive_step_and_store(self, batch.x, batch.index, batch.view, inputs, gradient)
        return StepOutput(loss.detach(), inputs, logits.detach())


def _part_of(view: View, part: slice) -> View:
    return View(view.top[part], view.left[part], view.flip[part], view.pad)
