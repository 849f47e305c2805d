"""A step of APGD and all that it remembers, one program a lane."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.attacks import _apgd
from atas.attacks._apgd import Climb
from atas.attacks._lanes import Lanes
from atas.kernels._attacks._lanes import covers, finite, flags, moves, pieces, tick
from atas.kernels._launch import launch
from atas.kernels._small._ball import project, stepped
from atas.kernels._small._shared import AS_TORCH, inverse, usual
from atas.threat import Linf, Threat

_BLOCK = 1024
_RISES = tl.constexpr(_apgd._RISES)
_NEW = tl.constexpr(_apgd._MOMENTUM)
_OLD = tl.constexpr(1 - _apgd._MOMENTUM)


@triton.jit(do_not_specialize=["steps"])
def _move(  # type: ignore[no-untyped-def]
    x, evaluated, gradient, losses, right, active, broken, done, clock, point, current, previous, best_point,
    best_gradient, last_loss, best_loss, checked_loss, length, rises, halved, table, eps, first_length, per_pass, steps,
    size: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """`_apgd._move` of one lane. Of what it remembers, only what this step needs is read."""
    lane = tl.program_id(0)
    if moves(active, broken, done, lane):
        time = tl.load(clock + lane)
        fresh = time == 0
        loss, best = tl.load(losses + lane), tl.load(best_loss + lane)
        better = fresh | (loss > best)
        best = tl.where(better, tl.where(loss == loss, loss, float("-inf")), best)

        window = tl.load(table + tl.minimum(time, steps - 1))
        looked = window > 0
        risen = tl.load(rises + lane) + (loss > tl.load(last_loss + lane)).to(tl.int64)
        risen = tl.where(fresh, 0, risen)
        checked, was_halved = tl.load(checked_loss + lane), tl.load(halved + lane) != 0
        stuck = ~was_halved & (best <= checked)
        halve = looked & ((risen.to(tl.float32) <= _RISES * window.to(tl.float32)) | stuck)
        far = tl.load(length + lane)
        far = tl.where(fresh, first_length, tl.where(halve, far * 0.5, far))

        fooled = tl.load(right + lane) == 0
        back = halve & ~better  # to a best point that is not the one just evaluated
        shown = ~fooled & ~better  # that one is also what there is to judge
        for first in range(0, size, block):
            at = first + tl.arange(0, block)
            valid = at < size
            here = lane * size + at
            image, new = tl.load(x + here, valid, 0.0), tl.load(evaluated + here, valid, 0.0)
            slope = finite(tl.load(gradient + here, valid, 0.0)) * per_pass
            kept = tl.load(best_point + here, valid & (back | shown), 0.0)
            kept_slope = tl.load(best_gradient + here, valid & back, 0.0)
            past = tl.load(previous + here, valid & ~fresh, 0.0)
            start = tl.where(back, kept, new)
            ahead = stepped(start, tl.where(back, kept_slope, slope), far, image, eps)
            mixed = project(start + _NEW * (ahead - start) + _OLD * (start - past), image, eps)
            tl.store(current + here, tl.where(fresh, ahead, mixed), valid)
            tl.store(previous + here, start, valid)
            tl.store(best_point + here, new, valid & better)
            tl.store(best_gradient + here, slope, valid & better)
            tl.store(point + here, tl.where(shown, kept, new), valid)

        tl.debug_barrier()  # every thread has read what follows
        tl.store(last_loss + lane, loss)
        tl.store(best_loss + lane, best)
        tl.store(checked_loss + lane, tl.where(fresh | looked, best, checked))
        tl.store(length + lane, far)
        tl.store(rises + lane, tl.where(looked, 0, risen))
        tl.store(halved + lane, fresh | tl.where(looked, halve, was_halved))
        tl.store(broken + lane, fooled)
        tick(clock, done, lane, time, steps)


def move(
    threat: Threat,
    lanes: Lanes,
    climb: Climb,
    table: Tensor,
    passes: int,
    current: Tensor,
    loss: Tensor,
    gradient: Tensor,
    right: Tensor,
) -> None:
    """As `_apgd._move`."""
    images = climb.current, climb.previous, climb.best_point, climb.best_gradient
    numbers = climb.loss, climb.best_loss, climb.checked_loss, climb.size
    if type(threat) is not Linf or not covers(lanes, *images) or not usual(current, gradient):
        return NotImplemented
    if any(number.dtype != torch.float32 for number in (loss, *numbers)):
        return NotImplemented
    launch(
        _move, (len(lanes),),
        lanes.x, current.contiguous(), gradient.contiguous(), loss.contiguous(), right.contiguous(), *flags(lanes),
        lanes.point, *images, *numbers, climb.rises, climb.halved, table, float(threat.eps), float(2 * threat.eps),
        inverse(passes), len(table), **pieces(lanes.x, _BLOCK), **AS_TORCH,
    )  # fmt: skip
    return None
