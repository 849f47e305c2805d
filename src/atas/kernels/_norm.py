"""BatchNorm and ReLU as two passes over memory in each direction, an addition before them included.

Activations are channels_last, so a batch is a matrix of M = N H W rows and C columns. In train mode the first pass adds
up each column (and writes the sum of two inputs, where there are two), the second normalises; in eval mode one pass
does all.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.kernels._launch import launch
from atas.kernels._sums import all_groups, counter, leave, space

_TILE = 4096  # entries that a program takes at a time
_SUM_TILE = 4096
_SUM_PROGRAMS = 528  # four for each multiprocessor of an H100 or H200


@triton.jit
def _finalize_forward(  # type: ignore[no-untyped-def]
    first, second, columns, at, inside, weight, bias, running_mean, running_var, saved, rows, eps, momentum, shift
):
    """Mean and deviation of these columns from their sums; running statistics follow."""
    offset = first / rows
    mean = shift + offset
    variance = tl.maximum(second / rows - offset * offset, 0.0)
    scale = tl.load(weight + at, inside, 0.0) * tl.rsqrt(variance + eps)
    tl.store(saved + at, mean, inside)
    tl.store(saved + columns + at, tl.rsqrt(variance + eps), inside)
    tl.store(saved + 2 * columns + at, scale, inside)
    tl.store(saved + 3 * columns + at, tl.load(bias + at, inside, 0.0) - mean * scale, inside)
    tl.store(running_mean + at, shift + momentum * (mean - shift), inside)
    old = tl.load(running_var + at, inside, 0.0)
    tl.store(running_var + at, old + momentum * (variance * (rows / (rows - 1)) - old), inside)


@triton.jit
def _train_sums(  # type: ignore[no-untyped-def]
    a, b, total, parts, counters, weight, bias, running_mean, running_var, saved, rows, eps, momentum,
    adds: tl.constexpr, columns: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
    repeats: tl.constexpr,
):  # fmt: skip
    """Column sums of a (+ b, kept in total), about the running mean so that squares do not cancel."""
    part, column_block = tl.program_id(0), tl.program_id(1)
    at = column_block * block_columns + tl.arange(0, block_columns)
    inside = at < columns
    shift = tl.load(running_mean + at, inside, 0.0)
    first = tl.zeros((block_rows, block_columns), tl.float32)
    second = tl.zeros((block_rows, block_columns), tl.float32)
    for repeat in range(repeats):
        row = (part * repeats + repeat) * block_rows + tl.arange(0, block_rows)
        cells = row[:, None] * columns + at[None, :]
        valid = (row < rows)[:, None] & inside[None, :]
        x = tl.load(a + cells, valid, 0.0)
        if adds:
            x = (x.to(tl.float32) + tl.load(b + cells, valid, 0.0).to(tl.float32)).to(x.dtype)
            tl.store(total + cells, x, valid)
        x = tl.where(valid, x.to(tl.float32) - shift[None, :], 0.0)
        first += x
        second += x * x
    count = tl.num_programs(0)
    if leave(
        tl.sum(first, 0), tl.sum(second, 0), parts, counters, part, count, column_block, columns, at, inside,
        block_columns,
    ):  # fmt: skip
        first_sum, second_sum = all_groups(parts, count, columns, at, inside, block_columns)
        _finalize_forward(
            first_sum, second_sum, columns, at, inside, weight, bias, running_mean, running_var, saved, rows, eps,
            momentum, shift,
        )  # fmt: skip


@triton.jit
def _scale_and_clip(  # type: ignore[no-untyped-def]
    total, out, saved, rows, columns: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr
):
    """out = relu(total * scale + shift)."""
    at = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    inside = at < columns
    scale = tl.load(saved + 2 * columns + at, inside, 0.0)
    shift = tl.load(saved + 3 * columns + at, inside, 0.0)
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    cells = row[:, None] * columns + at[None, :]
    valid = (row < rows)[:, None] & inside[None, :]
    x = tl.load(total + cells, valid, 0.0)
    z = x.to(tl.float32) * scale[None, :] + shift[None, :]
    tl.store(out + cells, tl.maximum(z, 0.0).to(x.dtype), valid)


@triton.jit
def _train_gradient_sums(  # type: ignore[no-untyped-def]
    total, gradient, parts, counters, saved, sums, rows,
    columns: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr, repeats: tl.constexpr,
):  # fmt: skip
    """Column sums of the gradient behind the ReLU, and of its product with the normalised input."""
    part, column_block = tl.program_id(0), tl.program_id(1)
    at = column_block * block_columns + tl.arange(0, block_columns)
    inside = at < columns
    mean, deviation = tl.load(saved + at, inside, 0.0), tl.load(saved + columns + at, inside, 0.0)
    scale = tl.load(saved + 2 * columns + at, inside, 0.0)
    shift = tl.load(saved + 3 * columns + at, inside, 0.0)
    first = tl.zeros((block_rows, block_columns), tl.float32)
    second = tl.zeros((block_rows, block_columns), tl.float32)
    for repeat in range(repeats):
        row = (part * repeats + repeat) * block_rows + tl.arange(0, block_rows)
        cells = row[:, None] * columns + at[None, :]
        valid = (row < rows)[:, None] & inside[None, :]
        x = tl.load(total + cells, valid, 0.0).to(tl.float32)
        g = tl.load(gradient + cells, valid, 0.0).to(tl.float32)
        g = tl.where(x * scale[None, :] + shift[None, :] > 0, g, 0.0)
        first += g
        second += g * (x - mean[None, :])
    count = tl.num_programs(0)
    if leave(
        tl.sum(first, 0), tl.sum(second, 0) * deviation, parts, counters, part, count, column_block, columns, at,
        inside, block_columns,
    ):  # fmt: skip
        first_sum, second_sum = all_groups(parts, count, columns, at, inside, block_columns)
        tl.store(sums + at, first_sum, inside)
        tl.store(sums + columns + at, second_sum, inside)


@triton.jit
def _train_gradient(  # type: ignore[no-untyped-def]
    total, gradient, extra, out, saved, sums, rows,
    adds: tl.constexpr, columns: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """The gradient by the input of BatchNorm, with what comes to it past BatchNorm (extra)."""
    at = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    inside = at < columns
    mean, deviation = tl.load(saved + at, inside, 0.0), tl.load(saved + columns + at, inside, 0.0)
    scale = tl.load(saved + 2 * columns + at, inside, 0.0)
    shift = tl.load(saved + 3 * columns + at, inside, 0.0)
    first = tl.load(sums + at, inside, 0.0) / rows
    second = tl.load(sums + columns + at, inside, 0.0) / rows * deviation
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    cells = row[:, None] * columns + at[None, :]
    valid = (row < rows)[:, None] & inside[None, :]
    x = tl.load(total + cells, valid, 0.0)
    kind = x.dtype
    x = x.to(tl.float32)
    g = tl.load(gradient + cells, valid, 0.0).to(tl.float32)
    g = tl.where(x * scale[None, :] + shift[None, :] > 0, g, 0.0)
    d = scale[None, :] * (g - first[None, :] - (x - mean[None, :]) * second[None, :])
    if adds:
        d += tl.load(extra + cells, valid, 0.0).to(tl.float32)
    tl.store(out + cells, d.to(kind), valid)


@triton.jit
def _eval_forward(  # type: ignore[no-untyped-def]
    a, b, total, out, weight, bias, running_mean, running_var, rows, eps,
    adds: tl.constexpr, columns: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """total = a + b and out = relu(bn(total)) by the running statistics."""
    at = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    inside = at < columns
    scale = tl.load(weight + at, inside, 0.0) * tl.rsqrt(tl.load(running_var + at, inside, 1.0) + eps)
    shift = tl.load(bias + at, inside, 0.0) - tl.load(running_mean + at, inside, 0.0) * scale
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    cells = row[:, None] * columns + at[None, :]
    valid = (row < rows)[:, None] & inside[None, :]
    x = tl.load(a + cells, valid, 0.0)
    if adds:
        x = (x.to(tl.float32) + tl.load(b + cells, valid, 0.0).to(tl.float32)).to(x.dtype)
        tl.store(total + cells, x, valid)
    z = x.to(tl.float32) * scale[None, :] + shift[None, :]
    tl.store(out + cells, tl.maximum(z, 0.0).to(x.dtype), valid)


@triton.jit
def _eval_gradient(  # type: ignore[no-untyped-def]
    result, gradient, extra, out, weight, running_var, rows, eps,
    adds: tl.constexpr, columns: tl.constexpr, block_rows: tl.constexpr, block_columns: tl.constexpr,
):  # fmt: skip
    """The gradient by total in eval mode; the ReLU's mask is read off its result."""
    at = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    inside = at < columns
    scale = tl.load(weight + at, inside, 0.0) * tl.rsqrt(tl.load(running_var + at, inside, 1.0) + eps)
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    cells = row[:, None] * columns + at[None, :]
    valid = (row < rows)[:, None] & inside[None, :]
    y = tl.load(result + cells, valid, 0.0)
    g = tl.load(gradient + cells, valid, 0.0).to(tl.float32)
    d = tl.where(y > 0, g, 0.0) * scale[None, :]
    if adds:
        d += tl.load(extra + cells, valid, 0.0).to(tl.float32)
    tl.store(out + cells, d.to(y.dtype), valid)


