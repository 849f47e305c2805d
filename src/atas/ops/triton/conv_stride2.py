"""Backward pass of a down-sampling block: its 3x3 convolution of stride 2 and its 1x1 shortcut together.

A pixel of the input was read by one, two or four taps, depending on whether its row and column are even or odd. So the
input gradient is four small convolutions, one for each parity; the shortcut read the pixels whose row and column are
both even. ReLU and BatchNorm before the convolution are fused as in `conv`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from atas.ops.triton.batch_statistics import empty_partials, group_counters
from atas.ops.triton.batchnorm import apply_backward
from atas.ops.triton.conv import tile_position
from atas.ops.triton.conv_tiling import HALF_DTYPES, MAX_WIDTH, TileGrid, Tiling
from atas.ops.triton.epilogue import relu_backward
from atas.ops.triton.launch import has_tma, launch

_TILING = Tiling(256, 64, num_warps=8, num_stages=3)


@triton.jit
def _parity_tile(
    gradient, w, shortcut_grad, shortcut_w, image, top, left, first_c, odd_row, odd_column, activated: tl.constexpr,
    channels_k: tl.constexpr, channels: tl.constexpr, tile_n: tl.constexpr, tile_h: tl.constexpr, tile_w: tl.constexpr,
    block_c: tl.constexpr, block_k: tl.constexpr,
):
    """A tile (block_c, pixels) of the gradient by the convolution's input, and of that by the shortcut's input."""
    tile_pixels: tl.constexpr = tile_n * tile_h * tile_w
    chunks: tl.constexpr = channels_k // block_k
    acc = tl.zeros((block_c, tile_pixels), tl.float32)
    for step in range((1 + odd_row) * (1 + odd_column) * chunks):
        tap, k = step // chunks, (step % chunks) * block_k
        later_row, later_column = tap // (1 + odd_column), tap % (1 + odd_column)
        row, column = 1 - odd_row + 2 * later_row, 1 - odd_column + 2 * later_column
        tile = gradient.load([image, top + odd_row * (1 - later_row), left + odd_column * (1 - later_column), k])
        weights = w.load([k, (3 * row + column) * channels + first_c])
        acc = tl.dot(weights.T, tile.reshape(tile_pixels, block_k).T, acc)
    direct = acc if activated else tl.zeros((block_c, tile_pixels), tl.float32)
    for step in range((1 - odd_row) * (1 - odd_column) * chunks):
        tile = shortcut_grad.load([image, top, left, step * block_k])
        weights = shortcut_w.load([step * block_k, first_c])
        direct = tl.dot(weights.T, tile.reshape(tile_pixels, block_k).T, direct)
    if activated:
        acc = direct
    return acc, direct


@triton.jit
def _tile_of_program(
    pixels, height, channels: tl.constexpr, blocks_c: tl.constexpr, programs_per_parity, tile_n: tl.constexpr,
    tile_h: tl.constexpr, tile_w: tl.constexpr, tiles_w: tl.constexpr, block_c: tl.constexpr,
):
    """Return the parity and tile of this program, and its offsets; parities with more taps come first."""
    parity = 3 - tl.program_id(0) // programs_per_parity
    odd_row, odd_column = parity // 2, parity % 2
    number = tl.program_id(0) % programs_per_parity
    tile, first_c = number // blocks_c, (number % blocks_c) * block_c
    image, top, left, pixel = tile_position(tile, height, tile_n, tile_h, tile_w, tiles_w)
    offs_c = first_c + tl.arange(0, block_c)
    mask_c = offs_c < channels
    width: tl.constexpr = tile_w * tiles_w
    row, column = pixel // width, pixel % width  # rows of all images, one after the other
    input_pixel = (2 * row + odd_row) * (2 * width) + 2 * column + odd_column
    offs = input_pixel[:, None] * channels + offs_c[None, :]
    mask = (pixel < pixels)[:, None] & mask_c[None, :]
    partial = (3 - parity) * (programs_per_parity // blocks_c) + tile
    return partial, image, top, left, first_c, odd_row, odd_column, offs_c, mask_c, offs, mask


@triton.jit
def _backward_eval_kernel(
    gradient, w, shortcut_grad, shortcut_w, act, out, weight, running_var, pixels, height, programs_per_parity, eps,
    activated: tl.constexpr, channels: tl.constexpr, blocks_c: tl.constexpr, channels_k: tl.constexpr,
    tile_n: tl.constexpr, tile_h: tl.constexpr, tile_w: tl.constexpr, tiles_w: tl.constexpr, block_c: tl.constexpr,
    block_k: tl.constexpr,
):
    """The gradient by the input of the BatchNorm and ReLU before the convolution, with the shortcut's."""
    _, image, top, left, first_c, odd_row, odd_column, offs_c, mask_c, offs, mask = _tile_of_program(
        pixels, height, channels, blocks_c, programs_per_parity, tile_n, tile_h, tile_w, tiles_w, block_c
    )
    acc, direct = _parity_tile(
        gradient, w, shortcut_grad, shortcut_w, image, top, left, first_c, odd_row, odd_column, activated, channels_k,
        channels, tile_n, tile_h, tile_w, block_c, block_k,
    )
    scale = tl.load(weight + offs_c, mask_c, 0.0) * tl.rsqrt(tl.load(running_var + offs_c, mask_c, 1.0) + eps)
    dtype = out.dtype.element_ty
    d = tl.where(tl.load(act + offs, mask, 0.0) > 0, tl.trans(acc.to(dtype)).to(tl.float32), 0.0)
    d *= scale[None, :]
    if not activated:
        d += tl.trans(direct.to(dtype)).to(tl.float32)
    tl.store(out + offs, d.to(dtype), mask)


