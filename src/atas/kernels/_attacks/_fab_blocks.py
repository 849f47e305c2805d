"""The way to FAB's linearised boundary for images that do not fit into a program's registers: every line is found by
going through the image once more."""

from __future__ import annotations

import triton
import triton.language as tl

from atas.attacks import _fab
from atas.kernels._attacks._fab_lines import falls, reached, room_of
from atas.kernels._attacks._lanes import finite
from atas.kernels._small._ball import bounded

_SHORTEST = tl.constexpr(_fab._SHORTEST)


@triton.jit
def ahead_in_blocks(  # type: ignore[no-untyped-def]
    points, x, gradient, leads, out, eta, most, size: tl.constexpr, block: tl.constexpr
):
    """`_fab._ahead` of one lane."""
    lane = tl.program_id(0)
    start = lane.to(tl.int64) * size
    steepest, along = tl.zeros((block,), tl.float32), tl.zeros((block,), tl.float32)
    for first in range(0, size, block):
        at = first + tl.arange(0, block)
        valid = at < size
        normal = finite(tl.load(gradient + start + at, valid, 0.0))
        way = tl.load(x + start + at, valid, 0.0) - tl.load(points + start + at, valid, 0.0)
        steepest = tl.maximum(steepest, tl.abs(normal))
        along += normal * way
    scale = tl.max(steepest, 0)
    scale = tl.where(scale > 0, scale, 1.0)
    value = finite(tl.load(leads + lane))
    value_x = finite(value + tl.sum(along, 0))
    value, value_x = value / scale, value_x / scale

    t, t_x = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    longest, longest_x = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    rising = tl.full((), 1, tl.int32)
    while rising > 0:
        nothing = tl.zeros((block,), tl.float32)
        rate, ended, far = nothing, nothing, nothing
        rate_x, ended_x, far_x = nothing, nothing, nothing
        for first in range(0, size, block):
            at = first + tl.arange(0, block)
            valid = at < size
            normal = finite(tl.load(gradient + start + at, valid, 0.0))
            slope = tl.abs(normal) / scale
            room = room_of(tl.load(points + start + at, valid, 0.0), normal, value)
            room_x = room_of(tl.load(x + start + at, valid, 0.0), normal, value_x)
            rate += tl.where(room > t, slope, 0.0)
            ended += tl.where(room > t, 0.0, slope * room)
            far = tl.maximum(far, tl.where(slope > 0, room, 0.0))
            rate_x += tl.where(room_x > t_x, slope, 0.0)
            ended_x += tl.where(room_x > t_x, 0.0, slope * room_x)
            far_x = tl.maximum(far_x, tl.where(slope > 0, room_x, 0.0))
        higher = reached(t, tl.abs(value), tl.sum(rate, 0), tl.sum(ended, 0))
        higher_x = reached(t_x, tl.abs(value_x), tl.sum(rate_x, 0), tl.sum(ended_x, 0))
        longest, longest_x = tl.max(far, 0), tl.max(far_x, 0)
        rising = ((higher > t) | (higher_x > t_x)).to(tl.int32)
        t, t_x = higher, higher_x

    length, length_x = tl.maximum(tl.minimum(t, longest), _SHORTEST), tl.maximum(tl.minimum(t_x, longest_x), _SHORTEST)
    alpha = tl.minimum(length / (length + length_x), most)
    for first in range(0, size, block):
        at = first + tl.arange(0, block)
        valid = at < size
        point, image = tl.load(points + start + at, valid, 0.0), tl.load(x + start + at, valid, 0.0)
        normal = finite(tl.load(gradient + start + at, valid, 0.0))
        slope = tl.abs(normal) / scale
        far = tl.where(slope > 0, tl.minimum(t, room_of(point, normal, value)), 0.0)
        far_x = tl.where(slope > 0, tl.minimum(t_x, room_of(image, normal, value_x)), 0.0)
        end = point + eta * tl.where(falls(normal, value), -far, far)
        end_x = image + eta * tl.where(falls(normal, value_x), -far_x, far_x)
        tl.store(out + start + at, bounded(end * (1 - alpha) + end_x * alpha, 0.0, 1.0), valid)