class Plan:
    """How a matrix of this many rows and columns is cut into programs."""

    def __init__(self, x: Tensor) -> None:
        self.columns = x.shape[1]
        self.rows = x.numel() // self.columns
        self.block_columns = min(triton.next_power_of_2(self.columns), 64)
        self.column_blocks = triton.cdiv(self.columns, self.block_columns)
        self.block_rows = _TILE // self.block_columns
        self.grid = (triton.cdiv(self.rows, self.block_rows), self.column_blocks)
        self.sum_rows = _SUM_TILE // self.block_columns
        tiles = triton.cdiv(self.rows, self.sum_rows)
        self.repeats = triton.next_power_of_2(triton.cdiv(tiles, max(1, _SUM_PROGRAMS // self.column_blocks)))
        self.parts = triton.cdiv(tiles, self.repeats)
        self.sum_grid = (self.parts, self.column_blocks)

    def tiles(self) -> dict[str, int]:
        """What every kernel that goes once over the matrix is told."""
        return {"columns": self.columns, "block_rows": self.block_rows, "block_columns": self.block_columns}

    def sum_tiles(self) -> dict[str, int]:
        """What the kernels that add up columns are told."""
        return self.tiles() | {"block_rows": self.sum_rows, "repeats": self.repeats, "num_warps": 8}


def forward_train(
    a: Tensor,
    b: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(a + b, relu(bn(a + b)), what the backward pass needs); running statistics are updated."""
    plan = Plan(a)
    total, out = a if b is None else torch.empty_like(a), torch.empty_like(a)
    saved = torch.empty(4, plan.columns, dtype=torch.float32, device=a.device)
    parts = space(plan.parts, plan.columns, a.device)
    launch(
        _train_sums, plan.sum_grid,
        a, a if b is None else b, total, parts, counter(a.device), weight, bias, running_mean, running_var, saved,
        plan.rows, eps, momentum, adds=b is not None, **plan.sum_tiles(),
    )  # fmt: skip
    launch(_scale_and_clip, plan.grid, total, out, saved, plan.rows, **plan.tiles())
    return total, out, saved


def backward_train(
    total: Tensor, gradient: Tensor, extra: Tensor | None, saved: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by the input, the weight and the bias of BatchNorm."""
    plan = Plan(total)
    sums = torch.empty(2, plan.columns, dtype=torch.float32, device=total.device)
    parts = space(plan.parts, plan.columns, total.device)
    launch(
        _train_gradient_sums,
        plan.sum_grid,
        total,
        gradient,
        parts,
        counter(total.device),
        saved,
        sums,
        plan.rows,
        **plan.sum_tiles(),
    )
    return apply_gradient(total, gradient, extra, saved, sums), sums[1], sums[0]


def apply_gradient(total: Tensor, gradient: Tensor, extra: Tensor | None, saved: Tensor, sums: Tensor) -> Tensor:
    """The gradient by the input of BatchNorm, once the column sums are there."""
    plan, out = Plan(total), torch.empty_like(total)
    launch(
        _train_gradient, plan.grid,
        total, gradient, gradient if extra is None else extra, out, saved, sums, plan.rows,
        adds=extra is not None, **plan.tiles(),
    )  # fmt: skip
    return out


def forward_eval(
    a: Tensor, b: Tensor | None, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(a + b, relu(bn(a + b))) by the running statistics."""
    plan = Plan(a)
    total, out = a if b is None else torch.empty_like(a), torch.empty_like(a)
    launch(
        _eval_forward, plan.grid,
        a, a if b is None else b, total, out, weight, bias, running_mean, running_var, plan.rows, eps,
        adds=b is not None, **plan.tiles(),
    )  # fmt: skip
    return total, out


def backward_eval(
    result: Tensor, gradient: Tensor, extra: Tensor | None, weight: Tensor, running_var: Tensor, eps: float
) -> Tensor:
    """The gradient by the input of BatchNorm in eval mode."""
    plan = Plan(result)
    out = torch.empty_like(result)
    launch(
        _eval_gradient, plan.grid,
        result, gradient, gradient if extra is None else extra, out, weight, running_var, plan.rows, eps,
        adds=extra is not None, **plan.tiles(),
    )  # fmt: skip
    return out
