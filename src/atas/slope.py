"""How steep the loss of a pre-activation network is along a direction, as something that weights can learn from.

The slope of the loss at x along d is d . grad l(x). To differentiate that by the weights, autograd would go through its
own backward pass, of which torch.compile makes nothing. Here x and d go forward together instead, each layer's change
beside its value, and one ordinary backward pass follows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atas.fusing import fusable
from atas.models import PreActResNet, WideResNet
from atas.models._pooling import pooled
from atas.passes import full

Pair = Tensor  # a batch of values, and after it the batch of their changes


@fusable
def slope(model: PreActResNet | WideResNet, x: Tensor, direction: Tensor, y: Tensor) -> Tensor:
    """The sum over the batch of direction . grad cross-entropy(x), in train mode; running statistics stay."""
    change = direction / model.normalize.std.to(x.dtype)
    pair = torch.cat([model.normalize(x), change]).contiguous(memory_format=torch.channels_last)
    pair = _through(model, model.conv1(pair))
    values, changes = pooled(_activated(pair, model.bn), model.window).chunk(2)
    logits = full(model.fc(values))
    moves = full(F.linear(changes, model.fc.weight))
    target = y[:, None] == torch.arange(logits.shape[1], device=y.device)
    return ((logits.softmax(1) - target.to(logits.dtype)) * moves).sum()


def _through(model: PreActResNet | WideResNet, pair: Pair) -> Pair:
    """All blocks, one after the other."""
    for name, stage in model.named_children():
        for block in stage.children() if name.startswith("layer") else ():
            pair = _block(block, pair, activates=isinstance(model, WideResNet))
    return pair


def _block(block: Any, pair: Pair, *, activates: bool) -> Pair:
    """A block, whose projecting shortcut sees the activated input or the raw one."""
    active = _activated(pair, block.bn1)
    out = block.conv2(_activated(block.conv1(active), block.bn2))
    if not isinstance(block.shortcut, nn.Conv2d):
        return out + pair
    return out + block.shortcut(active if activates else pair)


def _activated(pair: Pair, bn: nn.BatchNorm2d) -> Pair:
    """BatchNorm by the statistics of the batch, which move with it, and ReLU."""
    values, changes = full(pair).chunk(2)
    every = (0, 2, 3)
    centred = values - values.mean(every, keepdim=True)
    scale = (centred.square().mean(every, keepdim=True) + bn.eps).rsqrt()
    normal = centred * scale
    moved = changes - changes.mean(every, keepdim=True) - normal * (normal * changes).mean(every, keepdim=True)
    weight, bias = (parameter.view(1, -1, 1, 1) for parameter in (bn.weight, bn.bias))
    out = normal * weight + bias
    return torch.cat([out.relu(), torch.where(out > 0, moved * (scale * weight), 0.0)]).to(pair.dtype)
