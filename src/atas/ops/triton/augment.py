"""Random views (crop and flip), and images seen through them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.core import augment as plain
from atas.core.augment import View
from atas.core.dispatch import implements
from atas.core.resized_crop import AnyView
from atas.core.rng import Stream
from atas.data.loader import gather_views
from atas.ops.triton.launch import NO_FMA, ImageGrid, can_launch, float32_reciprocal, launch
from atas.ops.triton.rng import stream_key, uniform

_EXAMPLES_PER_PROGRAM = 128  # examples that a program draws for


@triton.jit
def view_coordinates(offs, top, left, flip, height: tl.constexpr, width: tl.constexpr):
    """Return channel, canvas row and canvas column of these entries of a view."""
    pixel = offs % (height * width)
    column = pixel % width
    column = tl.where(flip, width - 1 - column, column)
    return offs // (height * width), top.to(tl.int32) + pixel // width, left.to(tl.int32) + column


@triton.jit(do_not_specialize=["top_key", "left_key", "flip_key"])
def _sample_view_kernel(
    epoch, index, top, left, flip, count, choices, top_key, left_key, flip_key, flips: tl.constexpr,
    block: tl.constexpr,
):
    """The position of each view and whether it is flipped."""
    offs = tl.program_id(0) * block + tl.arange(0, block)
    mask = offs < count
    now, example, position = tl.load(epoch), tl.load(index + offs, mask, 0), tl.zeros((block,), tl.int32)
    tl.store(top + offs, (uniform(top_key, now, example, position) * choices).to(tl.int64), mask)
    tl.store(left + offs, (uniform(left_key, now, example, position) * choices).to(tl.int64), mask)
    flipped = tl.zeros((block,), tl.int1)
    if flips:
        flipped = uniform(flip_key, now, example, position) < 0.5
    tl.store(flip + offs, flipped, mask)


@triton.jit
def _apply_view_kernel(
    images, index, top, left, flip, out, scale, size: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
    pad: tl.constexpr, block: tl.constexpr,
):
    """A block of one image as its view shows it, zero outside the stored image."""
    example = tl.program_id(0)
    offs = tl.program_id(1) * block + tl.arange(0, block)
    mask = offs < size
    channel, row, column = view_coordinates(
        offs, tl.load(top + example) - pad, tl.load(left + example) - pad, tl.load(flip + example), height, width
    )
    in_image = mask & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    pixel_offs = tl.load(index + example).to(tl.int64) * size + (channel * height + row) * width + column
    pixels = tl.load(images + pixel_offs, in_image, 0)
    tl.store(out + example * size + offs, pixels.to(tl.float32) * scale, mask)


def view_args(view: View, shape: torch.Size) -> dict[str, int]:
    """Return the arguments of kernels that read through a view."""
    return {"height": shape[-2], "width": shape[-1], "pad": view.pad}


def view_tensors(index: Tensor, view: View) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the examples of a batch and the positions of their views, contiguous."""
    return index.contiguous(), view.top.contiguous(), view.left.contiguous(), view.flip.contiguous()


@implements(plain.sample_view)
def sample_view(seed: int, epoch: Tensor, index: Tensor, pad: int, flip: bool) -> tuple[Tensor, Tensor, Tensor]:
    """All arguments."""
    if not can_launch(index):
        return NotImplemented
    index, count = index.contiguous(), len(index)
    top, left = torch.empty_like(index, dtype=torch.int64), torch.empty_like(index, dtype=torch.int64)
    flipped = torch.empty_like(index, dtype=torch.bool)
    keys = (stream_key(seed, purpose) for purpose in (Stream.TOP, Stream.LEFT, Stream.FLIP))
    launch(
        _sample_view_kernel, (triton.cdiv(count, _EXAMPLES_PER_PROGRAM),), epoch.to(index.device), index, top, left,
        flipped, count, 2 * pad + 1, *keys, flips=flip, block=_EXAMPLES_PER_PROGRAM, **NO_FMA,
    )
    return top, left, flipped


@implements(gather_views)
def apply_view(images: Tensor, index: Tensor, view: AnyView) -> Tensor:
    """Crops and flips of contiguous uint8 images."""
    if not isinstance(view, View) or images.dtype != torch.uint8 or images.dim() != 4:
        return NotImplemented
    if not images.is_contiguous() or not len(index) or not can_launch(images):
        return NotImplemented
    out = torch.empty(len(index), *images.shape[1:], dtype=torch.float32, device=images.device)
    image_grid = ImageGrid.of(out)
    launch(
        _apply_view_kernel, image_grid.grid, images, *view_tensors(index, view), out, float32_reciprocal(255),
        **image_grid.kernel_args(), **view_args(view, images.shape), **NO_FMA,
    )
    return out
