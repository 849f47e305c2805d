"""Ordinary training on clean images, the measure of what robustness costs."""

from __future__ import annotations

from torch import Tensor, nn

from atas.data.loader import Batch
from atas.methods.base import InputPerturbation


class Standard(InputPerturbation):
    """Cross-entropy on the images as they are: min_w l(x, y; w). Cost: one forward and backward pass."""

    adversarial = False

    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """No attack."""
        return batch.x
