"""Cross-entropy with its gradient, and the accumulation of a step's metrics: one program over all logits, so sums have
one order."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.core import autograd as plain
from atas.core.dispatch import implements
from atas.ops.triton.launch import can_launch, first_order, launch

_BLOCK = 4096  # logits at a time
_MAX_LOGITS = 1 << 19  # logits that one program should go over
_LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LABEL_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit
def _cross_entropy_kernel(
    logits,
    labels,
    loss,
    gradient,
    rows,
    weight,
    classes: tl.constexpr,
    block_classes: tl.constexpr,
    block_rows: tl.constexpr,
):
    """The losses of all examples, added up and times the weight, and the gradient by the logits."""
    column = tl.arange(0, block_classes)
    loss_sum = tl.zeros((block_rows,), tl.float32)
    for first in range(0, rows, block_rows):
        row = first + tl.arange(0, block_rows)
        mask_row, mask_class = row < rows, column < classes
        offs = row[:, None] * classes + column[None, :]
        mask = mask_row[:, None] & mask_class[None, :]
        z = tl.load(logits + offs, mask, 0.0).to(tl.float32)
        z = tl.where(mask_class[None, :], z, float("-inf"))
        z -= tl.max(z, 1)[:, None]
        share = tl.exp(z)
        sum_exp = tl.sum(share, 1)
        label = tl.load(labels + row, mask_row, 0)
        is_label = column[None, :] == label[:, None]
        loss_sum += tl.where(mask_row, tl.log(sum_exp) - tl.sum(tl.where(is_label, z, 0.0), 1), 0.0)
        tl.store(gradient + offs, (share / sum_exp[:, None] - tl.where(is_label, 1.0, 0.0)) * weight, mask)
    tl.store(loss, tl.sum(loss_sum, 0) * weight)


@triton.jit
def _soft_cross_entropy_kernel(
    logits,
    targets,
    loss,
    gradient,
    rows,
    weight,
    classes: tl.constexpr,
    block_classes: tl.constexpr,
    block_rows: tl.constexpr,
):
    """As `_cross_entropy_kernel`, with a distribution over the classes for each example."""
    column = tl.arange(0, block_classes)
    loss_sum = tl.zeros((block_rows,), tl.float32)
    for first in range(0, rows, block_rows):
        row = first + tl.arange(0, block_rows)
        mask_class = column < classes
        offs = row[:, None] * classes + column[None, :]
        mask = (row < rows)[:, None] & mask_class[None, :]
        z = tl.load(logits + offs, mask, 0.0).to(tl.float32)
        z -= tl.max(tl.where(mask_class[None, :], z, float("-inf")), 1)[:, None]
        share = tl.where(mask_class[None, :], tl.exp(z), 0.0)
        sum_exp = tl.sum(share, 1)
        target = tl.load(targets + offs, mask, 0.0)
        total = tl.sum(target, 1)
        loss_sum += tl.sum(target * (tl.log(sum_exp)[:, None] - z), 1)
        tl.store(gradient + offs, (share / sum_exp[:, None] * total[:, None] - target) * weight, mask)
    tl.store(loss, tl.sum(loss_sum, 0) * weight)


@triton.jit
def _accumulate_kernel(
    sums, loss, logits, labels, index, step_sizes, rows, adaptive: tl.constexpr, classes: tl.constexpr,
    block_classes: tl.constexpr, block_rows: tl.constexpr,
):
    """Add a step's loss, correct predictions, step sizes and examples to those of the epoch."""
    column = tl.arange(0, block_classes)
    correct = tl.zeros((block_rows,), tl.int32)
    step_size_sum = tl.zeros((block_rows,), tl.float32)
    for first in range(0, rows, block_rows):
        row = first + tl.arange(0, block_rows)
        mask_row, mask_class = row < rows, column < classes
        z = tl.load(logits + row[:, None] * classes + column[None, :], mask_row[:, None] & mask_class[None, :], 0.0)
        z = z.to(tl.float32)
        z = tl.where(z == z, z, float("inf"))  # NaN is the largest, as in torch
        z = tl.where(mask_class[None, :], z, float("-inf"))
        correct += (mask_row & (tl.argmax(z, 1) == tl.load(labels + row, mask_row, 0))).to(tl.int32)
        if adaptive:
            step_size_sum += tl.load(step_sizes + tl.load(index + row, mask_row, 0), mask_row, 0.0)
    tl.store(sums, tl.load(sums) + (tl.load(loss) * rows).to(tl.float64))
    tl.store(sums + 1, tl.load(sums + 1) + tl.sum(correct, 0).to(tl.float64))
    tl.store(sums + 2, tl.load(sums + 2) + tl.sum(step_size_sum, 0).to(tl.float64))
    tl.store(sums + 3, tl.load(sums + 3) + rows)


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy with labels or distributions; its gradient is computed with the loss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor, weight: float) -> Tensor:
        """The losses of the batch, added up and times the weight."""
        loss = torch.empty((), dtype=torch.float32, device=logits.device)
        gradient = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        kernel = _cross_entropy_kernel if y.dim() == 1 else _soft_cross_entropy_kernel
        launch(
            kernel, (1,), logits.contiguous(), y.contiguous(), loss, gradient, len(y), weight,
            **_kernel_args(logits),
        )
        ctx.save_for_backward(gradient)
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    @first_order
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        """By the logits."""
        (gradient,) = ctx.saved_tensors
        return (gradient * grad_output).to(ctx.dtype), None, None


