"""How a recipe shows its images: `pad` as they are, `crop` and `resized` as boxes of a larger stored image.

In training, boxes are drawn at random and may be shown small at first and larger later (progressive resolution). For
the monitor and the evaluation it is always the centre, at the size that the training ends with: with 224 of 256 stored
pixels the usual protocol of ImageNet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from atas import methods
from atas.boxes import AnyView, BoxView
from atas.data import Dataset
from atas.errors import UsageError, unknown
from atas.noise import Draw

if TYPE_CHECKING:
    from atas.training.recipe import Recipe
    from atas.training.sections import Data

KINDS = ("pad", "crop", "resized")
_SIZE = 224
_SCALE = (0.08, 1.0)
_MULTIPLE = 32  # networks halve images five times
_TINY = 1e-6  # of a pixel; what rounding may cost


def full_size(data: Data) -> int | None:
    """The side in pixels at which images are shown in the end; None for `pad`, where they are as they are stored."""
    if data.view == "pad":
        return None
    return _SIZE if data.view_size is None else data.view_size


def shown_size(data: Data, epoch: int, epochs: int) -> int | None:
    """The side in pixels at which images are shown in an epoch, counted from 0; None for `pad`.

    It rises linearly from `view_start` over the first `view_ramp` of the training, in multiples of 32.
    """
    size = full_size(data)
    if size is None or data.view_start is None or data.view_ramp is None or epoch >= data.view_ramp * epochs:
        return size
    exact = data.view_start + (size - data.view_start) * epoch / (data.view_ramp * epochs)
    return max(data.view_start, int((exact + _TINY) // _MULTIPLE) * _MULTIPLE)


def random_views(data: Data, size: int, frame: tuple[int, int]) -> Callable[[Draw], AnyView]:
    """What draws the boxes of stored images of this height and width, to be shown at this size."""
    if data.view == "crop":
        full = full_size(data)
        assert full is not None
        whole = round(frame[0] * size / full)  # smaller images show as large a part
        return lambda draw: BoxView.crop(draw, size, whole, data.flip)
    scale = _SCALE if data.view_scale is None else data.view_scale
    return lambda draw: BoxView.resized(draw, size, frame, scale, flip=data.flip)


def as_tested(images: Dataset, data: Data) -> Dataset:
    """The data set as the monitor and the evaluation see it: the centre of each image."""
    size = full_size(data)
    if size is None:
        return images
    _, high, wide = images.shape
    if size > min(high, wide):
        raise UsageError(
            f"images of {high} x {wide} pixels cannot be shown at data.view_size = {size}; store them larger or set a "
            f"smaller one"
        )
    if data.view == "crop" and high != wide:
        raise UsageError(f"data.view = crop is for square images, these have {high} x {wide} pixels; set resized")
    return Dataset(images.name, images.train.centre(size), images.test.centre(size))


def check_views(recipe: Recipe) -> None:
    """An error for settings that contradict each other."""
    data, size = recipe.data, full_size(recipe.data)
    if data.view not in KINDS:
        raise unknown("value of data.view", data.view, KINDS)
    if size is None:
        for key in ("view_size", "view_start", "view_ramp", "view_scale"):
            if getattr(data, key) is not None:
                raise UsageError(f"data.{key} is for data.view = crop or resized; set one of them, or leave it out")
        return
    if size < 1 or (data.size is not None and size > data.size):
        stored = "" if data.size is None else f" and at most the {data.size} of data.size"
        raise UsageError(f"data.view_size must be at least 1 pixel{stored}; got {size}")
    _check_ramp(data, size)
    if data.view_scale is not None and (data.view == "crop" or not 0 < data.view_scale[0] <= data.view_scale[1] <= 1):
        raise UsageError(
            f"data.view_scale is for data.view = resized, the (smallest, largest) share of an image in (0, 1]; got "
            f"{data.view_scale} for {data.view}"
        )
    name, own = recipe.method.name, recipe.method.settings
    if "grid" in methods.settings(name) and own.get("grid") is None:
        raise UsageError(
            f"with data.view = {data.view} no image is shown as it is stored, so method {name} cannot remember every "
            f"pixel; set method.grid = 32"
        )
    if methods.get(name) is methods.Free and data.view_start is not None:
        raise UsageError(
            "free training carries perturbations of one size from batch to batch; leave out data.view_start"
        )


def _check_ramp(data: Data, size: int) -> None:
    if (data.view_start is None) != (data.view_ramp is None):
        raise UsageError("data.view_start and data.view_ramp belong together; set both, or leave both out")
    if data.view_start is not None and not 1 <= data.view_start < size:
        raise UsageError(f"data.view_start must be at least 1 pixel and below {size}; got {data.view_start}")
    if data.view_ramp is not None and not 0 < data.view_ramp <= 1:
        raise UsageError(f"data.view_ramp is a share of the training in (0, 1]; got {data.view_ramp}")
