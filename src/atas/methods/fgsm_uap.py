"""FGSM-UAP: one step from a perturbation that all images of a class, or all images, share.

Each group k of images has a perturbation u, in a ball of radius r = 1.25 eps, and a momentum m of its gradients. For an
image x with label y:

    x0 = P[x + u_k]                                        k: the class of x
    g  = gradient of l(x0, y) with respect to x0           l: label smoothing of 0.4
    x1 = P[x0 + eps sgn g]
    one SGD step on l(x1, y) + weight MSE(f(x0), f(x1))    all passes in train mode, gradients through both f
    h  = g + gradient of this loss with respect to x0      from the same backward pass
    m_k <- mu m_k + mean of h / |h| over group k           |h|: the L1 norm over the whole batch
    u_k <- u_k + r sgn m_k, clipped to the ball of radius r

u starts in random corners of its ball. A group without an image in the batch stays as it is. Pan, Li and Yao,
"Adversarial Initialization with Universal Adversarial Perturbation", AAAI 2024: FGSM-CUAP, and with one group FGSM-UAP.
This follows the released code, in which the tensor with g collects the gradient of the loss too before it is used. That
code keeps the graph of the pass at x0; here that pass is repeated for the weights, and the running statistics of
BatchNorm count it once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from atas.core.autograd import keep_statistics
from atas.core.rng import CounterRNG, Stream
from atas.core.validation import check_logits
from atas.data.loader import Batch
from atas.errors import UsageError
from atas.methods.base import CommonArgs, InputPerturbation
from atas.methods.checks import check_shown_shape
from atas.methods.consistency import Consistency
from atas.methods.prior import smoothed_cross_entropy_sum
from atas.methods.step_warnings import warn_of_steps
from atas.methods.targets import LabelTargets
from atas.methods.update import Update
from atas.methods.weight_perturbation import Directions
from atas.threat import Size, Threat

_TINY = 1e-30  # keeps the quotient finite where all gradients are zero


class FGSMUAP(InputPerturbation):
    """FGSM from universal adversarial perturbations (Pan et al., 2024).

    `classes` is the number of the model's outputs; `atas.train` passes it. A perturbation is shared by the images of a
    class (FGSM-CUAP) or, with `shared_by="all"`, by all images (FGSM-UAP). `radius` is that of its ball, `smoothing` is
    the label smoothing of attack and loss, `weight` is that of the mean squared difference of logits, `momentum` is mu.
    By default `radius` is 1.25 eps and `step_size` is eps. Cost: three forward, one input and two weight passes.
    """

    fixed_size = True
    has_start = True
    own_targets = ("smoothing",)
    own_consistency = ("weight",)
    replicated_buffers = frozenset({"universal", "momentum"})
    universal: Tensor
    momentum: Tensor
    _attacked: tuple[Tensor, Tensor, Tensor]  # start, gradient and groups of the current batch

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        classes: int,
        shared_by: Literal["class", "all"] = "class",
        radius: Size = "auto",
        smoothing: float = 0.4,
        weight: float = 10.0,
        momentum: float = 0.3,
        step_size: Size = "auto",
        **common: Unpack[CommonArgs],
    ) -> None:
        self.check_own_parts(common)
        common["targets"] = LabelTargets(smoothing=smoothing)
        common["consistency"] = Consistency(weight, distance="mse", through="both")
        super().__init__(threat, examples, shape, **common)
        if classes < 2 or not 0 <= momentum < 1:
            raise UsageError(f"FGSM-UAP needs classes >= 2 and a momentum in [0, 1); got {classes=}, {momentum=}")
        self.classes, self.shared_by, self.smoothing, self.decay = classes, shared_by, smoothing, momentum
        self.radius = threat.size("radius", radius, auto=1.25)
        self.step_size = threat.size("step_size", step_size, auto=1.0)
        self.settings_warning = warn_of_steps(threat, self.step_size)
        self._ball = threat.with_eps(self.radius)
        groups = torch.arange(classes if shared_by == "class" else 1, device=self.epoch.device)
        still = torch.zeros(len(groups), *shape, device=self.epoch.device)
        signs = CounterRNG(self.seed, torch.zeros_like(self.epoch), groups).normal(Stream.RESET, still.shape[1:])
        self.register_buffer("universal", threat.step(still, signs, self.radius))
        self.register_buffer("momentum", still)

    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """Take one step from the shared perturbation."""
        x, y = batch.x, self.checks.labels(batch.y, self.classes)
        check_shown_shape(x, self.universal.shape[1:], "fgsm-uap keeps perturbations of one shape")
        group = y if self.shared_by == "class" else torch.zeros_like(y)
        start = self.threat.project(x + self.universal[group].to(x.dtype), x)
        with keep_statistics(model):  # they see the start in the pass that the weights are trained through
            gradient = self.start_gradient(model, start, y)
        self._attacked = start, gradient, group
        return self.threat.ascend(start, gradient, self.step_size * self.step_scale, x)

    def minimize(
        self,
        model: nn.Module,
        update: Update,
        objective: Callable[[], tuple[Tensor, Tensor]],
        *inputs: Tensor,
        attack_gradients: Directions | None = None,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Update the weights; move the shared perturbations with the gradients of attack and loss at the start."""
        start, gradient, group = self._attacked
        del self._attacked
        start.requires_grad_(True)
        found = super().minimize(model, update, objective, start, *inputs, attack_gradients=attack_gradients)
        loss, logits, (of_loss, *others) = found
        self._move(gradient + of_loss * len(start), group)  # of a sum; the loss is a mean
        return loss, logits, tuple(others)

    def attack_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the summed cross-entropy with the smoothed labels."""
        if check_logits(logits, len(y)).shape[1] != self.classes:
            raise UsageError(f"the model has {logits.shape[1]} outputs; create the method with that many classes")
        y = self.checks.labels(y, self.classes)
        return smoothed_cross_entropy_sum(logits, y, self.smoothing * (1 - 1 / self.classes))

    def _move(self, gradient: Tensor, group: Tensor) -> None:
        """Update momenta and perturbations of the groups that have images in the global batch."""
        members = (group == torch.arange(len(self.universal), device=group.device)[:, None]).double()
        gradient = gradient.double()  # autocast would round a product in float32
        norm, counts, sums = self.total(gradient.abs().sum(), members.sum(1), members @ gradient.flatten(1))
        shape = (-1, *(1,) * (gradient.dim() - 1))
        counts = counts.view(shape)
        mean = sums.view(self.momentum.shape) / counts.clamp_min(1) / (norm + _TINY)
        momentum = self.decay * self.momentum + mean.to(self.momentum.dtype)
        moved = self._ball.clip(self.threat.step(self.universal, momentum, self.radius * self.step_scale))
        self.momentum.copy_(torch.where(counts > 0, momentum, self.momentum))
        self.universal.copy_(torch.where(counts > 0, moved, self.universal))
