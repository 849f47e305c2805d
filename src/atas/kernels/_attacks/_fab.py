"""A step of FAB: the way to the linearised boundary, and what is kept of the end.

Both linear problems of an image, from the point and from the image, are solved in registers; those of large
images in `_fab_blocks`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.attacks import _fab
from atas.attacks._fab import FAB
from atas.attacks._lanes import Lanes
from atas.kernels._attacks._fab_blocks import ahead_in_blocks
from atas.kernels._attacks._fab_lines import falls, reached, room_of
from atas.kernels._attacks._lanes import covers, finite, flags, moves, pieces, tick
from atas.kernels._launch import launch
from atas.kernels._small._ball import bounded
from atas.kernels._small._shared import AS_TORCH, usual
from atas.threat import Linf, Threat

_BLOCK = 4096
_LARGEST = 4096  # entries of an image that fit into a program's registers
_PROGRAM = {"num_warps": 16, "maxnreg": 64}  # two of 3 x 32 x 32 at a time on a multiprocessor
_PIECE = 2048  # entries at a time of an image that does not fit
_SHORTEST = tl.constexpr(_fab._SHORTEST)


@triton.jit
def _next(t, goal, room, slope):  # type: ignore[no-untyped-def]
    """Where the line that holds at t reaches the goal."""
    under_way = room > t
    rate, ended = tl.sum(tl.where(under_way, slope, 0.0), 0), tl.sum(tl.where(under_way, 0.0, slope * room), 0)
    return reached(t, goal, rate, ended)


@triton.jit
def _ahead(  # type: ignore[no-untyped-def]
    points, x, gradient, leads, out, eta, most, size: tl.constexpr, block: tl.constexpr
):
    """`_fab._ahead` of one lane."""
    lane = tl.program_id(0)
    at = tl.arange(0, block)
    valid = at < size
    here = lane * size + at
    point, image = tl.load(points + here, valid, 0.0), tl.load(x + here, valid, 0.0)
    normal = finite(tl.load(gradient + here, valid, 0.0))
    value = finite(tl.load(leads + lane))
    value_x = finite(value + tl.sum(normal * (image - point), 0))
    scale = tl.max(tl.abs(normal), 0)
    scale = tl.where(scale > 0, scale, 1.0)
    value, value_x = value / scale, value_x / scale
    slope = tl.abs(normal) / scale
    room, room_x = room_of(point, normal, value), room_of(image, normal, value_x)

    t, t_x = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    rising = tl.full((), 1, tl.int32)
    while rising > 0:
        higher, higher_x = _next(t, tl.abs(value), room, slope), _next(t_x, tl.abs(value_x), room_x, slope)
        rising = ((higher > t) | (higher_x > t_x)).to(tl.int32)
        t, t_x = higher, higher_x

    far, far_x = tl.where(slope > 0, tl.minimum(t, room), 0.0), tl.where(slope > 0, tl.minimum(t_x, room_x), 0.0)
    length, length_x = tl.maximum(tl.max(far, 0), _SHORTEST), tl.maximum(tl.max(far_x, 0), _SHORTEST)
    alpha = tl.minimum(length / (length + length_x), most)
    # Again rather than still: what waits in registers while t rises keeps other programs out.
    point = tl.load(points + here, valid, 0.0, eviction_policy="evict_first")
    image = tl.load(x + here, valid, 0.0, eviction_policy="evict_first")
    normal = tl.load(gradient + here, valid, 0.0, eviction_policy="evict_first")
    end = point + eta * tl.where(falls(normal, value), -far, far)
    end_x = image + eta * tl.where(falls(normal, value_x), -far_x, far_x)
    tl.store(out + here, bounded(end * (1 - alpha) + end_x * alpha, 0.0, 1.0), valid)


@triton.jit(do_not_specialize=["steps"])
def _keep(  # type: ignore[no-untyped-def]
    x, ahead, right, active, broken, done, clock, point, current, closest, eps, beta, steps, size: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """`_fab._keep` of one lane."""
    lane = tl.program_id(0)
    if moves(active, broken, done, lane):
        time, wrong = tl.load(clock + lane), tl.load(right + lane) == 0
        before = tl.where(time == 0, float("inf"), tl.load(closest + lane))
        far = tl.zeros((block,), tl.float32)
        for first in range(0, size, block):
            at = first + tl.arange(0, block)
            here = lane * size + at
            far = tl.maximum(far, tl.abs(tl.load(ahead + here, at < size, 0.0) - tl.load(x + here, at < size, 0.0)))
        distance = tl.max(far, 0)
        inside = wrong & (distance <= eps)
        kept = inside | (wrong & (distance < before))
        for first in range(0, size, block):
            at = first + tl.arange(0, block)
            valid = at < size
            here = lane * size + at
            end, image = tl.load(ahead + here, valid, 0.0), tl.load(x + here, valid & wrong, 0.0)
            tl.store(current + here, tl.where(wrong, image + beta * (end - image), end), valid)
            tl.store(point + here, end, valid & kept)
        tl.debug_barrier()  # every thread has read what follows
        tl.store(closest + lane, tl.where(wrong, tl.minimum(before, distance), before))
        tl.store(broken + lane, inside)
        tick(clock, done, lane, time, steps)


def ahead(
    threat: Threat, point: Tensor, x: Tensor, gradient: Tensor, lead: Tensor, eta: float, alpha_max: float
) -> Tensor:
    """As `_fab._ahead`."""
    if type(threat) is not Linf or not usual(point, x, gradient) or lead.dtype != torch.float32:
        return NotImplemented
    fits = x[0].numel() <= _LARGEST
    x = x.contiguous()
    out = torch.empty_like(x)
    launch(
        _ahead if fits else ahead_in_blocks, (len(x),),
        point.contiguous(), x, gradient.contiguous(), lead.contiguous(), out, float(eta), float(alpha_max),
        **pieces(x, _LARGEST if fits else _PIECE), **(_PROGRAM if fits else {"num_warps": 8}), **AS_TORCH,
    )  # fmt: skip
    return out


def keep(
    search: FAB, threat: Threat, lanes: Lanes, current: Tensor, closest: Tensor, ahead: Tensor, right: Tensor
) -> None:
    """As `_fab._keep`."""
    if type(threat) is not Linf or not covers(lanes, current) or not usual(ahead) or closest.dtype != torch.float32:
        return NotImplemented
    launch(
        _keep, (len(lanes),),
        lanes.x, ahead.contiguous(), right.contiguous(), *flags(lanes), lanes.point, current, closest,
        float(threat.eps), float(search.beta), search.iterations, **pieces(lanes.x, _BLOCK), num_warps=8, **AS_TORCH,
    )  # fmt: skip
    return None
