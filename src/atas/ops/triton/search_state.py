"""Helpers of the attack kernels: which slots are running, their clocks, their initial points."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.attacks.search import Slots, random_start
from atas.core.dispatch import implements
from atas.core.rng import Stream
from atas.ops.triton.launch import NO_FMA, ImageGrid, is_plain_float32, launch
from atas.ops.triton.projected_step import project
from atas.ops.triton.rng import stream_key, uniform
from atas.threat import Linf, Threat

_FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def is_running(active, broken, done, slot):
    """`Slots.running` of one slot."""
    return (tl.load(active + slot) != 0) & (tl.load(broken + slot) == 0) & (tl.load(done + slot) == 0)


@triton.jit
def mask_if(flag, mask):
    """The mask if a scalar flag is set, else an empty one. Triton's interpreter takes no `mask & flag` as a mask."""
    return tl.where(flag, mask, False)


@triton.jit
def finite(value):
    """`nan_to_num`."""
    return tl.where(value == value, tl.minimum(tl.maximum(value, -_FLOAT32_MAX), _FLOAT32_MAX), 0.0)


@triton.jit
def advance_clock(clock, done, slot, step_index, steps):
    """Count one more iteration of a running slot; `step_index` is the clock before."""
    tl.store(clock + slot, step_index + 1)
    tl.store(done + slot, step_index + 1 >= steps)


@triton.jit(do_not_specialize=["start_key"])
def _initial_point_kernel(
    x, current, clock, epoch, example, out, eps, start_key, per_slot: tl.constexpr, size: tl.constexpr,
    block: tl.constexpr,
):
    """A random point of the ball in a new slot, else its current point; `per_slot`: slots have their own epochs."""
    slot = tl.program_id(0)
    offs = tl.program_id(1) * block + tl.arange(0, block)
    mask = offs < size
    image_offs = slot * size + offs
    if tl.load(clock + slot) == 0:
        image = tl.load(x + image_offs, mask, 0.0)
        uniform_values = uniform(start_key, tl.load(epoch + (slot if per_slot else 0)), tl.load(example + slot), offs)
        tl.store(out + image_offs, project(image + (2 * uniform_values - 1) * eps, image, eps), mask)
    else:
        tl.store(out + image_offs, tl.load(current + image_offs, mask, 0.0), mask)


def supports(slots: Slots, *images: Tensor) -> bool:
    """Return whether the kernels support these slots, and write to these images of theirs."""
    tensors = (slots.x, slots.point, *images)
    return is_plain_float32(*tensors) and all(x.is_contiguous() for x in tensors)


def flags(slots: Slots) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the flags that tell whether a slot is running, and its clock."""
    return slots.occupied, slots.broken, slots.done, slots.iteration


def kernel_args(x: Tensor, max_block: int) -> dict[str, int]:
    """Return the arguments of a kernel with one program per slot, which takes at most `max_block` entries of an image
    at a time."""
    size = x[0].numel()
    return {"size": size, "block": min(max_block, triton.next_power_of_2(size))}


@implements(random_start)
def initial_point(threat: Threat, slots: Slots, seed: int, epoch: Tensor, current: Tensor) -> Tensor:
    """Linf, float32; one epoch, or one per slot."""
    if type(threat) is not Linf or not supports(slots, current) or epoch.shape not in ((), (len(slots),)):
        return NotImplemented
    image_grid, out = ImageGrid.of(slots.x), torch.empty_like(slots.x)
    launch(
        _initial_point_kernel, image_grid.grid, slots.x, current, slots.iteration, epoch.to(out.device), slots.index,
        out, float(threat.eps), stream_key(seed, Stream.START), per_slot=epoch.dim() == 1, **image_grid.kernel_args(),
        **NO_FMA,
    )
    return out
