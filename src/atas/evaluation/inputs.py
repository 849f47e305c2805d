"""The images and labels of an evaluation, as tensors, arrays or datasets, read in chunks that fit into memory.

`check_classes` compares the class names of data and model.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from atas.core.fingerprint import DataHash
from atas.core.validation import check_images, check_shapes
from atas.data import LazyImages, MapDataset
from atas.errors import DataError, first_few

CHUNK_BYTES = 2**30  # of images; searches keep about twice as much beside them


class InputSource(Sized, Protocol):
    """Images and labels to evaluate on."""

    device: torch.device

    def read(self, rows: range, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Images in [0, 1] and labels, both on the CPU. There division by 255 is exact, so pixels do not depend on
        where the images lived."""


class TensorSource:
    """Images and labels that are tensors already, or come as tensors from the disk; all floats are checked at once."""

    def __init__(self, images: Tensor | LazyImages, labels: Tensor) -> None:
        # Only shapes and the labels' type are looked at here, so a stand-in without memory will do.
        check_shapes(torch.empty(images.shape, device="meta"), labels, None, None)
        self._images, self._labels, self.device = images, labels, images.device
        if isinstance(images, Tensor) and images.dtype != torch.uint8:
            check_pixels(images)

    def __len__(self) -> int:
        return len(self._images)

    def read(self, rows: range, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A slice."""
        part = slice(rows.start, rows.stop, rows.step)
        return to_pixels(self._images[part].detach().cpu(), dtype), self._labels[part].cpu().long()


class DatasetSource:
    """A dataset whose items are (image, label), read and checked as they are needed."""

    device = torch.device("cpu")

    def __init__(self, dataset: MapDataset) -> None:
        self._dataset = dataset
        self._shape: torch.Size | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, rows: range, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The items of these positions."""
        items = [self._item(i) for i in rows]
        images = torch.stack([image for image, _ in items])
        labels = torch.stack([label for _, label in items])
        check_shapes(torch.empty(images.shape, device="meta"), labels, None, None)
        if images.dtype != torch.uint8:
            check_pixels(images)
        return to_pixels(images, dtype), labels.long()

    def _item(self, position: int) -> tuple[Tensor, Tensor]:
        item = self._dataset[position]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise DataError(f"item {position} of the dataset is no pair (image, label); make the dataset return both")
        if not isinstance(item[0], (Tensor, np.ndarray)):
            raise DataError(
                f"image {position} of the dataset is a {type(item[0]).__name__}; make the dataset return tensors "
                "(C, H, W) in [0, 1] or uint8"
            )
        image, label = as_tensor(item[0], "image").detach().cpu(), as_tensor(item[1], "label").cpu()
        self._shape = self._shape or image.shape
        if image.shape != self._shape:
            raise DataError(
                f"image {position} has the shape {tuple(image.shape)} and the first {tuple(self._shape)}; "
                "resize all images to one shape"
            )
        return image, label


def open_source(images: object, labels: object) -> InputSource:
    """Tensors or arrays with labels, an object that holds both as tensors, or a dataset of pairs."""
    source = _open(images, labels)
    if not len(source):
        raise DataError("the data set is empty; give at least one image")
    return source


def _open(images: object, labels: object) -> InputSource:
    if isinstance(images, (Tensor, np.ndarray, LazyImages)):
        if labels is None:
            raise DataError("labels are missing; give them after the images, or a dataset of (image, label) pairs")
        kept = images if isinstance(images, LazyImages) else as_tensor(images, "images")
        return TensorSource(kept, as_tensor(labels, "labels"))
    if labels is not None:
        raise DataError(f"images given with labels must be a tensor or an array; got {type(images).__name__}")
    inner = getattr(images, "images", None), getattr(images, "labels", None)
    if isinstance(inner[0], (Tensor, LazyImages)) and isinstance(inner[1], Tensor):
        return TensorSource(inner[0], inner[1])
    if hasattr(images, "__getitem__") and hasattr(images, "__len__"):
        return DatasetSource(images)
    raise DataError(
        f"cannot evaluate on {type(images).__name__}; give images and labels as tensors or arrays, or a dataset with "
        "a length and items (image, label)"
    )


def as_tensor(value: object, what: str) -> Tensor:
    """A tensor of the value, sharing memory where that is possible."""
    if isinstance(value, np.ndarray):
        # Arrays that are read-only or run backwards cannot be shared.
        value = value if value.flags.writeable and value.flags.c_contiguous else np.array(value, order="C")
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise DataError(f"cannot make a tensor of the {what}, {kind}; give numbers") from error


def check_pixels(images: Tensor) -> None:
    """Floats in [0, 1]."""
    if not images.dtype.is_floating_point:
        raise DataError(f"images must be float in [0, 1] or uint8; got {images.dtype}: convert them with .to()")
    check_images(images)


def to_pixels(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Pixels in [0, 1] of the model's type, from uint8 or from floats."""
    return images.to(dtype) / 255 if images.dtype == torch.uint8 else images.to(dtype)


class ChunkReader:
    """Reads rows of a source as tensors, and keeps what it read last: often that is all there is."""

    def __init__(self, source: InputSource, dtype: torch.dtype) -> None:
        self._source, self._dtype = source, dtype
        self._rows: range | None = None
        self.shape = torch.Size(self.read(range(1))[0].shape[1:])

    def __len__(self) -> int:
        return len(self._source)

    def read(self, rows: range) -> tuple[Tensor, Tensor]:
        """Images and labels, on the CPU."""
        if rows != self._rows:
            x, y = self._source.read(rows, self._dtype)
            # What was made in inference mode cannot take part in a backward pass; a copy can.
            self._held = tuple(part.clone() if part.is_inference() else part for part in (x, y))
            self._rows = rows
        x, y = self._held
        return x, y

    def sample(self, count: int) -> tuple[range, Tensor, Tensor]:
        """At most so many rows, evenly spread, as a set may be sorted by class, and what is in them; what is kept
        stays."""
        rows = range(0, len(self), -(-len(self) // count))
        if self._rows == range(len(self)):
            x, y = self._held
            return rows, x[:: rows.step], y[:: rows.step]
        return rows, *ChunkReader(self._source, self._dtype).read(rows)

    def chunks(self, rows: range) -> list[range]:
        """The rows in pieces."""
        most = max(CHUNK_BYTES // (self.shape.numel() * self._dtype.itemsize), 1)
        return [rows[first : first + most] for first in range(0, len(rows), most)]

    def digest(self) -> str:
        """The hash of all images and labels."""
        found = DataHash()
        for rows in self.chunks(range(len(self))):
            found.update(*self.read(rows))
        return found.hexdigest()


def check_classes(known: Sequence[str], found: Sequence[str]) -> None:
    """Refuse data whose classes are not those that a model was trained on, where both have names; nothing is known of a
    model without any."""
    known, found = list(known), list(found)
    if not known or found == known or not _comparable(known, found):
        return
    more, less = sorted(set(found) - set(known)), sorted(set(known) - set(found))
    differences = [
        f"{what} {first_few(names)}" for what, names in (("only in the data:", more), ("missing there:", less)) if names
    ]
    raise DataError(
        f"the data has other classes than the model was trained on ({'; '.join(differences) or 'their order'}); give "
        f"data with the same class names in the same order"
    )


def _comparable(known: list[str], found: list[str]) -> bool:
    """Classes without names have numbers; beside names these say nothing.

    >>> _comparable(["0", "1"], ["cat", "dog"]), _comparable(["0", "1", "2"], ["0", "2"])
    (False, True)
    """
    numbered = any(names == [str(number) for number in range(len(names))] for names in (known, found))
    return not numbered or not set(known).isdisjoint(found)
