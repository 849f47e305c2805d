"""BatchNorm and ReLU as two passes over memory in each direction, with an optional addition before them.

Activations are channels_last, so a batch is a matrix (pixels, channels). In train mode the first pass adds up each
channel (and stores the sum of two inputs, if there are two), the second normalises. In eval mode one pass does both.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.ops.triton.batch_statistics import (
    empty_partials,
    finalize_statistics,
    group_counters,
    reduce_partials,
    sum_groups,
)
from atas.ops.triton.launch import launch

_TILE = 4096  # entries that a program takes at a time
_SUM_TILE = 4096
_SUM_PROGRAMS = 528  # four for each multiprocessor of an H100 or H200


@triton.jit
def _forward_sums_kernel(
    a, b, pre_bn, partials, counters, weight, bias, running_mean, running_var, bn_state, pixels, eps, momentum,
    has_residual: tl.constexpr, channels: tl.constexpr, block_pixels: tl.constexpr, block_c: tl.constexpr,
    repeats: tl.constexpr,
):
    """Sums by channel of a (+ b, stored in pre_bn), about the running mean so that squares do not cancel."""
    partial, channel_block = tl.program_id(0), tl.program_id(1)
    offs_c = channel_block * block_c + tl.arange(0, block_c)
    mask_c = offs_c < channels
    shift = tl.load(running_mean + offs_c, mask_c, 0.0)
    first = tl.zeros((block_pixels, block_c), tl.float32)
    second = tl.zeros((block_pixels, block_c), tl.float32)
    for repeat in range(repeats):
        pixel = (partial * repeats + repeat) * block_pixels + tl.arange(0, block_pixels)
        offs = pixel[:, None] * channels + offs_c[None, :]
        mask = (pixel < pixels)[:, None] & mask_c[None, :]
        x = tl.load(a + offs, mask, 0.0)
        if has_residual:
            x = (x.to(tl.float32) + tl.load(b + offs, mask, 0.0).to(tl.float32)).to(x.dtype)
            tl.store(pre_bn + offs, x, mask)
        x = tl.where(mask, x.to(tl.float32) - shift[None, :], 0.0)
        first += x
        second += x * x
    num_partials = tl.num_programs(0)
    if reduce_partials(
        tl.sum(first, 0), tl.sum(second, 0), partials, counters, partial, num_partials, channel_block, channels,
        offs_c, mask_c, block_c,
    ):
        first_sum, second_sum = sum_groups(partials, num_partials, channels, offs_c, mask_c, block_c)
        finalize_statistics(
            first_sum, second_sum, channels, offs_c, mask_c, weight, bias, running_mean, running_var, bn_state, pixels,
            eps, momentum, shift,
        )


@triton.jit
def normalize_relu_kernel(
    pre_bn, out, bn_state, pixels, channels: tl.constexpr, block_pixels: tl.constexpr, block_c: tl.constexpr
):
    """out = relu(pre_bn * scale + shift)."""
    offs_c = tl.program_id(1) * block_c + tl.arange(0, block_c)
    mask_c = offs_c < channels
    scale = tl.load(bn_state + 2 * channels + offs_c, mask_c, 0.0)
    shift = tl.load(bn_state + 3 * channels + offs_c, mask_c, 0.0)
    pixel = tl.program_id(0) * block_pixels + tl.arange(0, block_pixels)
    offs = pixel[:, None] * channels + offs_c[None, :]
    mask = (pixel < pixels)[:, None] & mask_c[None, :]
    x = tl.load(pre_bn + offs, mask, 0.0)
    z = x.to(tl.float32) * scale[None, :] + shift[None, :]
    tl.store(out + offs, tl.maximum(z, 0.0).to(x.dtype), mask)


@triton.jit
def _backward_sums_kernel(
    pre_bn, gradient, partials, counters, bn_state, sums, pixels, channels: tl.constexpr, block_pixels: tl.constexpr,
    block_c: tl.constexpr, repeats: tl.constexpr,
):
    """Sums by channel of the gradient through the ReLU, and of its product with the normalised input."""
    partial, channel_block = tl.program_id(0), tl.program_id(1)
    offs_c = channel_block * block_c + tl.arange(0, block_c)
    mask_c = offs_c < channels
    mean, inv_std = tl.load(bn_state + offs_c, mask_c, 0.0), tl.load(bn_state + channels + offs_c, mask_c, 0.0)
    scale = tl.load(bn_state + 2 * channels + offs_c, mask_c, 0.0)
    shift = tl.load(bn_state + 3 * channels + offs_c, mask_c, 0.0)
    first = tl.zeros((block_pixels, block_c), tl.float32)
    second = tl.zeros((block_pixels, block_c), tl.float32)
    for repeat in range(repeats):
        pixel = (partial * repeats + repeat) * block_pixels + tl.arange(0, block_pixels)
        offs = pixel[:, None] * channels + offs_c[None, :]
        mask = (pixel < pixels)[:, None] & mask_c[None, :]
        x = tl.load(pre_bn + offs, mask, 0.0).to(tl.float32)
        g = tl.load(gradient + offs, mask, 0.0).to(tl.float32)
        g = tl.where(x * scale[None, :] + shift[None, :] > 0, g, 0.0)
        first += g
        second += g * (x - mean[None, :])
    num_partials = tl.num_programs(0)
    if reduce_partials(
        tl.sum(first, 0), tl.sum(second, 0) * inv_std, partials, counters, partial, num_partials, channel_block,
        channels, offs_c, mask_c, block_c,
    ):
        first_sum, second_sum = sum_groups(partials, num_partials, channels, offs_c, mask_c, block_c)
        tl.store(sums + offs_c, first_sum, mask_c)
        tl.store(sums + channels + offs_c, second_sum, mask_c)


@triton.jit
def _backward_train_kernel(
    pre_bn, gradient, residual_grad, out, bn_state, sums, pixels, has_residual: tl.constexpr, channels: tl.constexpr,
    block_pixels: tl.constexpr, block_c: tl.constexpr,
):
    """The gradient by the input of BatchNorm, + residual_grad."""
    offs_c = tl.program_id(1) * block_c + tl.arange(0, block_c)
    mask_c = offs_c < channels
    mean, inv_std = tl.load(bn_state + offs_c, mask_c, 0.0), tl.load(bn_state + channels + offs_c, mask_c, 0.0)
    scale = tl.load(bn_state + 2 * channels + offs_c, mask_c, 0.0)
    shift = tl.load(bn_state + 3 * channels + offs_c, mask_c, 0.0)
    first = tl.load(sums + offs_c, mask_c, 0.0) / pixels
    second = tl.load(sums + channels + offs_c, mask_c, 0.0) / pixels * inv_std
    pixel = tl.program_id(0) * block_pixels + tl.arange(0, block_pixels)
    offs = pixel[:, None] * channels + offs_c[None, :]
    mask = (pixel < pixels)[:, None] & mask_c[None, :]
    x = tl.load(pre_bn + offs, mask, 0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    g = tl.load(gradient + offs, mask, 0.0).to(tl.float32)
    g = tl.where(x * scale[None, :] + shift[None, :] > 0, g, 0.0)
    d = scale[None, :] * (g - first[None, :] - (x - mean[None, :]) * second[None, :])
    if has_residual:
        d += tl.load(residual_grad + offs, mask, 0.0).to(tl.float32)
    tl.store(out + offs, d.to(dtype), mask)


@triton.jit
def _forward_eval_kernel(
    a, b, pre_bn, out, weight, bias, running_mean, running_var, pixels, eps, has_residual: tl.constexpr,
    channels: tl.constexpr, block_pixels: tl.constexpr, block_c: tl.constexpr,
):
    """pre_bn = a + b and out = relu(bn(pre_bn)) by the running statistics."""
    offs_c = tl.program_id(1) * block_c + tl.arange(0, block_c)
    mask_c = offs_c < channels
    scale = tl.load(weight + offs_c, mask_c, 0.0) * tl.rsqrt(tl.load(running_var + offs_c, mask_c, 1.0) + eps)
    shift = tl.load(bias + offs_c, mask_c, 0.0) - tl.load(running_mean + offs_c, mask_c, 0.0) * scale
    pixel = tl.program_id(0) * block_pixels + tl.arange(0, block_pixels)
    offs = pixel[:, None] * channels + offs_c[None, :]
    mask = (pixel < pixels)[:, None] & mask_c[None, :]
    x = tl.load(a + offs, mask, 0.0)
    if has_residual:
        x = (x.to(tl.float32) + tl.load(b + offs, mask, 0.0).to(tl.float32)).to(x.dtype)
        tl.store(pre_bn + offs, x, mask)
    z = x.to(tl.float32) * scale[None, :] + shift[None, :]
    tl.store(out + offs, tl.maximum(z, 0.0).to(x.dtype), mask)


@triton.jit
def _backward_eval_kernel(
    act, gradient, residual_grad, out, weight, running_var, pixels, eps, has_residual: tl.constexpr,
    channels: tl.constexpr, block_pixels: tl.constexpr, block_c: tl.constexpr,
):
    """The gradient by pre_bn in eval mode; the ReLU's mask comes from its output."""
    offs_c = tl.program_id(1) * block_c + tl.arange(0, block_c)
    mask_c = offs_c < channels
    scale = tl.load(weight + offs_c, mask_c, 0.0) * tl.rsqrt(tl.load(running_var + offs_c, mask_c, 1.0) + eps)
    pixel = tl.program_id(0) * block_pixels + tl.arange(0, block_pixels)
    offs = pixel[:, None] * channels + offs_c[None, :]
    mask = (pixel < pixels)[:, None] & mask_c[None, :]
    y = tl.load(act + offs, mask, 0.0)
    g = tl.load(gradient + offs, mask, 0.0).to(tl.float32)
    d = tl.where(y > 0, g, 0.0) * scale[None, :]
    if has_residual:
        d += tl.load(residual_grad + offs, mask, 0.0).to(tl.float32)
    tl.store(out + offs, d.to(y.dtype), mask)


