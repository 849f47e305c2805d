"""The adaptive step of ATAS and all that it leaves behind, one program an example."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.augment import View
from atas.kernels._launch import launch
from atas.kernels._small._ball import bounded, cells, covers, encoded, per_level, stepped
from atas.kernels._small._shared import AS_TORCH, frame, inverse, places, usual

if TYPE_CHECKING:
    from atas.methods import ATAS

_BLOCK = 4096  # entries at a time: a whole image of 3 x 32 x 32


@triton.jit
def _climb(  # type: ignore[no-untyped-def]
    x, start, gradient, index, top, left, flip, delta, averages, lengths, epoch, scale, out, eps, per_level, per_c,
    longest, beta, rest, low, high, warmup_epochs, clips: tl.constexpr, size: tl.constexpr, height: tl.constexpr,
    width: tl.constexpr, pad: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """`ATAS.climb` of one example; its average, its step size and its perturbation are remembered."""
    example = tl.program_id(0)
    image = tl.load(index + example).to(tl.int64)
    average = tl.load(averages + image)
    squares = tl.zeros((block,), tl.float32)
    for first in range(0, size, block):
        at = first + tl.arange(0, block)
        slope = tl.load(gradient + example * size + at, at < size, 0.0)
        squares += slope * slope
    adapted = beta * average + rest * tl.sum(squares, 0)
    length = tl.div_rn(1.0, 1.0 + tl.sqrt_rn(adapted) * per_c) * longest
    if clips:
        length = bounded(length, low, high)
    warming = tl.load(epoch) < warmup_epochs
    length = tl.where(warming, eps, length) * tl.load(scale)
    tl.debug_barrier()  # every thread has read the average
    tl.store(averages + image, tl.where(warming, average, adapted))
    tl.store(lengths + image, length)
    for first in range(0, size, block):
        at = first + tl.arange(0, block)
        valid = at < size
        here = example * size + at
        clean = tl.load(x + here, valid, 0.0)
        slope = tl.load(gradient + here, valid, 0.0)
        point = stepped(tl.load(start + here, valid, 0.0), slope, length, clean, eps)
        tl.store(out + here, point, valid)
        place = delta + cells(at, index, top, left, flip, example, size, height, width, pad)
        tl.store(place, encoded(point - clean, per_level, delta.dtype.element_ty), valid)


def climb_and_remember(method: ATAS, x: Tensor, index: Tensor, view: View, start: Tensor, gradient: Tensor) -> Tensor:
    """As `atas._climb_and_remember`."""
    from atas.methods import ATAS

    norms = method.norms
    own = type(method).climb is ATAS.climb and norms.average.dtype == norms.step_size.dtype == torch.float32
    if not own or not covers(method.memory, view) or not usual(x, start, gradient):
        return NotImplemented
    x = x.contiguous()
    out, size = torch.empty_like(x), x[0].numel()
    low, high = method.clip or (0.0, 0.0)
    launch(
        _climb, (len(x),),
        x, start.contiguous(), gradient.contiguous(), *places(index, view), method.memory.delta, norms.average,
        norms.step_size, method.epoch, method.step_scale, out, float(method.threat.eps), per_level(method.memory),
        inverse(method.c), float(method.max_step), float(method.beta), float(1 - method.beta), float(low), float(high),
        method.warmup_epochs, clips=method.clip is not None, size=size, block=min(_BLOCK, triton.next_power_of_2(size)),
        num_warps=8, **frame(view, x.shape), **AS_TORCH,
    )  # fmt: skip
    return out
