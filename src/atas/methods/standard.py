"""Standard training on clean images."""

from __future__ import annotations

from torch import Tensor, nn

from atas.data.loader import Batch
from atas.methods.base import InputPerturbation


class Standard(InputPerturbation):
    """Cross-entropy on clean images: min_w l(x, y; w). Cost: one forward and one backward pass."""

    adversarial = False
    weight_perturbations = ("ascent", "momentum")  # it has no attack pass

    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the images unchanged."""
        return batch.x
