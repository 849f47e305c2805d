"""A data set: images as uint8 pixels (NCHW), labels, and the names of the classes.

`Dataset` holds a training and a test `Split`. `indexed` adds the position of each example to any dataset of pairs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.utils.data
from torch import Tensor

from atas._utils.console import ProgressCallback
from atas.core.autograd import contiguous
from atas.data.lazy_images import CentreCrop, LazyImages, centre_crop
from atas.errors import DataError, first_few

_HASHED_AT_ONCE = 256  # lazy images


def content_sha256(images: np.ndarray, labels: np.ndarray) -> str:
    """Return the SHA-256 over the bytes of the images, then of the labels."""
    digest = hashlib.sha256()
    for array in (images, labels):
        digest.update(np.ascontiguousarray(array).reshape(-1).data)
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Split(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """The training or test images of a data set; also a map-style dataset of (image in [0, 1], label).

    `images` is a tensor, or `LazyImages` that stay on the disk and return tensors when indexed. `files` is the
    fingerprint of the image files that a tensor was decoded from.

    >>> split = Split(torch.full((2, 1, 4, 4), 255, dtype=torch.uint8), torch.tensor([0, 1]), ("cat", "dog"))
    >>> image, label = split[1]
    >>> len(split), float(image.max()), split.classes[label]
    (2, 1.0, 'dog')
    """

    images: Tensor | LazyImages
    labels: Tensor
    classes: tuple[str, ...]
    files: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.dtype != torch.uint8:
            raise DataError(
                f"images are {_dtype_name(images.dtype)}, expected uint8; "
                "atas.data.from_arrays converts floats in [0, 1]."
            )
        if images.ndim != 4:
            raise DataError(
                f"images have the shape {tuple(images.shape)}, expected four axes (count, channels, height, width); "
                "add or reshape the missing axis."
            )
        if labels.dtype != torch.int64 or labels.ndim != 1:
            raise DataError(
                f"labels are {_dtype_name(labels.dtype)} of the shape {tuple(labels.shape)}, expected one int64 class "
                "number per image; convert them with labels.long(), one-hot rows with labels.argmax(1)."
            )
        if len(images) != len(labels):
            raise DataError(
                f"there are {len(images)} images but {len(labels)} labels; pass exactly one label per image."
            )
        if not all(images.shape):
            raise DataError(f"images of the shape {tuple(images.shape)} have no pixels; pass at least one image.")
        if isinstance(images, Tensor) and images.stride(1) < images.stride(2):  # channels last, transposed
            object.__setattr__(self, "images", contiguous(images))
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= len(self.classes):
            raise DataError(
                f"labels run from {low} to {high}, but {len(self.classes)} classes allow 0 to "
                f"{len(self.classes) - 1}; renumber the labels from 0 or name all the classes."
            )

    def __repr__(self) -> str:
        return f"Split({len(self):,} images of {_shape_text(self.images.shape[1:])}, {len(self.classes):,} classes)"

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index].float() / 255, int(self.labels[index])

    def subset(self, rows: Tensor | slice) -> Split:
        """Return the split with these rows; lazy images stay on the disk."""
        images = self.images.subset(rows) if isinstance(self.images, LazyImages) else self.images[rows]
        return Split(images, self.labels[rows], self.classes)

    def centre_crop(self, size: int) -> Split:
        """Return the split with the central `size` x `size` pixels of each image; lazy images stay on the disk.

        >>> split = Split(torch.zeros(1, 3, 256, 256, dtype=torch.uint8), torch.tensor([0]), ("cat",))
        >>> split.centre_crop(224).images.shape
        torch.Size([1, 3, 224, 224])
        """
        if isinstance(self.images, LazyImages):
            return Split(CentreCrop(self.images, size), self.labels, self.classes)
        return Split(centre_crop(self.images, size), self.labels, self.classes)

    # The names of earlier versions.
    part = subset
    centre = centre_crop

    def fingerprint(self) -> str:
        """Return a hash of the content: `sha256`, or for lazy images a hash that does not read all of them."""
        return self._hash_with_labels(self.images.fingerprint) if isinstance(self.images, LazyImages) else self.sha256()

    def fingerprints(self) -> tuple[str, ...]:
        """Return the fingerprint, and for images decoded from files also that of the files.

        Data sets that were loaded eagerly and lazily from the same files share one of them.
        """
        return (self.fingerprint(),) if self.files is None else (self.fingerprint(), self._hash_with_labels(self.files))

    def _hash_with_labels(self, fingerprint: str) -> str:
        labels = self.labels.numpy().astype("<i8").tobytes()
        return hashlib.sha256(fingerprint.encode() + labels).hexdigest()

    def sha256(self, progress: ProgressCallback | None = None) -> str:
        """Return a hash of pixels and labels, equal for equal content in any format.

        It covers the images as NCHW bytes, then the labels as single bytes, or as little-endian int64 where there
        are more than 256 classes. Lazy images are read a few at a time; `progress` is called after each of these.
        """
        labels = self.labels.cpu().numpy().astype("u1" if len(self.classes) <= 256 else "<i8")
        if not isinstance(self.images, LazyImages):
            return content_sha256(self.images.cpu().numpy(), labels)
        digest = hashlib.sha256()
        for start in range(0, len(self), _HASHED_AT_ONCE):
            digest.update(self.images[start : start + _HASHED_AT_ONCE].numpy().reshape(-1).data)
            if progress is not None:
                progress("reading images", min(start + _HASHED_AT_ONCE, len(self)), len(self))
        digest.update(labels.data)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training split and a test split over the same classes.

    `skipped` has the damaged images of a folder that were left out, each with its path in the folder and the reason.
    """

    name: str
    train: Split
    test: Split
    skipped: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        train, test = tuple(self.train.images.shape[1:]), tuple(self.test.images.shape[1:])
        if train != test:
            raise DataError(f"training images have the shape {train} and test images {test}; bring both to one shape.")
        if self.train.classes != self.test.classes:
            raise DataError(
                "the training and the test split name different classes; name them alike, in the same order."
            )

    def __repr__(self) -> str:
        counts = f"{len(self.train):,} training and {len(self.test):,} test images"
        return f"Dataset('{self.name}', {counts} of {_shape_text(self.shape)}, {self.num_classes:,} classes)"

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.train.classes)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one image."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    @property
    def gap(self) -> str | None:
        """Which classes have test images and no training images, in a sentence; None if there are none."""
        known = torch.isin(self.test.labels, self.train.labels.unique())
        if known.all():
            return None
        names = first_few([self.test.classes[number] for number in self.test.labels[~known].unique().tolist()])
        count = int((~known).sum())
        return (
            f"no training image has a class of {count:,} of the {len(self.test):,} test images ({names}): they cannot "
            f"be learnt; check the labels"
        )


