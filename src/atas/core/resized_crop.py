"""Random boxes of large images, resized to one shape, and their inverse on a coarse grid.

A box is given in fractions of the stored image's height and width, so it fits the image at any resolution as well as
the grid of a low-resolution perturbation. Images are antialiased where they shrink. Grids are read bilinearly: they are
coarser than the view, so there is nothing to smooth.

Resampling is a matrix along each axis, so a batch of windows is two matrix products. Indexing four neighbours and
`grid_sample` cannot widen their filter where an image shrinks, and their inverse is a scatter, whose order is not
deterministic on a GPU. Positions are fractions of the axis in float64: 0 is the start of the first sample, 1 the end of
the last one. Weights have the precision of what is resampled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from atas.core.arguments import check_arguments
from atas.core.augment import Flip, View, check_batch, sample_flips
from atas.core.erasing import PixelView
from atas.core.rng import GeneratorRNG, Stream, UniformSource
from atas.errors import UsageError

_TRIES = 10  # to sample a box that fits the image, as in torchvision
_ITERATIONS = 4  # of correction when a grid is fitted to a perturbation


@dataclass(frozen=True)
class BoxView:
    """One box per example, in fractions of the stored image (float64), resized to `size`, mirrored if `flip`."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    flip: Tensor
    size: tuple[int, int]

    @classmethod
    def crop(cls, source: UniformSource, size: int, of: int, flip: Flip = True) -> BoxView:
        """Return random squares of `size` pixels of images resized to `of` x `of`. The authors' code for ImageNet uses
        224 of 256."""
        top, left = ((source.uniform(p) * (of - size + 1)).long() for p in (Stream.TOP, Stream.LEFT))
        share = torch.full_like(top, size, dtype=torch.float64) / of
        return cls(top.double() / of, left.double() / of, share, share, sample_flips(source, flip), (size, size))

    @classmethod
    def resized(
        cls,
        source: UniformSource,
        size: int,
        frame: tuple[int, int],
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: Flip = True,
    ) -> BoxView:
        """Return random boxes of whole pixels of stored images of shape `frame`, as torchvision's RandomResizedCrop:
        area fraction in `scale`, width over height in `ratio`, resized to a square."""
        tall, wide = frame
        share = source.uniform(Stream.AREA, (_TRIES,)).double() * (scale[1] - scale[0]) + scale[0]
        slant = source.uniform(Stream.RATIO, (_TRIES,)).double() * math.log(ratio[1] / ratio[0]) + math.log(ratio[0])
        area, aspect = tall * wide * share, slant.exp()
        heights, widths = (area / aspect).sqrt().round(), (area * aspect).sqrt().round()
        fits = (heights >= 1) & (heights <= tall) & (widths >= 1) & (widths <= wide)
        first, any_fits = fits.int().argmax(1, keepdim=True), fits.any(1)
        centred = min(max(wide / tall, ratio[0]), ratio[1])  # fallback: the largest box at the centre
        height = torch.where(any_fits, heights.gather(1, first)[:, 0], min(tall, round(wide / centred)))
        width = torch.where(any_fits, widths.gather(1, first)[:, 0], min(wide, round(tall * centred)))
        top = torch.where(any_fits, source.uniform(Stream.TOP) * (tall - height + 1), (tall - height) / 2).floor()
        left = torch.where(any_fits, source.uniform(Stream.LEFT) * (wide - width + 1), (wide - width) / 2).floor()
        return cls(top / tall, left / wide, height / tall, width / wide, sample_flips(source, flip), (size, size))

    def __len__(self) -> int:
        return len(self.top)

    def apply(self, images: Tensor, index: Tensor | None = None) -> Tensor:
        """Return the boxes of images (or of `images[index]`) as floats, in the units of the images."""
        shown = images if index is None else images[index]
        shown = shown if shown.dtype.is_floating_point else shown.float()
        (tall, wide), (rows, columns) = shown.shape[-2:], self._sample_positions()
        down, across = self.height * (tall / self.size[0]), self.width * (wide / self.size[1])
        return apply_separable(
            interpolation_matrix(rows, tall, down, shown.dtype),
            shown,
            interpolation_matrix(columns, wide, across, shown.dtype),
        )

    def read(self, grids: Tensor) -> Tensor:
        """Return what the boxes show of grids that cover the stored images."""
        rows, columns = self._reading(grids)
        return apply_separable(rows, grids, columns)

    def update(self, grids: Tensor, window: Tensor) -> Tensor:
        """Return the grids fitted to new windows.

        Afterwards the mean of `read(grids)` over each cell approximately equals the mean of the window there. Each
        iteration adds to a cell the mean error of its pixels; several are needed because a pixel is interpolated from
        several cells. A window equal to `read(grids)` changes nothing. Cells without a pixel of the window keep their
        values; cells at its edge use the pixels that they contain.
        """
        rows, columns = self._sample_positions()
        down, across = (
            cell_mean_matrix(rows, grids.shape[-2], grids.dtype),
            cell_mean_matrix(columns, grids.shape[-1], grids.dtype),
        )
        target = apply_separable(down, window, across)
        with torch.autocast(grids.device.type, enabled=False):
            down, across = (mean @ line for mean, line in zip((down, across), self._reading(grids), strict=True))
        for _ in range(_ITERATIONS):
            grids = grids + (target - apply_separable(down, grids, across))
        return grids

    def _reading(self, grids: Tensor) -> tuple[Tensor, Tensor]:
        (high, wide), (rows, columns) = grids.shape[-2:], self._sample_positions()
        return interpolation_matrix(rows, high, None, grids.dtype), interpolation_matrix(
            columns, wide, None, grids.dtype
        )

    def _sample_positions(self) -> tuple[Tensor, Tensor]:
        """Return the positions of the view's rows and columns, in fractions of the stored image."""
        high, wide = (torch.arange(n, device=self.top.device, dtype=torch.float64) + 0.5 for n in self.size)
        column = torch.where(self.flip[:, None], self.size[1] - wide, wide)
        return (
            self.top[:, None] + high * (self.height / self.size[0])[:, None],
            self.left[:, None] + column * (self.width / self.size[1])[:, None],
        )


