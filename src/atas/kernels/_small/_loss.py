"""Cross-entropy with its gradient, and the tally of a step: one program over all logits, so sums have one order."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.kernels._launch import launch

_TILE = 4096  # logits at a time
_MOST = 1 << 19  # logits that one program should go over
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit
def _cross_entropy(  # type: ignore[no-untyped-def]
    logits, labels, loss, gradient, rows, weight, classes: tl.constexpr, padded: tl.constexpr, some: tl.constexpr
):
    """The losses of all examples, added up and times the weight, and the gradient by the logits."""
    column = tl.arange(0, padded)
    total = tl.zeros((some,), tl.float32)
    for first in range(0, rows, some):
        row = first + tl.arange(0, some)
        there, known = row < rows, column < classes
        cells = row[:, None] * classes + column[None, :]
        valid = there[:, None] & known[None, :]
        z = tl.load(logits + cells, valid, 0.0).to(tl.float32)
        z = tl.where(known[None, :], z, float("-inf"))
        z -= tl.max(z, 1)[:, None]
        share = tl.exp(z)
        whole = tl.sum(share, 1)
        label = tl.load(labels + row, there, 0)
        right = column[None, :] == label[:, None]
        total += tl.where(there, tl.log(whole) - tl.sum(tl.where(right, z, 0.0), 1), 0.0)
        tl.store(gradient + cells, (share / whole[:, None] - tl.where(right, 1.0, 0.0)) * weight, valid)
    tl.store(loss, tl.sum(total, 0) * weight)


@triton.jit
def _tally(  # type: ignore[no-untyped-def]
    sums, loss, logits, labels, index, lengths, rows, adaptive: tl.constexpr, classes: tl.constexpr,
    padded: tl.constexpr, some: tl.constexpr,
):  # fmt: skip
    """Add a step's loss, right answers, step sizes and examples to those of the epoch."""
    column = tl.arange(0, padded)
    right = tl.zeros((some,), tl.int32)
    far = tl.zeros((some,), tl.float32)
    for first in range(0, rows, some):
        row = first + tl.arange(0, some)
        there, known = row < rows, column < classes
        z = tl.load(logits + row[:, None] * classes + column[None, :], there[:, None] & known[None, :], 0.0)
        z = z.to(tl.float32)
        z = tl.where(z == z, z, float("inf"))  # what is not a number is the largest, as for torch
        z = tl.where(known[None, :], z, float("-inf"))
        right += (there & (tl.argmax(z, 1) == tl.load(labels + row, there, 0))).to(tl.int32)
        if adaptive:
            far += tl.load(lengths + tl.load(index + row, there, 0), there, 0.0)
    tl.store(sums, tl.load(sums) + (tl.load(loss) * rows).to(tl.float64))
    tl.store(sums + 1, tl.load(sums + 1) + tl.sum(right, 0).to(tl.float64))
    tl.store(sums + 2, tl.load(sums + 2) + tl.sum(far, 0).to(tl.float64))
    tl.store(sums + 3, tl.load(sums + 3) + rows)


class _CrossEntropy(torch.autograd.Function):
    """The gradient comes with the loss; the way back is a product."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor, weight: float) -> Tensor:
        """The losses of the batch, added up and times the weight."""
        loss = torch.empty((), dtype=torch.float32, device=logits.device)
        gradient = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        launch(
            _cross_entropy, (1,), logits.contiguous(), y.contiguous(), loss, gradient, len(y), weight, **_tiles(logits)
        )  # fmt: skip
        ctx.save_for_backward(gradient)
        ctx.kind = logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor, None, None]:
        """By the logits."""
        if torch.is_grad_enabled():  # what is kept is a constant, so its derivative would be wrong
            raise RuntimeError("the cross-entropy by hand has no second derivative")
        (gradient,) = ctx.saved_tensors
        return (gradient * incoming).to(ctx.kind), None, None


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """As `passes.cross_entropy`."""
    return _CrossEntropy.apply(logits, y, 1 / len(y)) if _covers(logits, y) else NotImplemented


def cross_entropy_sum(logits: Tensor, y: Tensor) -> Tensor:
    """As `passes.cross_entropy_sum`."""
    return _CrossEntropy.apply(logits, y, 1.0) if _covers(logits, y) else NotImplemented


def tally(sums: Tensor, loss: Tensor, logits: Tensor, y: Tensor, index: Tensor, step_sizes: Tensor | None) -> None:
    """As `engine._tally`."""
    numbers = [loss] if step_sizes is None else [loss, step_sizes]
    if not _covers(logits, y) or any(number.dtype != torch.float32 for number in numbers):
        return NotImplemented
    launch(
        _tally, (1,),
        sums, loss, logits.contiguous(), y.contiguous(), index.contiguous(), numbers[-1], len(y),
        adaptive=step_sizes is not None, **_tiles(logits),
    )  # fmt: skip
    return None


def _covers(logits: Tensor, y: Tensor) -> bool:
    if logits.dim() != 2 or y.shape != logits.shape[:1] or not logits.numel():
        return False
    few = len(y) * triton.next_power_of_2(logits.shape[1]) <= _MOST and logits.shape[1] <= _TILE
    return few and logits.dtype in _FLOATS and y.dtype in _INTEGERS


def _tiles(logits: Tensor) -> dict[str, int]:
    rows, classes = logits.shape
    padded = triton.next_power_of_2(classes)
    some = min(triton.next_power_of_2(rows), _TILE // padded)
    return {"classes": classes, "padded": padded, "some": some, "num_warps": 8 if some * padded > 1024 else 4}
