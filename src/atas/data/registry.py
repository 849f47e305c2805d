"""Data sets by name, of any form (see `load`), and what users pass as data in Python (see `as_dataset`)."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from atas._utils.console import ProgressCallback
from atas._utils.imports import current_directory_importable, describe_error, import_object
from atas.core.arguments import check_argument, describe
from atas.data import digits, tiny_imagenet
from atas.data.array_files import as_arrays, from_named, read_npy_folder, read_npz
from atas.data.arrays import from_arrays
from atas.data.cifar import SPECS, read_cifar
from atas.data.dataset import Dataset, Split
from atas.data.folder import read_image_folder
from atas.data.hugging_face import from_splits, is_hugging_face, read_hub, read_saved
from atas.data.official import FILE_SETS, read_idx_folder, read_official
from atas.data.packed import read_packed
from atas.data.sources import IMAGE_FOLDER, PACKED, Source, find_source
from atas.data.torch_datasets import from_datasets
from atas.errors import AtasError, DataError, UsageError

DEFAULT_SIZE = 224
FOLDERS = (IMAGE_FOLDER, tiny_imagenet.NAME)  # of image files
_SIZED = (*FOLDERS, "hub", "saved", "function")
_KINDS = (
    "a Dataset, a pair (train, test) of datasets of (image, label), a pair ((x, y), (x_test, y_test)) of arrays, or a "
    "dictionary of arrays x_train, y_train, x_test, y_test"
)
_HELD_OUT = (*FOLDERS, "npz", "npy", "hub", "saved")  # data of which training images can be held out


def is_official(name: str, sha256: str) -> bool:
    """Return whether a split of this hash, which `load` returned, is official. MNIST, Fashion-MNIST and SVHN load from
    official files only."""
    return sha256 in official_hashes(name) or (name in FILE_SETS and name not in FOLDERS)


def default_size(kind: str) -> int:
    """Return the side in pixels to which images of a folder are resized by default."""
    return tiny_imagenet.SIZE if kind == tiny_imagenet.NAME else DEFAULT_SIZE


def official_hashes(name: str) -> tuple[str, ...]:
    """Return the SHA-256 of the official training and test splits, as in `Split.sha256`; empty for other data."""
    return (SPECS[name].train_sha256, SPECS[name].test_sha256) if name in SPECS else ()


def num_train_images(name: str) -> int | None:
    """Return the number of training images of a data set whose content is fixed, without reading it; else None.

    >>> num_train_images("cifar100"), num_train_images("imagefolder")
    (50000, None)
    """
    fixed = {"digits": digits.TRAIN, tiny_imagenet.NAME: tiny_imagenet.TRAIN}
    return SPECS[name].train_count if name in SPECS else fixed.get(name)


def load(
    name: str,
    root: str | os.PathLike[str] | None = None,
    *,
    size: int | None = None,
    lazy: bool | Literal["train"] | None = None,
    skip_damaged: bool | Collection[str] = False,
    test_only: bool = False,
    held_out: int | None = None,
    seed: int = 0,
    progress: ProgressCallback | None = None,
    trusted: bool = True,
) -> Dataset:
    """Read a data set as uint8 and check it.

    `name` is a name of `names()`; the path of a folder of images, of a packed set, of an `.npz` file or of a folder of
    `.npy` files; `hf:owner/name` for the Hugging Face hub; or `package.module:function` for a function that returns a
    Dataset, or a pair (train, test) of datasets or of arrays.

    `root` is the folder of a set by name; its default is the environment variable ATAS_DATA, else ./data (digits need
    none). With a path, `root` is where the data is now; a function gets it as the argument `root`. `size` is the side
    in pixels to which images are resized and centre-cropped, for folders of images (224, Tiny-ImageNet 64), Hugging
    Face data sets and functions. `lazy` is for folders of images and decodes them when they are accessed: "train" only
    those for training, True all of them; by default all, if they would take more than half of the memory. Images of a
    packed set always stay on the disk. `skip_damaged` leaves out images of a folder that cannot be decoded, and lists
    them in `skipped`; the paths of such a list leave out the same images again. `test_only` accepts arrays and folders
    of images without a training split, and repeats the test split in its place. `held_out` is for folders of images,
    arrays and Hugging Face data sets without test images: that number of the training images, stratified by class and
    drawn by `seed`, are the test images. `progress` is called while images are read, with the task, the
    number done, and the total. Without `trusted`, a function is not imported.

    >>> digits = load("digits")
    >>> len(digits.train), len(digits.test), digits.shape, digits.num_classes
    (1297, 500, (1, 8, 8), 10)
    """
    check_argument("name", name, str)
    source = find_source(name, root)
    _check_options(name, source, size, lazy, skip_damaged, held_out)
    if source.kind in FOLDERS:
        return _read_folder(source, size, lazy, skip_damaged, test_only, held_out, seed, progress)
    if source.kind == "function":
        return _call_function(name, source.path, size, progress, trusted=trusted)
    if source.kind == "hub":
        return read_hub(name, source.path, size=size, held_out=held_out, seed=seed, progress=progress)
    if source.kind == "digits":
        return digits.read_digits()
    assert source.path is not None
    if source.kind == "saved":
        return read_saved(source.path, size=size, held_out=held_out, seed=seed, progress=progress)
    if source.kind == "npz":
        return read_npz(source.path, test_only=test_only, held_out=held_out, seed=seed)
    if source.kind == "npy":
        return read_npy_folder(source.path, test_only=test_only, held_out=held_out, seed=seed)
    if source.kind == "idx":
        return read_idx_folder(source.path)
    if source.kind == PACKED:
        return read_packed(source.path)
    if source.kind in SPECS:
        return read_cifar(SPECS[source.kind], source.path)
    return read_official(FILE_SETS[source.kind], source.path)


def _check_options(
    name: str, source: Source, size: int | None, lazy: object, skip_damaged: object, held_out: int | None
) -> None:
    if held_out is not None and source.kind not in _HELD_OUT:
        raise UsageError(
            "images are held out of image folders, of arrays in files and of Hugging Face data sets; leave out "
            f"data.held_out for {name}."
        )
    if size is not None and source.kind not in _SIZED:
        raise UsageError(
            f"size is for imagefolder, tiny-imagenet, Hugging Face data sets and functions; images of {name} have a "
            "fixed size, so leave it out."
        )
    if lazy is not None and source.kind not in FOLDERS:
        raise UsageError(f"lazy is for imagefolder and tiny-imagenet only; leave it out for {name}.")
    if skip_damaged is not False and source.kind not in FOLDERS:
        raise UsageError(
            f"damaged images can be skipped in folders of image files only; leave it out for {name}, and for packed "
            "sets pass --skip-damaged to `atas data pack`."
        )


def _read_folder(
    source: Source,
    size: int | None,
    lazy: bool | Literal["train"] | None,
    skip_damaged: bool | Collection[str],
    test_only: bool,
    held_out: int | None,
    seed: int,
    progress: ProgressCallback | None,
) -> Dataset:
    assert source.path is not None
    tiny = source.kind == tiny_imagenet.NAME
    folder = tiny_imagenet.locate_tiny_imagenet(source.path) if tiny else source.path
    side = default_size(source.kind) if size is None else size
    dataset = read_image_folder(
        folder,
        side,
        root_given=source.root_given,
        lazy=lazy,
        skip_damaged=skip_damaged,
        test_only=test_only,
        held_out=held_out,
        seed=seed,
        progress=progress,
    )
    return tiny_imagenet.named(dataset, folder) if tiny else dataset


def _call_function(
    name: str, root: Path | None, size: int | None, progress: ProgressCallback | None, *, trusted: bool
) -> Dataset:
    """Return the data of a user's function."""
    function = import_object(name, "data set", "function", trusted=trusted)
    try:
        with current_directory_importable():
            value = function() if root is None else function(root=str(root))
    except AtasError:
        raise
    except Exception as error:  # the user's code may raise anything
        raise UsageError(f"the function {name} failed: {describe_error(error)}.") from error
    try:
        dataset = as_dataset(value, name.rpartition(":")[2], size=size, progress=progress)
    except (DataError, UsageError) as error:
        raise type(error)(f"{name}: {error}") from error
    if size is not None and dataset.shape[1:] != (size, size):
        raise UsageError(
            f"{name} returns images of {dataset.shape[1]} x {dataset.shape[2]} pixels, and size is {size}; leave size "
            "out, or resize them in the function."
        )
    return dataset


