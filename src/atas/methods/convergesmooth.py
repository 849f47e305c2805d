"""ConvergeSmooth: training whose loss on unattacked images may change little from epoch to epoch.

A collapse begins with a jump of this loss. With L its mean over a batch, M its mean over the last epoch and D how much
larger M was than in the epoch before, a step on images x with labels y is

    x0, x1 = start and end of the attack
    L  = l(xn, y),  xn = x0 in `fgsm-rs-cs`, x in `fgsm-mep-cs`     labels smoothed by 0.4
    t  = min(max(gamma / ratio, D), gamma)
    loss = l(x1, y) + L  if L > M + t,  l(x1, y) - L  if L < M - t,  else l(x1, y)

and in epochs within `stride` of the first, of the last or of a drop of the learning rate, loss = l(x1, y).

`fgsm-rs-cs` has x0 = x + U, uniform in the ball, and x1 = P01[x0 + eps sgn grad l0(x0, y)], where P01 clamps to [0, 1]
and l0 is not smoothed: x1 may be 2 eps from the image. `fgsm-mep-cs` has the attack of `fgsm_pgi`. All passes run in
train mode. Zhao et al., "Fast Adversarial Training with Smooth Convergence", ICCV 2023, as in the authors' code without
the terms that its options add.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from atas.core.resized_crop import AnyView
from atas.data.loader import Batch
from atas.errors import UsageError
from atas.methods.base import CommonArgs, InputPerturbation, Method
from atas.methods.checks import known_epochs
from atas.methods.n_fgsm import wide_balls
from atas.methods.step_warnings import warn_of_steps
from atas.methods.targets import LabelTargets
from atas.threat import Size, Threat

DROPS = (100 / 110, 105 / 110)  # of the learning rate in the authors' schedule


class ConvergeSmooth(InputPerturbation):
    """What both forms have in common: all but the attack, which sets `unattacked`."""

    own_targets = ("smoothing",)
    last_mean: Tensor
    change: Tensor
    epoch_sum: Tensor
    count: Tensor
    is_active: Tensor
    unattacked: Tensor  # the images of the current batch at which the loss may change little
    _outputs: Tensor  # the logits there

    def setup_constraint(self, gamma: float, ratio: float, stride: int, drops: tuple[float, ...]) -> None:
        """Create the state of the constraint."""
        if not (0 <= gamma < math.inf and ratio >= 1 and stride >= 0):
            given = f"{gamma=}, {ratio=}, {stride=}"
            raise UsageError(f"ConvergeSmooth needs gamma >= 0, ratio >= 1 and stride >= 0; got {given}")
        if not all(0 < drop < 1 for drop in drops) or list(drops) != sorted(drops):
            raise UsageError(f"drops are rising fractions of the training between 0 and 1; got {drops}")
        self.gamma, self.ratio, self.stride, self.drops = gamma, ratio, stride, drops
        for name in ("last_mean", "change", "epoch_sum", "count"):
            self.register_buffer(name, torch.zeros_like(self.step_scale))
        self.register_buffer("is_active", torch.zeros_like(self.step_scale), persistent=False)

    def start_epoch(self, epoch: int, epochs: int | None = None) -> None:
        """Start an epoch, in which the constraint is active or not."""
        super().start_epoch(epoch, epochs)
        total = known_epochs("ConvergeSmooth", epochs)
        ends = [0.0, *(round(drop * total, 6) for drop in self.drops), float(total)]
        inside = (start + self.stride < epoch < end - self.stride for start, end in itertools.pairwise(ends))
        self.is_active.fill_(any(inside))

    def on_new_epoch(self, epoch: int, epochs: int | None) -> None:
        """Take over the mean of the last epoch."""
        super().on_new_epoch(epoch, epochs)
        mean = torch.where(self.count > 0, self.epoch_sum / self.count.clamp_min(1), self.last_mean)
        self.change.copy_(torch.where(self.count > 0, mean - self.last_mean, self.change))
        self.last_mean.copy_(mean)
        self.epoch_sum.zero_()
        self.count.zero_()

    def perturb(self, model: nn.Module, x: Tensor, y: Tensor, index: Tensor, view: AnyView | None = None) -> Tensor:
        """Raise UsageError: the loss needs another pass."""
        return Method.perturb(self, model, x, y, index, view)

    def _logits(self, model: nn.Module, inputs: Tensor) -> Tensor:
        logits = super()._logits(model, inputs)
        self._outputs = model(self.unattacked)
        return logits

    def loss(self, logits: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Return the loss at the perturbed inputs, with the constraint if it is active."""
        with self.keep_targets():
            unattacked = Method.loss(self, self._outputs, y, index)
        here = torch.full_like(self.count, len(y))
        of_these = torch.where(here > 0, unattacked.detach() * here, 0.0)  # a mean of no images is NaN
        total, count = self.total(of_these, here)
        if self._remembers:
            self.epoch_sum += total
            self.count += count
            del self.unattacked, self._outputs
        above = total / count - self.last_mean
        limit = self.change.clamp(self.gamma / self.ratio, self.gamma)
        sign = torch.where(above.abs() > limit, above.sign(), 0.0) * self.is_active
        return super().loss(logits, y, index) + sign * unattacked


class FGSMRSCS(ConvergeSmooth):
    """FGSM-RS with ConvergeSmooth (Zhao et al., 2023).

    `gamma` and gamma / `ratio` bound the change of the loss that is allowed, `drops` is where the learning rate drops,
    as fractions of the training, and `stride` is a number of epochs. `smoothing` is the share of a label that the other
    classes have. `step_size` is eps by default. Cost: three forward, one input and two weight passes.
    """

    has_start = True

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        gamma: float = 0.03,
        ratio: float = 1.0,
        stride: int = 1,
        drops: tuple[float, ...] = DROPS,
        smoothing: float = 0.4,
        step_size: Size = "auto",
        **common: Unpack[CommonArgs],
    ) -> None:
        self.check_own_parts(common)
        common["targets"] = LabelTargets(smoothing=smoothing, noise="others")
        super().__init__(threat, examples, shape, **common)
        self.setup_constraint(gamma, ratio, stride, drops)
        self.step_size = threat.size("step_size", step_size, auto=1.0)
        self.settings_warning = warn_of_steps(threat, self.step_size)
        _, self._reach = wide_balls(threat, threat.eps, self.step_size)

    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """Take a step from a random start, clamped to [0, 1] alone."""
        self.unattacked = self.threat.random_start(batch.x, self.rng(batch.index))
        gradient = self.start_gradient(model, self.unattacked, batch.y)
        return self._reach.ascend(self.unattacked, gradient, self.step_size * self.step_scale, batch.x)
