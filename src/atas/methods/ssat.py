"""SSAT: look along the perturbation for the first point that fools the model, and train there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from atas.core.autograd import input_gradient
from atas.data.loader import Batch
from atas.errors import UsageError
from atas.methods.base import CommonArgs, InputPerturbation
from atas.threat import Threat


class SSAT(InputPerturbation):
    """Stable single-step adversarial training (Kim et al., 2021).

    d = P[x0 + a sgn grad l(x0)] - x from a random start x0, a = 1.25 eps. Of x + (k/c) d, k = 1..c, the first that the
    model gets wrong is trained on, x + d if it gets none wrong; where it is wrong at x0 already, the clean image is.
    Attack and checks in eval mode. As in the authors' code, correctness is read at x0, where the logits are at hand,
    not at x: that is why its clean accuracy is high. Cost: as FGSM-RS and c - 1 forward passes.
    """

    attack_mode = "eval"

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        checkpoints: int = 3,
        step_size: float | None = None,
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        if checkpoints < 1:
            raise UsageError(f"checkpoints must be at least 1; got {checkpoints}")
        self.checkpoints = checkpoints
        self.step_size = threat.check_size("step_size", step_size) if step_size is not None else 1.25 * threat.eps

    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """The shortest of the checked parts of an FGSM-RS perturbation that fools the model."""
        x, y = batch.x, batch.y
        start = self.threat.random_start(x, self.rng(batch.index))
        gradient, logits = input_gradient(model, start, y, self.attack_loss)
        end = self.threat.ascend(start, gradient, self.step_size * self.step_scale, x)
        fooled_at_start = logits.argmax(1) != y
        if self.checkpoints == 1:
            share = torch.ones_like(y, dtype=x.dtype)
        else:
            shares = torch.arange(1, self.checkpoints, device=x.device).to(x.dtype) / self.checkpoints
            points = x + shares.view(-1, 1, 1, 1, 1) * (end - x)
            with torch.no_grad():
                fooled = model(points.flatten(0, 1)).argmax(1).view(len(shares), len(x)) != y
            share = torch.where(fooled, shares[:, None], 1.0).amin(0)
        share = torch.where(fooled_at_start, 0.0, share)
        return self.threat.project(x + share.view(-1, 1, 1, 1) * (end - x), x)
