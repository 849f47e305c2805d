"""N-FGSM: one step from a start with stronger noise, and no projection onto the ball.

For each image x with label y, with P01 the clamp to [0, 1]:

    x0 = P01[x + n],  n uniform in the ball of radius k eps     k = 2: the noise leaves the ball
    g  = gradient of l(x0, y) with respect to x0                model in train mode
    x1 = P01[x0 + a sgn g]                                      a = eps; up to (k + 1) eps from the image
    one SGD step on l(x1, y)                                    model in train mode

De Jorge et al., "Make Some Noise: Reliable and Efficient Single-Step Adversarial Training", NeurIPS 2022. The noise is
part of the trained input, and a projection would undo part of it. The authors' k is 2, but 3 for SVHN at 12/255 and 4
for CIFAR-10 at 16/255 with WRN-28-10, where single steps collapse earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor, nn

from atas.data.loader import Batch
from atas.methods.base import CommonArgs, InputPerturbation
from atas.methods.step_warnings import warn_of_steps
from atas.threat import Size, Threat


class NFGSM(InputPerturbation):
    """N-FGSM (de Jorge et al., 2022): trained inputs may leave the ball, up to `noise` + `step_size` from the image.

    `noise`, the radius of the random start, is 2 eps and `step_size` is eps by default. Cost: two forward and two
    backward passes, one of them without weight gradients.

    >>> from atas import Linf
    >>> method = NFGSM(Linf(8/255), examples=100, shape=(3, 32, 32))
    >>> method.noise * 255, method.step_size * 255
    (16.0, 8.0)
    """

    has_start = True

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        noise: Size = "auto",
        step_size: Size = "auto",
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        self.noise = threat.size("noise", noise, auto=2.0)
        self.step_size = threat.size("step_size", step_size, auto=1.0)
        self.settings_warning = warn_of_steps(threat, self.step_size)
        self._noisy, self._reach = wide_balls(threat, self.noise, self.step_size)

    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """Take a step from a noisy start, clamped to [0, 1] alone."""
        start = self._noisy.random_start(batch.x, self.rng(batch.index))
        gradient = self.start_gradient(model, start, batch.y)
        return self._reach.ascend(start, gradient, self.step_size * self.step_scale, batch.x)


def wide_balls(threat: Threat, noise: float, step_size: float) -> tuple[Threat, Threat]:
    """Return the balls of the random start, and of the inputs that a step from there can reach."""
    largest = threat.largest_size
    return threat.with_eps(min(noise, largest)), threat.with_eps(min(noise + step_size, largest))
