"""One step of APGD and the update of its state, one program per slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.attacks import apgd
from atas.attacks.apgd import APGDBuffers, apgd_update
from atas.attacks.search import Slots
from atas.core.dispatch import implements
from atas.ops.triton.launch import NO_FMA, float32_reciprocal, is_plain_float32, launch
from atas.ops.triton.projected_step import project, sign_step
from atas.ops.triton.search_state import advance_clock, finite, flags, is_running, kernel_args, mask_if, supports
from atas.threat import Linf, Threat

_BLOCK = 1024
_MIN_INCREASES = tl.constexpr(apgd.RHO)
_MOMENTUM = tl.constexpr(apgd.ALPHA)
_INERTIA = tl.constexpr(1 - apgd.ALPHA)


@triton.jit(do_not_specialize=["steps"])
def _step_kernel(
    x, evaluated, gradient, losses, correct, active, broken, done, clock, point, current, previous, best_point,
    best_gradient, last_loss, best_loss, checked_loss, step_size, increases, halved, table, eps, initial_step_size,
    inv_passes, steps, size: tl.constexpr, block: tl.constexpr,
):
    """`atas.attacks.apgd.apgd_update` of one slot. Reads only the state that this step needs."""
    slot = tl.program_id(0)
    if is_running(active, broken, done, slot):
        step_index = tl.load(clock + slot)
        is_first = step_index == 0
        loss, best = tl.load(losses + slot), tl.load(best_loss + slot)
        better = is_first | (loss > best)
        best = tl.where(better, tl.where(loss == loss, loss, float("-inf")), best)

        window = tl.load(table + tl.minimum(step_index, steps - 1))
        at_checkpoint = window > 0
        num_increases = tl.load(increases + slot) + (loss > tl.load(last_loss + slot)).to(tl.int64)
        num_increases = tl.where(is_first, 0, num_increases)
        checkpoint_loss, was_halved = tl.load(checked_loss + slot), tl.load(halved + slot) != 0
        stuck = ~was_halved & (best <= checkpoint_loss)
        halve = at_checkpoint & ((num_increases.to(tl.float32) <= window.to(tl.float32) * _MIN_INCREASES) | stuck)
        new_step_size = tl.load(step_size + slot)
        new_step_size = tl.where(is_first, initial_step_size, tl.where(halve, new_step_size * 0.5, new_step_size))

        is_adversarial = tl.load(correct + slot) == 0
        restart_from_best = halve & ~better  # the best point is not the one just evaluated
        report_best = ~is_adversarial & ~better  # the verifier then judges the best point
        for first in range(0, size, block):
            offs = first + tl.arange(0, block)
            mask = offs < size
            image_offs = slot * size + offs
            image, evaluated_image = tl.load(x + image_offs, mask, 0.0), tl.load(evaluated + image_offs, mask, 0.0)
            grad = finite(tl.load(gradient + image_offs, mask, 0.0)) * inv_passes
            best_image = tl.load(best_point + image_offs, mask_if(restart_from_best | report_best, mask), 0.0)
            best_grad = tl.load(best_gradient + image_offs, mask_if(restart_from_best, mask), 0.0)
            previous_point = tl.load(previous + image_offs, mask_if(~is_first, mask), 0.0)
            start = tl.where(restart_from_best, best_image, evaluated_image)
            stepped_point = sign_step(start, tl.where(restart_from_best, best_grad, grad), new_step_size, image, eps)
            mixed = project(
                start + _MOMENTUM * (stepped_point - start) + _INERTIA * (start - previous_point), image, eps
            )
            tl.store(current + image_offs, tl.where(is_first, stepped_point, mixed), mask)
            tl.store(previous + image_offs, start, mask)
            tl.store(best_point + image_offs, evaluated_image, mask_if(better, mask))
            tl.store(best_gradient + image_offs, grad, mask_if(better, mask))
            tl.store(point + image_offs, tl.where(report_best, best_image, evaluated_image), mask)

        tl.debug_barrier()  # all threads have read the state that is written below
        tl.store(last_loss + slot, loss)
        tl.store(best_loss + slot, best)
        tl.store(checked_loss + slot, tl.where(is_first | at_checkpoint, best, checkpoint_loss))
        tl.store(step_size + slot, new_step_size)
        tl.store(increases + slot, tl.where(at_checkpoint, 0, num_increases))
        tl.store(halved + slot, is_first | tl.where(at_checkpoint, halve, was_halved))
        tl.store(broken + slot, is_adversarial)
        advance_clock(clock, done, slot, step_index, steps)


@implements(apgd_update)
def step(
    threat: Threat,
    slots: Slots,
    buffers: APGDBuffers,
    table: Tensor,
    eot_iterations: int,
    current: Tensor,
    loss: Tensor,
    gradient: Tensor,
    is_correct: Tensor,
) -> None:
    """Linf, float32."""
    images = buffers.current, buffers.previous, buffers.best_point, buffers.best_gradient
    numbers = buffers.loss, buffers.best_loss, buffers.checkpoint_loss, buffers.step_size
    if type(threat) is not Linf or not supports(slots, *images) or not is_plain_float32(current, gradient):
        return NotImplemented
    if any(number.dtype != torch.float32 for number in (loss, *numbers)):
        return NotImplemented
    launch(
        _step_kernel, (len(slots),), slots.x, current.contiguous(), gradient.contiguous(), loss.contiguous(),
        is_correct.contiguous(), *flags(slots), slots.point, *images, *numbers, buffers.increases, buffers.halved,
        table, float(threat.eps), float(2 * threat.eps), float32_reciprocal(eot_iterations), len(table),
        **kernel_args(slots.x, _BLOCK), **NO_FMA,
    )
    return None
