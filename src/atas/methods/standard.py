"""Ordinary training on clean images, the measure of what robustness costs."""

from __future__ import annotations

from torch import Tensor, nn

from atas.core.resized_crop import AnyView
from atas.methods.base import InputPerturbation


class Standard(InputPerturbation):
    """Cross-entropy on the images as they are: min_w l(x, y; w). Cost: one forward and backward pass."""

    def attack(self, model: nn.Module, x: Tensor, y: Tensor, index: Tensor, view: AnyView) -> Tensor:
        """No attack."""
        return x