class BatchNormGrid:
    """The programs for a matrix of this many pixels and channels."""

    def __init__(self, x: Tensor) -> None:
        self.channels = x.shape[1]
        self.pixels = x.numel() // self.channels
        self.block_c = min(triton.next_power_of_2(self.channels), 64)
        self.blocks_c = triton.cdiv(self.channels, self.block_c)
        self.block_pixels = _TILE // self.block_c
        self.grid = (triton.cdiv(self.pixels, self.block_pixels), self.blocks_c)
        self.sum_block_pixels = _SUM_TILE // self.block_c
        tiles = triton.cdiv(self.pixels, self.sum_block_pixels)
        self.repeats = triton.next_power_of_2(triton.cdiv(tiles, max(1, _SUM_PROGRAMS // self.blocks_c)))
        self.num_partials = triton.cdiv(tiles, self.repeats)
        self.sum_grid = (self.num_partials, self.blocks_c)

    def kernel_args(self) -> dict[str, int]:
        """Return the arguments of kernels that go over the matrix once."""
        return {"channels": self.channels, "block_pixels": self.block_pixels, "block_c": self.block_c}

    def sum_kernel_args(self) -> dict[str, int]:
        """Return the arguments of kernels that sum by channel."""
        return self.kernel_args() | {"block_pixels": self.sum_block_pixels, "repeats": self.repeats, "num_warps": 8}


def forward_train(
    a: Tensor,
    b: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a + b, relu(bn(a + b)) and the state for the backward pass; update the running statistics."""
    bn_grid = BatchNormGrid(a)
    pre_bn, out = a if b is None else torch.empty_like(a), torch.empty_like(a)
    bn_state = torch.empty(4, bn_grid.channels, dtype=torch.float32, device=a.device)
    partials = empty_partials(bn_grid.num_partials, bn_grid.channels, a.device)
    launch(
        _forward_sums_kernel, bn_grid.sum_grid, a, a if b is None else b, pre_bn, partials, group_counters(a.device),
        weight, bias, running_mean, running_var, bn_state, bn_grid.pixels, eps, momentum, has_residual=b is not None,
        **bn_grid.sum_kernel_args(),
    )
    launch(normalize_relu_kernel, bn_grid.grid, pre_bn, out, bn_state, bn_grid.pixels, **bn_grid.kernel_args())
    return pre_bn, out, bn_state


def backward_train(
    pre_bn: Tensor, gradient: Tensor, residual_grad: Tensor | None, bn_state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by the input, the weight and the bias of BatchNorm."""
    bn_grid = BatchNormGrid(pre_bn)
    sums = torch.empty(2, bn_grid.channels, dtype=torch.float32, device=pre_bn.device)
    partials = empty_partials(bn_grid.num_partials, bn_grid.channels, pre_bn.device)
    launch(
        _backward_sums_kernel,
        bn_grid.sum_grid,
        pre_bn,
        gradient,
        partials,
        group_counters(pre_bn.device),
        bn_state,
        sums,
        bn_grid.pixels,
        **bn_grid.sum_kernel_args(),
    )
    return apply_backward(pre_bn, gradient, residual_grad, bn_state, sums), sums[1], sums[0]


def apply_backward(
    pre_bn: Tensor, gradient: Tensor, residual_grad: Tensor | None, bn_state: Tensor, sums: Tensor
) -> Tensor:
    """Return the gradient by the input of BatchNorm, once the sums by channel are there."""
    bn_grid, out = BatchNormGrid(pre_bn), torch.empty_like(pre_bn)
    launch(
        _backward_train_kernel, bn_grid.grid, pre_bn, gradient, gradient if residual_grad is None else residual_grad,
        out, bn_state, sums, bn_grid.pixels, has_residual=residual_grad is not None, **bn_grid.kernel_args(),
    )
    return out


def forward_eval(
    a: Tensor, b: Tensor | None, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(a + b, relu(bn(a + b))) by the running statistics."""
    bn_grid = BatchNormGrid(a)
    pre_bn, out = a if b is None else torch.empty_like(a), torch.empty_like(a)
    launch(
        _forward_eval_kernel, bn_grid.grid, a, a if b is None else b, pre_bn, out, weight, bias, running_mean,
        running_var, bn_grid.pixels, eps, has_residual=b is not None, **bn_grid.kernel_args(),
    )
    return pre_bn, out


def backward_eval(
    act: Tensor, gradient: Tensor, residual_grad: Tensor | None, weight: Tensor, running_var: Tensor, eps: float
) -> Tensor:
    """The gradient by the input of BatchNorm in eval mode."""
    bn_grid = BatchNormGrid(act)
    out = torch.empty_like(act)
    launch(
        _backward_eval_kernel, bn_grid.grid, act, gradient, gradient if residual_grad is None else residual_grad, out,
        weight, running_var, bn_grid.pixels, eps, has_residual=residual_grad is not None, **bn_grid.kernel_args(),
    )
    return out
