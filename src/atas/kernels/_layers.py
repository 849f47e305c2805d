"""One link of a pre-activation network: a convolution, perhaps an addition, BatchNorm and ReLU.

Each way through a link takes as few kernels as it can: those of `_conv` where the convolution is among them, otherwise
cuDNN's convolution and the passes of `_norm`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from atas.kernels import _conv, _norm, _stem, _strided, _tiles
from atas.kernels._conv import Projection
from atas.models import Normalize


@dataclass
class Trace:
    """What a pass through a link leaves for the way back: `saved` only in train mode, `patches` only the stem."""

    x: Tensor
    total: Tensor | None
    active: Tensor
    saved: Tensor | None = None
    patches: Tensor | None = None


def forward(x: Tensor, conv: nn.Conv2d, other: Tensor | Projection | None, bn: nn.BatchNorm2d) -> Trace:
    """total = conv(x) + other, active = relu(bn(total)), in the mode that BatchNorm is in."""
    fits = _tiles.fits(conv, x)
    if isinstance(other, Projection) and not (fits and _tiles.fits(other.conv, other.source)):
        other = convolve(other.source, other.conv)
    if fits:
        if bn.training:
            return Trace(x, *_conv.forward_train(x, conv, other, bn))
        return Trace(x, *_conv.forward_eval(x, conv, other, bn))
    assert bn.running_mean is not None
    assert bn.running_var is not None
    assert not isinstance(other, Projection)
    out = convolve(x, conv)
    statistics = bn.weight, bn.bias, bn.running_mean, bn.running_var
    if bn.training:
        assert bn.momentum is not None
        return Trace(x, *_norm.forward_train(out, other, *statistics, bn.momentum, bn.eps))
    return Trace(x, *_norm.forward_eval(out, other, *statistics, bn.eps))


def stem_forward(x: Tensor, normalize: Normalize, conv: nn.Conv2d, bn: nn.BatchNorm2d) -> Trace:
    """total = conv(normalize(x)), active = relu(bn(total)); the trace keeps the image as it came."""
    if not _stem.fits(conv):
        return replace(forward(normalized(x, normalize, conv), conv, None, bn), x=x)
    x = x.contiguous()
    if bn.training:
        return Trace(x, *_stem.forward_train(x, normalize, conv, bn))
    return Trace(x, *_stem.forward_eval(x, normalize, conv, bn))


def stem_input_gradient(gradient: Tensor, x: Tensor, normalize: Normalize, conv: nn.Conv2d) -> Tensor:
    """The gradient by the image."""
    if _stem.fits(conv):
        return _stem.input_gradient(gradient, x, normalize, conv)
    return input_gradient(gradient, conv, normalized(x, normalize, conv)).to(x.dtype) / normalize.std


def stem_weight_gradient(gradient: Tensor, trace: Trace, normalize: Normalize, conv: nn.Conv2d) -> Tensor:
    """The gradient by the first convolution's weight."""
    if trace.patches is not None:
        return _stem.weight_gradient(gradient, trace.patches, conv)
    return weight_gradient(gradient, conv, normalized(trace.x, normalize, conv))


def normalized(x: Tensor, normalize: Normalize, conv: nn.Conv2d) -> Tensor:
    """The image as the first convolution sees it."""
    return normalize(x).to(conv.weight.dtype, memory_format=torch.channels_last)


@dataclass
class Gradients:
    """By the total before BatchNorm and, in train mode, by BatchNorm's weight and bias."""

    total: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None


def backward(gradient: Tensor, conv: nn.Conv2d, trace: Trace, bn: nn.BatchNorm2d, past: Tensor | None) -> Gradients:
    """From the result of a convolution back through the BatchNorm and ReLU before it; `past` came another way."""
    if not _tiles.fits(conv, trace.active, backward=True):
        return activation_backward(input_gradient(gradient, conv, trace.active), trace, bn, past)
    if trace.saved is None:
        return Gradients(_conv.backward_eval(gradient, conv, trace.active, past, bn))
    assert trace.total is not None
    return Gradients(*_conv.backward_train(gradient, conv, trace.total, trace.saved, past))


def projecting_backward(
    inner: Tensor,
    conv: nn.Conv2d,
    beyond: Tensor,
    shortcut: nn.Conv2d,
    trace: Trace,
    bn: nn.BatchNorm2d,
    activated: bool,
) -> Gradients:
    """From the results of a block's first convolution and of its shortcut back to the block's input."""
    if _strided.fits(conv, shortcut, trace.active):
        ways = inner, conv, beyond, shortcut
        if trace.saved is None:
            return Gradients(_strided.backward_eval(*ways, trace.active, bn, activated))
        assert trace.total is not None
        return Gradients(*_strided.backward_train(*ways, trace.total, trace.saved, activated))
    past = input_gradient(beyond, shortcut, trace.active)
    if activated:
        return activation_backward(input_gradient(inner, conv, trace.active).add_(past), trace, bn, None)
    return backward(inner, conv, trace, bn, past)


def activation_backward(gradient: Tensor, trace: Trace, bn: nn.BatchNorm2d, past: Tensor | None) -> Gradients:
    """From relu(bn(total)) back to the total; `past` came another way."""
    if trace.saved is None:
        assert bn.running_var is not None
        return Gradients(_norm.backward_eval(trace.active, gradient, past, bn.weight, bn.running_var, bn.eps))
    assert trace.total is not None
    return Gradients(*_norm.backward_train(trace.total, gradient, past, trace.saved))


def convolve(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """As `nn.Conv2d`."""
    return torch.conv2d(x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)


def input_gradient(gradient: Tensor, conv: nn.Conv2d, x: Tensor) -> Tensor:
    """The gradient by the input of a convolution.

    Without a stride that is a convolution as well, by weights turned around, and cuDNN's forward kernels are faster.
    """
    same = tuple(size // 2 for size in conv.kernel_size)
    odd = all(size % 2 for size in conv.kernel_size)
    if odd and (conv.stride, conv.padding, conv.dilation, conv.groups) == ((1, 1), same, (1, 1), 1):
        turned = conv.weight.flip(2, 3).transpose(0, 1).contiguous(memory_format=torch.channels_last)
        return torch.conv2d(gradient, turned, None, 1, same)
    return _convolution_backward(gradient, conv, x, 0)


def weight_gradient(gradient: Tensor, conv: nn.Conv2d, x: Tensor) -> Tensor:
    """The gradient by the weight of a convolution."""
    return _convolution_backward(gradient, conv, x, 1)


def _convolution_backward(gradient: Tensor, conv: nn.Conv2d, x: Tensor, which: int) -> Tensor:
    wanted = [which == 0, which == 1, False]
    arguments = (None, conv.stride, conv.padding, conv.dilation, False, [0, 0], conv.groups, wanted)
    found = torch.ops.aten.convolution_backward(gradient, x, conv.weight, *arguments)[which]
    assert found is not None
    return found
