"""Random views (crops, shifted boxes, flips and erased rectangles), and images seen through them."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.core import augment as plain
from atas.core import crop_shift, erasing
from atas.core.augment import Flip, View
from atas.core.crop_shift import ShiftView, Size
from atas.core.dispatch import implements
from atas.core.erasing import ErasedView, PixelView
from atas.core.resized_crop import AnyView
from atas.core.rng import Stream
from atas.data.loader import gather_views
from atas.ops.triton.launch import NO_FMA, ImageGrid, can_launch, float32_reciprocal, launch
from atas.ops.triton.rng import stream_key, uniform

_EXAMPLES_PER_PROGRAM = 128  # examples that a program draws for
_NEVER = 2**31 - 1  # an epoch that no training reaches
_ROUNDING_OFFSET = tl.constexpr(1.5 * 2.0**52)  # adding this to a float64 leaves no bits behind the point


@triton.jit
def stored_pixels(
    offs, position, box, hole, size: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
    stored_height: tl.constexpr, stored_width: tl.constexpr, margin_top: tl.constexpr, margin_left: tl.constexpr,
):
    """Return the offsets of these entries of a view in the stored frames, and whether the view shows anything there.

    `position` is (examples, top, left, flip). `box` is None for windows; it is (source top, source left, height, width)
    for boxes that are shown at `top` and `left`. `hole` is (top, left, height, width) of erased rectangles, or None.
    """
    example = tl.program_id(0)
    index, top, left, flip = position
    pixel = offs % (height * width)
    row, column = pixel // width, pixel % width
    shown = offs < size
    if hole is not None:
        hole_top, hole_left, hole_height, hole_width = hole
        shown &= ~_in_rectangle(row, column, hole_top, hole_left, hole_height, hole_width)
    column = tl.where(tl.load(flip + example), width - 1 - column, column)
    down, across = tl.load(top + example).to(tl.int32), tl.load(left + example).to(tl.int32)
    if box is not None:
        source_top, source_left, box_height, box_width = box
        shown &= _in_rectangle(row, column, top, left, box_height, box_width)
        down = tl.load(source_top + example).to(tl.int32) - down
        across = tl.load(source_left + example).to(tl.int32) - across
    row, column = row + down + margin_top, column + across + margin_left
    shown &= (row >= 0) & (row < stored_height) & (column >= 0) & (column < stored_width)
    channel = offs // (height * width)
    frame = tl.load(index + example).to(tl.int64) * (size // (height * width) * stored_height * stored_width)
    return frame + (channel * stored_height + row) * stored_width + column, shown


@triton.jit
def _in_rectangle(row, column, top, left, height, width):
    """Whether these pixels are in the rectangle of the program's example."""
    example = tl.program_id(0)
    down, across = row - tl.load(top + example).to(tl.int32), column - tl.load(left + example).to(tl.int32)
    return (down >= 0) & (down < tl.load(height + example)) & (across >= 0) & (across < tl.load(width + example))


@triton.jit
def _is_flipped(key, epoch, example, flips: tl.constexpr, block: tl.constexpr):
    """Whether these examples are mirrored in this epoch; `flips` is the setting `flip`."""
    flipped, first = tl.zeros((block,), tl.int1), tl.zeros((block,), tl.int32)
    if flips == "alternate":
        flipped = (uniform(key, epoch >> 1, example, first) < 0.5) ^ ((epoch & 1) == 1)
    elif flips:
        flipped = uniform(key, epoch, example, first) < 0.5
    return flipped


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
    tl.store(flip + offs, _is_flipped(flip_key, now, example, flips, block), mask)


