"""Epilogues of the convolution kernels, applied to a tile of sums in registers.

In eval mode the epilogue is the residual addition, BatchNorm and ReLU, in both directions. In train mode it is the
addition and the sums by channel that BatchNorm needs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from atas.ops.triton.batch_statistics import finalize_statistics, reduce_partials, sum_groups

_MIN_BLOCK_C = tl.constexpr(64)  # channels of the smallest block: the index of a counter depends on it


@triton.jit
def _tile_offsets(pixel_ids, first_c, pixels, channels: tl.constexpr, block_c: tl.constexpr):
    """Return channel offsets of a tile and their mask, its offsets in a matrix (pixels, channels) and their mask."""
    offs_c = first_c + tl.arange(0, block_c)
    mask_c = offs_c < channels
    return (
        offs_c,
        mask_c,
        pixel_ids[:, None] * channels + offs_c[None, :],
        (pixel_ids < pixels)[:, None] & mask_c[None, :],
    )


@triton.jit
def epilogue_forward_eval(
    acc, pixel_ids, first_c, residual, pre_bn, act, weight, bias, running_mean, running_var, pixels, eps,
    has_residual: tl.constexpr, store_pre_bn: tl.constexpr, channels: tl.constexpr, block_c: tl.constexpr,
):
    """act = relu(bn(pre_bn)) for pre_bn = acc (+ residual)."""
    offs_c, mask_c, offs, mask = _tile_offsets(pixel_ids, first_c, pixels, channels, block_c)
    scale = tl.load(weight + offs_c, mask_c, 0.0) * tl.rsqrt(tl.load(running_var + offs_c, mask_c, 1.0) + eps)
    shift = tl.load(bias + offs_c, mask_c, 0.0) - tl.load(running_mean + offs_c, mask_c, 0.0) * scale
    out = tl.trans(acc.to(act.dtype.element_ty))
    if has_residual:
        out = (out.to(tl.float32) + tl.load(residual + offs, mask, 0.0).to(tl.float32)).to(out.dtype)
    if store_pre_bn:
        tl.store(pre_bn + offs, out, mask)
    z = out.to(tl.float32) * scale[None, :] + shift[None, :]
    tl.store(act + offs, tl.maximum(z, 0.0).to(out.dtype), mask)


@triton.jit
def epilogue_forward_train(
    acc, pixel_ids, partial, first_c, num_partials, residual, pre_bn, partials, counters, bn_state, weight, bias,
    running_mean, running_var, pixels, eps, momentum, has_residual: tl.constexpr, channels: tl.constexpr,
    block_c: tl.constexpr,
):
    """pre_bn = acc (+ residual), and its mean and variance; running statistics are updated."""
    offs_c, mask_c, offs, mask = _tile_offsets(pixel_ids, first_c, pixels, channels, block_c)
    shift = tl.load(running_mean + offs_c, mask_c, 0.0)
    out = tl.trans(acc.to(pre_bn.dtype.element_ty))
    if has_residual:
        out = (out.to(tl.float32) + tl.load(residual + offs, mask, 0.0).to(tl.float32)).to(out.dtype)
    tl.store(pre_bn + offs, out, mask)
    z = tl.where(mask, out.to(tl.float32) - shift[None, :], 0.0)
    if reduce_partials(
        tl.sum(z, 0), tl.sum(z * z, 0), partials, counters, partial, num_partials, first_c // _MIN_BLOCK_C, channels,
        offs_c, mask_c, block_c,
    ):
        first_sum, second_sum = sum_groups(partials, num_partials, channels, offs_c, mask_c, block_c)
        finalize_statistics(
            first_sum, second_sum, channels, offs_c, mask_c, weight, bias, running_mean, running_var, bn_state, pixels,
            eps, momentum, shift,
        )


@triton.jit
def epilogue_backward_eval(
    acc, pixel_ids, first_c, residual_grad, act, out, weight, running_var, pixels, eps, has_residual: tl.constexpr,
    channels: tl.constexpr, block_c: tl.constexpr,
):
    """The gradient through ReLU and BatchNorm by the running statistics (+ residual_grad)."""
    offs_c, mask_c, offs, mask = _tile_offsets(pixel_ids, first_c, pixels, channels, block_c)
    scale = tl.load(weight + offs_c, mask_c, 0.0) * tl.rsqrt(tl.load(running_var + offs_c, mask_c, 1.0) + eps)
    g = tl.trans(acc.to(out.dtype.element_ty)).to(tl.float32)
    d = tl.where(tl.load(act + offs, mask, 0.0) > 0, g, 0.0) * scale[None, :]
    if has_residual:
        d += tl.load(residual_grad + offs, mask, 0.0).to(tl.float32)
    tl.store(out + offs, d.to(out.dtype.element_ty), mask)


@triton.jit
def epilogue_backward_train(
    acc, pixel_ids, partial, first_c, num_partials, pre_bn, out, partials, counters, bn_state, sums, pixels,
    channels: tl.constexpr, block_c: tl.constexpr,
):
    """The gradient through the ReLU, and the sums that BatchNorm's gradient needs."""
    offs_c, mask_c, offs, mask = _tile_offsets(pixel_ids, first_c, pixels, channels, block_c)
    relu_backward(
        acc, partial, num_partials, first_c // _MIN_BLOCK_C, offs_c, mask_c, offs, mask, pre_bn, out, partials,
        counters, bn_state, sums, channels, block_c,
    )


@triton.jit
def relu_backward(
    acc, partial, num_partials, channel_block, offs_c, mask_c, offs, mask, pre_bn, out, partials, counters, bn_state,
    sums, channels: tl.constexpr, block_c: tl.constexpr,
):
    """The gradient `acc` through the ReLU at these offsets, and its sums."""
    mean, inv_std = tl.load(bn_state + offs_c, mask_c, 0.0), tl.load(bn_state + channels + offs_c, mask_c, 0.0)
    scale = tl.load(bn_state + 2 * channels + offs_c, mask_c, 0.0)
    shift = tl.load(bn_state + 3 * channels + offs_c, mask_c, 0.0)
    x = tl.load(pre_bn + offs, mask, 0.0).to(tl.float32)
    g = tl.trans(acc.to(out.dtype.element_ty))
    g = tl.where(mask & (x * scale[None, :] + shift[None, :] > 0), g, 0.0)
    tl.store(out + offs, g, mask)
    g = g.to(tl.float32)
    if reduce_partials(
        tl.sum(g, 0), tl.sum(g * (x - mean[None, :]), 0) * inv_std, partials, counters, partial, num_partials,
        channel_block, channels, offs_c, mask_c, block_c,
    ):
        first_sum, second_sum = sum_groups(partials, num_partials, channels, offs_c, mask_c, block_c)
        tl.store(sums + offs_c, first_sum, mask_c)
        tl.store(sums + channels + offs_c, second_sum, mask_c)
