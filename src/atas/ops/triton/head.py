"""The end of a network: mean over the pixels and a linear layer, one program per image."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.ops.cuda_graphs import weight_grad_stream
from atas.ops.triton.launch import first_order, launch

_BLOCK_CLASSES = 16  # at a time
_BLOCK_PIXELS = 16
_MAX_WIDTH = 1024


@triton.jit
def _forward_kernel(
    act, w, bias, pooled, logits, area, classes, channels: tl.constexpr, block_c: tl.constexpr,
    block_classes: tl.constexpr, block_pixels: tl.constexpr,
):
    """An image's mean activations, and from them its logits."""
    image = tl.program_id(0)
    offs_c = tl.arange(0, block_c)
    mask_c = offs_c < channels
    acc = tl.zeros((block_c,), tl.float32)
    for start in range(0, area, block_pixels):
        pixel = start + tl.arange(0, block_pixels)
        ptrs = act + (image * area + pixel[:, None]) * channels + offs_c[None, :]
        acc += tl.sum(tl.load(ptrs, (pixel < area)[:, None] & mask_c[None, :], 0.0).to(tl.float32), 0)
    mean = acc / area
    tl.store(pooled + image * channels + offs_c, mean, mask_c)
    for start in range(0, classes, block_classes):
        offs_class = start + tl.arange(0, block_classes)
        mask_class = offs_class < classes
        rows = tl.load(
            w + offs_class[:, None] * channels + offs_c[None, :], mask_class[:, None] & mask_c[None, :], 0.0
        ).to(tl.float32)
        out = tl.sum(rows * mean[None, :], 1) + tl.load(bias + offs_class, mask_class, 0.0).to(tl.float32)
        tl.store(logits + image * classes + offs_class, out, mask_class)


@triton.jit
def _backward_kernel(
    gradient, w, out, area, classes, channels: tl.constexpr, block_c: tl.constexpr, block_classes: tl.constexpr,
    block_pixels: tl.constexpr,
):
    """The gradient by an image's activations: the same for each of its pixels."""
    image = tl.program_id(0)
    offs_c = tl.arange(0, block_c)
    mask_c = offs_c < channels
    acc = tl.zeros((block_c,), tl.float32)
    for start in range(0, classes, block_classes):
        offs_class = start + tl.arange(0, block_classes)
        mask_class = offs_class < classes
        rows = tl.load(
            w + offs_class[:, None] * channels + offs_c[None, :], mask_class[:, None] & mask_c[None, :], 0.0
        ).to(tl.float32)
        acc += tl.sum(rows * tl.load(gradient + image * classes + offs_class, mask_class, 0.0)[:, None], 0)
    share = (acc / area).to(out.dtype.element_ty)
    for start in range(0, area, block_pixels):
        pixel = start + tl.arange(0, block_pixels)
        ptrs = out + (image * area + pixel[:, None]) * channels + offs_c[None, :]
        tl.store(ptrs, share[None, :].broadcast_to(block_pixels, block_c), (pixel < area)[:, None] & mask_c[None, :])


def supports(act: Tensor) -> bool:
    """Return whether the kernels support such activations."""
    return act.shape[1] <= _MAX_WIDTH


def forward(act: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 logits (N, classes) of the last activations, which are channels_last, and the activations' means."""
    images, channels, height, width = act.shape
    pooled = torch.empty(images, channels, dtype=torch.float32, device=act.device)
    logits = torch.empty(images, len(weight), dtype=torch.float32, device=act.device)
    launch(
        _forward_kernel, (images,), act, weight, bias, pooled, logits, height * width, len(weight),
        **_kernel_args(channels),
    )
    return logits, pooled


def backward(gradient: Tensor, shape: torch.Size, weight: Tensor) -> Tensor:
    """The gradient by the last activations, which had this shape and the weight's precision."""
    images, channels, height, width = shape
    out = torch.empty(shape, dtype=weight.dtype, device=weight.device, memory_format=torch.channels_last)
    area, classes = height * width, len(weight)
    launch(_backward_kernel, (images,), gradient, weight, out, area, classes, **_kernel_args(channels))
    return out


class PoolLinear(torch.autograd.Function):
    """`forward` and `backward`; weight and bias come beside the main stream."""

    @staticmethod
    def forward(ctx: Any, act: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """As the mean over the pixels and `nn.Linear`."""
        logits, pooled = forward(act, weight, bias)
        ctx.shape, ctx.key = act.shape, id(weight)
        ctx.save_for_backward(pooled, weight)
        return logits

    @staticmethod
    @first_order
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """By activations, weight and bias."""
        pooled, weight = ctx.saved_tensors
        gradient = gradient.float().contiguous()
        weight_grad = bias_grad = None
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            with weight_grad_stream.run(ctx.key, gradient, pooled):
                weight_grad = (gradient.T @ pooled).to(weight.dtype)
                bias_grad = gradient.sum(0).to(weight.dtype)
        return backward(gradient, ctx.shape, weight), weight_grad, bias_grad


def _kernel_args(channels: int) -> dict[str, int]:
    return {
        "channels": channels,
        "block_c": triton.next_power_of_2(channels),
        "block_classes": _BLOCK_CLASSES,
        "block_pixels": _BLOCK_PIXELS,
    }