@triton.jit
def _backward_train_kernel(
    gradient, w, shortcut_grad, shortcut_w, pre_bn, out, residual_grad, partials, counters, bn_state, sums, pixels,
    height, programs_per_parity, activated: tl.constexpr, channels: tl.constexpr, blocks_c: tl.constexpr,
    channels_k: tl.constexpr, tile_n: tl.constexpr, tile_h: tl.constexpr, tile_w: tl.constexpr, tiles_w: tl.constexpr,
    block_c: tl.constexpr, block_k: tl.constexpr,
):
    """The gradient by the input of the ReLU before the convolution, the sums that BatchNorm's gradient needs, and the
    shortcut's gradient."""
    partial, image, top, left, first_c, odd_row, odd_column, offs_c, mask_c, offs, mask = _tile_of_program(
        pixels, height, channels, blocks_c, programs_per_parity, tile_n, tile_h, tile_w, tiles_w, block_c
    )
    acc, direct = _parity_tile(
        gradient, w, shortcut_grad, shortcut_w, image, top, left, first_c, odd_row, odd_column, activated, channels_k,
        channels, tile_n, tile_h, tile_w, block_c, block_k,
    )
    if not activated:
        tl.store(residual_grad + offs, tl.trans(direct.to(residual_grad.dtype.element_ty)), mask)
    relu_backward(
        acc, partial, tl.num_programs(0) // blocks_c, first_c // block_c, offs_c, mask_c, offs, mask, pre_bn, out,
        partials, counters, bn_state, sums, channels, block_c,
    )


def supports(conv: nn.Conv2d, shortcut: nn.Conv2d, x: Tensor) -> bool:
    """Return whether the kernels support the backward pass of this convolution and this shortcut."""
    height, width = x.shape[2:]
    both = all(one.bias is None and one.groups == 1 and one.stride == (2, 2) for one in (conv, shortcut))
    kernels = (conv.kernel_size, conv.padding, shortcut.kernel_size, shortcut.padding) == (
        (3, 3),
        (1, 1),
        (1, 1),
        (0, 0),
    )
    side = width // 2
    if not both or not kernels or x.dtype not in HALF_DTYPES or height != width or conv.in_channels % 32:
        return False
    if not has_tma(x.device):
        return False
    return side <= MAX_WIDTH and width % 2 == 0 and conv.out_channels % _TILING.block_k == 0


def _tile_grid(gradient: Tensor, conv: nn.Conv2d) -> tuple[TileGrid, dict[str, int]]:
    """Return the tiles of one parity, and the arguments that both kernels take."""
    n, _, height, width = gradient.shape
    output = torch.empty((n, conv.in_channels, height, width), device="meta")
    tile_grid = TileGrid(output, conv.out_channels, _TILING)
    args = tile_grid.kernel_args(9)
    del args["taps"], args["rest_c"]
    return tile_grid, args | {"programs_per_parity": tile_grid.grid[0]}


def backward_eval(
    main_grad: Tensor, conv: nn.Conv2d, shortcut_grad: Tensor, shortcut: nn.Conv2d, act: Tensor, bn: nn.BatchNorm2d,
    activated: bool,
) -> Tensor:
    """Return the gradient by the block's input, from those by the outputs of its convolution and of its shortcut.

    `act = relu(bn(input))` is the convolution's input; with `activated` it is the shortcut's input too.
    """
    out = torch.empty_like(act)
    tile_grid, args = _tile_grid(main_grad, conv)
    launch(
        _backward_eval_kernel, (4 * tile_grid.grid[0],), tile_grid.input_descriptor(main_grad, 1),
        tile_grid.weight_descriptors(conv.weight, True)[0], tile_grid.input_descriptor(shortcut_grad, 1),
        tile_grid.weight_descriptors(shortcut.weight, True)[0], act, out, bn.weight, bn.running_var, tile_grid.pixels,
        tile_grid.height, eps=bn.eps, activated=activated, **args,
    )
    return out


def backward_train(
    main_grad: Tensor,
    conv: nn.Conv2d,
    shortcut_grad: Tensor,
    shortcut: nn.Conv2d,
    pre_bn: Tensor,
    bn_state: Tensor,
    activated: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `backward_eval` in train mode; also the gradients by BatchNorm's weight and bias."""
    masked_grad = torch.empty_like(pre_bn)
    residual_grad = None if activated else torch.empty_like(pre_bn)
    tile_grid, args = _tile_grid(main_grad, conv)
    sums = torch.empty(2, tile_grid.channels, dtype=torch.float32, device=pre_bn.device)
    partials = empty_partials(4 * tile_grid.num_partials, tile_grid.channels, pre_bn.device)
    launch(
        _backward_train_kernel, (4 * tile_grid.grid[0],), tile_grid.input_descriptor(main_grad, 1),
        tile_grid.weight_descriptors(conv.weight, True)[0], tile_grid.input_descriptor(shortcut_grad, 1),
        tile_grid.weight_descriptors(shortcut.weight, True)[0], pre_bn, masked_grad,
        masked_grad if residual_grad is None else residual_grad, partials, group_counters(pre_bn.device), bn_state,
        sums, tile_grid.pixels, tile_grid.height, activated=activated, **args,
    )
    return apply_backward(pre_bn, masked_grad, residual_grad, bn_state, sums), sums[1], sums[0]
