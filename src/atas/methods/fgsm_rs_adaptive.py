"""FGSM-RS with the adaptive step size, the paper's first experiment with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack

from torch import Tensor, nn

from atas.boxes import AnyView
from atas.memory import GradientNorms
from atas.methods._adaptive import Adaptive, adaptive_step, check_adaptive
from atas.methods._method import Common, Perturbing
from atas.passes import input_gradient
from atas.threat import Threat


class FGSMRSAdaptive(Adaptive, Perturbing):
    """A random start in every epoch, and a step inverse to the example's gradient norm (the paper's section 4).

    x0 uniform in the ball, v <- beta v + (1 - beta) |g|^2, a = gamma / (c + sqrt v), x' = P[x0 + a sgn g]; attacked in
    train mode, without clip or warm-up. The authors released no code for it.
    """

    checks_indices = True

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        c: float = 1.28,
        max_step: float | Literal["auto"] = "auto",
        beta: float = 0.5,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        self.c, self.beta = c, beta
        self.max_step = threat.usual(16 / 255, 2.0) if max_step == "auto" else max_step
        check_adaptive(threat, self.c, self.max_step, self.beta)
        self.norms = GradientNorms(examples, device=common.get("device"))

    def attack(self, model: nn.Module, x: Tensor, y: Tensor, index: Tensor, view: AnyView) -> Tensor:
        """An adaptive step from a random point."""
        start = self.threat.random_start(x, self.draw(index))
        gradient, _ = input_gradient(model, start, y, self.summed_loss)
        size, average = adaptive_step(
            gradient, self.norms.average[index], c=self.c, max_step=self.max_step, beta=self.beta
        )
        size = size * self.step_scale
        self.norms.write(index, average, size)
        return self.threat.ascend(start, gradient, size, x)
