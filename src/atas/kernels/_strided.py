"""The way back through a block that halves the image: its 3x3 convolution of stride 2 and its 1x1 shortcut at once.

A pixel of the input was seen by one, two or four taps, depending on whether its row and its column are even or odd. So
the input gradient is four small convolutions, each for a quarter of the pixels; the shortcut saw the pixels whose row
and column are both even. What comes before the convolution, ReLU and BatchNorm, is dealt with as in `_conv`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from atas.kernels._conv import _place
from atas.kernels._finish import _behind_relu
from atas.kernels._launch import has_copy_engine, launch
from atas.kernels._norm import apply_gradient
from atas.kernels._sums import counter, space
from atas.kernels._tiles import HALF, WIDEST, Cut, Tiling

_TILING = Tiling(256, 64, warps=8, stages=3)


@triton.jit
def _quarter(  # type: ignore[no-untyped-def]
    gradient, w, beyond, v, image, top, left, first, odd_row, odd_column, activated: tl.constexpr,
    channels: tl.constexpr, others: tl.constexpr, images: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
    block: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient by what the convolution saw, and of that by what the shortcut saw, (block, pixels)."""
    pixels: tl.constexpr = images * high * wide
    chunks: tl.constexpr = channels // depth
    result = tl.zeros((block, pixels), tl.float32)
    for turn in range((1 + odd_row) * (1 + odd_column) * chunks):
        tap, at = turn // chunks, (turn % chunks) * depth
        later_row, later_column = tap // (1 + odd_column), tap % (1 + odd_column)
        row, column = 1 - odd_row + 2 * later_row, 1 - odd_column + 2 * later_column
        tile = gradient.load([image, top + odd_row * (1 - later_row), left + odd_column * (1 - later_column), at])
        weights = w.load([at, (3 * row + column) * others + first])
        result = tl.dot(weights.T, tile.reshape(pixels, depth).T, result)
    direct = result if activated else tl.zeros((block, pixels), tl.float32)
    for turn in range((1 - odd_row) * (1 - odd_column) * chunks):
        tile = beyond.load([image, top, left, turn * depth])
        weights = v.load([turn * depth, first])
        direct = tl.dot(weights.T, tile.reshape(pixels, depth).T, direct)
    if activated:
        result = direct
    return result, direct