AnyView: TypeAlias = PixelView | BoxView


def to_box_view(view: AnyView, frame: tuple[int, int]) -> BoxView:
    """Convert any view of images of this height and width to boxes. Boxes of padded images extend beyond them."""
    if isinstance(view, BoxView):
        return view
    if not isinstance(view, View):
        raise UsageError(
            "shifted boxes and erased rectangles are followed pixel by pixel, which a perturbation on a grid cannot "
            "do; create the method without grid"
        )
    one = torch.ones_like(view.top, dtype=torch.float64)
    top, left = (view.top - view.pad).double() / frame[0], (view.left - view.pad).double() / frame[1]
    return BoxView(top, left, one, one, view.flip, frame)


@check_arguments
def random_crop_view(
    x: Tensor, size: int = 224, *, of: int = 256, flip: bool = True, generator: torch.Generator | None = None
) -> tuple[Tensor, BoxView]:
    """Resize a batch of images to `of` x `of`, crop to `size` and flip at random; return images and view.

    >>> x, view = random_crop_view(torch.rand(2, 3, 256, 256))
    >>> x.shape, len(view)
    (torch.Size([2, 3, 224, 224]), 2)
    """
    check_batch("random_crop_view", x)
    _check_size(size)
    if of < size:
        raise UsageError(f"a crop of {size} pixels does not fit an image of {of}; pass of >= size")
    view = BoxView.crop(GeneratorRNG(x, generator), size, of, flip)
    return view.apply(x), view


@check_arguments
def random_resized_view(
    x: Tensor,
    size: int = 224,
    *,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: bool = True,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, BoxView]:
    """Crop a random box of each image, resize to `size`, flip at random (RandomResizedCrop); return images and view.

    >>> x, view = random_resized_view(torch.rand(2, 3, 256, 340), size=128)
    >>> x.shape, len(view)
    (torch.Size([2, 3, 128, 128]), 2)
    """
    check_batch("random_resized_view", x)
    _check_size(size)
    if not 0 < scale[0] <= scale[1] <= 1 or not 0 < ratio[0] <= ratio[1]:
        raise UsageError(
            f"scale is (smallest, largest) share of the area in (0, 1], ratio (narrowest, widest) width over height; "
            f"got {scale=}, {ratio=}"
        )
    frame = (int(x.shape[-2]), int(x.shape[-1]))
    view = BoxView.resized(GeneratorRNG(x, generator), size, frame, scale, ratio, flip)
    return view.apply(x), view


def _check_size(size: int) -> None:
    if size < 1:
        raise UsageError(f"size must be at least 1 pixel; got {size}")


_TIE = 1e-9  # assigns a position on the border of two cells to the second, in spite of rounding


def interpolation_matrix(positions: Tensor, count: int, step: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return bilinear weights of `count` samples at each position: (batch, positions, count); rows sum to one.

    `step` is the number of samples between two positions. If it is above one, the filter is widened by it
    (antialiasing, as in Pillow and torchvision). Beyond the outermost samples their value is constant.
    """
    at = (positions * count - 0.5).clamp(-0.5, count - 0.5)
    whole = at.floor()  # apart from its fraction, so that float32 keeps all digits of the distance
    sample = torch.arange(count, device=positions.device, dtype=dtype)
    distance = (sample - whole[..., None].to(dtype)) - (at - whole)[..., None].to(dtype)
    if step is not None:
        distance = distance / step.clamp_min(1).to(dtype)[:, None, None]
    weight = (1 - distance.abs()).clamp_min(0)
    return weight / weight.sum(-1, keepdim=True)


def cell_mean_matrix(positions: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return weights for the mean over the positions in each of `count` cells: (batch, count, positions)."""
    cell = torch.arange(count, device=positions.device)[:, None]
    inside = ((positions * count + _TIE).floor()[:, None, :] == cell).to(dtype)
    return inside / inside.sum(-1, keepdim=True).clamp_min(1)


def apply_separable(rows: Tensor, x: Tensor, columns: Tensor) -> Tensor:
    """Apply one matrix per example to rows and one to columns of its channels, outside of autocast."""
    with torch.autocast(x.device.type, enabled=False):
        x = (x.flatten(1, 2) @ columns.transpose(1, 2)).unflatten(1, x.shape[1:3])  # all channels at once
        return rows[:, None] @ x
