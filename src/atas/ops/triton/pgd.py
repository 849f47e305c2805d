"""One step of PGD, one program per slot."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from atas.attacks.projected_gradient_descent import pgd_update
from atas.attacks.search import Slots
from atas.core.dispatch import implements
from atas.ops.triton.launch import NO_FMA, is_plain_float32, launch
from atas.ops.triton.projected_step import sign_step
from atas.ops.triton.search_state import advance_clock, flags, is_running, kernel_args, supports
from atas.threat import Linf, Threat

_BLOCK = 1024


@triton.jit(do_not_specialize=["steps"])
def _step_kernel(
    x, current, gradient, active, broken, done, clock, point, step_size, eps, steps, size: tl.constexpr,
    block: tl.constexpr,
):
    """`atas.attacks.projected_gradient_descent.pgd_update` of one slot. The sign of NaN is 0."""
    slot = tl.program_id(0)
    if is_running(active, broken, done, slot):
        step_index = tl.load(clock + slot)
        for first in range(0, size, block):
            offs = first + tl.arange(0, block)
            mask = offs < size
            image_offs = slot * size + offs
            image, grad = tl.load(x + image_offs, mask, 0.0), tl.load(gradient + image_offs, mask, 0.0)
            tl.store(
                point + image_offs,
                sign_step(tl.load(current + image_offs, mask, 0.0), grad, step_size, image, eps),
                mask,
            )
        tl.debug_barrier()  # all threads have read the state that is written below
        advance_clock(clock, done, slot, step_index, steps)


@implements(pgd_update)
def step(threat: Threat, slots: Slots, current: Tensor, gradient: Tensor, size: float, iterations: int) -> None:
    """Linf, float32."""
    if type(threat) is not Linf or not supports(slots) or not is_plain_float32(current, gradient):
        return NotImplemented
    launch(
        _step_kernel, (len(slots),), slots.x, current.contiguous(), gradient.contiguous(), *flags(slots), slots.point,
        float(size), float(threat.eps), iterations, **kernel_args(slots.x, _BLOCK), **NO_FMA,
    )
    return None