@triton.jit
def _where(  # type: ignore[no-untyped-def]
    rows, height, columns: tl.constexpr, blocks: tl.constexpr, quarters, images: tl.constexpr, high: tl.constexpr,
    wide: tl.constexpr, across: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Which tile of which quarter this program makes, and its cells; quarters with more taps come first."""
    quarter = 3 - tl.program_id(0) // quarters
    odd_row, odd_column = quarter // 2, quarter % 2
    number = tl.program_id(0) % quarters
    tile, first = number // blocks, (number % blocks) * block
    image, top, left, pixel = _place(tile, height, images, high, wide, across)
    at = first + tl.arange(0, block)
    inside = at < columns
    width: tl.constexpr = wide * across
    row, column = pixel // width, pixel % width  # rows of all images, one after the other
    place = (2 * row + odd_row) * (2 * width) + 2 * column + odd_column
    cells = place[:, None] * columns + at[None, :]
    valid = (pixel < rows)[:, None] & inside[None, :]
    part = (3 - quarter) * (quarters // blocks) + tile
    return part, image, top, left, first, odd_row, odd_column, at, inside, cells, valid


@triton.jit
def _strided_eval(  # type: ignore[no-untyped-def]
    gradient, w, beyond, v, active, out, weight, running_var, rows, height, quarters, eps, activated: tl.constexpr,
    columns: tl.constexpr, blocks: tl.constexpr, channels: tl.constexpr, images: tl.constexpr, high: tl.constexpr,
    wide: tl.constexpr, across: tl.constexpr, block: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """The gradient by the input of BatchNorm and ReLU before the convolution, with the shortcut's."""
    _, image, top, left, first, odd_row, odd_column, at, inside, cells, valid = _where(
        rows, height, columns, blocks, quarters, images, high, wide, across, block
    )
    found, direct = _quarter(
        gradient, w, beyond, v, image, top, left, first, odd_row, odd_column, activated, channels, columns, images,
        high, wide, block, depth,
    )  # fmt: skip
    scale = tl.load(weight + at, inside, 0.0) * tl.rsqrt(tl.load(running_var + at, inside, 1.0) + eps)
    kind = out.dtype.element_ty
    d = tl.where(tl.load(active + cells, valid, 0.0) > 0, tl.trans(found.to(kind)).to(tl.float32), 0.0)
    d *= scale[None, :]
    if not activated:
        d += tl.trans(direct.to(kind)).to(tl.float32)
    tl.store(out + cells, d.to(kind), valid)


@triton.jit
def _strided_train(  # type: ignore[no-untyped-def]
    gradient, w, beyond, v, total, out, past, parts, counters, saved, sums, rows, height, quarters,
    activated: tl.constexpr, columns: tl.constexpr, blocks: tl.constexpr, channels: tl.constexpr, images: tl.constexpr,
    high: tl.constexpr, wide: tl.constexpr, across: tl.constexpr, block: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """The gradient behind the ReLU before the convolution, the sums that BatchNorm's needs, and the shortcut's."""
    part, image, top, left, first, odd_row, odd_column, at, inside, cells, valid = _where(
        rows, height, columns, blocks, quarters, images, high, wide, across, block
    )
    found, direct = _quarter(
        gradient, w, beyond, v, image, top, left, first, odd_row, odd_column, activated, channels, columns, images,
        high, wide, block, depth,
    )  # fmt: skip
    if not activated:
        tl.store(past + cells, tl.trans(direct.to(past.dtype.element_ty)), valid)
    _behind_relu(
        found, part, tl.num_programs(0) // blocks, first // block, at, inside, cells, valid, total, out, parts,
        counters, saved, sums, columns, block,
    )  # fmt: skip


def fits(conv: nn.Conv2d, shortcut: nn.Conv2d, x: Tensor) -> bool:
    """Whether the kernels can go back through this convolution and this shortcut of such an input."""
    height, width = x.shape[2:]
    both = all(one.bias is None and one.groups == 1 and one.stride == (2, 2) for one in (conv, shortcut))
    kernels = (conv.kernel_size, conv.padding, shortcut.kernel_size, shortcut.padding) == (
        (3, 3),
        (1, 1),
        (1, 1),
        (0, 0),
    )
    side = width // 2
    if not both or not kernels or x.dtype not in HALF or height != width or conv.in_channels % 32:
        return False
    if not has_copy_engine(x.device):
        return False
    return side <= WIDEST and width % 2 == 0 and conv.out_channels % _TILING.depth == 0


def _cut(gradient: Tensor, conv: nn.Conv2d) -> tuple[Cut, dict[str, int]]:
    """The quarters' cut, and what both kernels are told."""
    n, _, height, width = gradient.shape
    quarter = torch.empty((n, conv.in_channels, height, width), device="meta")
    cut = Cut(quarter, conv.out_channels, _TILING)
    constants = cut.constants(9)
    del constants["taps"], constants["rest"]
    return cut, constants | {"quarters": cut.grid[0]}


def backward_eval(
    inner: Tensor, conv: nn.Conv2d, beyond: Tensor, shortcut: nn.Conv2d, active: Tensor, bn: nn.BatchNorm2d,
    activated: bool,
) -> Tensor:  # fmt: skip
    """The gradient by the block's input, from those by the results of its convolution and of its shortcut.

    `active = relu(bn(input))` is what the convolution saw; with `activated` the shortcut saw it too.
    """
    out = torch.empty_like(active)
    cut, constants = _cut(inner, conv)
    launch(
        _strided_eval, (4 * cut.grid[0],),
        cut.pixels_of(inner, 1), cut.weights_of(conv.weight, True)[0], cut.pixels_of(beyond, 1),
        cut.weights_of(shortcut.weight, True)[0], active, out, bn.weight, bn.running_var, cut.rows, cut.height,
        eps=bn.eps, activated=activated, **constants,
    )  # fmt: skip
    return out


def backward_train(
    inner: Tensor, conv: nn.Conv2d, beyond: Tensor, shortcut: nn.Conv2d, total: Tensor, saved: Tensor, activated: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As `backward_eval` in train mode; also the gradients by BatchNorm's weight and bias."""
    masked = torch.empty_like(total)
    past = None if activated else torch.empty_like(total)
    cut, constants = _cut(inner, conv)
    sums = torch.empty(2, cut.columns, dtype=torch.float32, device=total.device)
    parts = space(4 * cut.parts, cut.columns, total.device)
    launch(
        _strided_train, (4 * cut.grid[0],),
        cut.pixels_of(inner, 1), cut.weights_of(conv.weight, True)[0], cut.pixels_of(beyond, 1),
        cut.weights_of(shortcut.weight, True)[0], total, masked, masked if past is None else past, parts,
        counter(total.device), saved, sums, cut.rows, cut.height, activated=activated, **constants,
    )  # fmt: skip
    return apply_gradient(total, masked, past, saved, sums), sums[1], sums[0]