def _shape_text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class MapDataset(Sized, Protocol):
    """The interface of a map-style dataset: a length, and items by position."""

    def __getitem__(self, index: int, /) -> Any: ...


class Indexed(torch.utils.data.Dataset[tuple[Any, Any, int]]):
    """A dataset whose items are (x, y, index); made by `indexed`."""

    def __init__(self, dataset: MapDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any, int]:
        # The index addresses the stored perturbation, so an example must always have the same index.
        index = index + len(self) if index < 0 else int(index)
        item = self.dataset[index]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            kind = f"{len(item)} entries" if isinstance(item, (tuple, list)) else type(item).__name__
            raise DataError(
                f"item {index} of the dataset is {kind}, expected a pair (x, y); "
                "make the dataset return image and label."
            )
        x, y = item
        return x, y, index


def indexed(dataset: MapDataset) -> Indexed:
    """Wrap a map-style dataset of (x, y) so that its items are (x, y, index), for methods with per-example state.

    Images must not be augmented; `atas.random_view` augments a batch so that stored perturbations follow. Take a subset
    before wrapping it, so that indices run from 0 to its length.

    >>> pairs = [("a", 0), ("b", 1)]
    >>> indexed(pairs)[1]
    ('b', 1, 1)
    """
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise DataError(
            f"{type(dataset).__name__} has no length or no items by position; pass a map-style dataset, not a stream."
        )
    return Indexed(dataset)
