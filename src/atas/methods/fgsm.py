"""FGSM and FGSM-RS: one step of the gradient sign, from the image or from a random start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

from torch import Tensor, nn

from atas.data.loader import Batch
from atas.methods.base import CommonArgs, InputPerturbation
from atas.methods.step_warnings import warn_of_steps
from atas.threat import Size, Threat


class FGSM(InputPerturbation):
    """One step from the image (Goodfellow et al., 2015). Collapses at larger budgets.

    x' = P[x + a sgn grad l(x)] with a = eps, attacked in train mode. With a larger `step_size` the perturbation leaves
    the ball. Cost: two forward and two backward passes, one of them without weight gradients.
    """

    has_start = True

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        step_size: Size | None = None,
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        self.step_size = threat.size("step_size", step_size, auto=1.0)
        self.settings_warning = warn_of_steps(threat, self.step_size)
        self._reach = replace(threat, eps=max(threat.eps, self.step_size))

    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """Take a full step from the image."""
        gradient = self.start_gradient(model, batch.x, batch.y)
        return self._reach.ascend(batch.x, gradient, self.step_size * self.step_scale, batch.x)


class FGSMRS(InputPerturbation):
    """FGSM from a random start (Wong et al., "Fast is better than free", 2020).

    x0 uniform in the ball, x' = P[x0 + a sgn grad l(x0)] with a = 1.25 eps, attacked in train mode: as in the authors'
    code, both passes update the running statistics of BatchNorm.
    """

    has_start = True

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        step_size: Size | None = None,
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        self.step_size = threat.size("step_size", step_size, auto=1.25)
        self.settings_warning = warn_of_steps(threat, self.step_size)

    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """Take a step from a random start."""
        start = self.threat.random_start(batch.x, self.rng(batch.index))
        gradient = self.start_gradient(model, start, batch.y)
        return self.threat.ascend(start, gradient, self.step_size * self.step_scale, batch.x)
