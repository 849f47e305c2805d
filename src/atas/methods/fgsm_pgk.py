"""FGSM-PGK: FGSM-PGI whose momentum and averaged weights follow how well the attack works.

As in `fgsm_pgi`, an example has a perturbation d and a momentum m, and g is the gradient at x + d. With the accuracies
of a batch at the start x + d and at the trained inputs x1,

    q = accuracy at x1 / accuracy at x + d                 near 1 where the step fools the model in no further image
    m <- mu m + (2 - q) g / |g|                            1 instead of 2 - q in FGSM-PGI
    averaged weights have their usual decay if q < 0.82, else min(1, 0.99999 q / 0.82)

Jia et al., "Improving Fast Adversarial Training With Prior-Guided Knowledge", TPAMI 2024, as in the authors' code for
CIFAR-10, whose averages have the decay 0.999 and the warm-up of `training.ema_warmup`. q is 1 where no image of the
batch is classified correctly at the start; that code stops there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from atas.data.loader import Batch
from atas.errors import UsageError
from atas.methods.fgsm_pgi import FGSMPGI, PGIArgs
from atas.threat import Threat

_SLOW = 0.99999  # the decay of averages at the threshold


class FGSMPGK(FGSMPGI):
    """FGSM with prior-guided knowledge (Jia et al., 2024).

    `threshold` is the ratio of accuracies from which on the weights are hardly averaged (`training.ema`, in a loop of
    your own `average_decay`), and `accuracy_ratio` is that of the last batch. Other settings are those of `FGSMPGI`.
    The authors have smoothing 0.2, weight 1, momentum 0.1, resets every 40 epochs and threshold 0.9 for CIFAR-100.
    """

    accuracy_ratio: Tensor
    _attacked: tuple[Batch, Tensor, Tensor]  # the current batch, the start and the gradient there

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        smoothing: float = 0.5,
        weight: float = 5.6,
        reset_every: int = 10,
        threshold: float = 0.82,
        **settings: Unpack[PGIArgs],
    ) -> None:
        super().__init__(
            threat, examples, shape, smoothing=smoothing, weight=weight, reset_every=reset_every, **settings
        )
        if not threshold > 0:
            raise UsageError(f"threshold must be above zero; got {threshold}")
        self.threshold = threshold
        ratio = torch.ones_like(self.step_scale)
        self.register_buffer("accuracy_ratio", ratio, persistent=False)  # a step does not depend on the last one's

    def store(self, batch: Batch, start: Tensor, gradient: Tensor, weight: Tensor | float = 1.0) -> None:
        """Wait for the accuracy at the trained inputs."""
        self._attacked = batch, start, gradient

    def loss(self, logits: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Return the loss at the perturbed inputs; measure the attack, and store what it leads to."""
        start = self._start
        loss = super().loss(logits, y, index)
        if start is not None and self._remembers:
            kind = self.accuracy_ratio.dtype
            right, before = self.total(*((ends.argmax(1) == y).sum(dtype=kind) for ends in (logits, start.logits)))
            self.accuracy_ratio.copy_(torch.where(before > 0, right / before.clamp_min(1), 1.0))
            super().store(*self._attacked, weight=2 - self.accuracy_ratio)
            del self._attacked
        return loss

    def average_decay(self, decay: float) -> Tensor:
        """Return the decay of averaged weights in this step: near 1 if the accuracy ratio is above the threshold."""
        relative = self.accuracy_ratio / self.threshold
        return torch.where(relative < 1, decay, (_SLOW * relative).clamp_max(1))
