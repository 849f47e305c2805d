"""The first convolution, from pixels: few channels in, so it is bound by what it writes.

The image comes as it is, in [0, 1] and NCHW; its normalisation is done on the way, before the padding, and so is what
follows the convolution. The input gradient goes the other way in two passes: the share of each tap of each pixel, then
their sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from atas.kernels._finish import _finish_eval, _finish_train
from atas.kernels._launch import launch
from atas.kernels._norm import Plan, _scale_and_clip
from atas.kernels._sums import counter, space
from atas.kernels._tiles import HALF
from atas.models import Normalize

_PIXELS = 256
_PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
_OUTPUTS = 16


@triton.jit
def _patches(  # type: ignore[no-untyped-def]
    x, mean, std, row, rows, height, width, channels: tl.constexpr, depth: tl.constexpr, kind: tl.constexpr
):
    """What the taps see at these pixels, (tap x channels + channel, pixel): normalised, and zero outside."""
    entry = tl.arange(0, depth)
    real = entry < 9 * channels
    tap, channel = entry // channels, entry % channels
    middle, scale = tl.load(mean + channel, real, 0.0), 1.0 / tl.load(std + channel, real, 1.0)
    area = height * width
    image, pixel = row // area, row % area
    down = (pixel // width)[None, :] + (tap // 3 - 1)[:, None]
    right = (pixel % width)[None, :] + (tap % 3 - 1)[:, None]
    valid = real[:, None] & (row < rows)[None, :] & (down >= 0) & (down < height) & (right >= 0) & (right < width)
    place = (image[None, :] * channels + channel[:, None]) * area + down * width + right
    pixels = tl.load(x + place, valid, 0.0).to(tl.float32)
    return tl.where(valid, (pixels - middle[:, None]) * scale[:, None], 0.0).to(kind)


@triton.jit
def _convolved(pixels, w, channels: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr):  # type: ignore[no-untyped-def]
    """The convolution, (columns, pixels), from what the taps see."""
    entry, at = tl.arange(0, depth), tl.arange(0, columns)
    weights = tl.load(w + at[:, None] * (9 * channels) + entry[None, :], (entry < 9 * channels)[None, :], 0.0)
    return tl.dot(weights, pixels)


@triton.jit
def _stem_eval(  # type: ignore[no-untyped-def]
    x, w, mean, std, total, active, weight, bias, running_mean, running_var, rows, height, width, eps,
    channels: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, pixels: tl.constexpr,
):  # fmt: skip
    """total = conv(normalised x) and relu(bn(total))."""
    part = tl.program_id(0)
    row = part * pixels + tl.arange(0, pixels)
    seen = _patches(x, mean, std, row, rows, height, width, channels, depth, active.dtype.element_ty)
    found = _convolved(seen, w, channels, columns, depth)
    _finish_eval(
        found, row, 0, total, total, active, weight, bias, running_mean, running_var, rows, eps, False, True, columns,
        columns,
    )  # fmt: skip


@triton.jit
def _stem_train(  # type: ignore[no-untyped-def]
    x, w, mean, std, patches, total, parts, counters, saved, weight, bias, running_mean, running_var, rows, height,
    width, eps, momentum, channels: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, pixels: tl.constexpr,
):  # fmt: skip
    """total = conv(normalised x), and its statistics; what the taps saw is kept."""
    part = tl.program_id(0)
    row = part * pixels + tl.arange(0, pixels)
    seen = _patches(x, mean, std, row, rows, height, width, channels, depth, total.dtype.element_ty)
    tl.store(patches + tl.arange(0, depth)[:, None] * rows + row[None, :], seen, (row < rows)[None, :])
    found = _convolved(seen, w, channels, columns, depth)
    _finish_train(
        found, row, part, 0, tl.num_programs(0), total, total, parts, counters, saved, weight, bias, running_mean,
        running_var, rows, eps, momentum, False, columns, columns,
    )  # fmt: skip


@triton.jit
def _shares(  # type: ignore[no-untyped-def]
    gradient, w, shares, rows, channels: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr,
    pixels: tl.constexpr,
):  # fmt: skip
    """What each pixel of the result gives to each tap and channel, (tap x channels + channel, pixel)."""
    row = tl.program_id(0) * pixels + tl.arange(0, pixels)
    at, entry = tl.arange(0, columns), tl.arange(0, depth)
    real = entry < 9 * channels
    g = tl.load(gradient + row[:, None] * columns + at[None, :], (row < rows)[:, None], 0.0)
    weights = tl.load(w + at[:, None] * (9 * channels) + entry[None, :], real[None, :], 0.0)
    found = tl.trans(tl.dot(g, weights))
    tl.store(shares + entry[:, None] * rows + row[None, :], found, real[:, None] & (row < rows)[None, :])


@triton.jit
def _collect(  # type: ignore[no-untyped-def]
    shares, std, out, rows, height, width, channels: tl.constexpr, pixels: tl.constexpr
):
    """Each pixel's sum over the taps that saw it."""
    row = tl.program_id(0) * pixels + tl.arange(0, pixels)
    channel = tl.program_id(1)
    area = height * width
    pixel = row % area
    down, right = pixel // width, pixel % width
    total = tl.zeros((pixels,), tl.float32)
    for tap in tl.static_range(9):
        y, x = down + (1 - tap // 3), right + (1 - tap % 3)
        valid = (row < rows) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        total += tl.load(shares + (tap * channels + channel) * rows + row - pixel + y * width + x, valid, 0.0)
    place = (row // area * channels + channel) * area + pixel
    tl.store(out + place, (total / tl.load(std + channel)).to(out.dtype.element_ty), row < rows)


@triton.jit
def _weight_parts(  # type: ignore[no-untyped-def]
    gradient, patches, parts, rows, tiles, columns: tl.constexpr, depth: tl.constexpr, pixels: tl.constexpr
):
    """A program's share of the gradient by the weights, (columns, depth)."""
    at, entry = tl.arange(0, columns), tl.arange(0, depth)
    total = tl.zeros((columns, depth), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row = tile * pixels + tl.arange(0, pixels)
        g = tl.load(gradient + row[:, None] * columns + at[None, :], (row < rows)[:, None], 0.0)
        seen = tl.load(patches + entry[:, None] * rows + row[None, :], (row < rows)[None, :], 0.0)
        total = tl.dot(tl.trans(g), tl.trans(seen), total)
    tl.store(parts + (tl.program_id(0) * columns + at[:, None]) * depth + entry[None, :], total)


@triton.jit
def _weight_sum(  # type: ignore[no-untyped-def]
    parts, out, count, channels: tl.constexpr, columns: tl.constexpr, depth: tl.constexpr, block: tl.constexpr
):
    """The gradient by the weights: all programs' shares, in a fixed order."""
    place = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros((block,), tl.float32)
    for start in range(0, count, 64):
        part = start + tl.arange(0, 64)
        shares = tl.load(parts + part[:, None] * (columns * depth) + place[None, :], (part < count)[:, None], 0.0)
        total += tl.sum(shares, 0)
    column, entry = place // depth, place % depth
    tl.store(out + column * (9 * channels) + entry, total.to(out.dtype.element_ty), entry < 9 * channels)


def fits(conv: nn.Conv2d) -> bool:
    """Whether the kernels can do this first convolution."""
    usual = (conv.kernel_size, conv.padding, conv.stride, conv.groups) == ((3, 3), (1, 1), (1, 1), 1)
    width = conv.out_channels
    small = conv.in_channels <= 7 and 16 <= width <= 128 and width & (width - 1) == 0
    return usual and small and conv.bias is None and conv.weight.dtype in HALF


def _constants(conv: nn.Conv2d) -> dict[str, int]:
    depth = max(16, triton.next_power_of_2(9 * conv.in_channels))
    return {
        "channels": conv.in_channels,
        "columns": conv.out_channels,
        "depth": depth,
        "pixels": _PIXELS,
        "num_warps": 8,
    }


def _out(x: Tensor, conv: nn.Conv2d) -> Tensor:
    shape = x.shape[0], conv.out_channels, *x.shape[2:]
    return torch.empty(shape, dtype=conv.weight.dtype, device=x.device, memory_format=torch.channels_last)


def forward_eval(x: Tensor, normalize: Normalize, conv: nn.Conv2d, bn: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """(total, relu(bn(total))) for total = conv(normalize(x))."""
    total, active = _out(x, conv), _out(x, conv)
    rows = total.numel() // conv.out_channels
    launch(
        _stem_eval, (triton.cdiv(rows, _PIXELS),),
        x, conv.weight, normalize.mean, normalize.std, total, active, bn.weight, bn.bias, bn.running_mean,
        bn.running_var, rows, *x.shape[2:], bn.eps, **_constants(conv),
    )  # fmt: skip
    return total, active


def forward_train(
    x: Tensor, normalize: Normalize, conv: nn.Conv2d, bn: nn.BatchNorm2d
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(total, relu(bn(total)), what BatchNorm's backward pass needs, what the weight gradient needs) for
    total = conv(normalize(x)); statistics are updated."""
    total, active = _out(x, conv), _out(x, conv)
    rows = total.numel() // conv.out_channels
    programs = triton.cdiv(rows, _PIXELS)
    constants = _constants(conv)
    saved = torch.empty(4, conv.out_channels, dtype=torch.float32, device=x.device)
    patches = torch.empty(constants["depth"], rows, dtype=total.dtype, device=x.device)
    parts = space(programs, conv.out_channels, x.device)
    launch(
        _stem_train, (programs,), x, conv.weight, normalize.mean, normalize.std, patches, total, parts,
        counter(x.device), saved, bn.weight, bn.bias, bn.running_mean, bn.running_var, rows, *x.shape[2:], bn.eps,
        bn.momentum, **constants,
    )  # fmt: skip
    plan = Plan(total)
    launch(_scale_and_clip, plan.grid, total, active, saved, plan.rows, **plan.tiles())
    return total, active, saved, patches


def input_gradient(gradient: Tensor, x: Tensor, normalize: Normalize, conv: nn.Conv2d) -> Tensor:
    """The gradient by the pixels."""
    rows = gradient.numel() // conv.out_channels
    programs = triton.cdiv(rows, _PIXELS)
    shares = torch.empty(9 * conv.in_channels, rows, dtype=torch.float32, device=x.device)
    launch(_shares, (programs,), gradient, conv.weight, shares, rows, **_constants(conv))
    out = torch.empty_like(x)
    launch(
        _collect,
        (programs, conv.in_channels),
        shares,
        normalize.std,
        out,
        rows,
        *x.shape[2:],
        channels=conv.in_channels,
        pixels=_PIXELS,
    )
    return out


def weight_gradient(gradient: Tensor, patches: Tensor, conv: nn.Conv2d) -> Tensor:
    """The gradient by the weights, from what `forward_train` left for it."""
    (depth, rows), columns = patches.shape, conv.out_channels
    tiles = triton.cdiv(rows, _PIXELS)
    programs = min(tiles, _PROGRAMS)
    parts = torch.empty(programs, columns, depth, dtype=torch.float32, device=gradient.device)
    launch(
        _weight_parts, (programs,), gradient, patches, parts, rows, tiles, columns=columns, depth=depth, pixels=_PIXELS,
        num_stages=2,
    )  # fmt: skip
    out = torch.empty_like(conv.weight)
    sizes = {"channels": conv.in_channels, "columns": columns, "depth": depth, "block": _OUTPUTS}
    launch(_weight_sum, (columns * depth // _OUTPUTS,), parts, out, programs, **sizes)
    return out
