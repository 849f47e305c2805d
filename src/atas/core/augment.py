"""Random crops and flips that can be inverted, so that a perturbation follows its image.

A view is a window of the image's zero-padded canvas, optionally mirrored. It is stored as the canvas rows and columns
that the window shows, for each example. Reading or writing a batch of windows is then one indexing operation, and a
mirrored window needs no operation of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from atas.core.arguments import check_arguments, describe
from atas.core.dispatch import fast_op
from atas.core.rng import CounterRNG, Stream, UniformSource
from atas.errors import UsageError

Flip: TypeAlias = bool | Literal["alternate"]
"""Whether images are mirrored at random; `alternate` draws for two epochs, of which the second shows the other side."""

_MAX_PAD = 10_000


@dataclass(frozen=True)
class View:
    """One window per example: `top` and `left` on the padded canvas, and whether it is mirrored."""

    top: Tensor
    left: Tensor
    flip: Tensor
    pad: int

    @classmethod
    def centre(cls, count: int, pad: int, device: torch.device | None = None) -> View:
        """Return the view that shows the stored images unchanged."""
        offset = torch.full((count,), pad, device=device)
        return cls(offset, offset, torch.zeros(count, dtype=torch.bool, device=device), pad)

    @classmethod
    def draw(cls, rng: CounterRNG, pad: int, flip: Flip = True) -> View:
        """Return random views that depend on (seed, epoch, example) only."""
        return cls(*sample_view(rng.seed, rng.epoch, rng.index, pad, flip), pad)

    def __len__(self) -> int:
        return len(self.top)

    def read(self, canvas: Tensor, index: Tensor) -> Tensor:
        """Return the windows of the padded canvases `canvas[index]`."""
        return canvas[self._cells(canvas, index)]

    def write(self, canvas: Tensor, index: Tensor, window: Tensor) -> None:
        """Write windows to where `read` takes them from; the rest of each canvas keeps its values."""
        canvas[self._cells(canvas, index)] = window

    def apply(self, images: Tensor, index: Tensor | None = None) -> Tensor:
        """Return the windows of unpadded images (or of `images[index]`), zero-padded."""
        index = torch.arange(len(images), device=images.device) if index is None else index
        height, width = images.shape[-2:]
        rows, columns = self._rows(height) - self.pad, self._columns(width) - self.pad
        inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
        return gather_pixels(images, index, rows, columns) * inside[:, None]

    def _rows(self, height: int) -> Tensor:
        return self.top[:, None] + torch.arange(height, device=self.top.device)

    def _columns(self, width: int) -> Tensor:
        column = torch.arange(width, device=self.left.device)
        return self.left[:, None] + torch.where(self.flip[:, None], width - 1 - column, column)

    def _cells(self, canvas: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        channels = torch.arange(canvas.shape[1], device=canvas.device)
        rows = self._rows(canvas.shape[2] - 2 * self.pad)
        columns = self._columns(canvas.shape[3] - 2 * self.pad)
        return index[:, None, None, None], channels[:, None, None], rows[:, None, :, None], columns[:, None, None, :]


def gather_pixels(images: Tensor, index: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return these rows and columns of `images[index]`, the nearest ones for those outside of the images."""
    height, width = images.shape[-2:]
    channels = torch.arange(images.shape[1], device=images.device)
    return images[
        index[:, None, None, None],
        channels[:, None, None],
        rows.clamp(0, height - 1)[:, None, :, None],
        columns.clamp(0, width - 1)[:, None, None, :],
    ]


@fast_op
def sample_view(seed: int, epoch: Tensor, index: Tensor, pad: int, flip: Flip) -> tuple[Tensor, Tensor, Tensor]:
    """Sample `top`, `left` and `flip` of a view for each example."""
    rng, choices = CounterRNG(seed, epoch, index), 2 * pad + 1
    top, left = (rng.uniform(Stream.TOP) * choices).long(), (rng.uniform(Stream.LEFT) * choices).long()
    return top, left, sample_flips(rng, flip)


def sample_flips(source: UniformSource, flip: Flip) -> Tensor:
    """Return for each example whether it is mirrored."""
    if flip == "alternate" and isinstance(source, CounterRNG):  # a generator knows no epoch
        epoch = source.epoch.to(source.index.device)
        first = CounterRNG(source.seed, epoch >> 1, source.index).uniform(Stream.FLIP) < 0.5
        return first ^ ((epoch & 1) == 1)
    uniform = source.uniform(Stream.FLIP)
    return uniform < 0.5 if flip else torch.zeros_like(uniform, dtype=torch.bool)


def check_batch(function: str, x: object) -> None:
    """Raise UsageError unless this is a batch of images, as a function of this name takes one."""
    if not isinstance(x, Tensor):
        raise UsageError(f"{function} takes a tensor of images; got {describe(x)}: convert with torch.as_tensor()")
    if x.dim() != 4:
        raise UsageError(f"{function} takes a batch of images (N, C, H, W); got shape {tuple(x.shape)}")


@check_arguments
def random_view(
    x: Tensor, pad: int = 4, *, flip: bool = True, generator: torch.Generator | None = None
) -> tuple[Tensor, View]:
    """Crop and flip a batch of unaugmented images at random, and remember how.

    >>> x, view = random_view(torch.rand(2, 3, 32, 32), pad=4)
    >>> x.shape, len(view)
    (torch.Size([2, 3, 32, 32]), 2)
    """
    check_batch("random_view", x)
    if not 0 <= pad <= _MAX_PAD:
        raise UsageError(f"pad must be 0 to {_MAX_PAD:,} pixels; got {pad}")

    def draw(choices: int) -> Tensor:
        return torch.randint(choices, (len(x),), device=x.device, generator=generator)

    mirrored = draw(2).bool() if flip else torch.zeros(len(x), dtype=torch.bool, device=x.device)
    view = View(draw(2 * pad + 1), draw(2 * pad + 1), mirrored, pad)
    return view.apply(x), view
