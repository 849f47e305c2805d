"""One step of FAB: the step to the linearised boundary, and the update of the best point.

Both linear problems of an image, from the current point and from the image, are solved in registers; those of large
images in blocks, by reading the image again for every iteration.

The solver finds t with sum_i min(t, room_i) |g_i| = |value| without sorting. The left side is concave and piecewise
linear in t, so Newton's method from t = 0 increases monotonically and stops at the root after at most as many steps as
there are coordinates, usually fewer than ten.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.attacks import fab
from atas.attacks.fab import FAB, fab_update
from atas.attacks.search import Slots
from atas.core.dispatch import implements
from atas.ops.triton.launch import NO_FMA, is_plain_float32, launch
from atas.ops.triton.projected_step import clip
from atas.ops.triton.search_state import advance_clock, finite, flags, is_running, kernel_args, mask_if, supports
from atas.threat import Linf, Threat


@triton.jit
def decreases(normal, value):
    """Whether a coordinate has to decrease to take the linear function towards zero."""
    return tl.where(value > 0, normal, -normal) > 0


@triton.jit
def distance_to_bound(point, normal, value):
    """How far each coordinate can go towards the function's zero."""
    return tl.where(decreases(normal, value), point, 1 - point)


@triton.jit
def line_root(t, goal, rate, ended):
    """Where the line that holds at t reaches the goal; infinite if all coordinates have reached their bounds by t.

    `rate` is the sum of the slopes of the others, `ended` the share of those that have.
    """
    return tl.maximum(t, tl.where(rate > 0, (goal - ended) / tl.where(rate > 0, rate, 1.0), float("inf")))


_BLOCK = 4096
MAX_IN_REGISTERS = 4096  # entries of an image that fit into a program's registers; tests on small images lower it
_IN_REGISTERS = {"num_warps": 16, "maxnreg": 64}  # two of 3 x 32 x 32 at a time on a multiprocessor
BLOCK_LARGE = 2048  # entries at a time of an image that does not fit; likewise
_MIN_DISTANCE = tl.constexpr(fab.MIN_LENGTH)


@triton.jit
def _newton_step(t, goal, room, abs_grad):
    """Where the line that holds at t reaches the goal."""
    is_moving = room > t
    rate, ended = tl.sum(tl.where(is_moving, abs_grad, 0.0), 0), tl.sum(tl.where(is_moving, 0.0, abs_grad * room), 0)
    return line_root(t, goal, rate, ended)


@triton.jit
def _boundary_step_kernel(
    points, x, gradient, margins, out, eta, alpha_max, size: tl.constexpr, block: tl.constexpr
):
    """`atas.attacks.fab.boundary_step` of one slot, in registers."""
    slot = tl.program_id(0)
    offs = tl.arange(0, block)
    mask = offs < size
    image_offs = slot * size + offs
    point, image = tl.load(points + image_offs, mask, 0.0), tl.load(x + image_offs, mask, 0.0)
    normal = finite(tl.load(gradient + image_offs, mask, 0.0))
    value = finite(tl.load(margins + slot))
    value_x = finite(value + tl.sum(normal * (image - point), 0))
    scale = tl.max(tl.abs(normal), 0)
    scale = tl.where(scale > 0, scale, 1.0)
    value, value_x = value / scale, value_x / scale
    abs_grad = tl.abs(normal) / scale
    room, room_x = distance_to_bound(point, normal, value), distance_to_bound(image, normal, value_x)

    t, t_x = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    is_increasing = tl.full((), 1, tl.int32)
    while is_increasing > 0:
        next_t, next_t_x = (
            _newton_step(t, tl.abs(value), room, abs_grad),
            _newton_step(t_x, tl.abs(value_x), room_x, abs_grad),
        )
        is_increasing = ((next_t > t) | (next_t_x > t_x)).to(tl.int32)
        t, t_x = next_t, next_t_x

    far, far_x = tl.where(abs_grad > 0, tl.minimum(t, room), 0.0), tl.where(abs_grad > 0, tl.minimum(t_x, room_x), 0.0)
    distance, distance_x = tl.maximum(tl.max(far, 0), _MIN_DISTANCE), tl.maximum(tl.max(far_x, 0), _MIN_DISTANCE)
    alpha = tl.minimum(distance / (distance + distance_x), alpha_max)
    # Loaded again: values kept in registers during the loop would leave room for fewer programs.
    point = tl.load(points + image_offs, mask, 0.0, eviction_policy="evict_first")
    image = tl.load(x + image_offs, mask, 0.0, eviction_policy="evict_first")
    normal = tl.load(gradient + image_offs, mask, 0.0, eviction_policy="evict_first")
    end = point + eta * tl.where(decreases(normal, value), -far, far)
    end_x = image + eta * tl.where(decreases(normal, value_x), -far_x, far_x)
    tl.store(out + image_offs, clip(end * (1 - alpha) + end_x * alpha, 0.0, 1.0), mask)


