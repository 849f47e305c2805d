"""Networks that have an implementation in Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

from torch import nn

from atas.models import Normalize, PreActResNet, WideResNet

if TYPE_CHECKING:
    from atas.ops.triton.preact_resnet import PreActNetwork

_SMALLEST_ARGS: dict[type[nn.Module], tuple[int, ...]] = {
    PreActResNet: (),
    WideResNet: (10, 2),
}  # what to build one with


def accelerate(model: nn.Module) -> PreActNetwork | None:
    """Return the model's forward pass in Triton kernels, or None for a model without kernels or with frozen parts."""
    whole = all(module.training == model.training for module in model.modules())
    learns = all(weight.requires_grad for weight in model.parameters())
    if not (whole and learns and has_kernels(model)):
        return None
    from atas.ops.triton.preact_resnet import PreActNetwork  # imports Triton

    return PreActNetwork(model)


def has_kernels(model: nn.Module) -> TypeGuard[PreActResNet | WideResNet]:
    """Return whether this is exactly one of our networks: no subclass, no replaced layer, no hook that would be
    skipped."""
    if type(model) not in (PreActResNet, WideResNet):
        return False
    ours = {type(module) for module in type(model)(2, Normalize(1), *_SMALLEST_ARGS[type(model)]).modules()}
    for module in model.modules():
        if type(module) not in ours or module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return False
        if isinstance(module, nn.BatchNorm2d) and (module.momentum is None or not module.track_running_stats):
            return False
    return True
