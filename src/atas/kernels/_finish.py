"""What follows a convolution, done on a tile of its products while they are still in registers.

In eval mode that is all of an addition, BatchNorm and ReLU, in both directions; in train mode the addition and the
column sums that BatchNorm needs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from atas.kernels._norm import _finalize_forward
from atas.kernels._sums import all_groups, leave

_LEAST = tl.constexpr(64)  # channels of the smallest block: counters are told apart by it


@triton.jit
def _cells(pixels, first, rows, columns: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Columns of a tile, which of them exist, its cells in a matrix (rows, columns), and which of those exist."""
    at = first + tl.arange(0, block)
    inside = at < columns
    return at, inside, pixels[:, None] * columns + at[None, :], (pixels < rows)[:, None] & inside[None, :]


@triton.jit
def _finish_eval(  # type: ignore[no-untyped-def]
    found, pixels, first, other, total, active, weight, bias, running_mean, running_var, rows, eps, adds: tl.constexpr,
    keeps: tl.constexpr, columns: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """active = relu(bn(total)) for total = found (+ other)."""
    at, inside, cells, valid = _cells(pixels, first, rows, columns, block)
    scale = tl.load(weight + at, inside, 0.0) * tl.rsqrt(tl.load(running_var + at, inside, 1.0) + eps)
    shift = tl.load(bias + at, inside, 0.0) - tl.load(running_mean + at, inside, 0.0) * scale
    out = tl.trans(found.to(active.dtype.element_ty))
    if adds:
        out = (out.to(tl.float32) + tl.load(other + cells, valid, 0.0).to(tl.float32)).to(out.dtype)
    if keeps:
        tl.store(total + cells, out, valid)
    z = out.to(tl.float32) * scale[None, :] + shift[None, :]
    tl.store(active + cells, tl.maximum(z, 0.0).to(out.dtype), valid)


@triton.jit
def _finish_train(  # type: ignore[no-untyped-def]
    found, pixels, part, first, count, other, total, parts, counters, saved, weight, bias, running_mean, running_var,
    rows, eps, momentum, adds: tl.constexpr, columns: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """total = found (+ other), and from its column sums mean and deviation; running statistics follow."""
    at, inside, cells, valid = _cells(pixels, first, rows, columns, block)
    shift = tl.load(running_mean + at, inside, 0.0)
    out = tl.trans(found.to(total.dtype.element_ty))
    if adds:
        out = (out.to(tl.float32) + tl.load(other + cells, valid, 0.0).to(tl.float32)).to(out.dtype)
    tl.store(total + cells, out, valid)
    z = tl.where(valid, out.to(tl.float32) - shift[None, :], 0.0)
    if leave(
        tl.sum(z, 0), tl.sum(z * z, 0), parts, counters, part, count, first // _LEAST, columns, at, inside, block
    ):  # fmt: skip
        first_sum, second_sum = all_groups(parts, count, columns, at, inside, block)
        _finalize_forward(
            first_sum, second_sum, columns, at, inside, weight, bias, running_mean, running_var, saved, rows, eps,
            momentum, shift,
        )  # fmt: skip


@triton.jit
def _finish_backward_eval(  # type: ignore[no-untyped-def]
    found, pixels, first, past, active, out, weight, running_var, rows, eps, adds: tl.constexpr, columns: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Back through ReLU and BatchNorm by the running statistics (+ past)."""
    at, inside, cells, valid = _cells(pixels, first, rows, columns, block)
    scale = tl.load(weight + at, inside, 0.0) * tl.rsqrt(tl.load(running_var + at, inside, 1.0) + eps)
    g = tl.trans(found.to(out.dtype.element_ty)).to(tl.float32)
    d = tl.where(tl.load(active + cells, valid, 0.0) > 0, g, 0.0) * scale[None, :]
    if adds:
        d += tl.load(past + cells, valid, 0.0).to(tl.float32)
    tl.store(out + cells, d.to(out.dtype.element_ty), valid)


@triton.jit
def _finish_backward_train(  # type: ignore[no-untyped-def]
    found, pixels, part, first, count, total, out, parts, counters, saved, sums, rows, columns: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """Back through the ReLU, and the sums that BatchNorm's gradient needs."""
    at, inside, cells, valid = _cells(pixels, first, rows, columns, block)
    _behind_relu(
        found, part, count, first // _LEAST, at, inside, cells, valid, total, out, parts, counters, saved, sums,
        columns, block,
    )  # fmt: skip


@triton.jit
def _behind_relu(  # type: ignore[no-untyped-def]
    found, part, count, column_block, at, inside, cells, valid, total, out, parts, counters, saved, sums,
    columns: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The gradient `found` behind the ReLU at these cells, and its sums."""
    mean, deviation = tl.load(saved + at, inside, 0.0), tl.load(saved + columns + at, inside, 0.0)
    scale = tl.load(saved + 2 * columns + at, inside, 0.0)
    shift = tl.load(saved + 3 * columns + at, inside, 0.0)
    x = tl.load(total + cells, valid, 0.0).to(tl.float32)
    g = tl.trans(found.to(out.dtype.element_ty))
    g = tl.where(valid & (x * scale[None, :] + shift[None, :] > 0), g, 0.0)
    tl.store(out + cells, g, valid)
    g = g.to(tl.float32)
    if leave(
        tl.sum(g, 0), tl.sum(g * (x - mean[None, :]), 0) * deviation, parts, counters, part, count, column_block,
        columns, at, inside, block,
    ):  # fmt: skip
        first_sum, second_sum = all_groups(parts, count, columns, at, inside, block)
        tl.store(sums + at, first_sum, inside)
        tl.store(sums + columns + at, second_sum, inside)
