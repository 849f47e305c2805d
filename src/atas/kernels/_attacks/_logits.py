"""What the searches ask of logits: losses with their gradients, the lead of a target, and whether the label wins.

The gradient comes with the loss; the way back is a product. Where several logits are equally great, the first of them
takes the place of the others in the order; of the best other logit alone, all share the gradient, as in torch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.attacks import _losses
from atas.kernels._launch import launch
from atas.kernels._small._shared import AS_TORCH

_TILE = 1024  # logits of a program, or one row of them
_WIDEST = 4096
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_TINY = tl.constexpr(_losses._NO_DIVISION_BY_ZERO)


@triton.jit
def _rows(  # type: ignore[no-untyped-def]
    logits, rows, classes: tl.constexpr, padded: tl.constexpr, some: tl.constexpr
):
    """Some rows of logits: which rows, their cells, which of these there are, the logits, and which rows have a NaN."""
    row, column = tl.program_id(0) * some + tl.arange(0, some), tl.arange(0, padded)
    cells = row[:, None] * classes + column[None, :]
    valid = (row < rows)[:, None] & (column < classes)[None, :]
    z = tl.load(logits + cells, valid, 0.0).to(tl.float32)
    broken = tl.max((z != z).to(tl.int32), 1) > 0
    return row, cells, valid, tl.where((column < classes)[None, :], z, float("-inf")), broken


@triton.jit
def _numbers(z):  # type: ignore[no-untyped-def]
    """What can be put in order: what is not a number comes last."""
    return tl.where(z == z, z, float("-inf"))


@triton.jit
def _at(z, where):  # type: ignore[no-untyped-def]
    """The one logit of each row that is flagged."""
    return tl.sum(tl.where(where, z, 0.0), 1)


@triton.jit
def _greatest(z, column):  # type: ignore[no-untyped-def]
    """The greatest logit of each row, where it is, and the rest."""
    value, place = tl.max(z, 1, return_indices=True)
    there = column == place[:, None]
    return value, there, tl.where(there, float("-inf"), z)


@triton.jit
def _loss(  # type: ignore[no-untyped-def]
    logits, labels, targets, losses, gradient, rows, kind: tl.constexpr, wanted: tl.constexpr, classes: tl.constexpr,
    padded: tl.constexpr, some: tl.constexpr,
):  # fmt: skip
    """The loss of each row, and, if it is wanted, the gradient by its logits."""
    row, cells, valid, z, broken = _rows(logits, rows, classes, padded, some)
    column = tl.arange(0, padded)[None, :]
    label = column == tl.load(labels + row, row < rows, 0)[:, None]
    if kind != "lead":
        z = _numbers(z)
    if kind == "ce":
        z -= tl.max(z, 1)[:, None]
        share = tl.exp(z)
        whole = tl.sum(share, 1)
        loss = tl.log(whole) - _at(z, label)
        slope = share / whole[:, None] - tl.where(label, 1.0, 0.0)
    else:
        if (kind == "dlr") or (kind == "margin"):
            others = tl.where(label, float("-inf"), z)
            best = tl.max(others, 1)
            towards = (others == best[:, None]) & ~label & valid
            share = tl.where(towards, tl.div_rn(1.0, tl.sum(towards.to(tl.float32), 1))[:, None], 0.0)
        else:
            towards = column == tl.load(targets + row, row < rows, 0)[:, None]
            best = _at(z, towards)
            share = tl.where(towards, 1.0, 0.0)
        loss = best - _at(z, label)
        slope = share - tl.where(label, 1.0, 0.0)
        if (kind == "dlr" or kind == "t") and classes > 2:
            first, at_first, rest = _greatest(z, column)
            second, at_second, rest = _greatest(rest, column)
            low, at_low, rest = _greatest(rest, column)
            lower = tl.where(at_low, 1.0, 0.0)
            if kind == "t":
                if classes > 3:
                    second, at_second, rest = _greatest(rest, column)
                low = (low + second) * 0.5
                lower = tl.where(at_low | at_second, 0.5, 0.0)
            spread = first - low + _TINY
            loss = tl.div_rn(loss, spread)
            by_spread = tl.div_rn(loss, spread)[:, None]
            slope = tl.div_rn(slope, spread[:, None]) - by_spread * (tl.where(at_first, 1.0, 0.0) - lower)
        if kind == "margin":
            loss, slope = -loss, -slope
    if kind != "lead":
        loss = tl.where(broken, float("nan"), loss)
        slope = tl.where(broken[:, None], float("nan"), slope)
    tl.store(losses + row, loss, row < rows)
    if wanted:
        tl.store(gradient + cells, slope, valid)


@triton.jit
def _correct(  # type: ignore[no-untyped-def]
    logits, labels, right, rows, classes: tl.constexpr, padded: tl.constexpr, some: tl.constexpr
):
    """Whether the greatest logit of each row is the label's."""
    row, _, _, z, broken = _rows(logits, rows, classes, padded, some)
    label = tl.load(labels + row, row < rows, 0)
    tl.store(right + row, (tl.argmax(_numbers(z), 1) == label) & ~broken, row < rows)


