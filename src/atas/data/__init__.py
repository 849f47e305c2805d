"""Data sets: digits, CIFAR-10, CIFAR-100, folders of images, packed sets, and arrays of your own."""

from __future__ import annotations

import os
from typing import Literal

from atas._utils.progress import ProgressCallback
from atas.data.arrays import from_arrays
from atas.data.cifar import SPECS, read_cifar
from atas.data.dataset import Dataset, Indexed, MapDataset, Split, indexed
from atas.data.digits import read_digits
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
    "official_hashes",
    "pack",
    "verify",
]

DEFAULT_SIZE = 224


def names() -> list[str]:
    """The data sets that `load` knows."""
    return ["digits", *SPECS, "imagefolder", "packed"]


def official_hashes(name: str) -> tuple[str, ...]:
    """SHA-256 of the official training and test content, as `Split.sha256` computes it; nothing for other data."""
    return (SPECS[name].train_sha256, SPECS[name].test_sha256) if name in SPECS else ()


def load(
    name: str,
    root: str | os.PathLike[str] | None = None,
    *,
    size: int | None = None,
    lazy: bool | Literal["train"] | None = None,
    progress: ProgressCallback | None = None,
) -> Dataset:
    """Read a data set as uint8 and check it.

    `root` is the folder that holds the data: without it the environment variable ATAS_DATA, else ./data (digits need
    none). Two settings are for `imagefolder` alone: `size`, the side in pixels to which images are resized and
    centre-cropped (224); and `lazy`, to leave images in their files until they are asked for, by default where half of
    the memory would not hold them; "train" leaves those for training there. The images of a `packed` set always stay on
    the disk. `progress` is called while images are decoded, with what is done, how many are and how many there are.

    >>> digits = load("digits")
    >>> len(digits.train), len(digits.test), digits.shape, digits.num_classes
    (1297, 500, (1, 8, 8), 10)
    """
    if name not in names():
        raise unknown("data set", name, names())
    if size is not None and name != "imagefolder":
        raise UsageError(f"size is for imagefolder alone; the images of {name} have their own size, so leave it out.")
    if lazy is not None and name != "imagefolder":
        raise UsageError(f"lazy is for imagefolder alone; {name} is always read in one way, so leave it out.")
    if name == "digits":
        return read_digits()
    folder = resolve_root(root)
    if name == "imagefolder":
        side = DEFAULT_SIZE if size is None else size
        return read_image_folder(folder, side, root_given=root is not None, lazy=lazy, progress=progress)
    if name == "packed":
        return read_packed(folder)
    return read_cifar(SPECS[name], folder)
