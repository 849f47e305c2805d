"""The data of a recipe, and the views of its images in training and evaluation.

With `data.view = pad` or `cropshift` images are used at their stored size. With `crop` and `resized` they are boxes of
a larger stored image. Training draws boxes at random, and their resolution may grow over the epochs (progressive
resolution). The monitor and the evaluation use the centre at the final resolution; 224 of 256 stored pixels is the
protocol of ImageNet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Literal

from atas import data as datasets
from atas._utils.console import ProgressCallback
from atas._utils.imports import GIVEN
from atas.core.augment import View
from atas.core.crop_shift import ShiftView, check_shift
from atas.core.erasing import ErasedView, PixelView
from atas.core.resized_crop import AnyView, BoxView
from atas.core.rng import CounterRNG
from atas.data import Dataset
from atas.errors import DataError, UsageError
from atas.recipes import DataConfig, Recipe

_SCALE = (0.08, 1.0)
_SHIFT = 10
_ERASE_AREA = (0.02, 0.33)
_MULTIPLE = 32  # networks halve images five times
_TINY = 1e-6  # of a pixel, for rounding errors


def train_resolution(data: DataConfig, epoch: int, epochs: int) -> int | None:
    """Return the side in pixels of training images in an epoch, counted from 0; None for `pad` and `cropshift`.

    It rises linearly from `view_start` over the first `view_ramp` of the training, in multiples of 32.
    """
    size = data.eval_resolution
    if size is None or data.view_start is None or data.view_ramp is None or epoch >= data.view_ramp * epochs:
        return size
    exact = data.view_start + (size - data.view_start) * epoch / (data.view_ramp * epochs)
    return max(data.view_start, int((exact + _TINY) // _MULTIPLE) * _MULTIPLE)


def train_views(
    data: DataConfig, size: int | None, frame: tuple[int, int], epochs: int = 1
) -> Callable[[CounterRNG], AnyView]:
    """Return a function that draws the views of stored images, of height and width `frame`, in a training of `epochs`;
    boxes are resized to `size`."""
    if size is None:
        return _pixel_views(data, frame, None if data.view_until is None else round(data.view_until * epochs))
    if data.view == "crop":
        full = data.eval_resolution
        assert full is not None
        whole = round(frame[0] * size / full)  # smaller images show the same share of the stored image
        return lambda draw: BoxView.crop(draw, size, whole, data.flip)
    scale = _SCALE if data.view_scale is None else data.view_scale
    return lambda draw: BoxView.resized(draw, size, frame, scale, flip=data.flip)


def _pixel_views(data: DataConfig, frame: tuple[int, int], until: int | None) -> Callable[[CounterRNG], PixelView]:
    """Return a function that draws views of the size of stored images; from epoch `until` on, plain ones."""
    shift = _SHIFT if data.shift is None else data.shift
    area = _ERASE_AREA if data.erase_area is None else data.erase_area
    if data.view == "cropshift":
        check_shift(shift, frame)

    def draw(rng: CounterRNG) -> PixelView:
        view = View.draw(rng, data.pad, data.flip) if data.view == "pad" else shift_view(rng)
        return ErasedView.draw(rng, view, frame, data.erase, area, until) if data.erase else view

    def shift_view(rng: CounterRNG) -> ShiftView:
        return ShiftView.draw(rng, frame, shift, data.flip, until)

    return draw


def eval_view(images: Dataset, data: DataConfig) -> Dataset:
    """Return the data as the monitor and the evaluation use it: the centre of each image."""
    size = data.eval_resolution
    if size is None:
        return images
    _, high, wide = images.shape
    if size > min(high, wide):
        raise UsageError(
            f"images of {high} x {wide} pixels are smaller than data.view_size = {size}; store them larger or set a "
            f"smaller one"
        )
    if data.view == "crop" and high != wide:
        raise UsageError(f"data.view = crop is for square images, these have {high} x {wide} pixels; set resized")
    return dataclasses.replace(images, train=images.train.centre(size), test=images.test.centre(size))


def load_eval_data(
    recipe: Recipe,
    root: str | None = None,
    progress: ProgressCallback | None = None,
    *,
    skipped: Collection[str] | None = None,
) -> Dataset:
    """Load the data of a recipe as the evaluation sees it. Training images of a folder are decoded only when read;
    `root` may hold test images alone."""
    return eval_view(load_data(recipe, root, progress, to_train=False, skipped=skipped), recipe.data)


def load_data(
    recipe: Recipe,
    root: str | None = None,
    progress: ProgressCallback | None = None,
    *,
    to_train: bool = True,
    skipped: Collection[str] | None = None,
) -> Dataset:
    """Load the data of a recipe from its own folder or from `root`; `progress` is called while images are decoded.
    Without `to_train`, training images of a folder are decoded only when they are read. `skipped` are the damaged
    images that the run has left out; without it, `data.skip_damaged` finds them."""
    if recipe.data.name.startswith(GIVEN):
        name = recipe.data.name.removeprefix(GIVEN)
        raise UsageError(
            f"the data of this recipe was given in Python ('{name}'); pass it again, to atas.train(data=...) or to "
            f"atas.evaluate"
        )
    config, folder = recipe.data, root or recipe.data.root
    test_only = not to_train and root is not None and config.held_out is None
    kind = datasets.find_source(config.name, folder).kind
    if kind == "packed":
        return _load_packed(config, folder)
    lazy: bool | Literal["train"] | None = None
    skip_damaged: bool | Collection[str] = bool(config.skip_damaged)
    if kind in datasets.FOLDERS:  # only folders can be read lazily
        lazy = {"resident": False, "streaming": True}.get(config.loading)
        lazy = lazy if to_train or lazy else "train"
        skip_damaged = skip_damaged if skipped is None else skipped
    return datasets.load(
        config.name,
        folder,
        size=config.size,
        lazy=lazy,
        skip_damaged=skip_damaged,
        test_only=test_only,
        held_out=config.held_out,
        seed=recipe.training.seed,
        progress=progress,
        trusted=recipe.trusted,
    )


def _load_packed(config: DataConfig, folder: str | None) -> Dataset:
    packed = datasets.load(
        config.name, folder, skip_damaged=bool(config.skip_damaged), held_out=config.held_out, trusted=False
    )
    side = packed.shape[1]
    if config.size not in (None, side):
        raise DataError(
            f"the packed set in {folder or config.name} has images of {side} pixels, and the recipe has data.size = "
            f"{config.size}; pack it with --size {config.size}, or set data.size={side}"
        )
    return packed
