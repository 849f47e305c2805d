"""The images and labels of an evaluation, as tensors, arrays or datasets, read in chunks that fit into memory.

`check_classes` compares the class names of data and model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Sized
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from atas.attacks.base import target_classes
from atas.core.arguments import describe
from atas.core.autograd import contiguous
from atas.core.fingerprint import DataHash
from atas.core.validation import check_images, check_shapes
from atas.data import LazyImages, MapDataset
from atas.errors import DataError, UsageError, first_few
from atas.threat import Masked, Threat

CHUNK_BYTES = 2**30  # of images; searches need about twice as much in addition


class InputSource(Sized, Protocol):
    """Images and labels to evaluate on."""

    device: torch.device

    def read(self, rows: range, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return images in [0, 1] and labels, both on the CPU, where division by 255 is exact."""


class TensorSource:
    """Images and labels as tensors in memory or on disk. Float images are checked once, at the start."""

    def __init__(self, images: Tensor | LazyImages, labels: Tensor) -> None:
        # Only shapes and the dtype of the labels are checked here: a meta tensor suffices.
        check_shapes(torch.empty(images.shape, device="meta"), labels, None, None)
        self._images, self._labels, self.device = images, labels, images.device
        if isinstance(images, Tensor) and images.dtype != torch.uint8:
            check_pixels(images)

    def __len__(self) -> int:
        return len(self._images)

    def read(self, rows: range, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return a slice of the tensors."""
        selected = slice(rows.start, rows.stop, rows.step)
        return to_pixels(self._images[selected].detach().cpu(), dtype), self._labels[selected].cpu().long()

    def labels(self) -> Tensor:
        """Return the tensor of labels."""
        return self._labels.cpu().long()


class DatasetSource:
    """A dataset of (image, label) items, which are read and checked when they are needed."""

    device = torch.device("cpu")

    def __init__(self, dataset: MapDataset) -> None:
        self._dataset = dataset
        self._shape: torch.Size | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, rows: range, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the items at these positions."""
        items = [self._item(i) for i in rows]
        images = torch.stack([image for image, _ in items])
        labels = torch.stack([label for _, label in items])
        check_shapes(torch.empty(images.shape, device="meta"), labels, None, None)
        if images.dtype != torch.uint8:
            check_pixels(images)
        return to_pixels(images, dtype), labels.long()

    def labels(self) -> Tensor:
        """Read every item, and return the labels."""
        return torch.stack([self._item(i)[1] for i in range(len(self))]).long()

    def _item(self, position: int) -> tuple[Tensor, Tensor]:
        item = self._dataset[position]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise DataError(
                f"item {position} of the dataset is not a pair (image, label); return both from the dataset"
            )
        if not isinstance(item[0], (Tensor, np.ndarray)):
            raise DataError(
                f"image {position} of the dataset is a {type(item[0]).__name__}; return tensors (C, H, W) in [0, 1] or "
                "uint8 from the dataset"
            )
        image, label = as_tensor(item[0], "image").detach().cpu(), as_tensor(item[1], "label").cpu()
        self._shape = self._shape or image.shape
        if image.shape != self._shape:
            raise DataError(
                f"image {position} has the shape {tuple(image.shape)}, the first {tuple(self._shape)}; "
                "resize all images to one shape"
            )
        return image, label


class SelectedSource:
    """Some rows of a source, in their order."""

    def __init__(self, source: InputSource, rows: Tensor) -> None:
        self._source, self.rows, self.device = source, rows, source.device

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, rows: range, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the rows at these positions of the selection; neighbours are read together."""
        selected = self.rows[rows.start : rows.stop : rows.step]
        ends = ((selected[1:] - selected[:-1]) != 1).nonzero().flatten() + 1
        runs = [(int(run[0]), int(run[-1])) for run in selected.tensor_split(ends) if len(run)]
        parts = [self._source.read(range(first, last + 1), dtype) for first, last in runs]
        return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def select_targets(
    source: TensorSource | DatasetSource, targets: Tensor | np.ndarray | int
) -> tuple[InputSource, Tensor, dict[str, Any]]:
    """Return the images to push, their target classes, and values that describe the targets in a result.

    Images whose label is the one target class are left out: the model is there already.
    """
    labels = source.labels()
    if not isinstance(targets, Tensor | np.ndarray):
        if not isinstance(targets, int | np.integer) or isinstance(targets, bool):
            raise UsageError(
                f"targets must be one class, or a tensor with one class per image; got {describe(targets)}"
            )
        rows = (labels != targets).nonzero().flatten()
        if not len(rows):
            raise DataError(f"every image has the label {targets}, the target class; choose another class")
        left_out = len(labels) - len(rows)
        selected = SelectedSource(source, rows) if left_out else source
        return selected, torch.full_like(rows, int(targets)), {"class": int(targets), "left_out": left_out}
    classes = target_classes(as_tensor(targets, "targets").cpu(), labels).long()
    if len(same := (classes == labels).nonzero()):
        raise DataError(
            f"the target of image {int(same[0])} is its label, {int(labels[same[0]])}; choose another class"
        )
    digest = hashlib.sha256(classes.numpy().tobytes()).hexdigest()[:12]
    return source, classes, {"per_example": digest}


def describe_mask(threat: Threat) -> dict[str, Any] | None:
    """Return values that describe the mask of a threat model in a result."""
    if not isinstance(threat, Masked):
        return None
    mask = threat.mask.cpu()
    digest = hashlib.sha256(f"{tuple(mask.shape)}".encode() + mask.numpy().tobytes()).hexdigest()[:12]
    return {"share": threat.share, "shape": list(mask.shape), "hash": digest}


def open_source(images: object, labels: object) -> TensorSource | DatasetSource:
    """Return the source of tensors or arrays with labels, of an object with both, or of a dataset of pairs."""
    source = _open(images, labels)
    if not len(source):
        raise DataError("the data set is empty; pass at least one image")
    return source


def _open(images: object, labels: object) -> TensorSource | DatasetSource:
    if isinstance(images, (Tensor, np.ndarray, LazyImages)):
        if labels is None:
            raise DataError("labels are missing; pass them after the images, or pass a dataset of (image, label) pairs")
        tensor = images if isinstance(images, LazyImages) else as_tensor(images, "images")
        return TensorSource(tensor, as_tensor(labels, "labels"))
    if labels is not None:
        raise DataError(f"images with labels must be a tensor or an array; got {type(images).__name__}")
    inner_images, inner_labels = getattr(images, "images", None), getattr(images, "labels", None)
    if isinstance(inner_images, (Tensor, LazyImages)) and isinstance(inner_labels, Tensor):
        return TensorSource(inner_images, inner_labels)
    if hasattr(images, "__getitem__") and hasattr(images, "__len__"):
        return DatasetSource(images)
    raise DataError(
        f"cannot evaluate on {type(images).__name__}; pass images and labels as tensors or arrays, or a dataset with "
        "a length and items (image, label)"
    )


def as_tensor(value: object, name: str) -> Tensor:
    """Return a tensor of the value; it shares memory with the value if possible."""
    if isinstance(value, np.ndarray):
        # PyTorch cannot share arrays that are read-only or have negative strides.
        value = value if value.flags.writeable and value.flags.c_contiguous else np.array(value, order="C")
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise DataError(f"cannot convert the {name} ({kind}) to a tensor; pass numbers") from error


def check_pixels(images: Tensor) -> None:
    """Raise DataError unless the images are floats in [0, 1]."""
    if not images.dtype.is_floating_point:
        raise DataError(f"images must be float in [0, 1] or uint8; got {images.dtype}: convert them with .to()")
    check_images(images)


def to_pixels(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert uint8 or float images to pixels in [0, 1] of a dtype."""
    return images.to(dtype) / 255 if images.dtype == torch.uint8 else images.to(dtype)


class Sample(NamedTuple):
    """Some of the examples: their positions in the data, images and labels."""

    rows: range
    x: Tensor
    y: Tensor


class ChunkReader:
    """Reads rows of a source as tensors, and caches the last rows: a small data set is read once.

    >>> source = open_source(torch.rand(7, 1, 2, 2), torch.zeros(7, dtype=torch.int64))
    >>> ChunkReader(source, torch.float32, chunk_bytes=3 * 2 * 2 * 4).chunks(range(7))
    [range(0, 3), range(3, 6), range(6, 7)]
    """

    def __init__(self, source: InputSource, dtype: torch.dtype, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._source, self._dtype, self._chunk_bytes = source, dtype, chunk_bytes
        self._rows: range | None = None
        self.shape = torch.Size(self.read(range(1))[0].shape[1:])

    def __len__(self) -> int:
        return len(self._source)

    def read(self, rows: range) -> tuple[Tensor, Tensor]:
        """Return images and labels, on the CPU."""
        if rows != self._rows:
            x, y = self._source.read(rows, self._dtype)
            x = contiguous(x)  # an array of channels last that was transposed is not
            # Inference tensors cannot take part in a backward pass; copies can.
            self._cached = tuple(tensor.clone() if tensor.is_inference() else tensor for tensor in (x, y))
            self._rows = rows
        x, y = self._cached
        return x, y

    def sample(self, count: int) -> Sample:
        """Return at most `count` rows, evenly spread because a data set may be sorted by class; keep the cache."""
        rows = self.spread(count)
        if self._rows == range(len(self)):
            return Sample(rows, *(tensor[:: rows.step] for tensor in self._cached))
        return Sample(rows, *ChunkReader(self._source, self._dtype).read(rows))

    def spread(self, count: int) -> range:
        """Return at most `count` rows, evenly spread."""
        return range(0, len(self), -(-len(self) // count))

    def chunks(self, rows: range) -> list[range]:
        """Split the rows into chunks of at most `chunk_bytes` of images."""
        size = max(self._chunk_bytes // (self.shape.numel() * self._dtype.itemsize), 1)
        return [rows[first : first + size] for first in range(0, len(rows), size)]

    def digest_and_labels(self) -> tuple[str, Tensor]:
        """Return the hash of all images and labels, and the labels."""
        digest, labels = DataHash(), []
        for rows in self.chunks(range(len(self))):
            x, y = self.read(rows)
            digest.update(x, y)
            labels.append(y)
        return digest.hexdigest(), torch.cat(labels)


def data_hash(images: object, labels: object) -> str:
    """Return the hash of images and labels, as `Evaluation.data` holds it."""
    return ChunkReader(open_source(images, labels), torch.float32).digest_and_labels()[0]


def class_names(images: object, labels: Tensor) -> tuple[str, ...]:
    """Return the names of the classes of a data set; empty if it has none, or too few for its labels."""
    names = getattr(images, "classes", ())
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        return ()
    return tuple(names) if len(names) > int(labels.max()) else ()


def check_classes(model_classes: Sequence[str], data_classes: Sequence[str]) -> None:
    """Raise DataError if the data has other classes than the model; a model without class names takes any."""
    known, given = list(model_classes), list(data_classes)
    if not known or given == known or not _comparable(known, given):
        return
    extra, missing = sorted(set(given) - set(known)), sorted(set(known) - set(given))
    differences = [
        f"{label} {first_few(names)}"
        for label, names in (("only in the data:", extra), ("missing there:", missing))
        if names
    ]
    raise DataError(
        f"the data has other classes than the model was trained on ({'; '.join(differences) or 'their order'}); pass "
        f"data with the same class names in the same order"
    )


def _comparable(known: list[str], given: list[str]) -> bool:
    """Return False if one list holds names and the other numbers, as of classes without names.

    >>> _comparable(["0", "1"], ["cat", "dog"]), _comparable(["0", "1", "2"], ["0", "2"])
    (False, True)
    """
    numbered = any(names == [str(number) for number in range(len(names))] for names in (known, given))
    return not numbered or not set(known).isdisjoint(given)
