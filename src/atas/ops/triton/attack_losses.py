"""Losses of the attacks with their gradients, margins, and whether a prediction is correct.

The gradient is computed with the loss, so the backward pass is a product. Among equal logits the first comes first in
the order; the gradient of the best other logit is shared by all equal ones, as in torch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.attacks import losses as plain
from atas.attacks.losses import DIVISION_EPSILON
from atas.core.dispatch import implements
from atas.ops.triton.launch import NO_FMA, can_launch, first_order, launch

_BLOCK = 1024  # logits of a program, or one row of them
_MAX_CLASSES = 4096
_LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TINY = tl.constexpr(DIVISION_EPSILON)


@triton.jit
def _load_rows(
    logits, rows, classes: tl.constexpr, block_classes: tl.constexpr, block_rows: tl.constexpr
):
    """Load a block of rows: their numbers, offsets, mask and logits, and which rows have a NaN."""
    row, column = tl.program_id(0) * block_rows + tl.arange(0, block_rows), tl.arange(0, block_classes)
    offs = row[:, None] * classes + column[None, :]
    mask = (row < rows)[:, None] & (column < classes)[None, :]
    z = tl.load(logits + offs, mask, 0.0).to(tl.float32)
    has_nan = tl.max((z != z).to(tl.int32), 1) > 0
    return row, offs, mask, tl.where((column < classes)[None, :], z, float("-inf")), has_nan


@triton.jit
def _nan_last(z):
    """Replace NaN by the least value, so that it comes last in the order."""
    return tl.where(z == z, z, float("-inf"))


@triton.jit
def _select(z, selected):
    """The one logit of each row that is flagged."""
    return tl.sum(tl.where(selected, z, 0.0), 1)


@triton.jit
def _pop_max(z, column):
    """The greatest logit of each row, where it is, and the rest."""
    value, argmax = tl.max(z, 1, return_indices=True)
    is_max = column == argmax[:, None]
    return value, is_max, tl.where(is_max, float("-inf"), z)


@triton.jit
def _loss_kernel(
    logits, labels, targets, losses, gradient, rows, kind: tl.constexpr, needs_grad: tl.constexpr,
    classes: tl.constexpr, block_classes: tl.constexpr, block_rows: tl.constexpr,
):
    """The loss of each row and, with `needs_grad`, the gradient by its logits."""
    row, offs, mask, z, has_nan = _load_rows(logits, rows, classes, block_classes, block_rows)
    column = tl.arange(0, block_classes)[None, :]
    is_label = column == tl.load(labels + row, row < rows, 0)[:, None]
    if kind != "lead":
        z = _nan_last(z)
    if kind == "ce":
        z -= tl.max(z, 1)[:, None]
        share = tl.exp(z)
        sum_exp = tl.sum(share, 1)
        loss = tl.log(sum_exp) - _select(z, is_label)
        grad = share / sum_exp[:, None] - tl.where(is_label, 1.0, 0.0)
    else:
        if (kind == "dlr") or (kind == "margin"):
            others = tl.where(is_label, float("-inf"), z)
            best = tl.max(others, 1)
            is_target = (others == best[:, None]) & ~is_label & mask
            share = tl.where(is_target, tl.div_rn(1.0, tl.sum(is_target.to(tl.float32), 1))[:, None], 0.0)
        else:
            is_target = column == tl.load(targets + row, row < rows, 0)[:, None]
            best = _select(z, is_target)
            share = tl.where(is_target, 1.0, 0.0)
        loss = best - _select(z, is_label)
        grad = share - tl.where(is_label, 1.0, 0.0)
        if (kind == "dlr" or kind == "t") and classes > 2:
            first, at_first, rest = _pop_max(z, column)
            second, at_second, rest = _pop_max(rest, column)
            low, at_low, rest = _pop_max(rest, column)
            low_weights = tl.where(at_low, 1.0, 0.0)
            if kind == "t":
                if classes > 3:
                    second, at_second, rest = _pop_max(rest, column)
                low = (low + second) * 0.5
                low_weights = tl.where(at_low | at_second, 0.5, 0.0)
            denominator = first - low + _TINY
            loss = tl.div_rn(loss, denominator)
            by_spread = tl.div_rn(loss, denominator)[:, None]
            grad = tl.div_rn(grad, denominator[:, None]) - by_spread * (tl.where(at_first, 1.0, 0.0) - low_weights)
        if kind == "margin":
            loss, grad = -loss, -grad
    if kind != "lead":
        loss = tl.where(has_nan, float("nan"), loss)
        grad = tl.where(has_nan[:, None], float("nan"), grad)
    tl.store(losses + row, loss, row < rows)
    if needs_grad:
        tl.store(gradient + offs, grad, mask)


@triton.jit
def _correct_kernel(
    logits, labels, is_correct, rows, classes: tl.constexpr, block_classes: tl.constexpr, block_rows: tl.constexpr
):
    """Whether the greatest logit of each row is the label's."""
    row, _, _, z, has_nan = _load_rows(logits, rows, classes, block_classes, block_rows)
    label = tl.load(labels + row, row < rows, 0)
    tl.store(is_correct + row, (tl.argmax(_nan_last(z), 1) == label) & ~has_nan, row < rows)


