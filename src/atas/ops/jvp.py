"""The Jacobian-vector product of a pre-activation network's loss, differentiable by the weights.

The JVP of the loss at x along d is d . grad l(x). Differentiating it by the weights would send autograd through its own
backward pass, which torch.compile does not support. Here x and d go forward together, each layer's tangent beside its
value, and one ordinary backward pass follows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atas.core.autograd import to_float32
from atas.core.dispatch import fast_op
from atas.models import PreActResNet, WideResNet
from atas.models.layers import spatial_mean

PrimalTangent = Tensor  # a batch of values, followed by the batch of their tangents


@fast_op
def loss_jvp(model: PreActResNet | WideResNet, x: Tensor, direction: Tensor, y: Tensor) -> Tensor:
    """Return the sum over the batch of direction . grad cross-entropy(x), in train mode; running statistics are not
    updated."""
    assert model.bn is not None  # accelerated networks have it
    tangent = direction / model.normalize.std.to(x.dtype)
    primal_tangent = torch.cat([model.normalize(x), tangent]).contiguous(memory_format=torch.channels_last)
    primal_tangent = _blocks(model, model.conv1(primal_tangent))
    values, tangents = spatial_mean(_bn_relu(primal_tangent, model.bn), model.window).chunk(2)
    logits = to_float32(model.fc(values))
    logit_tangents = to_float32(F.linear(tangents, model.fc.weight))
    target = y[:, None] == torch.arange(logits.shape[1], device=y.device)
    return ((logits.softmax(1) - target.to(logits.dtype)) * logit_tangents).sum()


def _blocks(model: PreActResNet | WideResNet, primal_tangent: PrimalTangent) -> PrimalTangent:
    """Run all blocks."""
    for name, stage in model.named_children():
        for block in stage.children() if name.startswith("layer") else ():
            primal_tangent = _block(block, primal_tangent, activated_shortcut=isinstance(model, WideResNet))
    return primal_tangent


def _block(block: Any, primal_tangent: PrimalTangent, *, activated_shortcut: bool) -> PrimalTangent:
    """Run a block; the input of its projection shortcut is the activated or the raw input."""
    act = _bn_relu(primal_tangent, block.bn1)
    out = block.conv2(_bn_relu(block.conv1(act), block.bn2))
    if not isinstance(block.shortcut, nn.Conv2d):
        return out + primal_tangent
    return out + block.shortcut(act if activated_shortcut else primal_tangent)


def _bn_relu(primal_tangent: PrimalTangent, bn: nn.BatchNorm2d) -> PrimalTangent:
    """Run BatchNorm in train mode, whose statistics have tangents too, and ReLU."""
    values, tangents = to_float32(primal_tangent).chunk(2)
    dims = (0, 2, 3)
    centred = values - values.mean(dims, keepdim=True)
    scale = (centred.square().mean(dims, keepdim=True) + bn.eps).rsqrt()
    normalized = centred * scale
    tangent = (
        tangents - tangents.mean(dims, keepdim=True) - normalized * (normalized * tangents).mean(dims, keepdim=True)
    )
    weight, bias = (parameter.view(1, -1, 1, 1) for parameter in (bn.weight, bn.bias))
    out = normalized * weight + bias
    return torch.cat([out.relu(), torch.where(out > 0, tangent * (scale * weight), 0.0)]).to(primal_tangent.dtype)
