"""ZeroGrad and MultiGrad: single steps that leave out the pixels whose gradient is not to be trusted.

With x0 and x1, x2, x3 uniform in the ball around x, and a = 2 eps, they train on

    ZeroGrad     x' = P[x0 + a sgn g],       g = grad l(x0), zero where |g| is below its q-quantile over the image
    MultiGrad    x' = P[x + a sgn s],        s = sum of sgn grad l(xk), zero where the three signs differ

Both are of Golgooni et al., "ZeroGrad: Costless Conscious Remedies for Catastrophic Overfitting in the FGSM Adversarial
Training" (2021 and 2023). A step of 2 eps ends at the edge of the ball wherever it moves a pixel. As in the released
code, attacks run in train mode, one pass for each start, and MultiGrad steps from the image, not from a start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from atas.core.arguments import check_count
from atas.core.autograd import input_gradient
from atas.data.loader import Batch
from atas.errors import UsageError
from atas.methods.base import CommonArgs, InputPerturbation
from atas.methods.step_warnings import warn_of_steps
from atas.threat import Size, Threat


class ZeroGrad(InputPerturbation):
    """FGSM-RS without the smallest gradients of each image.

    `quantile` is the share of the pixels that the step leaves alone: 0.35 on CIFAR-10; the authors have 0.45 on
    CIFAR-100 and 0.7 on SVHN.
    """

    has_start = True

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        quantile: float = 0.35,
        step_size: Size = "auto",
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        if not 0 <= quantile <= 1:
            raise UsageError(f"quantile is a share of the pixels in [0, 1]; got {quantile}")
        self.quantile = quantile
        self.step_size = threat.size("step_size", step_size, auto=2.0)
        self.settings_warning = warn_of_steps(threat, self.step_size)

    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """Take a step from a random start along the larger gradients."""
        start = self.threat.random_start(batch.x, self.rng(batch.index))
        gradient = keep_largest(self.start_gradient(model, start, batch.y), self.quantile)
        return self.threat.ascend(start, gradient, self.step_size * self.step_scale, batch.x)


class MultiGrad(InputPerturbation):
    """One step from the image along the signs on which the gradients at several random points agree."""

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        starts: int = 3,
        step_size: Size = "auto",
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        self.starts = check_count("starts", starts)
        self.step_size = threat.size("step_size", step_size, auto=2.0)
        self.settings_warning = warn_of_steps(threat, self.step_size)

    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """Take a step from the image where all signs agree."""
        signs = torch.zeros_like(batch.x)
        for draw in range(self.starts):
            start = self.threat.random_start(batch.x, self.rng(batch.index, draw))
            gradient, _ = input_gradient(model, start, batch.y, self.attack_loss)
            signs = signs + gradient.sign().to(signs.dtype)
        agreed = torch.where(signs.abs() < self.starts, 0.0, signs)
        return self.threat.ascend(batch.x, agreed, self.step_size * self.step_scale, batch.x)


def keep_largest(gradient: Tensor, quantile: float) -> Tensor:
    """Return the gradients, zero where they are smaller than this quantile of the absolute values of their image."""
    sizes = gradient.flatten(1).abs()
    ordered = sizes.sort(1).values
    place = quantile * (ordered.shape[1] - 1)
    low, high = math.floor(place), math.ceil(place)
    limit = torch.lerp(ordered[:, low], ordered[:, high], place - low)  # as torch.quantile, of inputs of any size
    return torch.where(sizes < limit[:, None], 0.0, gradient.flatten(1)).view_as(gradient)
