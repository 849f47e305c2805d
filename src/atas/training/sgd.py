"""Stochastic gradient descent whose rate and momentum are tensors, on weights that may have a working copy in bf16."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atas.training import recipe


class SGD:
    """g <- g + decay w, m <- momentum m + g, w <- w - rate m (with Nesterov: g + momentum m in place of m).

    As `torch.optim.SGD`, but nothing in a step is read by the host, so that a step can be captured and replayed.
    `working` are the tensors that the forward pass uses: the weights themselves, or copies of them in lower precision,
    which follow.
    """

    def __init__(self, settings: recipe.Optimizer, weights: Sequence[Tensor], working: Sequence[Tensor]) -> None:
        self.settings = settings
        self.weights, self.working = list(weights), list(working)
        self.momentum = [torch.zeros_like(weight) for weight in self.weights]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], rate: Tensor, momentum: Tensor) -> None:
        """Change the weights; those without a gradient stay."""
        rows = [row for row, gradient in enumerate(gradients) if gradient is not None]
        weights = [self.weights[row] for row in rows]
        speeds = [self.momentum[row] for row in rows]
        steps = [gradients[row].to(self.weights[row].dtype) for row in rows]  # type: ignore[union-attr]
        steps = list(torch._foreach_add(steps, weights, alpha=self.settings.weight_decay))
        torch._foreach_mul_(speeds, momentum)
        torch._foreach_add_(speeds, steps)
        if self.settings.nesterov:
            torch._foreach_add_(steps, torch._foreach_mul(speeds, momentum))
        else:
            steps = speeds
        torch._foreach_sub_(weights, torch._foreach_mul(steps, rate))
        self.refresh()

    def begin_capture(self, steps: int) -> None:
        """Called before so many steps are captured."""

    def finish_capture(self) -> None:
        """Called when they are."""

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the working copies up to date."""
        for weight, working in zip(self.weights, self.working, strict=True):
            if working is not weight:
                working.copy_(weight)
