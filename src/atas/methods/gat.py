"""GAT: one step, guided by the distance of the prediction from that for the clean image.

For each image x with label y, in the batches number b = 0, 1, 2, ... of an epoch:

    p  = softmax f(x)                                       model in train mode, no gradient
    x0 = P01[x + (eps/2) s],  s random signs                P01: clamp to [0, 1]
    x1 = P[x0 + eps sgn grad (l(x0, y) + guide |softmax f(x0) - p|^2)],  guide = weight if b is odd, else 0; eval mode
    loss = l(x, y) + weight |softmax f(x) - softmax f(x1)|^2            model in train mode, gradients through both

Sriramanan et al., "Guided Adversarial Attack for Evaluating and Enhancing Adversarial Defenses", NeurIPS 2020. As in
the authors' code, the guide works in every other batch, the pass for p updates the running statistics of BatchNorm in
every batch, and the weight of 10 is multiplied by 4 for the last 14 of 100 epochs.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from atas.core.autograd import freeze, input_gradient, set_mode, to_float32
from atas.core.rng import Stream
from atas.core.validation import check_logits
from atas.data.loader import Batch
from atas.errors import UsageError
from atas.methods.base import CommonArgs, Method, StepOutput
from atas.methods.checks import known_epochs
from atas.methods.consistency import squared_probabilities
from atas.methods.step_warnings import warn_of_steps
from atas.methods.update import Update
from atas.threat import Size, Threat


class GuidedTraining(Method):
    """What GAT and NuAT have in common: all but the distance and how its weight changes."""

    attack_mode = "eval"
    weight_perturbations = ("ascent", "momentum")
    batches: Tensor
    current_weight: Tensor

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        weight: float,
        noise: Size,
        step_size: Size,
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        if not 0 <= weight < math.inf:
            raise UsageError(f"weight must be a number that is not negative; got {weight}")
        self.weight = weight
        self.noise = threat.size("noise", noise, auto=0.5)
        self.step_size = threat.size("step_size", step_size, auto=1.0)
        self.settings_warning = warn_of_steps(threat, self.step_size)
        self.register_buffer("batches", torch.zeros_like(self.epoch))  # of this epoch so far
        self.register_buffer("current_weight", torch.zeros_like(self.step_scale), persistent=False)

    @abstractmethod
    def weight_in(self, epoch: int, epochs: int | None) -> float:
        """Return the weight of the distance in an epoch."""

    @abstractmethod
    def distance(self, logits: Tensor, clean: Tensor, update: Update) -> Tensor:
        """Return the distance of predictions, summed over the batch."""

    def start_epoch(self, epoch: int, epochs: int | None = None) -> None:
        """Start an epoch, with the weight of this epoch."""
        super().start_epoch(epoch, epochs)
        self.current_weight.fill_(self.weight_in(epoch, epochs))

    def on_new_epoch(self, epoch: int, epochs: int | None) -> None:
        """Count batches from 0 again."""
        self.batches.zero_()

    def training_step(self, model: nn.Module, update: Update, batch: Batch) -> StepOutput:
        """Attack, then update the weights with the loss at the images and the distance of both predictions."""
        with freeze(model):
            inputs = self._attack(model, update, batch).detach()
        self.batches += 1

        def objective() -> tuple[Tensor, Tensor]:
            logits, clean = model(inputs), model(batch.x)
            apart = self.current_weight / max(len(inputs), 1) * self.distance(logits, clean, update)
            return self.loss(clean, batch.y, batch.index) + apart, logits

        loss, logits, _ = self.minimize(model, update, objective)
        return StepOutput(loss.detach(), inputs, logits.detach())

    def _attack(self, model: nn.Module, update: Update, batch: Batch) -> Tensor:
        with torch.no_grad():
            clean = check_logits(model(batch.x), len(batch.x))
        guide = self.current_weight * (self.batches % 2)

        def objective(logits: Tensor, y: Tensor) -> Tensor:
            return self.attack_loss(logits, y) + guide * self.distance(logits, clean, update)

        signs = self.rng(batch.index).normal(Stream.START, batch.x.shape[1:]).to(batch.x.dtype)
        start = self.threat.ascend(batch.x, signs, self.noise, batch.x)
        with set_mode(model, training=False):
            gradient, _ = input_gradient(model, start, batch.y, objective)
        return self.threat.ascend(start, gradient, self.step_size * self.step_scale, batch.x)


class GAT(GuidedTraining):
    """Guided adversarial training (Sriramanan et al., 2020).

    `weight` is that of the distance; from the share `late_from` of the training on, it is `late_factor` times as large.
    By default `noise`, the size of the random start, is eps/2 and `step_size` is eps. Cost: three standard steps.

    >>> from atas import Linf
    >>> method = GAT(Linf(8/255), examples=100, shape=(3, 32, 32))
    >>> [method.weight_in(epoch, 100) for epoch in (0, 85, 86)]
    [10.0, 10.0, 40.0]
    """

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        weight: float = 10.0,
        late_factor: float = 4.0,
        late_from: float = 0.86,
        noise: Size = "auto",
        step_size: Size = "auto",
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, weight=weight, noise=noise, step_size=step_size, **common)
        if not 0 <= late_factor < math.inf or not 0 <= late_from <= 1:
            raise UsageError(f"GAT needs late_factor >= 0 and late_from in [0, 1]; got {late_factor=}, {late_from=}")
        self.late_factor, self.late_from = late_factor, late_from

    def weight_in(self, epoch: int, epochs: int | None) -> float:
        """Return the weight of an epoch, larger late in the training."""
        late = self.late_factor != 1 and epoch / known_epochs("gat with a late_factor", epochs) >= self.late_from
        return self.weight * self.late_factor if late else self.weight

    def distance(self, logits: Tensor, clean: Tensor, update: Update) -> Tensor:
        """Return the squared Euclidean distance of the predictions."""
        return squared_probabilities(to_float32(logits), to_float32(clean)).sum()
