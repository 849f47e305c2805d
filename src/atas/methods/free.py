"""Free adversarial training: each batch is replayed, and one backward pass serves weights and perturbation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from atas.data.loader import Batch
from atas.errors import UsageError
from atas.methods.base import CommonArgs, Method, StepOutput
from atas.methods.checks import carried_rows
from atas.methods.step_warnings import warn_of_steps
from atas.methods.update import Update
from atas.threat import Size, Threat

Clamp = Literal["both", "inputs", "carried"]


class Free(Method):
    """Adversarial training for free (Shafahi et al., 2019).

    Each batch is used m times in a row. Each backward pass updates the weights and moves the perturbation by eps. The
    perturbation belongs to the position in the batch, not to the example: it starts at zero once, and the next batch
    continues from it. An epoch visits each example once, with m updates per batch. All passes run in train mode.

    `clamp` is what stays in [0, 1]: `both`, the inputs and the image with the carried perturbation (default);
    `inputs` alone, as in both programs of the authors, for CIFAR in TensorFlow and for ImageNet in PyTorch, where the
    gradient is zero at clamped pixels; or the `carried` perturbation alone, as in the code of FGSM-RS's authors, so
    that the first input of a batch may leave [0, 1].
    """

    fixed_size = True
    weight_perturbations = ("ascent", "momentum")
    carried: Tensor

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        replays: int = 8,
        step_size: Size | None = None,
        batch_size: int = 128,
        clamp: Clamp = "both",
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        if replays < 1 or batch_size < 1:
            raise UsageError(f"replays and batch_size must be at least 1; got {replays} and {batch_size}")
        self.clamp = clamp
        self.updates_per_step = replays
        self.step_size = threat.size("step_size", step_size, auto=1.0)
        self.settings_warning = warn_of_steps(threat, self.step_size, replays)
        self.register_buffer("carried", torch.zeros(batch_size, *shape, device=common.get("device")))

    def training_step(self, model: nn.Module, update: Update, batch: Batch) -> StepOutput:
        """Run all replays of a batch; return the output of the last one."""
        x = batch.x
        perturbation = carried_rows(self.carried, x, "free training")
        for _ in range(self.updates_per_step):
            inputs = self._inputs(x, perturbation).requires_grad_(True)
            objective = functools.partial(self._objective, model, inputs, batch)
            loss, logits, (gradient,) = self.minimize(model, update, objective, inputs)
            perturbation = self._next(x, perturbation, gradient)
        self.carried[: len(x)] = perturbation
        return StepOutput(loss.detach(), inputs.detach(), logits.detach())

    def _inputs(self, x: Tensor, perturbation: Tensor) -> Tensor:
        """Return the inputs of a replay."""
        if self.clamp == "both":
            return self.threat.project(x + perturbation, x)
        return (x + perturbation).clamp(0, 1) if self.clamp == "inputs" else x + perturbation

    def _next(self, x: Tensor, perturbation: Tensor, gradient: Tensor) -> Tensor:
        """Return the perturbation of the next replay."""
        if self.clamp == "inputs":  # the gradient of a clamped pixel is zero
            point = x + perturbation
            gradient = torch.where((point >= 0) & (point <= 1), gradient, 0.0)
        step = self.threat.step(perturbation, gradient, self.step_size * self.step_scale)
        return self.threat.clip(step) if self.clamp == "inputs" else self.threat.project(x + step, x) - x

    def _objective(self, model: nn.Module, inputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = model(inputs)
        return self.loss(logits, batch.y, batch.index), logits