@implements(plain.cross_entropy)
def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Up to 524,288 logits in float32, bfloat16 or float16."""
    return _CrossEntropy.apply(logits, y, 1 / len(y)) if _supports(logits, y) else NotImplemented


@implements(plain.soft_cross_entropy)
def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """As `cross_entropy`, with targets in float32 that need no gradient."""
    matches = targets.shape == logits.shape and targets.dtype == torch.float32 and not targets.requires_grad
    supported = matches and _supports_logits(logits)
    return _CrossEntropy.apply(logits, targets, 1 / len(targets)) if supported else NotImplemented


@implements(plain.cross_entropy_sum)
def cross_entropy_sum(logits: Tensor, y: Tensor) -> Tensor:
    """As `cross_entropy`."""
    return _CrossEntropy.apply(logits, y, 1.0) if _supports(logits, y) else NotImplemented


def accumulate(sums: Tensor, loss: Tensor, logits: Tensor, y: Tensor, index: Tensor, step_sizes: Tensor | None) -> None:
    """As `cross_entropy`; loss and step sizes in float32.

    Implements `atas.training.metrics.accumulate_metrics`; the CUDA graph engine registers it.
    """
    numbers = [loss] if step_sizes is None else [loss, step_sizes]
    if not _supports(logits, y) or any(number.dtype != torch.float32 for number in numbers):
        return NotImplemented
    launch(
        _accumulate_kernel, (1,), sums, loss, logits.contiguous(), y.contiguous(), index.contiguous(), numbers[-1],
        len(y), adaptive=step_sizes is not None, **_kernel_args(logits),
    )
    return None


def _supports(logits: Tensor, y: Tensor) -> bool:
    return _supports_logits(logits) and y.shape == logits.shape[:1] and y.dtype in _LABEL_DTYPES


def _supports_logits(logits: Tensor) -> bool:
    if logits.dim() != 2 or not logits.numel() or not can_launch(logits):
        return False
    is_small = len(logits) * triton.next_power_of_2(logits.shape[1]) <= _MAX_LOGITS and logits.shape[1] <= _BLOCK
    return is_small and logits.dtype in _LOGIT_DTYPES


def _kernel_args(logits: Tensor) -> dict[str, int]:
    rows, classes = logits.shape
    block_classes = triton.next_power_of_2(classes)
    block_rows = min(triton.next_power_of_2(rows), _BLOCK // block_classes)
    return {
        "classes": classes,
        "block_classes": block_classes,
        "block_rows": block_rows,
        "num_warps": 8 if block_rows * block_classes > 1024 else 4,
    }