@triton.jit(do_not_specialize=["steps"])
def _update_best_kernel(
    x, ahead, correct, active, broken, done, clock, point, current, closest, eps, beta, steps, size: tl.constexpr,
    block: tl.constexpr,
):
    """`atas.attacks.fab.fab_update` of one slot."""
    slot = tl.program_id(0)
    if is_running(active, broken, done, slot):
        step_index, is_adversarial = tl.load(clock + slot), tl.load(correct + slot) == 0
        closest_so_far = tl.where(step_index == 0, float("inf"), tl.load(closest + slot))
        max_change = tl.zeros((block,), tl.float32)
        for first in range(0, size, block):
            offs = first + tl.arange(0, block)
            image_offs = slot * size + offs
            max_change = tl.maximum(
                max_change,
                tl.abs(tl.load(ahead + image_offs, offs < size, 0.0) - tl.load(x + image_offs, offs < size, 0.0)),
            )
        distance = tl.max(max_change, 0)
        is_inside = is_adversarial & (distance <= eps)
        is_best = is_inside | (is_adversarial & (distance < closest_so_far))
        for first in range(0, size, block):
            offs = first + tl.arange(0, block)
            mask = offs < size
            image_offs = slot * size + offs
            end = tl.load(ahead + image_offs, mask, 0.0)
            image = tl.load(x + image_offs, mask_if(is_adversarial, mask), 0.0)
            tl.store(current + image_offs, tl.where(is_adversarial, image + beta * (end - image), end), mask)
            tl.store(point + image_offs, end, mask_if(is_best, mask))
        tl.debug_barrier()  # all threads have read the state that is written below
        tl.store(closest + slot, tl.where(is_adversarial, tl.minimum(closest_so_far, distance), closest_so_far))
        tl.store(broken + slot, is_inside)
        advance_clock(clock, done, slot, step_index, steps)


@implements(fab.boundary_step)
def boundary_step(
    threat: Threat, point: Tensor, x: Tensor, gradient: Tensor, margin: Tensor, eta: float, alpha_max: float
) -> Tensor:
    """Linf, float32."""
    if type(threat) is not Linf or not is_plain_float32(point, x, gradient) or margin.dtype != torch.float32:
        return NotImplemented
    in_registers = x[0].numel() <= MAX_IN_REGISTERS
    x = x.contiguous()
    out = torch.empty_like(x)
    launch(
        _boundary_step_kernel if in_registers else _boundary_step_in_blocks_kernel, (len(x),), point.contiguous(), x,
        gradient.contiguous(), margin.contiguous(), out, float(eta), float(alpha_max),
        **kernel_args(x, MAX_IN_REGISTERS if in_registers else BLOCK_LARGE),
        **(_IN_REGISTERS if in_registers else {"num_warps": 8}), **NO_FMA,
    )
    return out


@implements(fab_update)
def update_best(
    search: FAB, threat: Threat, slots: Slots, current: Tensor, closest: Tensor, ahead: Tensor, is_correct: Tensor
) -> None:
    """Linf, float32."""
    if (
        type(threat) is not Linf
        or not supports(slots, current)
        or not is_plain_float32(ahead)
        or closest.dtype != torch.float32
    ):
        return NotImplemented
    launch(
        _update_best_kernel, (len(slots),), slots.x, ahead.contiguous(), is_correct.contiguous(), *flags(slots),
        slots.point, current, closest, float(threat.eps), float(search.beta), search.iterations,
        **kernel_args(slots.x, _BLOCK), num_warps=8, **NO_FMA,
    )
    return None


