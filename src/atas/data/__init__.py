"""Data sets: digits, CIFAR-10, CIFAR-100, image folders, packed sets, and arrays of the user."""

from __future__ import annotations

import os
from typing import Literal

from atas._utils.console import ProgressCallback
from atas.core.validation import check_argument
from atas.data.arrays import from_arrays
from atas.data.cifar import SPECS, read_cifar
from atas.data.dataset import Dataset, Indexed, MapDataset, Split, indexed
from atas.data.digits import TRAIN, read_digits
from atas.data.download import fetch, resolve_root
from atas.data.folder import read_image_folder
from atas.data.lazy_images import LazyImages
from atas.data.lazy_images import LazyImages as Stored  # the name of earlier versions
from atas.data.packed import read_packed, verify
from atas.data.packing import pack
from atas.errors import UsageError, unknown

__all__ = [
    "Dataset",
    "Indexed",
    "LazyImages",
    "MapDataset",
    "Split",
    "Stored",
    "fetch",
    "from_arrays",
    "indexed",
    "load",
    "names",
    "num_train_images",
    "official_hashes",
    "pack",
    "verify",
]

DEFAULT_SIZE = 224


def names() -> list[str]:
    """Return the names that `load` accepts."""
    return ["digits", *SPECS, "imagefolder", "packed"]


def official_hashes(name: str) -> tuple[str, ...]:
    """Return the SHA-256 of the official training and test splits, as in `Split.sha256`; empty for other data."""
    return (SPECS[name].train_sha256, SPECS[name].test_sha256) if name in SPECS else ()


def num_train_images(name: str) -> int | None:
    """Return the number of training images of a data set whose content is fixed, without reading it; else None.

    >>> num_train_images("cifar100"), num_train_images("imagefolder")
    (50000, None)
    """
    return TRAIN if name == "digits" else SPECS[name].train_count if name in SPECS else None


def load(
    name: str,
    root: str | os.PathLike[str] | None = None,
    *,
    size: int | None = None,
    lazy: bool | Literal["train"] | None = None,
    progress: ProgressCallback | None = None,
) -> Dataset:
    """Read a data set as uint8 and check it.

    `root` is the folder of the data; its default is the environment variable ATAS_DATA, else ./data (digits need
    none). Two arguments are for `imagefolder` only. `size` is the side in pixels to which images are resized and
    centre-cropped (224). `lazy` decodes images when they are accessed: "train" only those for training, True all of
    them; by default all, if they would take more than half of the memory. Images of a `packed` set always stay on the
    disk. `progress` is called while images are decoded, with the task, the number done, and the total.

    >>> digits = load("digits")
    >>> len(digits.train), len(digits.test), digits.shape, digits.num_classes
    (1297, 500, (1, 8, 8), 10)
    """
    check_argument("name", name, str)
    if name not in names():
        raise unknown("data set", name, names())
    if size is not None and name != "imagefolder":
        raise UsageError(f"size is for imagefolder only; images of {name} have a fixed size, so leave it out.")
    if lazy is not None and name != "imagefolder":
        raise UsageError(f"lazy is for imagefolder only; leave it out for {name}.")
    if name == "digits":
        return read_digits()
    folder = resolve_root(root)
    if name == "imagefolder":
        side = DEFAULT_SIZE if size is None else size
        return read_image_folder(folder, side, root_given=root is not None, lazy=lazy, progress=progress)
    if name == "packed":
        return read_packed(folder)
    return read_cifar(SPECS[name], folder)
