"""Random boxes of images, shown elsewhere in a frame of the same size (CropShift), and their inverse.

The stored perturbation of a pixel moves with the pixel, and is kept while the pixel is not shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from atas.core.arguments import check_arguments
from atas.core.augment import Flip, check_batch, gather_pixels, sample_flips
from atas.core.dispatch import fast_op
from atas.core.rng import CounterRNG, GeneratorRNG, Stream, UniformSource
from atas.errors import UsageError

Size: TypeAlias = tuple[int, int]
_Box: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # the fields of a `ShiftView`


@dataclass(frozen=True)
class ShiftView:
    """A box of each image, shown at another position of a frame of the same size, mirrored if `flip`; zeros around it.

    The box has its first pixel at (`source_top`, `source_left`) of the stored image, and at (`top`, `left`) of the
    frame before it is mirrored.
    """

    source_top: Tensor
    source_left: Tensor
    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor
    flip: Tensor
    size: Size

    @classmethod
    def draw(cls, rng: CounterRNG, size: Size, shift: int, flip: Flip = True, until: int | None = None) -> ShiftView:
        """Return random views that depend on (seed, epoch, example) only; from epoch `until` on, no pixel is cut."""
        return cls(*sample_shift(rng.seed, rng.epoch, rng.index, size, shift, flip, until), size)

    def __len__(self) -> int:
        return len(self.top)

    def apply(self, images: Tensor, index: Tensor | None = None) -> Tensor:
        """Return the views of images (or of `images[index]`)."""
        return self._show(images, index, 0, 0)

    def read(self, canvas: Tensor, index: Tensor) -> Tensor:
        """Return the views of `canvas[index]`, whose frames may have padding around the image."""
        return self._show(canvas, index, *self._padding(canvas))

    def write(self, canvas: Tensor, index: Tensor, window: Tensor) -> None:
        """Write the box back to where `read` takes it from; the rest of each canvas keeps its values."""
        pads = self._padding(canvas)
        row, column = (
            torch.arange(n, device=canvas.device) - pad for n, pad in zip(canvas.shape[2:], pads, strict=True)
        )
        rows, columns = row + (self.top - self.source_top)[:, None], column + (self.left - self.source_left)[:, None]
        inside = in_box(rows, columns, self.top, self.left, self.height, self.width)
        new = gather_pixels(window, torch.arange(len(window), device=window.device), rows, self._mirrored(columns))
        canvas[index] = torch.where(inside, new, canvas[index])

    def _show(self, canvas: Tensor, index: Tensor | None, pad_rows: int, pad_columns: int) -> Tensor:
        index = torch.arange(len(canvas), device=canvas.device) if index is None else index
        row, column = (torch.arange(n, device=canvas.device)[None] for n in self.size)
        column = self._mirrored(column)
        rows = row + (self.source_top - self.top + pad_rows)[:, None]
        columns = column + (self.source_left - self.left + pad_columns)[:, None]
        inside = in_box(row, column, self.top, self.left, self.height, self.width)
        return gather_pixels(canvas, index, rows, columns) * inside

    def _mirrored(self, columns: Tensor) -> Tensor:
        return torch.where(self.flip[:, None], self.size[1] - 1 - columns, columns)

    def _padding(self, canvas: Tensor) -> Size:
        return (canvas.shape[2] - self.size[0]) // 2, (canvas.shape[3] - self.size[1]) // 2


def in_box(rows: Tensor, columns: Tensor, top: Tensor, left: Tensor, height: Tensor, width: Tensor) -> Tensor:
    """Return a mask (batch, 1, rows, columns) of the pixels in each example's box."""
    down, across = rows - top[:, None], columns - left[:, None]
    inside = ((down >= 0) & (down < height[:, None]))[:, :, None] & ((across >= 0) & (across < width[:, None]))[:, None]
    return inside[:, None]


@fast_op
def sample_shift(
    seed: int, epoch: Tensor, index: Tensor, size: Size, shift: int, flip: Flip, until: int | None
) -> _Box:
    """Sample the tensors of a `ShiftView` for each example."""
    return _random_box(CounterRNG(seed, epoch, index), size, shift, flip, is_before(epoch, until, index))


def _random_box(source: UniformSource, size: Size, shift: int, flip: Flip, active: Tensor | None = None) -> _Box:
    """CropShift of "Data augmentation alone can improve adversarial training" (Li and Spratling, 2023): 0 to `shift`
    rows and columns are cut off in all, which leaves a box anywhere in the image, and it is put anywhere in the frame.
    """
    uniform = source.uniform(Stream.SHIFT, (6,))
    lost = (uniform[:, 0] * (shift + 1)).long()
    lost = lost if active is None else torch.where(active, lost, 0)
    lost_columns = (uniform[:, 1] * (lost + 1)).long()
    lost_rows = lost - lost_columns
    source_top, top = ((uniform[:, place] * (lost_rows + 1)).long() for place in (2, 3))
    source_left, left = ((uniform[:, place] * (lost_columns + 1)).long() for place in (4, 5))
    mirrored = sample_flips(source, flip)
    return source_top, source_left, top, left, size[0] - lost_rows, size[1] - lost_columns, mirrored


def is_before(epoch: Tensor, until: int | None, index: Tensor) -> Tensor | None:
    """Return whether this is an epoch before `until`, on the device of `index`; None if there is no such limit."""
    return None if until is None else epoch.to(index.device) < until


@check_arguments
def random_shift_view(
    x: Tensor, shift: int = 10, *, flip: bool = True, generator: torch.Generator | None = None
) -> tuple[Tensor, ShiftView]:
    """Show a random box of each image at a random position and flip at random (CropShift); return images and view.

    0 to `shift` rows and columns are cut off in all.

    >>> x, view = random_shift_view(torch.rand(2, 3, 32, 32), shift=10)
    >>> x.shape, len(view)
    (torch.Size([2, 3, 32, 32]), 2)
    """
    check_batch("random_shift_view", x)
    size = (int(x.shape[2]), int(x.shape[3]))
    check_shift(shift, size)
    view = ShiftView(*_random_box(GeneratorRNG(x, generator), size, shift, flip), size)
    return view.apply(x), view


def check_shift(shift: int, size: Size) -> None:
    """Raise UsageError if nothing could be left of images of this height and width."""
    if not 0 <= shift < min(size):
        raise UsageError(f"shift must be at least 0 and below the {min(size)} pixels of the shorter side; got {shift}")
