"""Convolutions with a fused epilogue: residual addition, BatchNorm and ReLU, in both directions.

The convolution is an implicit matrix product: for each tap, TMA loads the pixels of a tile, shifted by the tap; pixels
outside the image read as zero. While the sums are in registers, the epilogue is applied to them (`epilogue`). The
residual may be the 1x1 convolution of a shortcut: then its products are part of the same sums. `conv_tiling.supports`
says which convolutions are supported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from atas.ops.triton.batch_statistics import empty_partials, group_counters
from atas.ops.triton.batchnorm import BatchNormGrid, apply_backward, normalize_relu_kernel
from atas.ops.triton.conv_tiling import TileGrid
from atas.ops.triton.epilogue import (
    epilogue_backward_eval,
    epilogue_backward_train,
    epilogue_forward_eval,
    epilogue_forward_train,
)
from atas.ops.triton.launch import launch


@dataclass(frozen=True)
class Projection:
    """The projection shortcut of a down-sampling block: its 1x1 convolution of stride 2, not computed yet."""

    source: Tensor
    conv: nn.Conv2d


@triton.jit
def _conv_tile(
    x, w, w_rest, image, top, left, first_c, channels_k: tl.constexpr, channels: tl.constexpr, taps: tl.constexpr,
    stride: tl.constexpr, backward: tl.constexpr, tile_n: tl.constexpr, tile_h: tl.constexpr, tile_w: tl.constexpr,
    block_c: tl.constexpr, rest_c: tl.constexpr, block_k: tl.constexpr,
):
    """Sum over taps and input channels: a tile (block_c, pixels) of the convolution, and of the `rest_c` channels that
    follow, if any."""
    tile_pixels: tl.constexpr = tile_n * tile_h * tile_w
    acc = tl.zeros((block_c, tile_pixels), tl.float32)
    acc_rest = tl.zeros((rest_c if rest_c else block_c, tile_pixels), tl.float32)
    chunks: tl.constexpr = (channels_k + block_k - 1) // block_k
    for step in range(taps * chunks):
        tap = step // chunks
        k = (step % chunks) * block_k
        dy = tap // 3 - 1 if taps == 9 else 0
        dx = tap % 3 - 1 if taps == 9 else 0
        if stride == 1:
            tile = x.load([image, top + dy, left + dx, k])
        else:  # x comes as (image, row / 2, row % 2, column / 2, (column % 2, channel))
            tile = x.load([image, top + (dy >> 1), dy & 1, left + (dx >> 1), (dx & 1) * channels_k + k])
        tile = tile.reshape(tile_pixels, block_k)
        if backward:
            column = (taps - 1 - tap) * channels + first_c
            acc = tl.dot(w.load([k, column]).T, tile.T, acc)
            if rest_c:
                acc_rest = tl.dot(w_rest.load([k, column + block_c]).T, tile.T, acc_rest)
        else:
            acc = tl.dot(w.load([first_c, tap * channels_k + k]), tile.T, acc)
            if rest_c:
                acc_rest = tl.dot(w_rest.load([first_c + block_c, tap * channels_k + k]), tile.T, acc_rest)
    return acc, acc_rest


@triton.jit
def _add_shortcut(
    acc, acc_rest, shortcut_x, w, w_rest, image, top, left, first_c, channels_k: tl.constexpr, tile_n: tl.constexpr,
    tile_h: tl.constexpr, tile_w: tl.constexpr, block_c: tl.constexpr, rest_c: tl.constexpr, block_k: tl.constexpr,
):
    """Add the shortcut's convolution to a tile."""
    for step in range((channels_k + block_k - 1) // block_k):
        tile = shortcut_x.load([image, top, 0, left, step * block_k]).reshape(tile_n * tile_h * tile_w, block_k)
        acc = tl.dot(w.load([first_c, step * block_k]), tile.T, acc)
        if rest_c:
            acc_rest = tl.dot(w_rest.load([first_c + block_c, step * block_k]), tile.T, acc_rest)
    return acc, acc_rest


@triton.jit
def tile_position(
    number, height, tile_n: tl.constexpr, tile_h: tl.constexpr, tile_w: tl.constexpr, tiles_w: tl.constexpr
):
    """Return the tile's first image, row and column, and its pixels' positions among those of all images."""
    tiles_per_image = (height // tile_h) * tiles_w
    image, tile = (number // tiles_per_image) * tile_n, number % tiles_per_image
    top, left = (tile // tiles_w) * tile_h, (tile % tiles_w) * tile_w
    pixel = tl.arange(0, tile_n * tile_h * tile_w)
    if tiles_w == 1:  # then they lie one after the other
        pixel_ids = number * (tile_n * tile_h * tile_w) + pixel
    else:
        row = (image + pixel // (tile_h * tile_w)) * height + top + pixel // tile_w % tile_h
        pixel_ids = row * (tile_w * tiles_w) + left + pixel % tile_w
    return image, top, left, pixel_ids


@triton.jit
def _forward_eval_kernel(
    x, w, w_rest, shortcut_x, shortcut_w, shortcut_w_rest, residual, pre_bn, act, weight, bias, running_mean,
    running_var, pixels, height, eps, has_residual: tl.constexpr, channels: tl.constexpr, blocks_c: tl.constexpr,
    channels_k: tl.constexpr, taps: tl.constexpr, stride: tl.constexpr, tile_n: tl.constexpr, tile_h: tl.constexpr,
    tile_w: tl.constexpr, tiles_w: tl.constexpr, block_c: tl.constexpr, rest_c: tl.constexpr, block_k: tl.constexpr,
    shortcut_channels: tl.constexpr, shortcut_block_k: tl.constexpr,
):
    """act = relu(bn(pre_bn)) for pre_bn = conv(x) (+ residual, or a shortcut's convolution of `shortcut_channels`
    channels). pre_bn is stored if something was added."""
    partial, first_c = tl.program_id(0) // blocks_c, (tl.program_id(0) % blocks_c) * (block_c + rest_c)
    image, top, left, pixel_ids = tile_position(partial, height, tile_n, tile_h, tile_w, tiles_w)
    acc, acc_rest = _conv_tile(
        x, w, w_rest, image, top, left, first_c, channels_k, channels, taps, stride, False, tile_n, tile_h, tile_w,
        block_c, rest_c, block_k,
    )
    if shortcut_channels:
        acc, acc_rest = _add_shortcut(
            acc, acc_rest, shortcut_x, shortcut_w, shortcut_w_rest, image, top, left, first_c, shortcut_channels,
            tile_n, tile_h, tile_w, block_c, rest_c, shortcut_block_k,
        )
    epilogue_forward_eval(
        acc, pixel_ids, first_c, residual, pre_bn, act, weight, bias, running_mean, running_var, pixels, eps,
        has_residual, has_residual or shortcut_channels > 0, channels, block_c,
    )
    if rest_c:
        epilogue_forward_eval(
            acc_rest, pixel_ids, first_c + block_c, residual, pre_bn, act, weight, bias, running_mean, running_var,
            pixels, eps, has_residual, has_residual or shortcut_channels > 0, channels, rest_c,
        )


@triton.jit
def _forward_train_kernel(
    x, w, w_rest, shortcut_x, shortcut_w, shortcut_w_rest, residual, pre_bn, partials, counters, bn_state, weight,
    bias, running_mean, running_var, pixels, height, eps, momentum, has_residual: tl.constexpr, channels: tl.constexpr,
    blocks_c: tl.constexpr, channels_k: tl.constexpr, taps: tl.constexpr, stride: tl.constexpr, tile_n: tl.constexpr,
    tile_h: tl.constexpr, tile_w: tl.constexpr, tiles_w: tl.constexpr, block_c: tl.constexpr, rest_c: tl.constexpr,
    block_k: tl.constexpr, shortcut_channels: tl.constexpr, shortcut_block_k: tl.constexpr,
):
    """pre_bn = conv(x) (+ residual, or a shortcut's convolution of `shortcut_channels` channels), and its batch
    statistics."""
    partial, first_c = tl.program_id(0) // blocks_c, (tl.program_id(0) % blocks_c) * (block_c + rest_c)
    image, top, left, pixel_ids = tile_position(partial, height, tile_n, tile_h, tile_w, tiles_w)
    acc, acc_rest = _conv_tile(
        x, w, w_rest, image, top, left, first_c, channels_k, channels, taps, stride, False, tile_n, tile_h, tile_w,
        block_c, rest_c, block_k,
    )
    if shortcut_channels:
        acc, acc_rest = _add_shortcut(
            acc, acc_rest, shortcut_x, shortcut_w, shortcut_w_rest, image, top, left, first_c, shortcut_channels,
            tile_n, tile_h, tile_w, block_c, rest_c, shortcut_block_k,
        )
    epilogue_forward_train(
        acc, pixel_ids, partial, first_c, tl.num_programs(0) // blocks_c, residual, pre_bn, partials, counters,
        bn_state, weight, bias, running_mean, running_var, pixels, eps, momentum, has_residual, channels, block_c,
    )
    if rest_c:
        epilogue_forward_train(
            acc_rest, pixel_ids, partial, first_c + block_c, tl.num_programs(0) // blocks_c, residual, pre_bn,
            partials, counters, bn_state, weight, bias, running_mean, running_var, pixels, eps, momentum, has_residual,
            channels, rest_c,
        )


@triton.jit
def _backward_eval_kernel(
    gradient, w, w_rest, residual_grad, act, out, weight, running_var, pixels, height, eps, has_residual: tl.constexpr,
    channels: tl.constexpr, blocks_c: tl.constexpr, channels_k: tl.constexpr, taps: tl.constexpr, tile_n: tl.constexpr,
    tile_h: tl.constexpr, tile_w: tl.constexpr, tiles_w: tl.constexpr, block_c: tl.constexpr, rest_c: tl.constexpr,
    block_k: tl.constexpr,
):
    """The gradient by the input of the BatchNorm and ReLU before the convolution (+ residual_grad)."""
    partial, first_c = tl.program_id(0) // blocks_c, (tl.program_id(0) % blocks_c) * (block_c + rest_c)
    image, top, left, pixel_ids = tile_position(partial, height, tile_n, tile_h, tile_w, tiles_w)
    acc, acc_rest = _conv_tile(
        gradient, w, w_rest, image, top, left, first_c, channels_k, channels, taps, 1, True, tile_n, tile_h, tile_w,
        block_c, rest_c, block_k,
    )
    epilogue_backward_eval(
        acc, pixel_ids, first_c, residual_grad, act, out, weight, running_var, pixels, eps, has_residual, channels,
        block_c,
    )
    if rest_c:
        epilogue_backward_eval(
            acc_rest, pixel_ids, first_c + block_c, residual_grad, act, out, weight, running_var, pixels, eps,
            has_residual, channels, rest_c,
        )


@triton.jit
def _backward_train_kernel(
    gradient, w, w_rest, pre_bn, out, partials, counters, bn_state, sums, pixels, height, channels: tl.constexpr,
    blocks_c: tl.constexpr, channels_k: tl.constexpr, taps: tl.constexpr, tile_n: tl.constexpr, tile_h: tl.constexpr,
    tile_w: tl.constexpr, tiles_w: tl.constexpr, block_c: tl.constexpr, rest_c: tl.constexpr, block_k: tl.constexpr,
):
    """The gradient by the input of the ReLU before the convolution, and the sums that BatchNorm's gradient needs."""
    partial, first_c = tl.program_id(0) // blocks_c, (tl.program_id(0) % blocks_c) * (block_c + rest_c)
    image, top, left, pixel_ids = tile_position(partial, height, tile_n, tile_h, tile_w, tiles_w)
    acc, acc_rest = _conv_tile(
        gradient, w, w_rest, image, top, left, first_c, channels_k, channels, taps, 1, True, tile_n, tile_h, tile_w,
        block_c, rest_c, block_k,
    )
    epilogue_backward_train(
        acc, pixel_ids, partial, first_c, tl.num_programs(0) // blocks_c, pre_bn, out, partials, counters, bn_state,
        sums, pixels, channels, block_c,
    )
    if rest_c:
        epilogue_backward_train(
            acc_rest, pixel_ids, partial, first_c + block_c, tl.num_programs(0) // blocks_c, pre_bn, out, partials,
            counters, bn_state, sums, pixels, channels, rest_c,
        )


def _empty_output(x: Tensor, conv: nn.Conv2d) -> Tensor:
    n, _, h, w = x.shape
    stride = conv.stride[0]
    shape = n, conv.out_channels, h // stride, w // stride
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def forward_eval(
    x: Tensor, conv: nn.Conv2d, residual: Tensor | Projection | None, bn: nn.BatchNorm2d
) -> tuple[Tensor | None, Tensor]:
    """Return (pre_bn, relu(bn(pre_bn))) for pre_bn = conv(x) + residual; without a residual pre_bn is None."""
    act = _empty_output(x, conv)
    pre_bn = None if residual is None else torch.empty_like(act)
    tile_grid = TileGrid(act, conv.in_channels)
    shortcut, added, args = _residual_args(tile_grid, x, conv, residual, act)
    launch(
        _forward_eval_kernel, tile_grid.grid, tile_grid.input_descriptor(x, conv.stride[0]),
        *tile_grid.weight_descriptors(conv.weight, False), *shortcut, added, act if pre_bn is None else pre_bn, act,
        bn.weight, bn.bias, bn.running_mean, bn.running_var, tile_grid.pixels, tile_grid.height, bn.eps,
        stride=conv.stride[0], **args, **tile_grid.kernel_args(conv.kernel_size[0] ** 2),
    )
    return pre_bn, act


def forward_train(
    x: Tensor, conv: nn.Conv2d, residual: Tensor | Projection | None, bn: nn.BatchNorm2d
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (pre_bn, relu(bn(pre_bn)), bn_state) for pre_bn = conv(x) + residual; running statistics are updated."""
    pre_bn = _empty_output(x, conv)
    tile_grid = TileGrid(pre_bn, conv.in_channels)
    bn_state = torch.empty(4, tile_grid.channels, dtype=torch.float32, device=x.device)
    partials = empty_partials(tile_grid.num_partials, tile_grid.channels, x.device)
    shortcut, added, args = _residual_args(tile_grid, x, conv, residual, pre_bn)
    launch(
        _forward_train_kernel, tile_grid.grid, tile_grid.input_descriptor(x, conv.stride[0]),
        *tile_grid.weight_descriptors(conv.weight, False), *shortcut, added, pre_bn, partials,
        group_counters(x.device), bn_state, bn.weight, bn.bias, bn.running_mean, bn.running_var, tile_grid.pixels,
        tile_grid.height, bn.eps, bn.momentum, stride=conv.stride[0], **args,
        **tile_grid.kernel_args(conv.kernel_size[0] ** 2),
    )
    act, bn_grid = torch.empty_like(pre_bn), BatchNormGrid(pre_bn)
    launch(normalize_relu_kernel, bn_grid.grid, pre_bn, act, bn_state, bn_grid.pixels, **bn_grid.kernel_args())
    return pre_bn, act, bn_state


def _residual_args(
    tile_grid: TileGrid, x: Tensor, conv: nn.Conv2d, residual: Tensor | Projection | None, out: Tensor
) -> tuple[tuple[Any, Any, Any], Tensor, dict[str, Any]]:
    """Return a kernel's arguments for the residual: the shortcut's input and weights, or a tensor; placeholders for
    absent ones."""
    if isinstance(residual, Projection):
        shortcut_grid = TileGrid(out, residual.conv.in_channels, tile_grid.tiling)
        descriptors = (
            shortcut_grid.input_descriptor(residual.source, 2),
            *shortcut_grid.weight_descriptors(residual.conv.weight, False),
        )
        return (
            descriptors,
            out,
            {
                "has_residual": False,
                "shortcut_channels": shortcut_grid.channels_k,
                "shortcut_block_k": shortcut_grid.block_k,
            },
        )
    descriptors = tile_grid.input_descriptor(x, conv.stride[0]), *tile_grid.weight_descriptors(conv.weight, False)
    return (
        descriptors,
        out if residual is None else residual,
        {"has_residual": residual is not None, "shortcut_channels": 0, "shortcut_block_k": 0},
    )


def backward_eval(
    gradient: Tensor, conv: nn.Conv2d, act: Tensor, residual_grad: Tensor | None, bn: nn.BatchNorm2d
) -> Tensor:
    """Return the gradient by pre_bn, where act = relu(bn(pre_bn)) was the convolution's input, + residual_grad."""
    out = torch.empty_like(act)
    tile_grid = TileGrid(out, conv.out_channels)
    launch(
        _backward_eval_kernel, tile_grid.grid, tile_grid.input_descriptor(gradient, 1),
        *tile_grid.weight_descriptors(conv.weight, True), out if residual_grad is None else residual_grad, act, out,
        bn.weight, bn.running_var, tile_grid.pixels, tile_grid.height, bn.eps, has_residual=residual_grad is not None,
        **tile_grid.kernel_args(conv.kernel_size[0] ** 2),
    )
    return out


def backward_train(
    gradient: Tensor, conv: nn.Conv2d, pre_bn: Tensor, bn_state: Tensor, residual_grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `backward_eval` in train mode; also the gradients by BatchNorm's weight and bias."""
    masked = torch.empty_like(pre_bn)
    tile_grid = TileGrid(pre_bn, conv.out_channels)
    sums = torch.empty(2, tile_grid.channels, dtype=torch.float32, device=pre_bn.device)
    partials = empty_partials(tile_grid.num_partials, tile_grid.channels, pre_bn.device)
    launch(
        _backward_train_kernel, tile_grid.grid, tile_grid.input_descriptor(gradient, 1),
        *tile_grid.weight_descriptors(conv.weight, True), pre_bn, masked, partials, group_counters(pre_bn.device),
        bn_state, sums, tile_grid.pixels, tile_grid.height, **tile_grid.kernel_args(conv.kernel_size[0] ** 2),
    )
    return apply_backward(pre_bn, masked, residual_grad, bn_state, sums), sums[1], sums[0]
