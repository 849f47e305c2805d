"""The first convolution, from pixels. It has few input channels, so it is bound by its output's memory traffic.

The image is in [0, 1] and NCHW. Its normalisation, before the padding, and the epilogue of the convolution are fused.
The input gradient takes two passes: each pixel's gradient for each tap, then the sum over taps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from atas.models import Normalize
from atas.ops.triton.batch_statistics import empty_partials, group_counters
from atas.ops.triton.batchnorm import BatchNormGrid, normalize_relu_kernel
from atas.ops.triton.conv_tiling import HALF_DTYPES
from atas.ops.triton.epilogue import epilogue_forward_eval, epilogue_forward_train
from atas.ops.triton.launch import launch

_BLOCK_PIXELS = 256
_MAX_PROGRAMS = 264  # two for each multiprocessor of an H100 or H200
_BLOCK_WEIGHTS = 16


@triton.jit
def _load_patches(
    x,
    mean,
    std,
    pixel_ids,
    pixels,
    height,
    width,
    in_channels: tl.constexpr,
    block_k: tl.constexpr,
    dtype: tl.constexpr,
):
    """Load the pixels that the taps see, (tap x channels + channel, pixel): normalised, and zero outside the image."""
    offs_k = tl.arange(0, block_k)
    mask_k = offs_k < 9 * in_channels
    tap, channel = offs_k // in_channels, offs_k % in_channels
    center, scale = tl.load(mean + channel, mask_k, 0.0), 1.0 / tl.load(std + channel, mask_k, 1.0)
    area = height * width
    image, pixel = pixel_ids // area, pixel_ids % area
    down = (pixel // width)[None, :] + (tap // 3 - 1)[:, None]
    right = (pixel % width)[None, :] + (tap % 3 - 1)[:, None]
    mask = (
        mask_k[:, None] & (pixel_ids < pixels)[None, :] & (down >= 0) & (down < height) & (right >= 0) & (right < width)
    )
    offs = (image[None, :] * in_channels + channel[:, None]) * area + down * width + right
    values = tl.load(x + offs, mask, 0.0).to(tl.float32)
    return tl.where(mask, (values - center[:, None]) * scale[:, None], 0.0).to(dtype)


@triton.jit
def _conv_patches(patches, w, in_channels: tl.constexpr, channels: tl.constexpr, block_k: tl.constexpr):
    """The convolution, (channels, pixels), of loaded patches."""
    offs_k, offs_c = tl.arange(0, block_k), tl.arange(0, channels)
    weights = tl.load(
        w + offs_c[:, None] * (9 * in_channels) + offs_k[None, :], (offs_k < 9 * in_channels)[None, :], 0.0
    )
    return tl.dot(weights, patches)


@triton.jit
def _forward_eval_kernel(
    x, w, mean, std, pre_bn, act, weight, bias, running_mean, running_var, pixels, height, width, eps,
    in_channels: tl.constexpr, channels: tl.constexpr, block_k: tl.constexpr, block_pixels: tl.constexpr,
):
    """pre_bn = conv(normalised x) and relu(bn(pre_bn))."""
    partial = tl.program_id(0)
    pixel_ids = partial * block_pixels + tl.arange(0, block_pixels)
    patch_tile = _load_patches(
        x, mean, std, pixel_ids, pixels, height, width, in_channels, block_k, act.dtype.element_ty
    )
    acc = _conv_patches(patch_tile, w, in_channels, channels, block_k)
    epilogue_forward_eval(
        acc, pixel_ids, 0, pre_bn, pre_bn, act, weight, bias, running_mean, running_var, pixels, eps, False, True,
        channels, channels,
    )


@triton.jit
def _forward_train_kernel(
    x, w, mean, std, patches, pre_bn, partials, counters, bn_state, weight, bias, running_mean, running_var, pixels,
    height, width, eps, momentum, in_channels: tl.constexpr, channels: tl.constexpr, block_k: tl.constexpr,
    block_pixels: tl.constexpr,
):
    """pre_bn = conv(normalised x), and its statistics; the patches are stored."""
    partial = tl.program_id(0)
    pixel_ids = partial * block_pixels + tl.arange(0, block_pixels)
    patch_tile = _load_patches(
        x, mean, std, pixel_ids, pixels, height, width, in_channels, block_k, pre_bn.dtype.element_ty
    )
    tl.store(
        patches + tl.arange(0, block_k)[:, None] * pixels + pixel_ids[None, :],
        patch_tile,
        (pixel_ids < pixels)[None, :],
    )
    acc = _conv_patches(patch_tile, w, in_channels, channels, block_k)
    epilogue_forward_train(
        acc, pixel_ids, partial, 0, tl.num_programs(0), pre_bn, pre_bn, partials, counters, bn_state, weight, bias,
        running_mean, running_var, pixels, eps, momentum, False, channels, channels,
    )


@triton.jit
def _tap_gradients_kernel(
    gradient, w, tap_grads, pixels, in_channels: tl.constexpr, channels: tl.constexpr, block_k: tl.constexpr,
    block_pixels: tl.constexpr,
):
    """Each output pixel's gradient by each tap and channel, (tap x channels + channel, pixel)."""
    pixel_ids = tl.program_id(0) * block_pixels + tl.arange(0, block_pixels)
    offs_c, offs_k = tl.arange(0, channels), tl.arange(0, block_k)
    mask_k = offs_k < 9 * in_channels
    g = tl.load(gradient + pixel_ids[:, None] * channels + offs_c[None, :], (pixel_ids < pixels)[:, None], 0.0)
    weights = tl.load(w + offs_c[:, None] * (9 * in_channels) + offs_k[None, :], mask_k[None, :], 0.0)
    grads = tl.trans(tl.dot(g, weights))
    tl.store(
        tap_grads + offs_k[:, None] * pixels + pixel_ids[None, :],
        grads,
        mask_k[:, None] & (pixel_ids < pixels)[None, :],
    )