def as_dataset(
    value: Any, name: str = "dataset", *, size: int | None = None, progress: ProgressCallback | None = None
) -> Dataset:
    """Return what a user gave as data as a Dataset: one already, a pair of datasets, arrays, or arrays by name."""
    if isinstance(value, Dataset):
        return value
    if is_hugging_face(value):
        return from_splits(value, name, size=size, progress=progress, given=f"the {type(value).__name__}")
    if isinstance(value, Mapping) and value and all(isinstance(array, np.ndarray | Tensor) for array in value.values()):
        return from_named(value, name)
    if isinstance(value, tuple | list) and len(value) == 2:
        train, test = value
        if is_hugging_face(train) and is_hugging_face(test):
            return from_splits({"train": train, "test": test}, name, size=size, progress=progress)
        if isinstance(train, Split) and isinstance(test, Split):
            return Dataset(name, train, test)
        arrays, test_arrays = as_arrays(train), as_arrays(test)
        if arrays is not None and test_arrays is not None:
            return from_arrays(name, *arrays, *test_arrays)
        if arrays is test_arrays is None and all(map(_holds_items, value)):
            return from_datasets(train, test, name, size=size, progress=progress)
        raise UsageError(f"data must be {_KINDS}; got the pair of {describe(train)} and {describe(test)}.")
    raise UsageError(f"data must be {_KINDS}; got {describe(value)}.")


def _holds_items(value: object) -> bool:
    is_array = isinstance(value, np.ndarray | Tensor | str | bytes)
    return not is_array and (hasattr(value, "__getitem__") or hasattr(value, "__iter__"))


def check_given(value: object) -> None:
    """Raise UsageError for what `as_dataset` can never take, before anything is read."""
    if not isinstance(value, Dataset | Mapping | tuple | list):
        raise UsageError(f"data must be {_KINDS}, or a name that atas.data.load takes; got {describe(value)}.")


def given_name(value: object) -> str:
    """Return a name for data that was passed in Python: that of a Dataset, or of the class of a training set."""
    if isinstance(value, Dataset):
        return value.name
    train = value[0] if isinstance(value, tuple | list) and value else None
    plain = train is None or isinstance(train, tuple | list | np.ndarray | Tensor)
    return "arrays" if plain else type(train).__name__
