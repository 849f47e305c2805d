"""One query of Square Attack: the proposal, and the update of the best point."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.attacks.search import Slots
from atas.attacks.square import linf_proposal, square_update
from atas.core.dispatch import implements
from atas.core.rng import Stream
from atas.ops.triton.launch import NO_FMA, ImageGrid, is_plain_float32, launch
from atas.ops.triton.projected_step import clip
from atas.ops.triton.rng import stream_key, uniform
from atas.ops.triton.search_state import advance_clock, flags, is_running, kernel_args, supports

_BLOCK = 1024


@triton.jit
def _in_window(number, side, offs, extent: tl.constexpr):
    """Which rows, or columns, are in a window at a random position."""
    first = (number * (extent - side + 1).to(tl.float32)).to(tl.int32)
    return (offs >= first) & (offs < first + side)


@triton.jit(do_not_specialize=["start_key", "proposal_key", "queries"])
def _propose_kernel(
    x, point, clock, example, sides, out, eps, start_key, proposal_key, queries, height: tl.constexpr,
    width: tl.constexpr, size: tl.constexpr, block: tl.constexpr,
):
    """Stripes in a new slot, else the point with another window."""
    slot = tl.program_id(0)
    offs = tl.program_id(1) * block + tl.arange(0, block)
    mask = offs < size
    image_offs = slot * size + offs
    channel, row, column = offs // (height * width), offs // width % height, offs % width
    step_index, number = tl.load(clock + slot), tl.load(example + slot)
    is_first = step_index == 0
    side = tl.load(sides + tl.minimum(step_index, queries - 1)).to(tl.int32)
    position = tl.full((), 0, tl.int32)
    changed = _in_window(uniform(proposal_key, step_index, number, position), side, row, height)
    changed = changed & _in_window(uniform(proposal_key, step_index, number, position + 1), side, column, width)
    changed = tl.where(is_first, True, changed)
    draw_position = tl.where(is_first, channel * width + column, 2 + channel)
    uniform_values = uniform(tl.where(is_first, start_key, proposal_key), step_index, number, draw_position)
    image = tl.load(x + image_offs, mask & changed, 0.0)
    shifted = clip(image + tl.where(uniform_values < 0.5, -eps, eps), 0.0, 1.0)
    tl.store(out + image_offs, tl.where(changed, shifted, tl.load(point + image_offs, mask & ~changed, 0.0)), mask)


@triton.jit(do_not_specialize=["queries"])
def _update_best_kernel(
    proposal, margins, correct, active, broken, done, clock, point, least, queries, size: tl.constexpr,
    block: tl.constexpr,
):
    """`atas.attacks.square.square_update` of one slot."""
    slot = tl.program_id(0)
    if is_running(active, broken, done, slot):
        step_index, margin = tl.load(clock + slot), tl.load(margins + slot)
        is_adversarial = tl.load(correct + slot) == 0
        previous = tl.load(least + slot)
        better = (step_index == 0) | (margin < previous) | (previous != previous) | is_adversarial
        if better:
            for first in range(0, size, block):
                offs = first + tl.arange(0, block)
                image_offs = slot * size + offs
                tl.store(point + image_offs, tl.load(proposal + image_offs, offs < size, 0.0), offs < size)
        tl.debug_barrier()  # all threads have read the state that is written below
        tl.store(least + slot, margin, better)
        tl.store(broken + slot, is_adversarial)
        advance_clock(clock, done, slot, step_index, queries)


@implements(linf_proposal)
def propose(eps: float, seed: int, slots: Slots, sides: Tensor) -> Tensor:
    """float32."""
    if not supports(slots):
        return NotImplemented
    x = slots.x
    image_grid, out, (height, width) = ImageGrid.of(x), torch.empty_like(x), x.shape[2:]
    launch(
        _propose_kernel, image_grid.grid, x, slots.point, slots.iteration, slots.index, sides, out, float(eps),
        stream_key(seed, Stream.START), stream_key(seed, Stream.PROPOSAL), len(sides), height=height, width=width,
        **image_grid.kernel_args(), **NO_FMA,
    )
    return out


@implements(square_update)
def update_best(
    queries: int, slots: Slots, least: Tensor, proposal: Tensor, margin: Tensor, is_correct: Tensor
) -> None:
    """float32."""
    floats = least.dtype == margin.dtype == torch.float32
    if not floats or not supports(slots) or not is_plain_float32(proposal):
        return NotImplemented
    launch(
        _update_best_kernel, (len(slots),), proposal.contiguous(), margin.contiguous(), is_correct.contiguous(),
        *flags(slots), slots.point, least, queries, **kernel_args(slots.x, _BLOCK), **NO_FMA,
    )
    return None
