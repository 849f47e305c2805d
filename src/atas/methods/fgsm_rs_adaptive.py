"""FGSM-RS with adaptive step sizes, the paper's first experiment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack

from torch import Tensor, nn

from atas.data.loader import Batch
from atas.methods.atas import (
    AdaptiveStepSizes,
    GradientNorms,
    adaptive_step_size,
    check_adaptive_settings,
    gradient_scale,
    update_squared_norm,
)
from atas.methods.base import CommonArgs, InputPerturbation
from atas.methods.step_warnings import warn_of_adaptive_steps
from atas.threat import Size, Threat


class FGSMRSAdaptive(AdaptiveStepSizes, InputPerturbation):
    """A random start and a step size inverse to the example's gradient norm (section 4 of the paper).

    x0 uniform in the ball, v <- beta v + (1 - beta) |g|^2, a = gamma / (c + sqrt v), x' = P[x0 + a sgn g]; attacked in
    train mode, without clip or warm-up. The authors released no code for it.
    """

    checks_indices = True
    has_start = True

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        c: float | Literal["auto"] = 1.28,
        max_step: Size = "auto",
        beta: float = 0.5,
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        self.c, self.beta = gradient_scale(threat, shape, c), beta
        self.max_step = threat.size("max_step", max_step, auto=2.0)
        check_adaptive_settings(self.c, self.beta)
        self.settings_warning = warn_of_adaptive_steps(threat, self.max_step)
        self.norms = GradientNorms(examples, device=common.get("device"))

    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """Take an adaptive step from a random start."""
        start = self.threat.random_start(batch.x, self.rng(batch.index))
        gradient = self.start_gradient(model, start, batch.y)
        squared_norm = update_squared_norm(self.norms.squared_norm[batch.index], gradient, beta=self.beta)
        size = adaptive_step_size(squared_norm, c=self.c, max_step=self.max_step) * self.step_scale
        self.norms.store(batch.index, squared_norm, size)
        return self.threat.ascend(start, gradient, size, batch.x)
