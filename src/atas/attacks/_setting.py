"""The setting in which every gradient attack runs: checked inputs, eval mode, frozen weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atas.checks import Guard, check_module, check_shapes, checked_logits
from atas.errors import DataError
from atas.passes import cross_entropy_sum, frozen, input_gradient, mode
from atas.threat import Threat


@dataclass(frozen=True)
class Target:
    """A model under attack at some images."""

    model: nn.Module
    x: Tensor
    y: Tensor
    threat: Threat
    loss: Callable[[Tensor, Tensor], Tensor]

    def ascend(self, point: Tensor, size: float) -> Tensor:
        """One step up the loss, projected. Where the gradient is not a number the point stays."""
        gradient, _ = input_gradient(self.model, point, self.y, self.loss)
        return self.threat.ascend(point, gradient.nan_to_num(), size, self.x)


@contextmanager
def attacking(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, index: Tensor | None = None) -> Iterator[Target]:
    """Check the inputs and hold the model in eval mode, its weights without gradients; both are put back at the end.

    On the CPU a wrong value is an error at once; on a GPU when the attack is over, so that the host never waits for
    the device between the steps.
    """
    check_module(model)
    check_shapes(x, y, index, None)
    for name, tensor in (("labels", y), ("indices", index)):
        if tensor is not None and tensor.device != x.device:
            raise DataError(f"the {name} live on {tensor.device}, the images on {x.device}: move them with .to()")
    # What is made in inference mode cannot take part in a backward pass: hence no inference mode, and copies.
    with torch.inference_mode(False), torch.no_grad(), mode(model, training=False), frozen(model):
        guard = Guard(x.device)
        if x.numel():
            guard.images(x)

        def loss(output: Tensor, y: Tensor) -> Tensor:
            logits = checked_logits(output, len(y))
            return cross_entropy_sum(logits, guard.labels(y, logits.shape[1]))

        yield Target(model, x.detach().clone(), y.to(torch.int64, copy=True), threat, loss)
        guard.raise_if_set()
