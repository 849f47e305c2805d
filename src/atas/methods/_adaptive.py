"""The adaptive step size of the paper's section 4, shared by ATAS and FGSM-RS with adaptive steps."""

from __future__ import annotations

import math

from torch import Tensor

from atas.errors import UsageError
from atas.memory import GradientNorms
from atas.threat import Threat, l2_norm


def adaptive_step(
    gradient: Tensor, average: Tensor, *, c: float, max_step: float, beta: float
) -> tuple[Tensor, Tensor]:
    """Each example's step size, and the new average of its squared gradient norm.

    v <- beta v + (1 - beta) |g|^2 and a = gamma / (c + sqrt v), written with max_step = gamma / c, the step where the
    gradient vanishes. All in float32 at least. The gradient is that of the summed loss, so c = 1.28 is the paper's
    0.01, which was set on the mean over 128 examples.
    """
    norm = l2_norm(gradient)
    average = beta * average + (1 - beta) * norm.square().to(average.dtype)
    return max_step / (1 + average.sqrt() / c), average


class Adaptive:
    """What methods with adaptive steps report of every example."""

    norms: GradientNorms

    @property
    def step_sizes(self) -> Tensor:
        """The last step size of every example, in pixel units; zero before its first."""
        return self.norms.step_size

    @property
    def gradient_norms(self) -> Tensor:
        """The averaged gradient norm of every example, the root of v."""
        return self.norms.average.sqrt()


def check_adaptive(threat: Threat, c: float, max_step: float, beta: float) -> None:
    """Refuse settings that make no step size."""
    threat.size("max_step", max_step)
    if not (0 < c < math.inf and 0 <= beta < 1):
        raise UsageError(f"adaptive steps need c > 0 and 0 <= beta < 1; got {c=}, {beta=}")
