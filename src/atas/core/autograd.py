"""Forward and backward passes as attacks and methods need them.

Train or eval mode, frozen weights, gradients with respect to the input, losses in float32, a penalty on the input
gradient (second order), and models split behind their first layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atas.core.dispatch import fast_op
from atas.errors import UsageError, unknown

Forward = Callable[[Tensor], Tensor]
Module = TypeVar("Module", bound=nn.Module)


@contextmanager
def set_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put a model into train or eval mode inside the context, then restore the mode of every module.

    A model that is already in train mode is left alone, so layers that the user keeps in eval mode stay there.
    """
    if training and model.training:
        yield
        return
    modes = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def eval_mode(model: Module) -> Module:
    """Put a model into eval mode, and return it. Do not use what `.eval()` and `.train()` return: a model whose
    `train` returns nothing, as is common with frozen BatchNorm, would become None."""
    model.eval()
    return model


@contextmanager
def freeze(model: nn.Module) -> Iterator[None]:
    """Exclude all weights from autograd inside the context, so a backward pass computes input gradients only."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


def to_float32(logits: Tensor) -> Tensor:
    """Return logits in float32 or wider: a loss in half precision distorts gradient norms."""
    return logits if logits.dtype == torch.float64 else logits.float()


@fast_op
def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy over the batch, which weights are trained on."""
    return F.cross_entropy(to_float32(logits), y)


@fast_op
def cross_entropy_sum(logits: Tensor, y: Tensor) -> Tensor:
    """Return the summed cross-entropy, so that an example's gradient does not depend on its batch."""
    return F.cross_entropy(to_float32(logits), y, reduction="sum")


def input_gradient(
    forward: Forward, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy_sum
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the loss with respect to the inputs, and the logits."""
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        logits = forward(x)
        (gradient,) = torch.autograd.grad(loss(logits, y), x)
    return gradient, logits.detach()


@runtime_checkable
class SupportsJvp(Protocol):
    """A model whose passes have no second derivative, but that has the derivative of its loss along a direction."""

    def loss_jvp(self, x: Tensor, direction: Tensor, y: Tensor) -> Tensor:
        """Return the sum over the batch of direction . grad cross-entropy(x), differentiable by the weights."""


def gradient_penalty(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: Callable[[Tensor, Tensor], Tensor],
    function: Callable[[Tensor], Tensor],
) -> Tensor:
    """A function of the gradient of the loss by x, through which weights can learn: a derivative of second order.

    Autograd differentiates its own backward pass. A model that `SupportsJvp` cannot do that; there the derivative by
    the weights is that of the loss along a fixed direction, the function's own gradient.
    """
    if not isinstance(model, SupportsJvp):
        x = x.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad(loss(model(x), y), x, create_graph=True)
        return function(gradient)
    with freeze(model):
        gradient, _ = input_gradient(model, x, y, loss)
    gradient.requires_grad_(True)
    value = function(gradient)
    (direction,) = torch.autograd.grad(value, gradient)
    jvp = model.loss_jvp(x, direction, y)
    return value.detach() + (jvp - jvp.detach())


class _Reached(Exception):  # noqa: N818  (not an error: it carries a value out of a forward pass)
    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


def find_first_layer(model: nn.Module, name: str | None) -> nn.Module:
    """Return the layer of that name, or the first convolution or linear layer."""
    layers = dict(model.named_modules())
    if name is not None:
        if name not in layers:
            raise unknown("layer", name, [layer for layer in layers if layer])
        return layers[name]
    for layer in layers.values():
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear):
            return layer
    raise UsageError("this model has no convolution or linear layer to start YOPO from; name one with layer=...")


class SplitModel(Protocol):
    """A model split behind its first layer f1."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the output of f1, which requires a gradient."""

    def first_layer(self, x: Tensor) -> Tensor:
        """Return f1(x) without running the rest of the model."""

    def first_layer_vjp(self, adjoint: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of adjoint . f1(x) with respect to x."""


@runtime_checkable
class SupportsSplit(Protocol):
    """A model that no hook can split, but that can split itself."""

    def split_first_layer(self) -> SplitModel:
        """Return the model split behind its first layer."""


class HookedSplit:
    """Any model, split behind a layer by hooks."""

    def __init__(self, model: nn.Module, layer: nn.Module) -> None:
        self._model, self._layer = model, layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the layer's output."""
        outputs: list[Tensor] = []

        def keep(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
            outputs.append(output)
            return output.clone()  # what comes next may work in place

        point = x.detach().requires_grad_(True)  # so the output has a gradient, the layer's weights frozen or not
        handle = self._layer.register_forward_hook(keep)
        try:
            logits = self._model(point)
        finally:
            handle.remove()
        if not outputs:
            raise _unused()
        return logits, outputs[-1]

    def first_layer(self, x: Tensor) -> Tensor:
        """Return the layer's output."""

        def stop(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            raise _Reached(output)

        handle = self._layer.register_forward_hook(stop)
        try:
            self._model(x)
        except _Reached as reached:
            return reached.output
        finally:
            handle.remove()
        raise _unused()

    def first_layer_vjp(self, adjoint: Tensor, x: Tensor) -> Tensor:
        """Return the vector-Jacobian product by autograd."""
        x = x.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad((self.first_layer(x) * adjoint).sum(), x)
        return gradient


def _unused() -> UsageError:
    return UsageError("the layer that YOPO starts from does not take part in the forward pass; name another one")
