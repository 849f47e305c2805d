"""A query of Square Attack: what is proposed, and what is kept of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.attacks._lanes import Lanes
from atas.kernels._attacks._lanes import covers, flags, moves, pieces, tick
from atas.kernels._launch import launch
from atas.kernels._small._ball import bounded
from atas.kernels._small._hash import salt, uniform
from atas.kernels._small._shared import AS_TORCH, Cut, usual
from atas.noise import Purpose

_BLOCK = 1024


@triton.jit
def _inside(number, side, place, extent: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which rows, or columns, are in a window at a random place."""
    first = (number * (extent - side + 1).to(tl.float32)).to(tl.int32)
    return (place >= first) & (place < first + side)


@triton.jit(do_not_specialize=["start_salt", "proposal_salt", "queries"])
def _squares(  # type: ignore[no-untyped-def]
    x, point, clock, example, sides, out, eps, start_salt, proposal_salt, queries, height: tl.constexpr,
    width: tl.constexpr, size: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Stripes in a fresh lane, else the point with another window."""
    lane = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    valid = at < size
    here = lane * size + at
    channel, row, column = at // (height * width), at // width % height, at % width
    time, number = tl.load(clock + lane), tl.load(example + lane)
    fresh = time == 0
    side = tl.load(sides + tl.minimum(time, queries - 1)).to(tl.int32)
    place = tl.full((), 0, tl.int32)
    changed = _inside(uniform(proposal_salt, time, number, place), side, row, height)
    changed = changed & _inside(uniform(proposal_salt, time, number, place + 1), side, column, width)
    changed = changed | fresh
    position = tl.where(fresh, channel * width + column, 2 + channel)
    drawn = uniform(tl.where(fresh, start_salt, proposal_salt), time, number, position)
    image = tl.load(x + here, valid & changed, 0.0)
    moved = bounded(image + tl.where(drawn < 0.5, -eps, eps), 0.0, 1.0)
    tl.store(out + here, tl.where(changed, moved, tl.load(point + here, valid & ~changed, 0.0)), valid)


@triton.jit(do_not_specialize=["queries"])
def _keep(  # type: ignore[no-untyped-def]
    proposal, margins, right, active, broken, done, clock, point, least, queries, size: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """`_square._keep` of one lane."""
    lane = tl.program_id(0)
    if moves(active, broken, done, lane):
        time, margin, fooled = tl.load(clock + lane), tl.load(margins + lane), tl.load(right + lane) == 0
        before = tl.load(least + lane)
        better = (time == 0) | (margin < before) | (before != before) | fooled
        if better:
            for first in range(0, size, block):
                at = first + tl.arange(0, block)
                here = lane * size + at
                tl.store(point + here, tl.load(proposal + here, at < size, 0.0), at < size)
        tl.debug_barrier()  # every thread has read what follows
        tl.store(least + lane, margin, better)
        tl.store(broken + lane, fooled)
        tick(clock, done, lane, time, queries)


def squares(eps: float, seed: int, lanes: Lanes, sides: Tensor) -> Tensor:
    """As `_square._squares`."""
    if not covers(lanes):
        return NotImplemented
    x = lanes.x
    cut, out, (height, width) = Cut.of(x), torch.empty_like(x), x.shape[2:]
    launch(
        _squares, cut.grid,
        x, lanes.point, lanes.clock, lanes.example, sides, out, float(eps), salt(seed, Purpose.START),
        salt(seed, Purpose.PROPOSAL), len(sides), height=height, width=width, **cut.sizes(), **AS_TORCH,
    )  # fmt: skip
    return out


def keep(queries: int, lanes: Lanes, least: Tensor, proposal: Tensor, margin: Tensor, right: Tensor) -> None:
    """As `_square._keep`."""
    floats = least.dtype == margin.dtype == torch.float32
    if not floats or not covers(lanes) or not usual(proposal):
        return NotImplemented
    launch(
        _keep, (len(lanes),),
        proposal.contiguous(), margin.contiguous(), right.contiguous(), *flags(lanes), lanes.point, least, queries,
        **pieces(lanes.x, _BLOCK), **AS_TORCH,
    )  # fmt: skip
    return None