class _Loss(torch.autograd.Function):
    """The gradient comes with the loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor, target: Tensor, kind: str) -> Tensor:
        """One number a row."""
        losses = torch.empty(len(y), dtype=torch.float32, device=logits.device)
        needs_grad = ctx.needs_input_grad[0]
        gradient = torch.empty(logits.shape if needs_grad else (1,), dtype=torch.float32, device=logits.device)
        launch(
            _loss_kernel, _grid(logits), logits.contiguous(), y.contiguous(), target.contiguous(), losses, gradient,
            len(y), kind=kind, needs_grad=needs_grad, **_kernel_args(logits), **NO_FMA,
        )
        ctx.save_for_backward(gradient)
        ctx.kind = logits.dtype
        return losses

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        """By the logits."""
        (gradient,) = ctx.saved_tensors
        return (gradient * grad_output.unsqueeze(1)).to(ctx.kind), None, None, None


@implements(plain.attack_loss)
def attack_loss(kind: str, logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """Up to 4,096 classes; logits in float32, bfloat16 or float16, labels in int64."""
    return _Loss.apply(logits, y, target, kind) if _supports(logits, y, target) else NotImplemented


@implements(plain.target_margin)
def target_margin(logits: Tensor, y: Tensor, target: Tensor) -> Tensor:
    """As `attack_loss`."""
    return attack_loss("lead", logits, y, target)


@implements(plain.margin)
def margin(logits: Tensor, y: Tensor) -> Tensor:
    """As `attack_loss`."""
    return attack_loss("margin", logits, y, y)


@implements(plain.correct)
def correct(logits: Tensor, y: Tensor) -> Tensor:
    """As `attack_loss`."""
    if not _supports(logits, y):
        return NotImplemented
    is_correct = torch.empty(len(y), dtype=torch.bool, device=logits.device)
    launch(
        _correct_kernel, _grid(logits), logits.contiguous(), y.contiguous(), is_correct, len(y),
        **_kernel_args(logits), **NO_FMA,
    )
    return is_correct


def _supports(logits: Tensor, *classes: Tensor) -> bool:
    if logits.dim() != 2 or not logits.numel() or not 2 <= logits.shape[1] <= _MAX_CLASSES or not can_launch(logits):
        return False
    numbers = all(number.shape == logits.shape[:1] and number.dtype == torch.int64 for number in classes)
    return numbers and logits.dtype in _LOGIT_DTYPES


def _rows_per_program(logits: Tensor) -> int:
    return max(_BLOCK // triton.next_power_of_2(logits.shape[1]), 1)


def _grid(logits: Tensor) -> tuple[int]:
    return (triton.cdiv(len(logits), _rows_per_program(logits)),)


def _kernel_args(logits: Tensor) -> dict[str, int]:
    classes = logits.shape[1]
    return {
        "classes": classes,
        "block_classes": triton.next_power_of_2(classes),
        "block_rows": _rows_per_program(logits),
    }
