"""Linf steps, projections and random starts, stored perturbations, and the adaptive step of ATAS."""

from __future__ import annotations

from typing import TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas import threat as plain
from atas.core.dispatch import implements
from atas.core.perturbations import FullResolution, PerturbationStore, store_pixels
from atas.core.resized_crop import AnyView
from atas.core.rng import Stream
from atas.methods import ATAS
from atas.methods import atas as plain_atas
from atas.methods.base import projected_start
from atas.ops.triton.augment import follows_pixels, stored_pixels, view_args
from atas.ops.triton.launch import NO_FMA, ImageGrid, float32_reciprocal, is_plain_float32, launch
from atas.ops.triton.rng import stream_key, uniform
from atas.threat import Linf, Threat

_STORED_DTYPES = (torch.int8, torch.float16, torch.float32)
_INT8_MAX = tl.constexpr(127.0)
_ROUNDING_OFFSET = tl.constexpr(1.5 * 2.0**23)  # adding this leaves no bits behind the point


@triton.jit
def clip(value, low, high):
    """Clip; NaN stays NaN."""
    value = tl.maximum(value, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(value, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def project(point, x, eps):
    """`Linf.project`."""
    return clip(clip(point, x - eps, x + eps), 0.0, 1.0)


@triton.jit
def sign_step(point, gradient, step_size, x, eps):
    """A step along the gradient's sign, projected."""
    sign = tl.where(gradient > 0, 1.0, tl.where(gradient < 0, -1.0, 0.0))
    return project(point + step_size * sign, x, eps)


@triton.jit
def encode(perturbation, inv_scale, kind: tl.constexpr):
    """A perturbation as it is stored; int8 by the nearest level, ties to even."""
    if kind == tl.int8:
        perturbation = clip(perturbation * inv_scale, -_INT8_MAX, _INT8_MAX)
        perturbation = (perturbation + _ROUNDING_OFFSET) - _ROUNDING_OFFSET
    return perturbation.to(kind)


@triton.jit
def _load_kernel(
    delta, x, out, eps, scale, position, box, hole, size: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
    stored_height: tl.constexpr, stored_width: tl.constexpr, margin_top: tl.constexpr, margin_left: tl.constexpr,
    block: tl.constexpr,
):
    """An image plus its stored perturbation, projected."""
    example = tl.program_id(0)
    offs = tl.program_id(1) * block + tl.arange(0, block)
    mask = offs < size
    places, shown = stored_pixels(
        offs, position, box, hole, size, height, width, stored_height, stored_width, margin_top, margin_left
    )
    stored = tl.load(delta + places, shown, 0)
    image = tl.load(x + example * size + offs, mask, 0.0)
    tl.store(out + example * size + offs, project(image + stored.to(tl.float32) * scale, image, eps), mask)


@triton.jit
def _store_kernel(
    delta, perturbation, inv_scale, position, box, hole, size: tl.constexpr, height: tl.constexpr,
    width: tl.constexpr, stored_height: tl.constexpr, stored_width: tl.constexpr, margin_top: tl.constexpr,
    margin_left: tl.constexpr, block: tl.constexpr,
):
    """Store a perturbation."""
    offs = tl.program_id(1) * block + tl.arange(0, block)
    places, shown = stored_pixels(
        offs, position, box, hole, size, height, width, stored_height, stored_width, margin_top, margin_left
    )
    delta_x = tl.load(perturbation + tl.program_id(0) * size + offs, shown, 0.0)
    tl.store(delta + places, encode(delta_x, inv_scale, delta.dtype.element_ty), shown)


@triton.jit
def _ascend_kernel(
    point, gradient, step_sizes, x, out, eps, per_example: tl.constexpr, size: tl.constexpr, block: tl.constexpr
):
    """A step up the gradient, projected; `per_example`: examples have their own step sizes."""
    example = tl.program_id(0)
    offs = tl.program_id(1) * block + tl.arange(0, block)
    mask = offs < size
    image_offs = example * size + offs
    step_size = tl.load(step_sizes + (example if per_example else 0))
    image = tl.load(x + image_offs, mask, 0.0)
    start, grad = tl.load(point + image_offs, mask, 0.0), tl.load(gradient + image_offs, mask, 0.0)
    tl.store(out + image_offs, sign_step(start, grad, step_size, image, eps), mask)


@triton.jit(do_not_specialize=["start_key"])
def _random_start_kernel(
    x, epoch, index, out, eps, start_key, per_example: tl.constexpr, size: tl.constexpr, block: tl.constexpr
):
    """A random point of the ball; `per_example`: examples have their own epochs."""
    example = tl.program_id(0)
    offs = tl.program_id(1) * block + tl.arange(0, block)
    mask = offs < size
    image = tl.load(x + example * size + offs, mask, 0.0)
    uniform_values = uniform(
        start_key, tl.load(epoch + (example if per_example else 0)), tl.load(index + example), offs
    )
    tl.store(out + example * size + offs, project(image + (2 * uniform_values - 1) * eps, image, eps), mask)


def supports(memory: PerturbationStore) -> TypeGuard[FullResolution]:
    """Return whether the kernels can read and write these perturbations: of every pixel, on the device."""
    return (
        type(memory) is FullResolution
        and memory.offload is None
        and type(memory.threat) is Linf
        and memory.delta.dtype in _STORED_DTYPES
        and memory.delta.is_contiguous()
    )


def encode_scale(memory: FullResolution) -> float:
    """Return the factor by which a perturbation is multiplied before it is stored."""
    return float32_reciprocal(memory._unit or 1.0) if memory.delta.dtype == torch.int8 else 1.0


@implements(projected_start)
def load(memory: PerturbationStore, x: Tensor, index: Tensor, view: AnyView) -> Tensor:
    """Linf; views of float32 images that show stored pixels; perturbations of every pixel on the device."""
    if not supports(memory) or not is_plain_float32(x) or not follows_pixels(view, x.shape[2:]):
        return NotImplemented
    x = x.contiguous()
    image_grid, out = ImageGrid.of(x), torch.empty_like(x)
    scale = memory._unit if memory.delta.dtype == torch.int8 else 1.0
    launch(
        _load_kernel, image_grid.grid, memory.delta, x, out, float(memory.threat.eps), scale,
        **image_grid.kernel_args(), **view_args(index, view, x.shape[2:], memory.delta.shape[2:]), **NO_FMA,
    )
    return out


@implements(store_pixels)
def store(perturbations: FullResolution, index: Tensor, view: AnyView, perturbation: Tensor) -> None:
    """As `load`."""
    if not supports(perturbations) or not is_plain_float32(perturbation):
        return NotImplemented
    frame, stored = perturbation.shape[2:], perturbations.delta.shape[2:]
    if not follows_pixels(view, frame):
        return NotImplemented
    image_grid = ImageGrid.of(perturbation)
    launch(
        _store_kernel, image_grid.grid, perturbations.delta, perturbation.contiguous(), encode_scale(perturbations),
        **image_grid.kernel_args(), **view_args(index, view, frame, stored), **NO_FMA,
    )
    return None


@implements(plain.ascend)
def ascend(threat: Threat, point: Tensor, gradient: Tensor, size: Tensor | float, x: Tensor) -> Tensor:
    """Linf; float32 images that need no gradient; one step size, or one per example."""
    if type(threat) is not Linf or not is_plain_float32(point, gradient, x):
        return NotImplemented
    if not isinstance(size, Tensor):
        size = torch.full((), size, dtype=torch.float32, device=x.device)
    if size.dtype != torch.float32 or size.shape not in ((), (len(x),)):
        return NotImplemented
    x = x.contiguous()
    image_grid, out = ImageGrid.of(x), torch.empty_like(x)
    launch(
        _ascend_kernel, image_grid.grid, point.contiguous(), gradient.contiguous(), size.contiguous(), x, out,
        float(threat.eps), per_example=size.dim() == 1, **image_grid.kernel_args(), **NO_FMA,
    )
    return out


@implements(plain.random_start)
def random_start(threat: Threat, x: Tensor, seed: int, epoch: Tensor, index: Tensor) -> Tensor:
    """Linf, float32; one epoch, or one per example."""
    if type(threat) is not Linf or not is_plain_float32(x) or epoch.shape not in ((), (len(x),)):
        return NotImplemented
    x = x.contiguous()
    image_grid, out = ImageGrid.of(x), torch.empty_like(x)
    launch(
        _random_start_kernel, image_grid.grid, x, epoch.to(x.device).contiguous(), index.contiguous(), out,
        float(threat.eps), stream_key(seed, Stream.START), per_example=epoch.dim() == 1, **image_grid.kernel_args(),
        **NO_FMA,
    )
    return out


_BLOCK = 4096  # entries at a time: a whole image of 3 x 32 x 32


@triton.jit
def _adaptive_step_kernel(
    x, start, gradient, delta, averages, step_sizes, epoch, scale, out, eps, inv_scale, inv_c, max_step, beta,
    one_minus_beta, min_clip, max_clip, warmup_epochs, position, box, hole, has_clip: tl.constexpr, size: tl.constexpr,
    height: tl.constexpr, width: tl.constexpr, stored_height: tl.constexpr, stored_width: tl.constexpr,
    margin_top: tl.constexpr, margin_left: tl.constexpr, block: tl.constexpr,
):
    """The adaptive step of one example; stores its averaged squared norm, step size and perturbation."""
    example = tl.program_id(0)
    image = tl.load(position[0] + example).to(tl.int64)
    average = tl.load(averages + image)
    squared_norm = tl.zeros((block,), tl.float32)
    for first in range(0, size, block):
        offs = first + tl.arange(0, block)
        grad = tl.load(gradient + example * size + offs, offs < size, 0.0)
        squared_norm += grad * grad
    new_average = beta * average + one_minus_beta * tl.sum(squared_norm, 0)
    step_size = tl.div_rn(1.0, 1.0 + tl.sqrt_rn(new_average) * inv_c) * max_step
    if has_clip:
        step_size = clip(step_size, min_clip, max_clip)
    is_warmup = tl.load(epoch) < warmup_epochs
    step_size = tl.where(is_warmup, eps, step_size) * tl.load(scale)
    tl.debug_barrier()  # every thread has read the average
    tl.store(averages + image, tl.where(is_warmup, average, new_average))
    tl.store(step_sizes + image, step_size)
    for first in range(0, size, block):
        offs = first + tl.arange(0, block)
        mask = offs < size
        image_offs = example * size + offs
        clean = tl.load(x + image_offs, mask, 0.0)
        grad = tl.load(gradient + image_offs, mask, 0.0)
        point = sign_step(tl.load(start + image_offs, mask, 0.0), grad, step_size, clean, eps)
        tl.store(out + image_offs, point, mask)
        places, shown = stored_pixels(
            offs, position, box, hole, size, height, width, stored_height, stored_width, margin_top, margin_left
        )
        tl.store(delta + places, encode(point - clean, inv_scale, delta.dtype.element_ty), shown)


@implements(plain_atas.adaptive_step_and_store)
def adaptive_step_and_store(
    method: ATAS, x: Tensor, index: Tensor, view: AnyView, start: Tensor, gradient: Tensor
) -> Tensor:
    """As `load`; methods that take the step of ATAS itself."""
    norms = method.norms
    is_plain_atas = (
        type(method).adaptive_update is ATAS.adaptive_update
        and norms.squared_norm.dtype == norms.step_size.dtype == torch.float32
    )
    if not is_plain_atas or not supports(method.memory) or not is_plain_float32(x, start, gradient):
        return NotImplemented
    if not follows_pixels(view, x.shape[2:]):
        return NotImplemented
    x = x.contiguous()
    out, size = torch.empty_like(x), x[0].numel()
    low, high = method.clip or (0.0, 0.0)
    launch(
        _adaptive_step_kernel, (len(x),), x, start.contiguous(), gradient.contiguous(), method.memory.delta,
        norms.squared_norm, norms.step_size, method.epoch, method.step_scale, out,
        float(method.threat.eps), encode_scale(method.memory), float32_reciprocal(method.c), float(method.max_step),
        float(method.beta), float(1 - method.beta), float(low), float(high), method.warmup_epochs,
        has_clip=method.clip is not None, size=size, block=min(_BLOCK, triton.next_power_of_2(size)), num_warps=8,
        **view_args(index, view, x.shape[2:], method.memory.delta.shape[2:]), **NO_FMA,
    )
    return out
