"""What the kernels of the searches have in common: which lanes move, how images are cut up, where a lane starts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.attacks._lanes import Lanes
from atas.kernels._launch import launch
from atas.kernels._small._ball import project
from atas.kernels._small._hash import salt, uniform
from atas.kernels._small._shared import AS_TORCH, Cut, usual
from atas.noise import Purpose
from atas.threat import Linf, Threat

_LARGEST = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def moves(active, broken, done, lane):  # type: ignore[no-untyped-def]
    """`Lanes.moving` of one lane."""
    return (tl.load(active + lane) != 0) & (tl.load(broken + lane) == 0) & (tl.load(done + lane) == 0)


@triton.jit
def finite(value):  # type: ignore[no-untyped-def]
    """`nan_to_num`."""
    return tl.where(value == value, tl.minimum(tl.maximum(value, -_LARGEST), _LARGEST), 0.0)


@triton.jit
def tick(clock, done, lane, time, steps):  # type: ignore[no-untyped-def]
    """One more iteration of a lane that moves; `time` is what the clock showed."""
    tl.store(clock + lane, time + 1)
    tl.store(done + lane, time + 1 >= steps)


@triton.jit(do_not_specialize=["start_salt"])
def _started(  # type: ignore[no-untyped-def]
    x, current, clock, epoch, example, out, eps, start_salt, each: tl.constexpr, size: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """A random point of the ball in a fresh lane, else where it is; `each` where lanes have epochs of their own."""
    lane = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    valid = at < size
    here = lane * size + at
    if tl.load(clock + lane) == 0:
        image = tl.load(x + here, valid, 0.0)
        drawn = uniform(start_salt, tl.load(epoch + (lane if each else 0)), tl.load(example + lane), at)
        tl.store(out + here, project(image + (2 * drawn - 1) * eps, image, eps), valid)
    else:
        tl.store(out + here, tl.load(current + here, valid, 0.0), valid)


def covers(lanes: Lanes, *images: Tensor) -> bool:
    """Whether the kernels can work on these lanes, and write to these images of theirs."""
    whole = (lanes.x, lanes.point, *images)
    return usual(*whole) and all(x.is_contiguous() for x in whole)


def flags(lanes: Lanes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What tells whether a lane moves, and its clock, as kernels read them."""
    return lanes.active, lanes.broken, lanes.done, lanes.clock


def pieces(x: Tensor, most: int) -> dict[str, int]:
    """What a kernel with one program a lane is told: it takes at most so many entries of an image at a time."""
    size = x[0].numel()
    return {"size": size, "block": min(most, triton.next_power_of_2(size))}


def started(threat: Threat, lanes: Lanes, seed: int, epoch: Tensor, current: Tensor) -> Tensor:
    """As `_lanes.started`."""
    if type(threat) is not Linf or not covers(lanes, current) or epoch.shape not in ((), (len(lanes),)):
        return NotImplemented
    cut, out = Cut.of(lanes.x), torch.empty_like(lanes.x)
    launch(
        _started, cut.grid,
        lanes.x, current, lanes.clock, epoch.to(out.device), lanes.example, out, float(threat.eps),
        salt(seed, Purpose.START), each=epoch.dim() == 1, **cut.sizes(), **AS_TORCH,
    )  # fmt: skip
    return out
