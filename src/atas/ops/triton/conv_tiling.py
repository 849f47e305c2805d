"""Tile shapes of the convolution kernels, and which convolutions they support.

Supported are those of residual networks: 3x3 with padding 1 and stride 1 or 2, or 1x1 of stride 2, without bias, in
half precision and channels_last, on square images.

A tile is a box of pixels whose sides are powers of two and divide those of the image: whole rows of one or several
images if the image's width is a power of two, 8 x 8 pixels of several images of 40 x 40.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor, nn
from triton.tools.tensor_descriptor import TensorDescriptor

from atas.ops.triton.launch import has_tma

HALF_DTYPES = torch.bfloat16, torch.float16
MAX_WIDTH = 64  # pixels a side, of a result


@dataclass(frozen=True)
class Tiling:
    """Pixels and channels of an output tile, and channels of an input chunk. Channels that are no multiple of a power
    of two are split into `block_c` and `rest_c`."""

    tile_pixels: int
    block_c: int
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 4
    rest_c: int = 0


MIN_PROGRAMS = 120  # fewer leave multiprocessors of an H100 or H200 idle; tests on small batches lower it
_TILING_64 = Tiling(128, 64, num_warps=4, num_stages=3)  # of 64 channels
_UNEVEN_CHANNELS = (160,)  # channels: a block of 128 and a rest
_TILING_UNEVEN = Tiling(256, 128, block_k=32, num_warps=8, rest_c=64)
_TILING_320 = Tiling(128, 256, num_warps=8, num_stages=3, rest_c=64)
_TILINGS = (
    Tiling(256, 128, num_stages=3),
    Tiling(256, 64, num_warps=4, num_stages=5),
    Tiling(128, 64, block_k=128, num_warps=4),
)


def choose_tiling(pixels: int, channels: int) -> Tiling:
    """The largest tiles that give every multiprocessor one, of those that were fast on an H200 (performance.md)."""
    if channels == 64:
        return _TILING_64
    if channels % 64:
        return _TILING_UNEVEN
    for tiling in (_TILING_320, *_TILINGS):
        width = tiling.block_c + tiling.rest_c
        if channels % width == 0 and pixels // tiling.tile_pixels * (channels // width) >= MIN_PROGRAMS:
            return tiling
    return _TILINGS[-1]


class TileGrid:
    """The tiles of a convolution's output, or of its input gradient; `channels_k` are the channels that are summed
    over."""

    def __init__(self, out: Tensor, channels_k: int, tiling: Tiling | None = None) -> None:
        images, channels, height, width = out.shape
        padded_images = triton.next_power_of_2(images)  # the short last batch then takes the same kernels
        self.tiling = tiling = tiling or choose_tiling(padded_images * height * width, channels)
        self.block_k = next(block_k for block_k in (tiling.block_k, 64, 32) if channels_k % block_k == 0)
        self.channels, self.channels_k, self.height, self.pixels = channels, channels_k, height, images * height * width
        self.tile_w = _power_of_two_divisor(width)
        self.tile_h = min(_power_of_two_divisor(height), tiling.tile_pixels // self.tile_w)
        self.tile_n = tiling.tile_pixels // (self.tile_w * self.tile_h)
        self.tiles_w = width // self.tile_w
        self.blocks_c = triton.cdiv(channels, tiling.block_c + tiling.rest_c)
        self.num_partials = triton.cdiv(images, self.tile_n) * (height // self.tile_h) * self.tiles_w
        self.grid = (self.num_partials * self.blocks_c,)

    def kernel_args(self, taps: int) -> dict[str, int]:
        """Return the arguments that every kernel takes."""
        tiling = self.tiling
        return {
            "channels": self.channels, "blocks_c": self.blocks_c, "channels_k": self.channels_k, "taps": taps,
            "tile_n": self.tile_n, "tile_h": self.tile_h, "tile_w": self.tile_w, "tiles_w": self.tiles_w,
            "block_c": tiling.block_c, "rest_c": tiling.rest_c, "block_k": self.block_k, "num_warps": tiling.num_warps,
            "num_stages": tiling.num_stages,
        }

    def input_descriptor(self, x: Tensor, stride: int) -> TensorDescriptor:
        """Return the TMA descriptor of the input, by tiles of shifted pixels."""
        n, c, h, w = x.shape
        if stride == 1:
            box = [self.tile_n, self.tile_h, self.tile_w, self.block_k]
            return TensorDescriptor(x, [n, h, w, c], [h * w * c, w * c, c, 1], box)
        shape, strides = [n, h // 2, 2, w // 2, 2 * c], [h * w * c, 2 * w * c, w * c, 2 * c, 1]
        return TensorDescriptor(x, shape, strides, [self.tile_n, self.tile_h, 1, self.tile_w, self.block_k])

    def weight_descriptors(self, weight: Tensor, backward: bool) -> tuple[TensorDescriptor, TensorDescriptor]:
        """Return TMA descriptors of the weights as a matrix (out channels, taps x in channels): blocks and rests."""
        rows, columns = weight.shape[0], weight.numel() // weight.shape[0]

        def descriptor(block_c: int) -> TensorDescriptor:
            tile = [self.block_k, block_c] if backward else [block_c, self.block_k]
            return TensorDescriptor(weight, [rows, columns], [columns, 1], tile)

        return descriptor(self.tiling.block_c), descriptor(self.tiling.rest_c or self.tiling.block_c)


def supports(conv: nn.Conv2d, x: Tensor, backward: bool = False) -> bool:
    """Return whether the kernels support this convolution of such an input, or its input gradient."""
    h, w = x.shape[2:]
    stride = conv.stride[0]
    plain = conv.bias is None and conv.groups == 1 and conv.dilation == (1, 1) and conv.stride == (stride, stride)
    usual = (conv.kernel_size, conv.padding, stride) in (
        ((3, 3), (1, 1), 1),
        ((3, 3), (1, 1), 2),
        ((1, 1), (0, 0), 2),
    )
    if not plain or not usual or (backward and stride > 1) or x.dtype not in HALF_DTYPES or h != w or h % stride:
        return False
    if not has_tma(x.device):
        return False
    side = w // stride
    channels = all(count % 64 == 0 or count in _UNEVEN_CHANNELS for count in (conv.in_channels, conv.out_channels))
    return side <= MAX_WIDTH and channels


def _power_of_two_divisor(size: int) -> int:
    """The largest power of two that divides a size.

    >>> [_power_of_two_divisor(size) for size in (32, 40, 20, 5)]
    [32, 8, 4, 1]
    """
    return size & -size
