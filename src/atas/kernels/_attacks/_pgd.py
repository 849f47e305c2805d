"""A step of PGD."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from atas.attacks._lanes import Lanes
from atas.kernels._attacks._lanes import covers, flags, moves, pieces, tick
from atas.kernels._launch import launch
from atas.kernels._small._ball import stepped
from atas.kernels._small._shared import AS_TORCH, usual
from atas.threat import Linf, Threat

_BLOCK = 1024


@triton.jit(do_not_specialize=["steps"])
def _move(  # type: ignore[no-untyped-def]
    x, current, gradient, active, broken, done, clock, point, length, eps, steps, size: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """`_pgd._move` of one lane. The sign of what is not a number is 0."""
    lane = tl.program_id(0)
    if moves(active, broken, done, lane):
        time = tl.load(clock + lane)
        for first in range(0, size, block):
            at = first + tl.arange(0, block)
            valid = at < size
            here = lane * size + at
            image, slope = tl.load(x + here, valid, 0.0), tl.load(gradient + here, valid, 0.0)
            tl.store(point + here, stepped(tl.load(current + here, valid, 0.0), slope, length, image, eps), valid)
        tl.debug_barrier()  # every thread has read what follows
        tick(clock, done, lane, time, steps)


def move(threat: Threat, lanes: Lanes, current: Tensor, gradient: Tensor, size: float, iterations: int) -> None:
    """As `_pgd._move`."""
    if type(threat) is not Linf or not covers(lanes) or not usual(current, gradient):
        return NotImplemented
    launch(
        _move, (len(lanes),),
        lanes.x, current.contiguous(), gradient.contiguous(), *flags(lanes), lanes.point, float(size),
        float(threat.eps), iterations, **pieces(lanes.x, _BLOCK), **AS_TORCH,
    )  # fmt: skip
    return None