class _Loss(torch.autograd.Function):
    """The gradient comes with the loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor, target: Tensor, kind: str) -> Tensor:
        """One number a row."""
        losses = torch.empty(len(y), dtype=torch.float32, device=logits.device)
        wanted = ctx.needs_input_grad[0]
        gradient = torch.empty(logits.shape if wanted else (1,), dtype=torch.float32, device=logits.device)
        launch(
            _loss, _grid(logits),
            logits.contiguous(), y.contiguous(), target.contiguous(), losses, gradient, len(y), kind=kind,
            wanted=wanted, **_tiles(logits), **AS_TORCH,
        )  # fmt: skip
        ctx.save_for_backward(gradient)
        ctx.kind = logits.dtype
        return losses

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None, None, None]:
        """By the logits."""
        if torch.is_grad_enabled():  # what is kept is a constant, so its derivative would be wrong
            raise RuntimeError("the losses by hand have no second derivative")
        (gradient,) = ctx.saved_tensors
        return (gradient * incoming.unsqueeze(1)).to(ctx.kind), None, None, None


def losses(kind: str, logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """As `_apgd._losses`."""
    return _Loss.apply(logits, y, target, kind) if _covers(logits, y, target) else NotImplemented


def lead(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """As `_fab._lead`."""
    return losses("lead", logits, y, target)


def margin(logits: Tensor, y: Tensor) -> Tensor:
    """As `_square._margin`."""
    return losses("margin", logits, y, y)


def correct(logits: Tensor, y: Tensor) -> Tensor:
    """As `_logits._correct`."""
    if not _covers(logits, y):
        return NotImplemented
    right = torch.empty(len(y), dtype=torch.bool, device=logits.device)
    launch(
        _correct, _grid(logits), logits.contiguous(), y.contiguous(), right, len(y), **_tiles(logits), **AS_TORCH
    )  # fmt: skip
    return right


def _covers(logits: Tensor, *classes: Tensor) -> bool:
    if logits.dim() != 2 or not logits.numel() or not 2 <= logits.shape[1] <= _WIDEST:
        return False
    numbers = all(number.shape == logits.shape[:1] and number.dtype == torch.int64 for number in classes)
    return numbers and logits.dtype in _FLOATS


def _some(logits: Tensor) -> int:
    return max(_TILE // triton.next_power_of_2(logits.shape[1]), 1)


def _grid(logits: Tensor) -> tuple[int]:
    return (triton.cdiv(len(logits), _some(logits)),)


def _tiles(logits: Tensor) -> dict[str, int]:
    classes = logits.shape[1]
    return {"classes": classes, "padded": triton.next_power_of_2(classes), "some": _some(logits)}
