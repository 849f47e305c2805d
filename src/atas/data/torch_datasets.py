"""Data sets from map-style datasets of (image, label), such as those of torchvision.

Images are PIL images, tensors or arrays. All are read once, into memory as uint8.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from atas._utils.console import ProgressCallback
from atas._utils.formatting import format_bytes
from atas._utils.imports import describe_error
from atas._utils.system import host_memory
from atas.core.arguments import describe
from atas.data.arrays import CHANNELS, from_arrays, to_tensor, to_uint8
from atas.data.dataset import Dataset, MapDataset
from atas.data.decode import resize, to_chw, to_rgb
from atas.errors import AtasError, DataError

_GREY = ("1", "L", "LA")  # modes of PIL images
_READ_TWICE = 32  # items that are read again, to notice random transforms
_EVERY = 256  # items between progress reports
_MEMORY_FRACTION = 0.5  # share of the memory that the images may take


def from_datasets(
    train: MapDataset,
    test: MapDataset,
    name: str = "dataset",
    classes: Sequence[str] | None = None,
    *,
    size: int | None = None,
    progress: ProgressCallback | None = None,
) -> Dataset:
    """Read two map-style datasets of (image, label) into memory.

    Images are PIL images, uint8, or floats in [0, 1], without augmentation and without normalisation. With `size`, the
    short side is resized to that number of pixels, and the centre is kept; without it, all images must have one size.
    `classes` names the classes; by default the attribute `classes` of the training set does, or their numbers.

    >>> pairs = [(np.zeros((8, 8, 3), dtype=np.uint8), label) for label in (0, 1, 2)]
    >>> from_datasets(pairs, pairs, "mine").shape
    (3, 8, 8)
    """
    x, y = _read(train, f"the training set of {name}", size, progress)
    x_test, y_test = _read(test, f"the test set of {name}", size, progress)
    channels = max(x.shape[1], x_test.shape[1])
    named = _class_names(train) if classes is None else classes
    x, x_test = (images.expand(-1, channels, -1, -1) for images in (x, x_test))
    return from_arrays(name, x, y, x_test, y_test, named, channels="first")


def _class_names(dataset: object) -> Sequence[str] | None:
    """Return the names in the attribute `classes`, also of the dataset that a Subset is taken from."""
    classes = getattr(dataset, "classes", None)
    if isinstance(classes, tuple | list) and classes and all(isinstance(entry, str) for entry in classes):
        return classes
    inner = getattr(dataset, "dataset", None)
    return None if inner is None else _class_names(inner)


def _read(
    dataset: MapDataset, what: str, size: int | None, progress: ProgressCallback | None
) -> tuple[Tensor, list[int]]:
    """Return all images (N, C, H, W) and labels."""
    check_map_style(dataset, what)
    report = progress or (lambda task, done, total: None)
    count = len(dataset)
    if not count:
        raise DataError(f"{what} is empty; pass at least one image.")
    images, labels = torch.empty(0), []
    for index in range(count):
        pixels, label = _item(dataset, index, what, size)
        if index == 0:
            images = _allocate(count, pixels, what)
        if pixels.shape[1:] != images.shape[2:]:
            raise DataError(
                f"image {index} of {what} is {_size(pixels)} pixels, and the first is {_size(images)}; pass size=... "
                "to resize all images, in a recipe data.size."
            )
        if pixels.shape[0] > images.shape[1]:  # grey images before one in colour
            images = images.repeat(1, pixels.shape[0], 1, 1)
        images[index] = pixels
        labels.append(label)
        if index % _EVERY == 0 or index == count - 1:
            report("reading images", index + 1, count)
    _check_constant(dataset, images, labels, what, size)
    return images, labels


def check_map_style(dataset: object, what: str) -> None:
    """Raise DataError unless a dataset has a length and items by position."""
    if hasattr(dataset, "batch_sampler") and hasattr(dataset, "dataset"):
        raise DataError(f"{what} is a {type(dataset).__name__}; pass the dataset that it loads from (loader.dataset).")
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise DataError(
            f"{what} is a {type(dataset).__name__}, which has no length or no items by position; pass a map-style "
            "dataset, not a stream."
        )


def _allocate(count: int, pixels: Tensor, what: str) -> Tensor:
    needed = count * pixels.numel()
    if needed > _MEMORY_FRACTION * host_memory():
        raise DataError(
            f"the images of {what} take {format_bytes(needed)}, more than half of the {format_bytes(host_memory())} of "
            "memory here; pass a smaller size, or write them to class folders and use imagefolder or `atas data pack`."
        )
    return torch.empty(count, *pixels.shape, dtype=torch.uint8)


def _item(dataset: MapDataset, index: int, what: str, size: int | None) -> tuple[Tensor, int]:
    try:
        item = dataset[index]
    except AtasError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise DataError(f"item {index} of {what} cannot be read: {describe_error(error)}.") from error
    if not isinstance(item, tuple | list) or len(item) != 2:
        kind = f"{len(item)} entries" if isinstance(item, tuple | list) else type(item).__name__
        raise DataError(
            f"item {index} of {what} is {kind}, expected a pair (image, label); make the dataset return it."
        )
    return to_pixels(item[0], f"image {index} of {what}", size), _label(item[1], index, what)


def to_pixels(image: object, what: str, size: int | None = None) -> Tensor:
    """Return an image as uint8 pixels (C, H, W), one channel for a grey one; with `size`, resized and cropped."""
    if isinstance(image, Image.Image):
        try:
            picture = image.convert("L") if image.mode in _GREY else to_rgb(image)
            picture = picture if size is None or picture.size == (size, size) else resize(picture, size)
        except (ValueError, OSError) as error:
            raise DataError(f"{what} cannot be used ({error}); repair or remove it.") from error
        grey = picture.mode == "L"
        return torch.from_numpy((np.asarray(picture)[None] if grey else to_chw(picture)).copy())
    if not isinstance(image, Tensor | np.ndarray):
        raise DataError(f"{what} is a {type(image).__name__}, expected a PIL image, a tensor or an array.")
    pixels = to_uint8(_channels_first(to_tensor(image), what), f"the pixels of {what}")
    if size is None or pixels.shape[1:] == (size, size):
        return pixels
    colours = pixels.permute(1, 2, 0).numpy()
    return to_pixels(
        Image.fromarray(np.ascontiguousarray(colours[..., 0] if len(pixels) == 1 else colours)), what, size
    )


def _channels_first(image: Tensor, what: str) -> Tensor:
    if image.ndim == 2:
        image = image.unsqueeze(0)
    first, last = (image.ndim == 3 and image.shape[axis] in CHANNELS for axis in (0, -1))
    if not all(image.shape) or not (first or last):
        raise DataError(
            f"{what} has the shape {tuple(image.shape)}, expected (C, H, W), (H, W, C) with 1 or 3 channels, or (H, W)."
        )
    return image if first else image.permute(2, 0, 1)


def _label(label: object, index: int, what: str) -> int:
    if isinstance(label, Tensor | np.ndarray | np.generic) and np.ndim(label) == 0:
        label = label.item()
    if isinstance(label, bool) or not isinstance(label, int):
        shown = f"of the shape {tuple(np.shape(label))}" if isinstance(label, Tensor | np.ndarray) else describe(label)
        raise DataError(f"label {index} of {what} is {shown}, expected one class number from 0 for each image.")
    return label


def _check_constant(dataset: MapDataset, images: Tensor, labels: list[int], what: str, size: int | None) -> None:
    """Raise DataError if an item differs when it is read again."""
    step = max(len(labels) // _READ_TWICE, 1)
    for index in range(0, len(labels), step):
        pixels, label = _item(dataset, index, what, size)
        if label != labels[index] or not torch.equal(pixels.expand_as(images[index]), images[index]):
            raise DataError(
                f"item {index} of {what} differs when it is read again, as with random transforms; pass the dataset "
                "without augmentation: atas crops and flips itself (data.pad, data.flip)."
            )


def _size(images: Tensor) -> str:
    return f"{images.shape[-2]} x {images.shape[-1]}"