@triton.jit(do_not_specialize=["shift", "until", "shift_key", "flip_key"])
def _sample_shift_kernel(
    epoch, index, source_top, source_left, top, left, box_height, box_width, flip, count, shift, until, shift_key,
    flip_key, height: tl.constexpr, width: tl.constexpr, flips: tl.constexpr, block: tl.constexpr,
):
    """The box of each image and the position where it is shown; from epoch `until` on, the whole image."""
    offs = tl.program_id(0) * block + tl.arange(0, block)
    mask = offs < count
    now, example, first = tl.load(epoch), tl.load(index + offs, mask, 0), tl.zeros((block,), tl.int32)
    lost = (uniform(shift_key, now, example, first) * (shift + 1)).to(tl.int32)
    lost = tl.where(now < until, lost, 0)
    lost_columns = (uniform(shift_key, now, example, first + 1) * (lost + 1)).to(tl.int32)
    lost_rows = lost - lost_columns
    tl.store(source_top + offs, (uniform(shift_key, now, example, first + 2) * (lost_rows + 1)).to(tl.int64), mask)
    tl.store(top + offs, (uniform(shift_key, now, example, first + 3) * (lost_rows + 1)).to(tl.int64), mask)
    tl.store(source_left + offs, (uniform(shift_key, now, example, first + 4) * (lost_columns + 1)).to(tl.int64), mask)
    tl.store(left + offs, (uniform(shift_key, now, example, first + 5) * (lost_columns + 1)).to(tl.int64), mask)
    tl.store(box_height + offs, (height - lost_rows).to(tl.int64), mask)
    tl.store(box_width + offs, (width - lost_columns).to(tl.int64), mask)
    tl.store(flip + offs, _is_flipped(flip_key, now, example, flips, block), mask)


# Numbers that are no integers are constants of the kernel, because an argument would be rounded to float32.
@triton.jit(do_not_specialize=["until", "key"])
def _sample_erasure_kernel(
    epoch, index, top, left, box_height, box_width, count, until, key, height: tl.constexpr, width: tl.constexpr,
    probability: tl.constexpr, low_area: tl.constexpr, area_range: tl.constexpr, low_ratio: tl.constexpr,
    ratio_range: tl.constexpr, tries: tl.constexpr, block: tl.constexpr,
):
    """The first rectangle that fits each image, with this probability and before epoch `until`, in float64."""
    offs = tl.program_id(0) * block + tl.arange(0, block)
    mask = offs < count
    now, example, first = tl.load(epoch), tl.load(index + offs, mask, 0), tl.zeros((block,), tl.int32)
    found, rows, columns = tl.zeros((block,), tl.int1), first, first
    for attempt in range(3, 3 + tries):
        share = uniform(key, now, example, first + attempt).to(tl.float64) * area_range + low_area
        ratio = uniform(key, now, example, first + attempt + tries).to(tl.float64) * ratio_range + low_ratio
        ratio, pixels = tl.exp(ratio), share * (height * width)
        high, wide = _nearest_side(pixels * ratio), _nearest_side(pixels / ratio)
        fits = (high >= 1) & (high < height) & (wide >= 1) & (wide < width) & ~found
        rows, columns, found = tl.where(fits, high, rows), tl.where(fits, wide, columns), found | fits
    erases = found & (uniform(key, now, example, first).to(tl.float64) < probability) & (now < until)
    rows, columns = tl.where(erases, rows, 0), tl.where(erases, columns, 0)
    down = uniform(key, now, example, first + 1).to(tl.float64) * (height - rows + 1)
    across = uniform(key, now, example, first + 2).to(tl.float64) * (width - columns + 1)
    tl.store(top + offs, down.to(tl.int64), mask)
    tl.store(left + offs, across.to(tl.int64), mask)
    tl.store(box_height + offs, rows.to(tl.int64), mask)
    tl.store(box_width + offs, columns.to(tl.int64), mask)


@triton.jit
def _nearest_side(area):
    """The side of a square of this area in whole pixels, ties to even."""
    return ((tl.sqrt(area) + _ROUNDING_OFFSET) - _ROUNDING_OFFSET).to(tl.int32)


@triton.jit
def _apply_view_kernel(
    images, out, scale, position, box, hole, size: tl.constexpr, height: tl.constexpr, width: tl.constexpr,
    stored_height: tl.constexpr, stored_width: tl.constexpr, margin_top: tl.constexpr, margin_left: tl.constexpr,
    block: tl.constexpr,
):
    """A block of one image as its view shows it, zero where it shows nothing of the stored image."""
    offs = tl.program_id(1) * block + tl.arange(0, block)
    stored, shown = stored_pixels(
        offs, position, box, hole, size, height, width, stored_height, stored_width, margin_top, margin_left
    )
    pixels = tl.load(images + stored, shown, 0)
    tl.store(out + tl.program_id(0) * size + offs, pixels.to(tl.float32) * scale, offs < size)


def follows_pixels(view: AnyView, frame: torch.Size) -> TypeGuard[PixelView]:
    """Return whether kernels can read and write images of this height and width through the view."""
    shown = view.view if isinstance(view, ErasedView) else view
    return isinstance(shown, View) or (isinstance(shown, ShiftView) and shown.size == frame)


