"""SSAT: train on the first point along the perturbation that the model misclassifies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from atas.core.arguments import check_count
from atas.core.autograd import input_gradient
from atas.data.loader import Batch
from atas.methods.base import CommonArgs, InputPerturbation
from atas.methods.step_warnings import warn_of_steps
from atas.threat import Size, Threat


class SSAT(InputPerturbation):
    """Stable single-step adversarial training (Kim et al., 2021).

    d = P[x0 + a sgn grad l(x0)] - x from a random start x0, with a = 1.25 eps. Trains on the first of x + (k/c) d,
    k = 1..c, that the model misclassifies, or on x + d if there is none. If x0 is already misclassified, it trains on
    the clean image. Attack and checks run in eval mode. As in the authors' code, the check is made at x0, whose logits
    are known, not at x; this explains the high clean accuracy. Cost: FGSM-RS plus c - 1 forward passes.
    """

    attack_mode = "eval"

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        checkpoints: int = 3,
        step_size: Size | None = None,
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        self.checkpoints = check_count("checkpoints", checkpoints)
        self.step_size = threat.size("step_size", step_size, auto=1.25)
        self.settings_warning = warn_of_steps(threat, self.step_size)

    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the shortest checked part of an FGSM-RS perturbation that is misclassified."""
        x, y = batch.x, batch.y
        start = self.threat.random_start(x, self.rng(batch.index))
        gradient, logits = input_gradient(model, start, y, self.attack_loss)
        end = self.threat.ascend(start, gradient, self.step_size * self.step_scale, x)
        wrong_at_start = logits.argmax(1) != y
        if self.checkpoints == 1:
            share = torch.ones_like(y, dtype=x.dtype)
        else:
            shares = torch.arange(1, self.checkpoints, device=x.device).to(x.dtype) / self.checkpoints
            points = x + shares.view(-1, 1, 1, 1, 1) * (end - x)
            with torch.no_grad():
                wrong = model(points.flatten(0, 1)).argmax(1).view(len(shares), len(x)) != y
            share = torch.where(wrong, shares[:, None], 1.0).amin(0)
        share = torch.where(wrong_at_start, 0.0, share)
        return self.threat.project(x + share.view(-1, 1, 1, 1) * (end - x), x)
