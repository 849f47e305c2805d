"""The end of a network: the mean over the pixels and a linear layer, one program an image."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.kernels._launch import launch
from atas.kernels._overlap import weights

_CLASSES = 16  # at a time
_PIXELS = 16
_WIDEST = 1024


@triton.jit
def _logits(  # type: ignore[no-untyped-def]
    active, w, bias, pooled, logits, area, classes, width: tl.constexpr, padded: tl.constexpr, some: tl.constexpr,
    several: tl.constexpr,
):  # fmt: skip
    """An image's mean activations, and from them its logits."""
    image = tl.program_id(0)
    at = tl.arange(0, padded)
    inside = at < width
    total = tl.zeros((padded,), tl.float32)
    for start in range(0, area, several):
        pixel = start + tl.arange(0, several)
        cells = active + (image * area + pixel[:, None]) * width + at[None, :]
        total += tl.sum(tl.load(cells, (pixel < area)[:, None] & inside[None, :], 0.0).to(tl.float32), 0)
    mean = total / area
    tl.store(pooled + image * width + at, mean, inside)
    for start in range(0, classes, some):
        number = start + tl.arange(0, some)
        there = number < classes
        rows = tl.load(w + number[:, None] * width + at[None, :], there[:, None] & inside[None, :], 0.0).to(tl.float32)
        found = tl.sum(rows * mean[None, :], 1) + tl.load(bias + number, there, 0.0).to(tl.float32)
        tl.store(logits + image * classes + number, found, there)


@triton.jit
def _logits_gradient(  # type: ignore[no-untyped-def]
    gradient, w, out, area, classes, width: tl.constexpr, padded: tl.constexpr, some: tl.constexpr,
    several: tl.constexpr,
):  # fmt: skip
    """The gradient by an image's activations: the same for each of its pixels."""
    image = tl.program_id(0)
    at = tl.arange(0, padded)
    inside = at < width
    total = tl.zeros((padded,), tl.float32)
    for start in range(0, classes, some):
        number = start + tl.arange(0, some)
        there = number < classes
        rows = tl.load(w + number[:, None] * width + at[None, :], there[:, None] & inside[None, :], 0.0).to(tl.float32)
        total += tl.sum(rows * tl.load(gradient + image * classes + number, there, 0.0)[:, None], 0)
    share = (total / area).to(out.dtype.element_ty)
    for start in range(0, area, several):
        pixel = start + tl.arange(0, several)
        cells = out + (image * area + pixel[:, None]) * width + at[None, :]
        tl.store(cells, share[None, :].broadcast_to(several, padded), (pixel < area)[:, None] & inside[None, :])


def fits(active: Tensor) -> bool:
    """Whether the kernels can do the end of a network with such activations."""
    return active.shape[1] <= _WIDEST


def forward(active: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 logits (N, classes) of the last activations, which are channels_last, and the activations' means."""
    images, width, height, breadth = active.shape
    pooled = torch.empty(images, width, dtype=torch.float32, device=active.device)
    logits = torch.empty(images, len(weight), dtype=torch.float32, device=active.device)
    launch(
        _logits, (images,), active, weight, bias, pooled, logits, height * breadth, len(weight), **_constants(width)
    )  # fmt: skip
    return logits, pooled


def backward(gradient: Tensor, shape: torch.Size, weight: Tensor) -> Tensor:
    """The gradient by the last activations, which had this shape and the weight's precision."""
    images, width, height, breadth = shape
    out = torch.empty(shape, dtype=weight.dtype, device=weight.device, memory_format=torch.channels_last)
    area, classes = height * breadth, len(weight)
    launch(_logits_gradient, (images,), gradient, weight, out, area, classes, **_constants(width))
    return out


class Head(torch.autograd.Function):
    """`forward` and `backward`; weight and bias come beside the main stream."""

    @staticmethod
    def forward(ctx: Any, active: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """As the mean over the pixels and `nn.Linear`."""
        logits, pooled = forward(active, weight, bias)
        ctx.shape, ctx.name = active.shape, id(weight)
        ctx.save_for_backward(pooled, weight)
        return logits

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """By activations, weight and bias."""
        pooled, weight = ctx.saved_tensors
        gradient = gradient.float().contiguous()
        by_weight = by_bias = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            with weights.aside(ctx.name, gradient, pooled):
                by_weight = (gradient.T @ pooled).to(weight.dtype)
                by_bias = gradient.sum(0).to(weight.dtype)
        return backward(gradient, ctx.shape, weight), by_weight, by_bias


def _constants(width: int) -> dict[str, int]:
    return {"width": width, "padded": triton.next_power_of_2(width), "some": _CLASSES, "several": _PIXELS}
