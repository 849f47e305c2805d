"""How convolutions are cut into tiles, and which of them the kernels take.

They take those of residual networks: 3x3 with padding 1 and stride 1 or 2, or 1x1 of stride 2, without bias, in half
precision and channels_last, on square images.

A tile is a box of pixels whose sides are powers of two and divide those of the image: whole rows of one or several
images where the image's width is a power of two, 8 x 8 pixels of several images of 40 x 40.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor, nn
from triton.tools.tensor_descriptor import TensorDescriptor

from atas.kernels._launch import has_copy_engine

HALF = torch.bfloat16, torch.float16
WIDEST = 64  # pixels a side, of a result


@dataclass(frozen=True)
class Tiling:
    """How the output of a convolution is cut: pixels and channels of a tile, channels of an input chunk. Channels that
    are no multiple of a power of two come as a block and the rest."""

    pixels: int
    block: int
    depth: int = 64
    warps: int = 8
    stages: int = 4
    rest: int = 0


_PROGRAMS = 120  # fewer leave multiprocessors of an H100 or H200 idle
_NARROW = Tiling(128, 64, warps=4, stages=3)  # of 64 channels
_UNEVENLY = (160,)  # channels: a block of 128 and a rest
_UNEVEN = Tiling(256, 128, depth=32, warps=8, rest=64)
_BY_320 = Tiling(128, 256, warps=8, stages=3, rest=64)
_TILINGS = (Tiling(256, 128, stages=3), Tiling(256, 64, warps=4, stages=5), Tiling(128, 64, depth=128, warps=4))


def tiling(rows: int, columns: int) -> Tiling:
    """The largest tiles that give every multiprocessor one, of those that were fast on an H200 (performance.md)."""
    if columns == 64:
        return _NARROW
    if columns % 64:
        return _UNEVEN
    for how in (_BY_320, *_TILINGS):
        width = how.block + how.rest
        if columns % width == 0 and rows // how.pixels * (columns // width) >= _PROGRAMS:
            return how
    return _TILINGS[-1]


class Cut:
    """A convolution's output, or its gradient by so many channels, cut into tiles."""

    def __init__(self, out: Tensor, channels: int, how: Tiling | None = None) -> None:
        images, columns, height, width = out.shape
        whole = triton.next_power_of_2(images)  # the short last batch then takes the same kernels
        self.how = how = how or tiling(whole * height * width, columns)
        self.depth = next(depth for depth in (how.depth, 64, 32) if channels % depth == 0)
        self.columns, self.channels, self.height, self.rows = columns, channels, height, images * height * width
        self.wide = _power(width)
        self.high = min(_power(height), how.pixels // self.wide)
        self.images = how.pixels // (self.wide * self.high)
        self.across = width // self.wide
        self.blocks = triton.cdiv(columns, how.block + how.rest)
        self.parts = triton.cdiv(images, self.images) * (height // self.high) * self.across
        self.grid = (self.parts * self.blocks,)

    def constants(self, taps: int) -> dict[str, int]:
        """What every kernel is told."""
        how = self.how
        return {
            "columns": self.columns, "blocks": self.blocks, "channels": self.channels, "taps": taps,
            "images": self.images, "high": self.high, "wide": self.wide, "across": self.across, "block": how.block,
            "rest": how.rest, "depth": self.depth, "num_warps": how.warps, "num_stages": how.stages,
        }  # fmt: skip

    def pixels_of(self, x: Tensor, stride: int) -> TensorDescriptor:
        """The input, as tiles of shifted pixels are fetched from it."""
        n, c, h, w = x.shape
        if stride == 1:
            box = [self.images, self.high, self.wide, self.depth]
            return TensorDescriptor(x, [n, h, w, c], [h * w * c, w * c, c, 1], box)
        shape, strides = [n, h // 2, 2, w // 2, 2 * c], [h * w * c, 2 * w * c, w * c, 2 * c, 1]
        return TensorDescriptor(x, shape, strides, [self.images, self.high, 1, self.wide, self.depth])

    def weights_of(self, weight: Tensor, backward: bool) -> tuple[TensorDescriptor, TensorDescriptor]:
        """The weights as a matrix (out channels, taps x in channels), as blocks and the rest are fetched from it."""
        rows, columns = weight.shape[0], weight.numel() // weight.shape[0]

        def tiles_of(block: int) -> TensorDescriptor:
            tile = [self.depth, block] if backward else [block, self.depth]
            return TensorDescriptor(weight, [rows, columns], [columns, 1], tile)

        return tiles_of(self.how.block), tiles_of(self.how.rest or self.how.block)


def fits(conv: nn.Conv2d, x: Tensor, backward: bool = False) -> bool:
    """Whether the kernels can do this convolution of such an input, or its input gradient."""
    h, w = x.shape[2:]
    stride = conv.stride[0]
    plain = conv.bias is None and conv.groups == 1 and conv.dilation == (1, 1) and conv.stride == (stride, stride)
    usual = (conv.kernel_size, conv.padding, stride) in (
        ((3, 3), (1, 1), 1),
        ((3, 3), (1, 1), 2),
        ((1, 1), (0, 0), 2),
    )
    if not plain or not usual or (backward and stride > 1) or x.dtype not in HALF or h != w or h % stride:
        return False
    if not has_copy_engine(x.device):
        return False
    side = w // stride
    channels = all(count % 64 == 0 or count in _UNEVENLY for count in (conv.in_channels, conv.out_channels))
    return side <= WIDEST and channels


def _power(size: int) -> int:
    """The largest power of two that divides a size.

    >>> [_power(size) for size in (32, 40, 20, 5)]
    [32, 8, 4, 1]
    """
    return size & -size
