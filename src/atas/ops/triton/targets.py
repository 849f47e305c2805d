"""Label targets of a batch and the update of the averages that they are made of, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.core.dispatch import implements
from atas.core.rng import CounterRNG
from atas.methods import targets as plain
from atas.methods.targets import LabelTargets, RememberedPredictions
from atas.ops.triton.launch import can_launch, launch

_BLOCK = 1024  # logits that a program takes
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _targets_kernel(
    logits, labels, index, averages, epoch, targets, rows, smoothing, share, decay, from_epoch, remembers: tl.constexpr,
    updates: tl.constexpr, classes: tl.constexpr, block_classes: tl.constexpr, block_rows: tl.constexpr,
):
    """The targets of a block of examples; their averages are read, then written."""
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    column = tl.arange(0, block_classes)
    mask_row, mask_class = row < rows, column < classes
    mask = mask_row[:, None] & mask_class[None, :]
    offs = row[:, None] * classes + column[None, :]
    label = tl.load(labels + row, mask_row, 0)
    hard = tl.where(column[None, :] == label[:, None], 1.0, 0.0)
    target = (1 - smoothing) * hard + smoothing * (1 / classes)
    if remembers:
        places = averages + tl.load(index + row, mask_row, 0)[:, None] * classes + column[None, :]
        average = tl.load(places, mask, 0.0).to(tl.float32)
        total = tl.sum(average, 1)[:, None]
        average = tl.where(total > 0, average / tl.where(total > 0, total, 1.0), hard)
        now = tl.where(tl.load(epoch) >= from_epoch, share, 0.0)
        target = (1 - now) * target + now * average
        if updates:
            z = tl.load(logits + offs, mask, 0.0).to(tl.float32)
            z = tl.where(mask_class[None, :], z, float("-inf"))
            predicted = tl.exp(z - tl.max(z, 1)[:, None])
            predicted = predicted / tl.sum(predicted, 1)[:, None]
            tl.store(places, decay * average + (1 - decay) * predicted, mask)
    tl.store(targets + offs, target, mask)


@implements(plain.make_targets)
def make_targets(
    targets: LabelTargets, logits: Tensor, y: Tensor, index: Tensor, rng: CounterRNG, remember: bool
) -> Tensor:
    """Labels with uniform smoothing, and remembered predictions of the package's own class; up to 1,024 classes."""
    remembers = type(targets) is RememberedPredictions
    known = (remembers or type(targets) is LabelTargets) and (targets.noise == "uniform" or not targets.smoothing)
    if not known or not can_launch(logits) or logits.dtype not in _DTYPES or not 0 < logits.shape[1] <= _BLOCK:
        return NotImplemented
    rows, classes = logits.shape
    averages, share, decay, from_epoch = logits, 0.0, 0.0, 0
    if isinstance(targets, RememberedPredictions):
        if classes != targets.classes or not targets.average.is_contiguous():
            return NotImplemented
        averages, share, decay, from_epoch = targets.average, targets.share, targets.decay, targets.from_epoch
    found = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    block_classes = triton.next_power_of_2(classes)
    block_rows = min(triton.next_power_of_2(rows), max(1, _BLOCK // block_classes))
    launch(
        _targets_kernel, (triton.cdiv(rows, block_rows),), logits.contiguous(), y.contiguous(), index.contiguous(),
        averages, rng.epoch, found, rows, float(targets.smoothing), float(share), float(decay), from_epoch,
        remembers=remembers, updates=remember, classes=classes, block_classes=block_classes, block_rows=block_rows,
    )
    return found
