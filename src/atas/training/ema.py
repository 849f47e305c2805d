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
        both = zip(self.model.state_dict().values(), model.state_dict().values(), strict=True)
        pairs = {average.data_ptr(): (average, value) for average, value in both}.values()  # tied weights once
        self._averaged = [pair for pair in pairs if pair[0].dtype.is_floating_point]
        self._copied = [pair for pair in pairs if not pair[0].dtype.is_floating_point]

    @torch.no_grad()
    def follow(self) -> None:
        """Move a little towards the model; called after every update of its weights."""
        decay = ((1 + self.updates) / (10 + self.updates)).clamp_max(self.decay)
        averages, values = [list(side) for side in zip(*self._averaged, strict=True)]
        torch._foreach_mul_(averages, decay)
        torch._foreach_add_(averages, torch._foreach_mul(values, 1 - decay))
        self.copy_counts()
        self.updates += 1

    def copy_counts(self) -> None:
        """Whole numbers, such as BatchNorm's count of batches, are the model's own."""
        for copied, value in self._copied:
            copied.copy_(value)
