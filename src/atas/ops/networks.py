"""Networks with a faster forward pass than their own: by Triton kernels, or by torch.compile."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeGuard

import torch
from torch import Tensor, nn

from atas.core.autograd import contiguous, input_gradient, set_mode
from atas.core.dispatch import compile_function
from atas.core.split_model import SplitModel
from atas.models import Normalize, PreActResNet, WideResNet
from atas.models.preact_resnet import PreActBlock
from atas.models.wide_resnet import WideBlock
from atas.ops import enable_kernels
from atas.ops.precision import strict_float32

_LAYOUT_TOLERANCE = 0.01  # rounding that a ReLU or a maximum amplifies stays below; wrong strides do not


class WrappedNetwork(nn.Module):
    """A module that runs another module's forward pass differently.

    Parameters and buffers are the wrapped model's. So is the mode: to set it here or there is the same.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def training(self) -> bool:
        """The mode of the wrapped model."""
        return self.model.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_modules" in self.__dict__:  # nn.Module sets a mode before it can hold a model
            self.model.training = mode


class CompiledNetwork(WrappedNetwork):
    """A model compiled with torch.compile: for passes with frozen weights, and for those that weights learn from.

    The compiler does not always notice whether weights are frozen (seen with torch 2.9.0 and 2.11.0, not with 2.13.0).
    For inputs alike it would run the graph of an attack in the training pass, and the weights would have no gradients.
    """

    def __init__(
        self, model: nn.Module, backend: str = "inductor", log: Callable[[str], None] = lambda sentence: None
    ) -> None:
        super().__init__(model)

        def run(x: Tensor, learns: bool) -> Tensor:
            if learns:  # a branch on it makes the compiler distinguish both
                return model(x)
            return model(x)

        self._run = compile_function(run, backend, log=log)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self._run(x, any(weight.requires_grad for weight in self.model.parameters()))


class AcceleratedNetwork(WrappedNetwork, ABC):
    """A model whose forward and backward passes run by kernels, which have no second derivative.

    It has the two things that methods would otherwise do with hooks or second derivatives: `loss_jvp`
    (`core.autograd.SupportsJvp`) and `split_first_layer` (`core.split_model.SupportsSplit`). `train_forward_count`
    counts the forward passes in train mode, as BatchNorm itself would.
    """

    train_forward_count: int = 0

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of pixels in [0, 1]."""

    @abstractmethod
    def loss_jvp(self, x: Tensor, direction: Tensor, y: Tensor) -> Tensor:
        """Return the derivative of the summed cross-entropy at x along a direction, differentiable by the weights."""

    @abstractmethod
    def split_first_layer(self) -> SplitModel:
        """Return the network split behind its first convolution."""

    @abstractmethod
    def precompile(self, x: Tensor, modes: tuple[bool, ...] = (False, True)) -> None:
        """Compile the kernels for batches like x in these modes (train mode: True), in parallel. Nothing is run."""


def channels_last(model: nn.Module) -> nn.Module:
    """Lay out the weights of convolutions for tensor cores, in place; values stay."""
    for parameter in model.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
    return model


def takes_channels_last(model: nn.Module, images: Tensor) -> bool:
    """Return whether a network computes the same with weights in channels_last, on images laid out as these.

    Convolutions then return channels_last too, which `view` and code that reads strides do not expect. Networks with
    kernels can compute with it, and those without convolutions if the images are contiguous. For others a copy makes a
    pass there and back, in eval mode and on random pixels, which is compared with a plain one.
    """
    has_convolutions = any(parameter.dim() == 4 for parameter in model.parameters())
    if has_kernels(model) or (not has_convolutions and images.is_contiguous()):
        return True
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(images.shape, generator=generator).to(images)
    pixels = torch.empty_like(images).copy_(pixels)
    try:
        with set_mode(model, training=False), strict_float32(images.device):
            with torch.no_grad():  # weight_norm keeps its weights, which cannot be copied with a history
                model(contiguous(pixels))
                copied = copy.deepcopy(model)
            plain = _logits_and_gradient(copied, contiguous(pixels))
            other = _logits_and_gradient(channels_last(copied), pixels)
    except Exception:  # a network may raise anything
        return False
    return all(float((a - b).norm()) <= _LAYOUT_TOLERANCE * float(a.norm()) for a, b in zip(plain, other, strict=True))


def _logits_and_gradient(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    def weighted_sum(logits: Tensor, _: Tensor) -> Tensor:  # a cross-entropy may be zero
        return (logits * torch.linspace(1, 2, logits.shape[1], device=logits.device)).sum()

    gradient, logits = input_gradient(model, x, x, weighted_sum)
    return logits, gradient


# Any other type of layer in a network means that its owner has replaced a layer.
_LAYERS: dict[type[nn.Module], set[type[nn.Module]]] = {
    PreActResNet: {PreActResNet, PreActBlock, nn.Identity},
    WideResNet: {WideResNet, WideBlock},
}
_COMMON_LAYERS = {Normalize, nn.Sequential, nn.Conv2d, nn.BatchNorm2d, nn.Linear}


def accelerate(model: nn.Module, *, for_training: bool = True) -> AcceleratedNetwork | None:
    """Return the model with passes by kernels; None for a model, or on a machine, without them.

    Training also needs all modules in one mode and no frozen weight.
    """
    one_mode = all(module.training == model.training for module in model.modules())
    learns = all(weight.requires_grad for weight in model.parameters())
    if for_training and not (one_mode and learns):
        return None
    if not has_kernels(model) or not enable_kernels():
        return None
    from atas.ops.triton.preact_resnet import PreActNetwork  # imports Triton

    return PreActNetwork(model)


def has_kernels(model: nn.Module) -> TypeGuard[PreActResNet | WideResNet]:
    """Return whether this is exactly one of the package's networks: no subclass, no replaced layer, no hook that would
    be skipped, and not another author's variant of PreActResNet."""
    if type(model) not in _LAYERS or _is_variant(model):
        return False
    layers = _LAYERS[type(model)] | _COMMON_LAYERS
    for module in model.modules():
        if type(module) not in layers or module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return False
        if isinstance(module, nn.BatchNorm2d) and (module.momentum is None or not module.track_running_stats):
            return False
    return True


def _is_variant(model: nn.Module) -> bool:
    return isinstance(model, PreActResNet) and (model.bn is None or model.activated_shortcut)
