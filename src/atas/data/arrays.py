"""Data sets from arrays of the user."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from atas.core.arguments import describe
from atas.data.dataset import Dataset, Split
from atas.errors import DataError, UsageError

Array = np.ndarray | Tensor | Sequence[object]

CHANNELS = (1, 3)
_SPLITS = ("training", "test")

_MAX_CLASSES = 1_000_000  # larger numbers are no labels


def from_arrays(
    name: str,
    train_images: Array,
    train_labels: Array,
    test_images: Array,
    test_labels: Array,
    classes: Sequence[str] | None = None,
    *,
    channels: Literal["first", "last"] | None = None,
) -> Dataset:
    """Make a data set from numpy arrays or tensors.

    Images are uint8 in 0..255 or floats in [0, 1], (N, C, H, W) or (N, H, W, C). The axis with one or three entries
    holds the channels; if none or both have, say where they are with `channels`. Labels are class numbers from 0.
    Without `classes`, the classes are named by their numbers. Contiguous uint8 images are not copied.

    >>> grey = np.zeros((4, 8, 8, 1), dtype=np.uint8)
    >>> data = from_arrays("mine", grey, [0, 1, 2, 0], grey, [0, 0, 1, 2])
    >>> data.shape, data.num_classes
    ((1, 8, 8), 3)
    """
    if channels not in (None, "first", "last"):
        raise UsageError(f"channels must be 'first' (N, C, H, W) or 'last' (N, H, W, C); got {channels!r}")
    images = [
        _images(train_images, "training images", channels),
        _images(test_images, "test images", channels),
    ]
    labels = [_labels(train_labels, "training labels"), _labels(test_labels, "test labels")]
    if classes is None:
        if len(labels[0]) and (lowest := int(labels[0].min())) > 0:
            raise DataError(
                f"training labels begin at {lowest}, and classes count from 0; subtract {lowest} from all labels, or "
                "name every class with classes=[...]."
            )
        highest = max((int(group.max()) for group in labels if len(group)), default=-1)
        if highest >= _MAX_CLASSES:
            raise DataError(
                f"the largest label is {highest}, and every number up to it would be a class; check the labels, or "
                "name every class with classes=[...]."
            )
        names = tuple(str(number) for number in range(highest + 1))
    else:
        if isinstance(classes, str) or not isinstance(classes, Iterable):
            raise DataError(f"classes are a list of names, one for each class; got {describe(classes)}.")
        names = tuple(classes)
    train, test = (_split(*split, names) for split in zip(_SPLITS, images, labels, strict=True))
    return Dataset(name, train, test)


def _split(kind: str, images: Tensor, labels: Tensor, classes: tuple[str, ...]) -> Split:
    try:
        return Split(images, labels, classes)
    except DataError as error:
        raise DataError(f"the {kind} set: {error}") from error


def to_tensor(array: Array) -> Tensor:
    """Return an array or nested lists as a tensor on the CPU."""
    if isinstance(array, Tensor):
        if array.is_meta:
            raise DataError("a tensor on the device 'meta' has no values; pass images and labels on the CPU or a GPU.")
        return array.detach().cpu()
    try:
        array = np.asarray(array)
    except ValueError as error:
        raise DataError("the rows of a list differ in length; give images and labels as numeric arrays.") from error
    if array.dtype.kind not in "buif":
        raise DataError(f"an array of {array.dtype} is not numeric; pass images and labels as numeric arrays.")
    # Torch does not accept read-only memory, negative strides or foreign byte order; only such arrays are copied.
    return torch.from_numpy(np.require(array, array.dtype.newbyteorder("="), ["C", "W"]))


def _images(array: Array, what: str, channels: str | None) -> Tensor:
    images = to_tensor(array)
    if images.ndim != 4:
        raise DataError(
            f"{what} have the shape {tuple(images.shape)}, expected (N, C, H, W) or (N, H, W, C); "
            "grey images need an axis of length 1 for their channel."
        )
    first, last = images.shape[1] in CHANNELS, images.shape[3] in CHANNELS
    if first == last and channels is None:
        which = "either the second or the last" if first else "neither the second nor the last"
        raise DataError(
            f"{what} have the shape {tuple(images.shape)}, where {which} axis can be the channels (1 or 3 entries); "
            "say which it is: channels='first' or channels='last'."
        )
    if channels == "last" or (channels is None and last):
        images = images.permute(0, 3, 1, 2)
    return to_uint8(images, what).contiguous()


def to_uint8(images: Tensor, what: str) -> Tensor:
    """Return uint8 pixels as they are, and floats in [0, 1] as uint8; raise DataError for others."""
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point():
        raise DataError(
            f"{what} are {str(images.dtype).removeprefix('torch.')}, expected uint8 in 0..255 or float in [0, 1]; "
            "convert them."
        )
    if not images.numel():
        return images.to(torch.uint8)
    # One pass is enough: a NaN makes both ends NaN.
    low, high = (float(end) for end in torch.aminmax(images))
    if not math.isfinite(low) or not math.isfinite(high):
        values = "NaN" if math.isnan(low) else "infinite values"
        raise DataError(
            f"{what} contain {values}; repair or drop those images, and undo a normalisation that divided by 0."
        )
    if low < 0 or high > 1:
        remedy = "divide by 255" if low >= 0 and high <= 255 else "undo the normalisation (x * std + mean)"
        raise DataError(
            f"{what} run from {low:.4g} to {high:.4g}, expected [0, 1]; {remedy}, because models normalise inside."
        )
    return (images.float() * 255).round().to(torch.uint8)


def _labels(array: Array, what: str) -> Tensor:
    labels = to_tensor(array)
    if labels.is_floating_point() or labels.dtype == torch.bool or labels.ndim != 1:
        raise DataError(
            f"{what} are {str(labels.dtype).removeprefix('torch.')} of the shape {tuple(labels.shape)}, expected one "
            "integer per image; use .argmax(1) on one-hot rows and .astype(int) on whole numbers."
        )
    return labels.to(torch.int64)