def view_args(index: Tensor, view: PixelView, frame: torch.Size, stored: torch.Size) -> dict[str, Any]:
    """Return the arguments of kernels that read or write through a view of images of this height and width.

    `stored` is the height and width of the stored frames, which may have padding around the image.
    """
    box = hole = None
    if isinstance(view, ErasedView):
        hole, view = _contiguous(view.top, view.left, view.height, view.width), view.view
    if isinstance(view, ShiftView):
        box = _contiguous(view.source_top, view.source_left, view.height, view.width)
    window_pad = view.pad if isinstance(view, View) else 0
    return {
        "position": _contiguous(index, view.top, view.left, view.flip),
        "box": box,
        "hole": hole,
        "height": frame[0],
        "width": frame[1],
        "stored_height": stored[0],
        "stored_width": stored[1],
        "margin_top": (stored[0] - frame[0]) // 2 - window_pad,
        "margin_left": (stored[1] - frame[1]) // 2 - window_pad,
    }


def _contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(tensor.contiguous() for tensor in tensors)


@implements(plain.sample_view)
def sample_view(seed: int, epoch: Tensor, index: Tensor, pad: int, flip: Flip) -> tuple[Tensor, Tensor, Tensor]:
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


@implements(crop_shift.sample_shift)
def sample_shift(
    seed: int, epoch: Tensor, index: Tensor, size: Size, shift: int, flip: Flip, until: int | None
) -> tuple[Tensor, ...]:
    """All arguments."""
    if not can_launch(index):
        return NotImplemented
    index, count = index.contiguous(), len(index)
    box = [torch.empty_like(index, dtype=torch.int64) for _ in range(6)]
    flipped = torch.empty_like(index, dtype=torch.bool)
    launch(
        _sample_shift_kernel, (triton.cdiv(count, _EXAMPLES_PER_PROGRAM),), epoch.to(index.device), index, *box,
        flipped, count, shift, _NEVER if until is None else until, stream_key(seed, Stream.SHIFT),
        stream_key(seed, Stream.FLIP), height=size[0], width=size[1], flips=flip, block=_EXAMPLES_PER_PROGRAM, **NO_FMA,
    )
    source_top, source_left, top, left, height, width = box
    return source_top, source_left, top, left, height, width, flipped


@implements(erasing.sample_erasure)
def sample_erasure(
    seed: int, epoch: Tensor, index: Tensor, size: Size, probability: float, area: tuple[float, float],
    until: int | None,
) -> tuple[Tensor, ...]:
    """All arguments."""
    if not can_launch(index):
        return NotImplemented
    index, count = index.contiguous(), len(index)
    rectangle = tuple(torch.empty_like(index, dtype=torch.int64) for _ in range(4))
    low_ratio, high_ratio = (math.log(end) for end in erasing._RATIO)
    launch(
        _sample_erasure_kernel, (triton.cdiv(count, _EXAMPLES_PER_PROGRAM),), epoch.to(index.device), index, *rectangle,
        count, _NEVER if until is None else until, stream_key(seed, Stream.ERASE), height=size[0], width=size[1],
        probability=float(probability), low_area=float(area[0]), area_range=float(area[1] - area[0]),
        low_ratio=low_ratio, ratio_range=high_ratio - low_ratio, tries=erasing._TRIES, block=_EXAMPLES_PER_PROGRAM,
        **NO_FMA,
    )
    return rectangle


@implements(gather_views)
def apply_view(images: Tensor, index: Tensor, view: AnyView) -> Tensor:
    """Crops, shifted boxes and erased rectangles, mirrored or not, of contiguous uint8 images."""
    if images.dtype != torch.uint8 or images.dim() != 4 or not follows_pixels(view, images.shape[2:]):
        return NotImplemented
    if not images.is_contiguous() or not len(index) or not can_launch(images):
        return NotImplemented
    out = torch.empty(len(index), *images.shape[1:], dtype=torch.float32, device=images.device)
    image_grid = ImageGrid.of(out)
    launch(
        _apply_view_kernel, image_grid.grid, images, out, float32_reciprocal(255), **image_grid.kernel_args(),
        **view_args(index, view, images.shape[2:], images.shape[2:]), **NO_FMA,
    )
    return out
