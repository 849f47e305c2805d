"""Forward and backward passes as attacks and methods need them: which mode, which gradients, which precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atas.fusing import fusable

Forward = Callable[[Tensor], Tensor]


@contextmanager
def mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put a model into train or eval mode, and every module back into the mode it had.

    A model that is in train mode already is left alone, so layers that its owner keeps frozen in eval mode stay so.
    """
    if training and model.training:
        yield
        return
    found = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in found:
            module.training = was_training


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No weight takes part in what is recorded, so that a backward pass computes input gradients alone."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def full(logits: Tensor) -> Tensor:
    """Logits in float32 at least: a loss in half precision loses what the gradient's size depends on."""
    return logits if logits.dtype == torch.float64 else logits.float()


@fusable
def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """The mean over the batch: the loss that weights are trained on."""
    return F.cross_entropy(full(logits), y)


@fusable
def cross_entropy_sum(logits: Tensor, y: Tensor) -> Tensor:
    """The sum over the batch: an example's gradient then does not depend on the batch that it is in."""
    return F.cross_entropy(full(logits), y, reduction="sum")


def input_gradient(
    forward: Forward, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy_sum
) -> tuple[Tensor, Tensor]:
    """The gradient of the loss with respect to each input, and the logits there."""
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        logits = forward(x)
        (gradient,) = torch.autograd.grad(loss(logits, y), x)
    return gradient, logits.detach()


def through_gradient(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    function: Callable[[Tensor], Tensor],
) -> Tensor:
    """A function of the gradient of the loss by x, through which weights can learn: a derivative of second order.

    Autograd goes back through its own backward pass. A fast forward pass has no such way; where it can tell the `slope`
    of the summed cross-entropy along a direction, the same is found from that: as far as the weights are concerned,
    the function changes as the slope does along the function's own gradient.
    """
    slope = getattr(model.forward, "slope", None)
    if slope is None:
        x = x.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(loss(model(x), y), x, create_graph=True)
        return function(gradient)
    with frozen(model):
        gradient, _ = input_gradient(model, x, y, loss)
    gradient.requires_grad_(True)
    value = function(gradient)
    (direction,) = torch.autograd.grad(value, gradient)
    change = slope(x, direction, y)
    return value.detach() + (change - change.detach())