@triton.jit
def _boundary_step_in_blocks_kernel(
    points, x, gradient, margins, out, eta, alpha_max, size: tl.constexpr, block: tl.constexpr
):
    """`atas.attacks.fab.boundary_step` of one slot, in blocks."""
    slot = tl.program_id(0)
    start = slot.to(tl.int64) * size
    max_abs, dot = tl.zeros((block,), tl.float32), tl.zeros((block,), tl.float32)
    for first in range(0, size, block):
        offs = first + tl.arange(0, block)
        mask = offs < size
        normal = finite(tl.load(gradient + start + offs, mask, 0.0))
        difference = tl.load(x + start + offs, mask, 0.0) - tl.load(points + start + offs, mask, 0.0)
        max_abs = tl.maximum(max_abs, tl.abs(normal))
        dot += normal * difference
    scale = tl.max(max_abs, 0)
    scale = tl.where(scale > 0, scale, 1.0)
    value = finite(tl.load(margins + slot))
    value_x = finite(value + tl.sum(dot, 0))
    value, value_x = value / scale, value_x / scale

    t, t_x = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    longest, longest_x = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    is_increasing = tl.full((), 1, tl.int32)
    while is_increasing > 0:
        nothing = tl.zeros((block,), tl.float32)
        rate, ended, far = nothing, nothing, nothing
        rate_x, ended_x, far_x = nothing, nothing, nothing
        for first in range(0, size, block):
            offs = first + tl.arange(0, block)
            mask = offs < size
            normal = finite(tl.load(gradient + start + offs, mask, 0.0))
            abs_grad = tl.abs(normal) / scale
            room = distance_to_bound(tl.load(points + start + offs, mask, 0.0), normal, value)
            room_x = distance_to_bound(tl.load(x + start + offs, mask, 0.0), normal, value_x)
            rate += tl.where(room > t, abs_grad, 0.0)
            ended += tl.where(room > t, 0.0, abs_grad * room)
            far = tl.maximum(far, tl.where(abs_grad > 0, room, 0.0))
            rate_x += tl.where(room_x > t_x, abs_grad, 0.0)
            ended_x += tl.where(room_x > t_x, 0.0, abs_grad * room_x)
            far_x = tl.maximum(far_x, tl.where(abs_grad > 0, room_x, 0.0))
        next_t = line_root(t, tl.abs(value), tl.sum(rate, 0), tl.sum(ended, 0))
        next_t_x = line_root(t_x, tl.abs(value_x), tl.sum(rate_x, 0), tl.sum(ended_x, 0))
        longest, longest_x = tl.max(far, 0), tl.max(far_x, 0)
        is_increasing = ((next_t > t) | (next_t_x > t_x)).to(tl.int32)
        t, t_x = next_t, next_t_x

    distance, distance_x = (
        tl.maximum(tl.minimum(t, longest), _MIN_DISTANCE),
        tl.maximum(tl.minimum(t_x, longest_x), _MIN_DISTANCE),
    )
    alpha = tl.minimum(distance / (distance + distance_x), alpha_max)
    for first in range(0, size, block):
        offs = first + tl.arange(0, block)
        mask = offs < size
        point, image = tl.load(points + start + offs, mask, 0.0), tl.load(x + start + offs, mask, 0.0)
        normal = finite(tl.load(gradient + start + offs, mask, 0.0))
        abs_grad = tl.abs(normal) / scale
        far = tl.where(abs_grad > 0, tl.minimum(t, distance_to_bound(point, normal, value)), 0.0)
        far_x = tl.where(abs_grad > 0, tl.minimum(t_x, distance_to_bound(image, normal, value_x)), 0.0)
        end = point + eta * tl.where(decreases(normal, value), -far, far)
        end_x = image + eta * tl.where(decreases(normal, value_x), -far_x, far_x)
        tl.store(out + start + offs, clip(end * (1 - alpha) + end_x * alpha, 0.0, 1.0), mask)
