"""An exponential moving average of the weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


class EMA(nn.Module):
    """A copy of a model that follows it slowly. Running statistics are averaged with the weights.

    In the first updates the decay is smaller, (1 + t) / (10 + t), so that the random start is forgotten.
    """

    updates: Tensor

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay
        first = next(iter(model.state_dict().values()))
        self.register_buffer("updates", torch.zeros((), device=first.device))

    @torch.no_grad()
    def follow(self, model: nn.Module) -> None:
        """Move a little towards the model; called after every update of its weights."""
        weight = 1 - ((1 + self.updates) / (10 + self.updates)).clamp_max(self.decay)
        for average, value in zip(self.model.state_dict().values(), model.state_dict().values(), strict=True):
            if average.dtype.is_floating_point:
                average.lerp_(value, weight.to(average.dtype))
            else:
                average.copy_(value)
        self.updates += 1
