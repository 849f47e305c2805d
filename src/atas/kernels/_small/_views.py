"""Random views, and images seen through them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.augment import View
from atas.boxes import AnyView
from atas.kernels._launch import launch
from atas.kernels._small._hash import salt, uniform
from atas.kernels._small._shared import AS_TORCH, Cut, frame, inverse, places, window
from atas.noise import Purpose

_SOME = 128  # examples that a program draws for


@triton.jit(do_not_specialize=["top_salt", "left_salt", "flip_salt"])
def _draw(  # type: ignore[no-untyped-def]
    epoch, index, top, left, flip, count, choices, top_salt, left_salt, flip_salt, flips: tl.constexpr,
    some: tl.constexpr,
):  # fmt: skip
    """Where each window lies and whether it is mirrored."""
    at = tl.program_id(0) * some + tl.arange(0, some)
    inside = at < count
    now, example, first = tl.load(epoch), tl.load(index + at, inside, 0), tl.zeros((some,), tl.int32)
    tl.store(top + at, (uniform(top_salt, now, example, first) * choices).to(tl.int64), inside)
    tl.store(left + at, (uniform(left_salt, now, example, first) * choices).to(tl.int64), inside)
    mirrored = tl.zeros((some,), tl.int1)
    if flips:
        mirrored = uniform(flip_salt, now, example, first) < 0.5
    tl.store(flip + at, mirrored, inside)


@triton.jit
def _show(  # type: ignore[no-untyped-def]
    images, index, top, left, flip, out, level, size: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
    pad: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """A part of one image as its view shows it, zero outside of the stored image."""
    example = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    valid = at < size
    channel, row, column = window(
        at, tl.load(top + example) - pad, tl.load(left + example) - pad, tl.load(flip + example), height, width
    )
    inside = valid & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    cells = tl.load(index + example).to(tl.int64) * size + (channel * height + row) * width + column
    pixels = tl.load(images + cells, inside, 0)
    tl.store(out + example * size + at, pixels.to(tl.float32) * level, valid)


def draw(seed: int, epoch: Tensor, index: Tensor, pad: int, flip: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As `augment._draw`."""
    index, count = index.contiguous(), len(index)
    top, left = torch.empty_like(index, dtype=torch.int64), torch.empty_like(index, dtype=torch.int64)
    mirrored = torch.empty_like(index, dtype=torch.bool)
    salts = (salt(seed, purpose) for purpose in (Purpose.TOP, Purpose.LEFT, Purpose.FLIP))
    launch(
        _draw, (triton.cdiv(count, _SOME),),
        epoch.to(index.device), index, top, left, mirrored, count, 2 * pad + 1, *salts, flips=flip, some=_SOME,
        **AS_TORCH,
    )  # fmt: skip
    return top, left, mirrored


def show(images: Tensor, index: Tensor, view: AnyView) -> Tensor:
    """As `resident._show`."""
    if not isinstance(view, View) or images.dtype != torch.uint8 or images.dim() != 4:
        return NotImplemented
    if not images.is_contiguous() or not len(index):
        return NotImplemented
    out = torch.empty(len(index), *images.shape[1:], dtype=torch.float32, device=images.device)
    cut = Cut.of(out)
    launch(
        _show, cut.grid,
        images, *places(index, view), out, inverse(255), **cut.sizes(), **frame(view, images.shape), **AS_TORCH,
    )  # fmt: skip
    return out
