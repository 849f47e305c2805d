"""FGSM-PGI: a start and a loss that are guided by the attacks of earlier epochs.

Two things are kept for every training example (FGSM-MEP of Jia et al., "Prior-Guided Adversarial Initialization for
Fast Adversarial Training", 2022): its perturbation d and a momentum m of its gradients. A training step is

    z0 = f(x + d),  g = gradient of l(z0, t) with respect to x      t: 0.6 for the true class; x + d may leave [0, 1]
    x1 = P[x + d + a sgn g]                                        a = eps
    m <- mu m + g / |g|,  d <- P[x + d + a sgn m] - x               |g|: the L1 norm over the whole batch
    one SGD step on l(f(x1), t) + lambda MSE(f(x1), z0)             the gradient goes through both

d starts, and every `reset_every` epochs starts again, as random corners of the ball, and m as zero. All passes run in
train mode. This follows the released code, in which d and m stay in place while the image is cropped and flipped below
them (`frame="view"`). That code keeps the graph of z0; here the start is passed once more, to the same logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from atas.core.arguments import check_count
from atas.core.autograd import keep_statistics, to_float32
from atas.data.loader import Batch
from atas.errors import UsageError
from atas.methods.base import CommonArgs
from atas.methods.consistency import Consistency
from atas.methods.prior import Frame, PriorPerturbation
from atas.methods.step_warnings import warn_of_steps
from atas.threat import Size, Threat

_TINY = 1e-30  # keeps the quotient finite where all gradients are zero


class PGIArgs(CommonArgs, total=False):
    """Settings of `FGSMPGI` that methods made from it have too, with the same defaults."""

    step_size: Size
    momentum: float
    frame: Frame
    dtype: torch.dtype | Literal["auto"]


class FGSMPGI(PriorPerturbation):
    """FGSM with prior-guided initialisation and regularisation, by the momentum of all epochs (FGSM-MEP).

    `smoothing` is the share of the probability that goes to the other classes, in attack and loss, `weight` is lambda,
    and `momentum` is mu. With `frame="image"`, d and m follow crop and flip, as in ATTA and ATAS. The authors reset
    every 40 epochs on CIFAR-10 and every 10 on CIFAR-100 and Tiny-ImageNet. A pixel takes one byte for d (`dtype`) and
    two for m.
    """

    has_start = True
    own_consistency = ("weight",)

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        step_size: Size = "auto",
        smoothing: float = 0.4,
        weight: float = 10.0,
        momentum: float = 0.3,
        reset_every: int = 40,
        frame: Frame = "view",
        dtype: torch.dtype | Literal["auto"] = "auto",
        **common: Unpack[CommonArgs],
    ) -> None:
        self.check_own_parts(common)
        common["consistency"] = Consistency(weight, distance="mse", through="both")
        super().__init__(threat, examples, shape, smoothing=smoothing, frame=frame, dtype=dtype, **common)
        if not 0 <= momentum < 1:
            raise UsageError(f"momentum must be in [0, 1); got {momentum}")
        self.decay, self.reset_every = momentum, check_count("reset_every", reset_every)
        self.step_size = threat.size("step_size", step_size, auto=1.0)
        self.settings_warning = warn_of_steps(threat, self.step_size)
        wide = torch.float32 if dtype == torch.float32 else torch.bfloat16  # float16 has too small a range
        self.momentum = self.make_store(wide)
        self.reset(0)

    def on_new_epoch(self, epoch: int, epochs: int | None) -> None:
        """Reset perturbations and momentum when it is due: in the epochs that `reset_every` divides, from 0."""
        if epoch > 0 and epoch % self.reset_every == 0:
            self.reset(epoch)

    def reset(self, epoch: int) -> None:
        """Set the perturbations to random corners of the ball, and the momentum to zero."""
        super().reset(epoch)
        self.momentum.delta.zero_()

    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """Take one step from the stored perturbation; store the one that the momentum leads to."""
        start = self.start(batch)
        # The statistics see the start in the pass that the weights are trained through, if there is one.
        with nullcontext() if self.consistency is None else keep_statistics(model):
            gradient = self.start_gradient(model, start, batch.y)
        self.store(batch, start, gradient)
        return self.threat.ascend(start, gradient, self.step_size * self.step_scale, batch.x)

    def store(self, batch: Batch, start: Tensor, gradient: Tensor, weight: Tensor | float = 1.0) -> None:
        """Add these gradients to the momentum, with a weight, and store the perturbation that it leads to."""
        view = self.view_of(batch)
        (norm,) = self.total(to_float32(gradient.abs()).sum())
        added = weight * gradient / (norm + _TINY)
        momentum = self.decay * self.momentum.load(batch.index, view, gradient.dtype) + added
        self.momentum.store(batch.index, view, momentum)
        end = self.threat.ascend(start, momentum, self.step_size * self.step_scale, batch.x)
        self.memory.store(batch.index, view, end - batch.x)
