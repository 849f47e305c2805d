"""Steps and projections in an Linf ball, and the perturbations that are remembered."""

from __future__ import annotations

from typing import TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.augment import View
from atas.boxes import AnyView
from atas.kernels._launch import launch
from atas.kernels._small._hash import salt, uniform
from atas.kernels._small._shared import AS_TORCH, Cut, frame, inverse, places, usual, window
from atas.memory import Memory, Perturbations
from atas.noise import Purpose
from atas.threat import Linf, Threat

_KEPT = (torch.int8, torch.float16, torch.float32)
_LARGEST = tl.constexpr(127.0)
_WHOLE = tl.constexpr(1.5 * 2.0**23)  # adding this leaves no bits behind the point


@triton.jit
def bounded(value, low, high):  # type: ignore[no-untyped-def]
    """Clip; what is not a number stays so."""
    value = tl.maximum(value, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(value, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def project(point, x, eps):  # type: ignore[no-untyped-def]
    """`Linf.project`."""
    return bounded(bounded(point, x - eps, x + eps), 0.0, 1.0)


@triton.jit
def stepped(point, gradient, length, x, eps):  # type: ignore[no-untyped-def]
    """A step along the gradient's sign, projected."""
    sign = tl.where(gradient > 0, 1.0, tl.where(gradient < 0, -1.0, 0.0))
    return project(point + length * sign, x, eps)


@triton.jit
def cells(  # type: ignore[no-untyped-def]
    at, index, top, left, flip, example, size: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
    pad: tl.constexpr,
):  # fmt: skip
    """Where the memory keeps these entries of a view."""
    high: tl.constexpr = height + 2 * pad
    wide: tl.constexpr = width + 2 * pad
    channel, row, column = window(
        at, tl.load(top + example), tl.load(left + example), tl.load(flip + example), height, width
    )
    canvas = tl.load(index + example).to(tl.int64) * (size // (height * width) * high * wide)
    return canvas + (channel * high + row) * wide + column


@triton.jit
def encoded(perturbation, per_level, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """A perturbation as it is stored; int8 by the nearest level, the even one of two."""
    if kind == tl.int8:
        perturbation = bounded(perturbation * per_level, -_LARGEST, _LARGEST)
        perturbation = (perturbation + _WHOLE) - _WHOLE
    return perturbation.to(kind)


@triton.jit
def _recall(  # type: ignore[no-untyped-def]
    delta, x, index, top, left, flip, out, eps, level, size: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
    pad: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """An image with its remembered perturbation."""
    example = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    valid = at < size
    kept = tl.load(delta + cells(at, index, top, left, flip, example, size, height, width, pad), valid, 0)
    image = tl.load(x + example * size + at, valid, 0.0)
    tl.store(out + example * size + at, project(image + kept.to(tl.float32) * level, image, eps), valid)


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    delta, perturbation, index, top, left, flip, per_level, size: tl.constexpr, height: tl.constexpr,
    width: tl.constexpr, pad: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Remember a perturbation."""
    example = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    valid = at < size
    change = tl.load(perturbation + example * size + at, valid, 0.0)
    place = delta + cells(at, index, top, left, flip, example, size, height, width, pad)
    tl.store(place, encoded(change, per_level, delta.dtype.element_ty), valid)


@triton.jit
def _ascend(  # type: ignore[no-untyped-def]
    point, gradient, length, x, out, eps, each: tl.constexpr, size: tl.constexpr, block: tl.constexpr
):
    """A step up the gradient, projected; `each` where examples have lengths of their own."""
    example = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    valid = at < size
    here = example * size + at
    far = tl.load(length + (example if each else 0))
    image = tl.load(x + here, valid, 0.0)
    start, slope = tl.load(point + here, valid, 0.0), tl.load(gradient + here, valid, 0.0)
    tl.store(out + here, stepped(start, slope, far, image, eps), valid)


@triton.jit(do_not_specialize=["start_salt"])
def _random_start(  # type: ignore[no-untyped-def]
    x, epoch, index, out, eps, start_salt, each: tl.constexpr, size: tl.constexpr, block: tl.constexpr
):
    """A random point of the ball; `each` where examples have epochs of their own."""
    example = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    valid = at < size
    image = tl.load(x + example * size + at, valid, 0.0)
    drawn = uniform(start_salt, tl.load(epoch + (example if each else 0)), tl.load(index + example), at)
    tl.store(out + example * size + at, project(image + (2 * drawn - 1) * eps, image, eps), valid)


def covers(memory: Memory, view: AnyView) -> TypeGuard[Perturbations]:
    """Whether the kernels can read and write such a memory through such a view: every pixel, on the device."""
    every_pixel = type(memory) is Perturbations and isinstance(view, View) and memory.visits is None
    return every_pixel and type(memory.threat) is Linf and memory.delta.dtype in _KEPT and memory.delta.is_contiguous()


def per_level(memory: Perturbations) -> float:
    """By what a perturbation is multiplied before it is stored."""
    return inverse(memory._unit or 1.0) if memory.delta.dtype == torch.int8 else 1.0


def recall(memory: Memory, x: Tensor, index: Tensor, view: View) -> Tensor:
    """As `atta._recall`."""
    if not covers(memory, view) or not usual(x):
        return NotImplemented
    x = x.contiguous()
    cut, out = Cut.of(x), torch.empty_like(x)
    level = memory._unit if memory.delta.dtype == torch.int8 else 1.0
    launch(
        _recall, cut.grid,
        memory.delta, x, *places(index, view), out, float(memory.threat.eps), level, **cut.sizes(),
        **frame(view, x.shape), **AS_TORCH,
    )  # fmt: skip
    return out


def write(memory: Perturbations, index: Tensor, view: View, perturbation: Tensor) -> None:
    """As `memory._write`."""
    if not covers(memory, view) or not usual(perturbation):
        return NotImplemented
    cut = Cut.of(perturbation)
    launch(
        _write, cut.grid,
        memory.delta, perturbation.contiguous(), *places(index, view), per_level(memory), **cut.sizes(),
        **frame(view, perturbation.shape), **AS_TORCH,
    )  # fmt: skip
    return None


def ascend(threat: Threat, point: Tensor, gradient: Tensor, size: Tensor | float, x: Tensor) -> Tensor:
    """As `threat._ascend`."""
    if type(threat) is not Linf or not usual(point, gradient, x):
        return NotImplemented
    if not isinstance(size, Tensor):
        size = torch.full((), size, dtype=torch.float32, device=x.device)
    if size.dtype != torch.float32 or size.shape not in ((), (len(x),)):
        return NotImplemented
    x = x.contiguous()
    cut, out = Cut.of(x), torch.empty_like(x)
    launch(
        _ascend, cut.grid,
        point.contiguous(), gradient.contiguous(), size.contiguous(), x, out, float(threat.eps), each=size.dim() == 1,
        **cut.sizes(), **AS_TORCH,
    )  # fmt: skip
    return out


def random_start(threat: Threat, x: Tensor, seed: int, epoch: Tensor, index: Tensor) -> Tensor:
    """As `threat._random_start`."""
    if type(threat) is not Linf or not usual(x) or epoch.shape not in ((), (len(x),)):
        return NotImplemented
    x = x.contiguous()
    cut, out = Cut.of(x), torch.empty_like(x)
    launch(
        _random_start, cut.grid,
        x, epoch.to(x.device).contiguous(), index.contiguous(), out, float(threat.eps), salt(seed, Purpose.START),
        each=epoch.dim() == 1, **cut.sizes(), **AS_TORCH,
    )  # fmt: skip
    return out