@triton.jit
def _sum_taps_kernel(
    tap_grads, std, out, pixels, height, width, in_channels: tl.constexpr, block_pixels: tl.constexpr
):
    """Each pixel's sum over the taps that saw it."""
    pixel_ids = tl.program_id(0) * block_pixels + tl.arange(0, block_pixels)
    channel = tl.program_id(1)
    area = height * width
    pixel = pixel_ids % area
    down, right = pixel // width, pixel % width
    acc = tl.zeros((block_pixels,), tl.float32)
    for tap in tl.static_range(9):
        y, x = down + (1 - tap // 3), right + (1 - tap % 3)
        mask = (pixel_ids < pixels) & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        acc += tl.load(
            tap_grads + (tap * in_channels + channel) * pixels + pixel_ids - pixel + y * width + x, mask, 0.0
        )
    offs = (pixel_ids // area * in_channels + channel) * area + pixel
    tl.store(out + offs, (acc / tl.load(std + channel)).to(out.dtype.element_ty), pixel_ids < pixels)


@triton.jit
def _weight_partials_kernel(
    gradient,
    patches,
    partials,
    pixels,
    tiles,
    channels: tl.constexpr,
    block_k: tl.constexpr,
    block_pixels: tl.constexpr,
):
    """A program's partial sum of the weight gradient, (channels, block_k)."""
    offs_c, offs_k = tl.arange(0, channels), tl.arange(0, block_k)
    acc = tl.zeros((channels, block_k), tl.float32)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        pixel_ids = tile * block_pixels + tl.arange(0, block_pixels)
        g = tl.load(gradient + pixel_ids[:, None] * channels + offs_c[None, :], (pixel_ids < pixels)[:, None], 0.0)
        patch_tile = tl.load(
            patches + offs_k[:, None] * pixels + pixel_ids[None, :], (pixel_ids < pixels)[None, :], 0.0
        )
        acc = tl.dot(tl.trans(g), tl.trans(patch_tile), acc)
    tl.store(partials + (tl.program_id(0) * channels + offs_c[:, None]) * block_k + offs_k[None, :], acc)


@triton.jit
def _weight_sum_kernel(
    partials, out, count, in_channels: tl.constexpr, channels: tl.constexpr, block_k: tl.constexpr, block: tl.constexpr
):
    """The weight gradient: the partial sums of all programs, in a fixed order."""
    offs = tl.program_id(0) * block + tl.arange(0, block)
    acc = tl.zeros((block,), tl.float32)
    for start in range(0, count, 64):
        partial = start + tl.arange(0, 64)
        values = tl.load(
            partials + partial[:, None] * (channels * block_k) + offs[None, :], (partial < count)[:, None], 0.0
        )
        acc += tl.sum(values, 0)
    column, offs_k = offs // block_k, offs % block_k
    tl.store(out + column * (9 * in_channels) + offs_k, acc.to(out.dtype.element_ty), offs_k < 9 * in_channels)


def supports(conv: nn.Conv2d) -> bool:
    """Return whether the kernels support this first convolution."""
    is_3x3 = (conv.kernel_size, conv.padding, conv.stride, conv.groups) == ((3, 3), (1, 1), (1, 1), 1)
    width = conv.out_channels
    small = conv.in_channels <= 7 and 16 <= width <= 128 and width & (width - 1) == 0
    return is_3x3 and small and conv.bias is None and conv.weight.dtype in HALF_DTYPES


def _kernel_args(conv: nn.Conv2d) -> dict[str, int]:
    block_k = max(16, triton.next_power_of_2(9 * conv.in_channels))
    return {
        "in_channels": conv.in_channels,
        "channels": conv.out_channels,
        "block_k": block_k,
        "block_pixels": _BLOCK_PIXELS,
        "num_warps": 8,
    }


def _empty_output(x: Tensor, conv: nn.Conv2d) -> Tensor:
    shape = x.shape[0], conv.out_channels, *x.shape[2:]
    return torch.empty(shape, dtype=conv.weight.dtype, device=x.device, memory_format=torch.channels_last)


def forward_eval(x: Tensor, normalize: Normalize, conv: nn.Conv2d, bn: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Return (pre_bn, relu(bn(pre_bn))) for pre_bn = conv(normalize(x))."""
    pre_bn, act = _empty_output(x, conv), _empty_output(x, conv)
    pixels = pre_bn.numel() // conv.out_channels
    launch(
        _forward_eval_kernel, (triton.cdiv(pixels, _BLOCK_PIXELS),), x, conv.weight, normalize.mean, normalize.std,
        pre_bn, act, bn.weight, bn.bias, bn.running_mean, bn.running_var, pixels, *x.shape[2:], bn.eps,
        **_kernel_args(conv),
    )
    return pre_bn, act


def forward_train(
    x: Tensor, normalize: Normalize, conv: nn.Conv2d, bn: nn.BatchNorm2d
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (pre_bn, relu(bn(pre_bn)), bn_state, patches) for pre_bn = conv(normalize(x)); running statistics are
    updated."""
    pre_bn, act = _empty_output(x, conv), _empty_output(x, conv)
    pixels = pre_bn.numel() // conv.out_channels
    programs = triton.cdiv(pixels, _BLOCK_PIXELS)
    args = _kernel_args(conv)
    bn_state = torch.empty(4, conv.out_channels, dtype=torch.float32, device=x.device)
    patches = torch.empty(args["block_k"], pixels, dtype=pre_bn.dtype, device=x.device)
    partials = empty_partials(programs, conv.out_channels, x.device)
    launch(
        _forward_train_kernel, (programs,), x, conv.weight, normalize.mean, normalize.std, patches, pre_bn, partials,
        group_counters(x.device), bn_state, bn.weight, bn.bias, bn.running_mean, bn.running_var, pixels, *x.shape[2:],
        bn.eps, bn.momentum, **args,
    )
    bn_grid = BatchNormGrid(pre_bn)
    launch(normalize_relu_kernel, bn_grid.grid, pre_bn, act, bn_state, bn_grid.pixels, **bn_grid.kernel_args())
    return pre_bn, act, bn_state, patches


def input_grad(gradient: Tensor, x: Tensor, normalize: Normalize, conv: nn.Conv2d) -> Tensor:
    """Return the gradient by the pixels."""
    pixels = gradient.numel() // conv.out_channels
    programs = triton.cdiv(pixels, _BLOCK_PIXELS)
    tap_grads = torch.empty(9 * conv.in_channels, pixels, dtype=torch.float32, device=x.device)
    launch(_tap_gradients_kernel, (programs,), gradient, conv.weight, tap_grads, pixels, **_kernel_args(conv))
    out = torch.empty_like(x)
    launch(
        _sum_taps_kernel,
        (programs, conv.in_channels),
        tap_grads,
        normalize.std,
        out,
        pixels,
        *x.shape[2:],
        in_channels=conv.in_channels,
        block_pixels=_BLOCK_PIXELS,
    )
    return out


def weight_grad(gradient: Tensor, patches: Tensor, conv: nn.Conv2d) -> Tensor:
    """Return the gradient by the weights, from the patches of `forward_train`."""
    (block_k, pixels), channels = patches.shape, conv.out_channels
    tiles = triton.cdiv(pixels, _BLOCK_PIXELS)
    programs = min(tiles, _MAX_PROGRAMS)
    partials = torch.empty(programs, channels, block_k, dtype=torch.float32, device=gradient.device)
    launch(
        _weight_partials_kernel, (programs,), gradient, patches, partials, pixels, tiles, channels=channels,
        block_k=block_k, block_pixels=_BLOCK_PIXELS, num_stages=2,
    )
    out = torch.empty_like(conv.weight)
    args = {"in_channels": conv.in_channels, "channels": channels, "block_k": block_k, "block": _BLOCK_WEIGHTS}
    launch(_weight_sum_kernel, (channels * block_k // _BLOCK_WEIGHTS,), partials, out, programs, **args)
    return out
