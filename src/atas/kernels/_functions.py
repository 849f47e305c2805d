"""The kernels as differentiable functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from atas.kernels import _norm
from atas.kernels._overlap import shortcuts, weights


def _dense(gradient: Tensor, like: Tensor) -> Tensor:
    """A gradient in the layout and precision of the activations."""
    return gradient.to(like.dtype).contiguous(memory_format=torch.channels_last)


class AddBNReLU(torch.autograd.Function):
    """(a + b, relu(bn(a + b))); without b: (a, relu(bn(a)))."""

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor | None, weight: Tensor, bias: Tensor, bn: nn.BatchNorm2d
    ) -> tuple[Tensor, Tensor]:
        """The sum, which a later shortcut may use, and what goes on."""
        assert bn.running_mean is not None
        assert bn.running_var is not None
        assert bn.momentum is not None
        ctx.set_materialize_grads(False)
        ctx.bn, ctx.training, ctx.adds = bn, bn.training, b is not None
        statistics = weight, bias, bn.running_mean, bn.running_var
        if bn.training:
            total, out, saved = _norm.forward_train(a, b, *statistics, bn.momentum, bn.eps)
            ctx.save_for_backward(total, saved)
        else:
            total, out = _norm.forward_eval(a, b, *statistics, bn.eps)
            ctx.save_for_backward(out, weight)
        return total, out

    @staticmethod
    def backward(ctx: Any, past: Tensor | None, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """The same gradient for both inputs; `past` is what reached the sum past BatchNorm."""
        saved, other = ctx.saved_tensors
        shortcuts.join()
        if gradient is None:
            return past, past if ctx.adds else None, None, None, None
        gradient = _dense(gradient, saved)
        past = None if past is None else _dense(past, saved)
        by_weight = by_bias = None
        if ctx.training:
            by_input, by_weight, by_bias = _norm.backward_train(saved, gradient, past, other)
        else:
            by_input = _norm.backward_eval(saved, gradient, past, other, ctx.bn.running_var, ctx.bn.eps)
        return by_input, by_input if ctx.adds else None, by_weight, by_bias, None


class Conv(torch.autograd.Function):
    """A convolution without bias whose weight gradient is computed beside the rest of the backward pass.

    With `aside`, for a shortcut, the forward pass and the input gradient also run beside the main stream; who uses
    them joins `shortcuts` first.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, conv: nn.Conv2d, aside: bool) -> Tensor:
        """As `nn.Conv2d`."""
        ctx.conv, ctx.aside = conv, aside
        ctx.save_for_backward(x, weight)
        with shortcuts.aside(x, when=aside):
            return torch.conv2d(x, weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """By the input on this stream, by the weight on another."""
        x, weight = ctx.saved_tensors
        gradient = _dense(gradient, x)
        by_input = by_weight = None
        if ctx.needs_input_grad[1]:
            with weights.aside(gradient, x):
                by_weight = _backward(ctx.conv, gradient, x, weight, 1)
        if ctx.needs_input_grad[0]:
            with shortcuts.aside(gradient, when=ctx.aside):
                by_input = _backward(ctx.conv, gradient, x, weight, 0)
        return by_input, by_weight, None, None


def _backward(conv: nn.Conv2d, gradient: Tensor, x: Tensor, weight: Tensor, which: int) -> Tensor:
    wanted = [which == 0, which == 1, False]
    arguments = (None, conv.stride, conv.padding, conv.dilation, False, [0, 0], conv.groups, wanted)
    found = torch.ops.aten.convolution_backward(gradient, x, weight, *arguments)[which]
    assert found is not None
    return found
