"""Forward passes of the pre-activation networks with the kernels of this package."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from atas.kernels._functions import AddBNReLU, Conv
from atas.kernels._overlap import shortcuts
from atas.models import PreActResNet, WideResNet


class FusedForward:
    """The forward pass of a pre-activation network. `passes` counts those in train mode, as BatchNorm itself would."""

    def __init__(self, model: PreActResNet | WideResNet) -> None:
        self.model, self.passes = model, 0
        self._activated_shortcut = isinstance(model, WideResNet)
        self._blocks: list[Any] = [
            block for name, stage in model.named_children() if name.startswith("layer") for block in stage.children()
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """Logits of pixels in [0, 1]."""
        model, blocks = self.model, self._blocks
        self.passes += model.training
        x = model.normalize(x).to(model.conv1.weight.dtype, memory_format=torch.channels_last)
        total, active = _activate(blocks[0].bn1, _conv(model.conv1, x), None)
        for block, following in zip(blocks, [*(block.bn1 for block in blocks[1:]), model.bn], strict=True):
            if isinstance(block.shortcut, nn.Conv2d):
                # Beside the main path only where its gradient goes to BatchNorm's kernel, which waits for it; gradients
                # that autograd adds up itself must be there.
                total = (
                    _conv(block.shortcut, active)
                    if self._activated_shortcut
                    else _conv(block.shortcut, total, aside=True)
                )
            _, inner = _activate(block.bn2, _conv(block.conv1, active), None)
            out = _conv(block.conv2, inner)
            total, active = _activate(following, out, total)
        return model.fc(active.mean((2, 3)))


def fused_forward(model: nn.Module) -> FusedForward | None:
    """The model's forward pass by hand-written kernels, or None for a model that has none or is partly frozen."""
    if not isinstance(model, PreActResNet | WideResNet):
        return None
    whole = all(module.training == model.training for module in model.modules())
    return FusedForward(model) if whole and all(weight.requires_grad for weight in model.parameters()) else None


def _activate(bn: nn.BatchNorm2d, a: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor]:
    shortcuts.join()
    return AddBNReLU.apply(a, b, bn.weight, bn.bias, bn)


def _conv(conv: nn.Conv2d, x: Tensor, aside: bool = False) -> Tensor:
    return Conv.apply(x, conv.weight, conv, aside)
