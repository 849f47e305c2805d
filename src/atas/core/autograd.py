"""Forward and backward passes as attacks and methods need them.

Train or eval mode, frozen weights, gradients with respect to the input, losses in float32, and a penalty on the input
gradient (second order).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Protocol, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.attention import SDPBackend, sdpa_kernel

from atas.core.dispatch import fast_op
from atas.core.validation import FIXED_GRAPH, is_fixed_graph
from atas.errors import UsageError

Forward = Callable[[Tensor], Tensor]
Module = TypeVar("Module", bound=nn.Module)


@contextmanager
def set_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put a model into train or eval mode inside the context, then restore the mode of every module.

    A model that is already in train mode is left alone, so layers that the user keeps in eval mode stay there. Graphs
    that are fixed in eval mode are left as they are.
    """
    if training and getattr(model, "training", False):
        yield
        return
    modes = [(module, module.training) for module in model.modules() if hasattr(module, "training")]
    is_set = not training and not any(mode for _, mode in modes)
    if not is_set:
        _switch_mode(model, training)
    try:
        with nullcontext() if training else _differentiable_rnns([module for module, _ in modes]):
            yield
    finally:
        if not is_set:
            for module, was_training in modes:
                module.training = was_training


def _switch_mode(model: nn.Module, training: bool) -> None:
    """Set the mode of a model and its modules, but for graphs that are fixed in eval mode."""
    if training and is_fixed_graph(model):
        raise UsageError(FIXED_GRAPH)
    fixed = {part for module in model.modules() if is_fixed_graph(module) for part in module.modules()}
    if not fixed:
        model.train(training)
    for module in model.modules() if fixed else ():
        if module not in fixed:
            module.training = training


@contextmanager
def _differentiable_rnns(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run recurrent layers on CUDA without cuDNN, which has no backward pass in eval mode and no second derivative."""
    outside: list[bool] = []

    def disable(*_: object) -> None:
        outside.append(torch.backends.cudnn.enabled)
        torch.backends.cudnn.enabled = False

    def restore(*_: object) -> None:
        torch.backends.cudnn.enabled = outside.pop()

    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, nn.RNNBase) and any(weight.is_cuda for weight in module.parameters()):
                stack.callback(module.register_forward_pre_hook(disable).remove)
                stack.callback(module.register_forward_hook(restore, always_call=True).remove)
        yield


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


@contextmanager
def keep_statistics(model: nn.Module) -> Iterator[None]:
    """Restore all buffers of a module after the context, for example the running statistics that passes change."""
    buffers = list(model.buffers())
    counts = [(module, module.train_forward_count) for module in model.modules() if isinstance(module, CountsForwards)]
    with temporary_values(buffers, buffers):
        yield
    for module, count in counts:
        module.train_forward_count = count


@contextmanager
def temporary_values(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Give tensors other values inside the context, in place; then restore the old ones to the bit."""
    saved = [torch.empty_like(tensor) for tensor in tensors]
    _copy_all(saved, tensors)
    _copy_all(tensors, values)
    try:
        yield
    finally:
        _copy_all(tensors, saved)


@torch.no_grad()
def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each tensor to its target, those of the same types together in one kernel."""
    groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target is not source:
            group = groups.setdefault((target.dtype, source.dtype), ([], []))
            group[0].append(target)
            group[1].append(source)
    for alike in groups.values():
        torch._foreach_copy_(*alike)


@runtime_checkable
class CountsForwards(Protocol):
    """A model that counts its forward passes in train mode on the host, instead of BatchNorm on the device."""

    train_forward_count: int


def contiguous(images: Tensor) -> Tensor:
    """Return images with the strides of a new tensor; they are copied only if they have others.

    `Tensor.contiguous()` ignores axes of length 1, such as the channel of grey images, but convolutions choose the
    layout of their outputs by such strides, and `view` then fails in the layer behind them.

    >>> grey = torch.rand(2, 4, 4, 1).permute(0, 3, 1, 2)
    >>> grey.contiguous().stride(), contiguous(grey).stride()
    ((16, 1, 4, 1), (16, 16, 4, 1))
    """
    stride, strides = 1, list[int]()
    for length in reversed(images.shape):
        strides.append(stride)
        stride *= max(length, 1)
    if images.stride() == tuple(reversed(strides)):
        return images
    return images.clone(memory_format=torch.contiguous_format)


def to_float32(logits: Tensor) -> Tensor:
    """Return logits in float32 or wider: a loss in half precision distorts gradient norms."""
    return logits if logits.dtype == torch.float64 else logits.float()


@fast_op
def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross-entropy over the batch, which weights are trained on."""
    return F.cross_entropy(to_float32(logits), y)


@fast_op
def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over the batch with a distribution over the classes for each example."""
    return F.cross_entropy(to_float32(logits), targets)


@fast_op
def cross_entropy_sum(logits: Tensor, y: Tensor) -> Tensor:
    """Return the summed cross-entropy, so that an example's gradient does not depend on its batch."""
    return F.cross_entropy(to_float32(logits), y, reduction="sum")


@runtime_checkable
class SupportsInputGradient(Protocol):
    """A model that takes the gradient itself, because it needs other gradients from the same pass."""

    def input_gradient(self, loss: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of a loss with respect to x."""


def input_gradient(
    forward: Forward, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy_sum
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the loss with respect to the inputs, and the logits."""
    with torch.enable_grad():
        x = x.detach().requires_grad_(True)
        logits = forward(x)
        if isinstance(forward, SupportsInputGradient):
            return forward.input_gradient(loss(logits, y), x), logits.detach()
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
        # The other kernels of attention, and cuDNN's of recurrent layers, have no second derivative.
        with sdpa_kernel(SDPBackend.MATH), _differentiable_rnns(model.modules()):
            (gradient,) = torch.autograd.grad(loss(model(x), y), x, create_graph=True)
        if model not in _twice_differentiable:
            # Autograd would silently leave out what lies behind a function that is differentiable once.
            if any(node.name().endswith("Error") for node in graph_nodes(gradient)):
                raise RuntimeError("trying to differentiate twice a function that was marked with @once_differentiable")
            _twice_differentiable.add(model)
        return function(gradient)
    with freeze(model):
        gradient, _ = input_gradient(model, x, y, loss)
    gradient.requires_grad_(True)
    value = function(gradient)
    (direction,) = torch.autograd.grad(value, gradient)
    jvp = model.loss_jvp(x, direction, y)
    return value.detach() + (jvp - jvp.detach())


# Models whose graphs have been looked at once.
_twice_differentiable: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def graph_nodes(output: Tensor, *stops: Tensor) -> Iterator[Node]:
    """Iterate over the nodes of a tensor's graph, without those behind other tensors."""
    seen, nodes = {stop.grad_fn for stop in stops}, [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            nodes += [following for following, _ in node.next_functions]
