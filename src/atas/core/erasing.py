"""Random erasing: a rectangle of each view is zero, whatever the view is.

Erased pixels are inputs of the network like all others: an attack starts there from zero and may perturb them. Stored
perturbations belong to the hidden pixels of the image, so they are neither read nor overwritten.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from atas.core.arguments import check_arguments
from atas.core.augment import View, check_batch
from atas.core.crop_shift import ShiftView, Size, in_box, is_before
from atas.core.dispatch import fast_op
from atas.core.rng import CounterRNG, GeneratorRNG, Stream, UniformSource
from atas.errors import UsageError

_Rectangle: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]  # top, left, height and width

_AREA = (0.02, 0.33)  # share of the image in an erased rectangle, as in torchvision
_RATIO = (0.3, 3.3)  # its height over its width, as there
_TRIES = 10  # to sample a rectangle that fits the image, as there


@dataclass(frozen=True)
class ErasedView:
    """A view with a rectangle of zeros for each image; its height and width are 0 where nothing is erased."""

    view: View | ShiftView
    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor

    @classmethod
    def draw(
        cls,
        rng: CounterRNG,
        view: View | ShiftView,
        size: Size,
        probability: float,
        area: tuple[float, float] = _AREA,
        until: int | None = None,
    ) -> ErasedView:
        """Erase random rectangles that depend on (seed, epoch, example) only; from epoch `until` on, none."""
        return cls(view, *sample_erasure(rng.seed, rng.epoch, rng.index, size, probability, area, until))

    def __len__(self) -> int:
        return len(self.view)

    def apply(self, images: Tensor, index: Tensor | None = None) -> Tensor:
        """Return the views of images (or of `images[index]`) with the rectangles erased."""
        shown = self.view.apply(images, index)
        return shown * ~self.mask(shown)

    def read(self, canvas: Tensor, index: Tensor) -> Tensor:
        """Return the views of `canvas[index]`, zero where pixels are erased."""
        shown = self.view.read(canvas, index)
        return shown * ~self.mask(shown)

    def write(self, canvas: Tensor, index: Tensor, window: Tensor) -> None:
        """Write views back, except for erased pixels."""
        self.view.write(canvas, index, torch.where(self.mask(window), self.view.read(canvas, index), window))

    def mask(self, window: Tensor) -> Tensor:
        """Return which pixels of these views are erased."""
        row, column = (torch.arange(n, device=window.device)[None] for n in window.shape[2:])
        return in_box(row, column, self.top, self.left, self.height, self.width)


PixelView: TypeAlias = View | ShiftView | ErasedView  # each of its pixels is one of the stored image, or none


@fast_op
def sample_erasure(
    seed: int,
    epoch: Tensor,
    index: Tensor,
    size: Size,
    probability: float,
    area: tuple[float, float],
    until: int | None,
) -> _Rectangle:
    """Sample a rectangle to erase for each example: top, left, height and width."""
    source = CounterRNG(seed, epoch, index)
    return _random_rectangle(source, size, probability, area, is_before(epoch, until, index))


def _random_rectangle(
    source: UniformSource, size: Size, probability: float, area: tuple[float, float], active: Tensor | None = None
) -> _Rectangle:
    """Random erasing (Zhong et al., 2020), as in torchvision; zero is the erased value."""
    uniform = source.uniform(Stream.ERASE, (3 + 2 * _TRIES,)).double()
    share = uniform[:, 3 : 3 + _TRIES] * (area[1] - area[0]) + area[0]
    low, high = (math.log(end) for end in _RATIO)
    ratio = (uniform[:, 3 + _TRIES :] * (high - low) + low).exp()
    pixels = size[0] * size[1] * share
    heights, widths = (pixels * ratio).sqrt().round().long(), (pixels / ratio).sqrt().round().long()
    fits = (heights >= 1) & (heights < size[0]) & (widths >= 1) & (widths < size[1])
    first = fits.int().argmax(1, keepdim=True)
    erases = fits.any(1) & (uniform[:, 0] < probability)
    erases = erases if active is None else erases & active
    height, width = (torch.where(erases, sides.gather(1, first)[:, 0], 0) for sides in (heights, widths))
    top, left = (uniform[:, 1] * (size[0] - height + 1)).long(), (uniform[:, 2] * (size[1] - width + 1)).long()
    return top, left, height, width


@check_arguments
def random_erasing(
    x: Tensor,
    view: View | ShiftView,
    probability: float = 0.5,
    *,
    area: tuple[float, float] = _AREA,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, ErasedView]:
    """Erase a random rectangle of each image that a view shows, with this probability; return images and view.

    A rectangle covers a share of the image in `area`.

    >>> from atas import random_view
    >>> x, view = random_erasing(*random_view(torch.rand(2, 3, 32, 32)), 0.5)
    >>> x.shape, len(view)
    (torch.Size([2, 3, 32, 32]), 2)
    """
    check_batch("random_erasing", x)
    if not isinstance(view, View | ShiftView) or len(x) != len(view):
        raise UsageError("random_erasing takes the images and the view that random_view or random_shift_view returned")
    if not 0 <= probability <= 1 or not 0 < area[0] <= area[1] <= 1:
        raise UsageError(
            f"random erasing needs a probability in [0, 1] and the (smallest, largest) share of an image in (0, 1]; "
            f"got {probability=}, {area=}"
        )
    size = (int(x.shape[2]), int(x.shape[3]))
    erased = ErasedView(view, *_random_rectangle(GeneratorRNG(x, generator), size, probability, area))
    return x * ~erased.mask(x), erased
