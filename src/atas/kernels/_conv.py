"""Convolutions together with what surrounds them: addition, BatchNorm and ReLU, in both directions.

A convolution is a matrix product that is never written down: for each of its taps the copy engine fetches the pixels of
a tile, shifted by the tap, and what lies outside of the image reads as zero. While the products are still in registers,
the pass that would follow is done on them (`_finish`). What is added may be the 1x1 convolution of a shortcut: then its
products are part of the same sums. `_tiles.fits` says which convolutions are taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from atas.kernels._finish import _finish_backward_eval, _finish_backward_train, _finish_eval, _finish_train
from atas.kernels._launch import launch
from atas.kernels._norm import Plan, _scale_and_clip, apply_gradient
from atas.kernels._sums import counter, space
from atas.kernels._tiles import Cut


@dataclass(frozen=True)
class Projection:
    """What a shortcut adds where it halves the image: its 1x1 convolution of stride 2, not computed yet."""

    source: Tensor
    conv: nn.Conv2d


@triton.jit
def _products(  # type: ignore[no-untyped-def]
    x, w, v, image, top, left, first, channels: tl.constexpr, others: tl.constexpr, taps: tl.constexpr,
    stride: tl.constexpr, backward: tl.constexpr, images: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
    block: tl.constexpr, rest: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """A tile of the convolution, (block channels, pixels): sums over taps and channels; and of the `rest` channels that
    follow, if there are any."""
    pixels: tl.constexpr = images * high * wide
    result = tl.zeros((block, pixels), tl.float32)
    more = tl.zeros((rest if rest else block, pixels), tl.float32)
    chunks: tl.constexpr = (channels + depth - 1) // depth
    for turn in range(taps * chunks):
        tap = turn // chunks
        at = (turn % chunks) * depth
        down = tap // 3 - 1 if taps == 9 else 0
        right = tap % 3 - 1 if taps == 9 else 0
        if stride == 1:
            tile = x.load([image, top + down, left + right, at])
        else:  # x comes as (image, row / 2, row % 2, column / 2, (column % 2, channel))
            tile = x.load([image, top + (down >> 1), down & 1, left + (right >> 1), (right & 1) * channels + at])
        tile = tile.reshape(pixels, depth)
        if backward:
            column = (taps - 1 - tap) * others + first
            result = tl.dot(w.load([at, column]).T, tile.T, result)
            if rest:
                more = tl.dot(v.load([at, column + block]).T, tile.T, more)
        else:
            result = tl.dot(w.load([first, tap * channels + at]), tile.T, result)
            if rest:
                more = tl.dot(v.load([first + block, tap * channels + at]), tile.T, more)
    return result, more


@triton.jit
def _projected(  # type: ignore[no-untyped-def]
    result, more, source, w, v, image, top, left, first, channels: tl.constexpr, images: tl.constexpr,
    high: tl.constexpr, wide: tl.constexpr, block: tl.constexpr, rest: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """A tile of a convolution with that of the shortcut's added."""
    for turn in range((channels + depth - 1) // depth):
        tile = source.load([image, top, 0, left, turn * depth]).reshape(images * high * wide, depth)
        result = tl.dot(w.load([first, turn * depth]), tile.T, result)
        if rest:
            more = tl.dot(v.load([first + block, turn * depth]), tile.T, more)
    return result, more


@triton.jit
def _place(  # type: ignore[no-untyped-def]
    number, height, images: tl.constexpr, high: tl.constexpr, wide: tl.constexpr, across: tl.constexpr
):
    """Where the tile of this number is: its first image, row and column, and its pixels among those of all images."""
    tiles = (height // high) * across
    image, tile = (number // tiles) * images, number % tiles
    top, left = (tile // across) * high, (tile % across) * wide
    pixel = tl.arange(0, images * high * wide)
    if across == 1:  # then they lie one after the other
        pixels = number * (images * high * wide) + pixel
    else:
        row = (image + pixel // (high * wide)) * height + top + pixel // wide % high
        pixels = row * (wide * across) + left + pixel % wide
    return image, top, left, pixels


@triton.jit
def _forward_eval(  # type: ignore[no-untyped-def]
    x, w, v, source, p, q, other, total, active, weight, bias, running_mean, running_var, rows, height, eps,
    adds: tl.constexpr, columns: tl.constexpr, blocks: tl.constexpr, channels: tl.constexpr, taps: tl.constexpr,
    stride: tl.constexpr, images: tl.constexpr, high: tl.constexpr, wide: tl.constexpr, across: tl.constexpr,
    block: tl.constexpr, rest: tl.constexpr, depth: tl.constexpr, before: tl.constexpr, fetched: tl.constexpr,
):  # fmt: skip
    """relu(bn(total)) for total = conv(x) (+ other, or a shortcut's convolution of so many channels `before`); the
    total is kept where something was added."""
    part, first = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * (block + rest)
    image, top, left, pixels = _place(part, height, images, high, wide, across)
    found, more = _products(
        x, w, v, image, top, left, first, channels, columns, taps, stride, False, images, high, wide, block, rest, depth
    )  # fmt: skip
    if before:
        found, more = _projected(
            found, more, source, p, q, image, top, left, first, before, images, high, wide, block, rest, fetched
        )  # fmt: skip
    _finish_eval(
        found, pixels, first, other, total, active, weight, bias, running_mean, running_var, rows, eps, adds,
        adds or before > 0, columns, block,
    )  # fmt: skip
    if rest:
        _finish_eval(
            more, pixels, first + block, other, total, active, weight, bias, running_mean, running_var, rows, eps, adds,
            adds or before > 0, columns, rest,
        )  # fmt: skip


@triton.jit
def _forward_train(  # type: ignore[no-untyped-def]
    x, w, v, source, p, q, other, total, parts, counters, saved, weight, bias, running_mean, running_var, rows, height,
    eps, momentum, adds: tl.constexpr, columns: tl.constexpr, blocks: tl.constexpr, channels: tl.constexpr,
    taps: tl.constexpr, stride: tl.constexpr, images: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
    across: tl.constexpr, block: tl.constexpr, rest: tl.constexpr, depth: tl.constexpr, before: tl.constexpr,
    fetched: tl.constexpr,
):  # fmt: skip
    """total = conv(x) (+ other, or a shortcut's convolution of so many channels `before`), and its statistics."""
    part, first = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * (block + rest)
    image, top, left, pixels = _place(part, height, images, high, wide, across)
    found, more = _products(
        x, w, v, image, top, left, first, channels, columns, taps, stride, False, images, high, wide, block, rest, depth
    )  # fmt: skip
    if before:
        found, more = _projected(
            found, more, source, p, q, image, top, left, first, before, images, high, wide, block, rest, fetched
        )  # fmt: skip
    _finish_train(
        found, pixels, part, first, tl.num_programs(0) // blocks, other, total, parts, counters, saved, weight, bias,
        running_mean, running_var, rows, eps, momentum, adds, columns, block,
    )  # fmt: skip
    if rest:
        _finish_train(
            more, pixels, part, first + block, tl.num_programs(0) // blocks, other, total, parts, counters, saved,
            weight, bias, running_mean, running_var, rows, eps, momentum, adds, columns, rest,
        )  # fmt: skip


@triton.jit
def _backward_eval(  # type: ignore[no-untyped-def]
    gradient, w, v, past, active, out, weight, running_var, rows, height, eps, adds: tl.constexpr,
    columns: tl.constexpr, blocks: tl.constexpr, channels: tl.constexpr, taps: tl.constexpr, images: tl.constexpr,
    high: tl.constexpr, wide: tl.constexpr, across: tl.constexpr, block: tl.constexpr, rest: tl.constexpr,
    depth: tl.constexpr,
):  # fmt: skip
    """The gradient by the input of BatchNorm and ReLU that the convolution's input went through (+ past)."""
    part, first = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * (block + rest)
    image, top, left, pixels = _place(part, height, images, high, wide, across)
    found, more = _products(
        gradient, w, v, image, top, left, first, channels, columns, taps, 1, True, images, high, wide, block, rest,
        depth,
    )  # fmt: skip
    _finish_backward_eval(
        found, pixels, first, past, active, out, weight, running_var, rows, eps, adds, columns, block,
    )  # fmt: skip
    if rest:
        _finish_backward_eval(
            more, pixels, first + block, past, active, out, weight, running_var, rows, eps, adds, columns, rest,
        )  # fmt: skip


@triton.jit
def _backward_train(  # type: ignore[no-untyped-def]
    gradient, w, v, total, out, parts, counters, saved, sums, rows, height, columns: tl.constexpr, blocks: tl.constexpr,
    channels: tl.constexpr, taps: tl.constexpr, images: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
    across: tl.constexpr, block: tl.constexpr, rest: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """The gradient behind the ReLU that the convolution's input went through, and the sums that BatchNorm's needs."""
    part, first = tl.program_id(0) // blocks, (tl.program_id(0) % blocks) * (block + rest)
    image, top, left, pixels = _place(part, height, images, high, wide, across)
    found, more = _products(
        gradient, w, v, image, top, left, first, channels, columns, taps, 1, True, images, high, wide, block, rest,
        depth,
    )  # fmt: skip
    _finish_backward_train(
        found, pixels, part, first, tl.num_programs(0) // blocks, total, out, parts, counters, saved, sums, rows,
        columns, block,
    )  # fmt: skip
    if rest:
        _finish_backward_train(
            more, pixels, part, first + block, tl.num_programs(0) // blocks, total, out, parts, counters, saved, sums,
            rows, columns, rest,
        )  # fmt: skip


def _empty(x: Tensor, conv: nn.Conv2d) -> Tensor:
    n, _, h, w = x.shape
    stride = conv.stride[0]
    shape = n, conv.out_channels, h // stride, w // stride
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def forward_eval(
    x: Tensor, conv: nn.Conv2d, other: Tensor | Projection | None, bn: nn.BatchNorm2d
) -> tuple[Tensor | None, Tensor]:
    """(total, relu(bn(total))) for total = conv(x) + other; without other the total is not kept."""
    active = _empty(x, conv)
    total = None if other is None else torch.empty_like(active)
    cut = Cut(active, conv.in_channels)
    shortcut, added, told = _beside(cut, x, conv, other, active)
    launch(
        _forward_eval, cut.grid,
        cut.pixels_of(x, conv.stride[0]), *cut.weights_of(conv.weight, False), *shortcut, added,
        active if total is None else total, active, bn.weight, bn.bias, bn.running_mean, bn.running_var, cut.rows,
        cut.height, bn.eps, stride=conv.stride[0], **told, **cut.constants(conv.kernel_size[0] ** 2),
    )  # fmt: skip
    return total, active


def forward_train(
    x: Tensor, conv: nn.Conv2d, other: Tensor | Projection | None, bn: nn.BatchNorm2d
) -> tuple[Tensor, Tensor, Tensor]:
    """(total, relu(bn(total)), what the backward pass needs) for total = conv(x) + other; statistics are updated."""
    total = _empty(x, conv)
    cut = Cut(total, conv.in_channels)
    saved = torch.empty(4, cut.columns, dtype=torch.float32, device=x.device)
    parts = space(cut.parts, cut.columns, x.device)
    shortcut, added, told = _beside(cut, x, conv, other, total)
    launch(
        _forward_train, cut.grid,
        cut.pixels_of(x, conv.stride[0]), *cut.weights_of(conv.weight, False), *shortcut, added, total, parts,
        counter(x.device), saved, bn.weight, bn.bias, bn.running_mean, bn.running_var, cut.rows, cut.height, bn.eps,
        bn.momentum, stride=conv.stride[0], **told, **cut.constants(conv.kernel_size[0] ** 2),
    )  # fmt: skip
    active, plan = torch.empty_like(total), Plan(total)
    launch(_scale_and_clip, plan.grid, total, active, saved, plan.rows, **plan.tiles())
    return total, active, saved


def _beside(
    cut: Cut, x: Tensor, conv: nn.Conv2d, other: Tensor | Projection | None, out: Tensor
) -> tuple[tuple[Any, Any, Any], Tensor, dict[str, Any]]:
    """What a kernel is told of what is added: the shortcut's input and weights, or else a tensor; something stands in
    for what there is none of."""
    if isinstance(other, Projection):
        through = Cut(out, other.conv.in_channels, cut.how)
        tiles = through.pixels_of(other.source, 2), *through.weights_of(other.conv.weight, False)
        return tiles, out, {"adds": False, "before": through.channels, "fetched": through.depth}
    tiles = cut.pixels_of(x, conv.stride[0]), *cut.weights_of(conv.weight, False)
    return tiles, out if other is None else other, {"adds": other is not None, "before": 0, "fetched": 0}


def backward_eval(gradient: Tensor, conv: nn.Conv2d, active: Tensor, past: Tensor | None, bn: nn.BatchNorm2d) -> Tensor:
    """The gradient by the total whose activation `active = relu(bn(total))` was the convolution's input, + past."""
    out = torch.empty_like(active)
    cut = Cut(out, conv.out_channels)
    launch(
        _backward_eval, cut.grid,
        cut.pixels_of(gradient, 1), *cut.weights_of(conv.weight, True), out if past is None else past, active, out,
        bn.weight, bn.running_var, cut.rows, cut.height, bn.eps, adds=past is not None,
        **cut.constants(conv.kernel_size[0] ** 2),
    )  # fmt: skip
    return out


def backward_train(
    gradient: Tensor, conv: nn.Conv2d, total: Tensor, saved: Tensor, past: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `backward_eval` in train mode; also the gradients by BatchNorm's weight and bias."""
    masked = torch.empty_like(total)
    cut = Cut(total, conv.out_channels)
    sums = torch.empty(2, cut.columns, dtype=torch.float32, device=total.device)
    parts = space(cut.parts, cut.columns, total.device)
    launch(
        _backward_train, cut.grid,
        cut.pixels_of(gradient, 1), *cut.weights_of(conv.weight, True), total, masked, parts, counter(total.device),
        saved, sums, cut.rows, cut.height, **cut.constants(conv.kernel_size[0] ** 2),
    )  # fmt: skip
    return apply_gradient(total, masked, past, saved, sums), sums[1], sums[0]
