"""Data sets from named arrays: `.npz` files, folders of `.npy` files, or dictionaries.

Arrays of a training and of a test split are recognised by names such as x_train and y_train, or train_images and
train_labels. Nothing is unpickled.
"""

from __future__ import annotations

import re
import stat
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor

from atas.data.arrays import CHANNELS, from_arrays, to_tensor
from atas.data.dataset import Dataset
from atas.data.held_out import hold_out
from atas.errors import DataError, MissingTestImagesError, UsageError, first_few

_IMAGES = ("x", "images", "image", "imgs", "img", "data", "pixels")
_LABELS = ("y", "labels", "label", "targets", "target")
_CLASSES = ("classes", "classnames", "labelnames")
_TRAIN, _TEST = ("train", "training"), ("test", "testing", "val", "valid", "validation")  # test before validation
_NAMES = "x_train, y_train, x_test and y_test"
_KINDS = {"train": "training", "test": "test"}
_DAMAGE = (
    *(OSError, ValueError, TypeError, KeyError, EOFError, MemoryError, RuntimeError, SyntaxError),
    *(zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError),
)

Read = Callable[[str], Any]
"""Returns the array of a name."""


def read_npz(path: Path, *, test_only: bool = False, held_out: int | None = None, seed: int = 0) -> Dataset:
    """Read the arrays of an `.npz` file.

    With `test_only`, training arrays may be missing. With `held_out`, test arrays are missing, and that number of the
    training images take their place, drawn by `seed`.
    """
    with _open(path, b"PK", "savez") as stream:
        with _explain(path):
            file = np.load(stream, allow_pickle=False)

        def read(name: str) -> np.ndarray:
            with _explain(path):
                array = file[name]
            return _plain(array, name)

        if held_out is not None:
            return _with_held_out(list(file.files), read, path, path.stem, held_out, seed)
        return _from_names(list(file.files), read, path, path.stem, test_only)


def read_npy_folder(folder: Path, *, test_only: bool = False, held_out: int | None = None, seed: int = 0) -> Dataset:
    """Read a folder of `.npy` files, such as x_train.npy; the options are those of `read_npz`."""
    files = {path.stem: path for path in sorted(folder.glob("*.npy")) if not path.name.startswith(".")}

    def read(name: str) -> np.ndarray:
        with _open(files[name], b"\x93NUMPY", "save") as stream, _explain(files[name]):
            array = np.load(stream, allow_pickle=False)
        return _plain(array, f"{name}.npy")

    name = folder.resolve().name
    if held_out is not None:
        return _with_held_out(list(files), read, folder, name, held_out, seed)
    return _from_names(list(files), read, folder, name, test_only)


def _open(path: Path, begin: bytes, function: str) -> BinaryIO:
    """Open a regular file with these first bytes; NumPy takes others for pickles, and opening a pipe waits forever."""
    try:
        if stat.S_ISREG(path.stat().st_mode):
            stream = path.open("rb")
            if stream.read(len(begin)) == begin:
                stream.seek(0)
                return stream
            stream.close()
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}); check the path.") from error
    raise DataError(f"{path} is no file of np.{function}; save images and labels with it.")


def from_named(arrays: Mapping[str, Any], name: str) -> Dataset:
    """Make a data set from arrays or tensors by name."""
    return _from_names(list(arrays), lambda key: arrays[key], "the dictionary", name, test_only=False)


@contextmanager
def _explain(path: Path) -> Iterator[None]:
    """Turn what NumPy raises for a damaged file into DataError."""
    try:
        yield
    except _DAMAGE as error:
        if "allow_pickle" in str(error):
            raise DataError(
                f"{path} holds Python objects, which are not read because they could run code; save images and labels "
                "as numeric arrays, with np.savez or np.save."
            ) from error
        cause = (isinstance(error, OSError) and error.strerror) or str(error).split("\n")[0] or type(error).__name__
        raise DataError(f"cannot read {path} ({cause}); save or copy it again.") from error


def _plain(array: Any, what: str) -> np.ndarray:
    """Return the array of a file; raise DataError for one of records or of objects."""
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "buifUS":
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise DataError(f"{what} holds {kind}, not numbers; save images and labels as numeric arrays.")
    return array


def _from_names(names: list[str], read: Read, where: object, name: str, test_only: bool) -> Dataset:
    found = {
        split: (_find(names, _IMAGES, words), _find(names, _LABELS, words))
        for split, words in (("train", _TRAIN), ("test", _TEST))
    }
    if test_only and found["test"] == (None, None):
        found["test"] = _find(names, _IMAGES, ("",)), _find(names, _LABELS, ("",))
    splits = {}
    for split, (images, labels) in found.items():
        if test_only and split == "train" and (images is None or labels is None):
            continue
        if images is None or labels is None:
            unsplit = _find(names, _IMAGES, ("",)) is not None
            kind = MissingTestImagesError if unsplit or (split == "test" and images is labels is None) else DataError
            raise kind(_missing(names, split, images, labels, where))
        try:
            splits[split] = _images(read(images), images), _labels(read(labels), labels)
        except DataError as error:
            raise error if str(where) in str(error) else DataError(f"{where}: {error}") from error
    classes = _find(names, _CLASSES, ("",))
    (x_test, y_test), (x, y) = splits["test"], splits.get("train", splits["test"])
    try:
        return from_arrays(name, x, y, x_test, y_test, None if classes is None else _class_names(read(classes)))
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _with_held_out(names: list[str], read: Read, where: object, name: str, count: int, seed: int) -> Dataset:
    """Return a data set whose test images are held-out training images."""
    if _find(names, _IMAGES, _TEST) is not None:
        raise UsageError(f"{where} has test images of its own; leave out data.held_out")
    words = _TRAIN if _find(names, _IMAGES, _TRAIN) is not None else ("",)
    images, labels = _find(names, _IMAGES, words), _find(names, _LABELS, words)
    if images is None or labels is None:
        raise DataError(_missing(names, "train", images, labels, where))
    # The arrays under the names of both splits; then the training split is split.
    both = {f"{kind}_{split}": array for split in _KINDS for kind, array in (("images", images), ("labels", labels))}
    classes = _find(names, _CLASSES, ("",))
    whole = _from_names(
        [*both, *([] if classes is None else [classes])], lambda key: read(both.get(key, key)), where, name, False
    )
    return Dataset(name, *hold_out(whole.train, count, seed))


def _find(names: list[str], what: tuple[str, ...], splits: tuple[str, ...]) -> str | None:
    """Return the first name that is made of a word for the arrays and one for the split, in any order and case."""
    plain = {re.sub(r"[^a-z]", "", name.lower()): name for name in reversed(names)}
    for split in splits:
        for word in what:
            for spelling in (f"{word}{split}", f"{split}{word}"):
                if spelling in plain:
                    return plain[spelling]
    return None


def _missing(names: list[str], split: str, images: str | None, labels: str | None, where: object) -> str:
    held = f"(it holds {first_few(names) if names else 'no arrays'})"
    remedy = f"name the arrays {_NAMES}"
    if images is not None or labels is not None:
        lacks = "labels" if labels is None else "images"
        return f"{where} has {images or labels} but no {_KINDS[split]} {lacks}; {remedy} {held}."
    is_unsplit = _find(names, _IMAGES, ("",)) is not None
    if isinstance(where, Path) and (is_unsplit or split == "test"):
        remedy += ", or train with data.held_out, the number of images to hold out as test images"
    if is_unsplit:
        return (
            f"{where} has one set of images, which is not split; to train, {remedy} {held}; `atas evaluate --data` "
            "takes a single set as it is."
        )
    return f"{where} has no {_KINDS[split]} images and labels; {remedy} {held}."


def _images(array: Any, name: str) -> Any:
    """Return images with four axes; grey images (N, H, W) get one for their channel."""
    images = array if isinstance(array, Tensor) else to_tensor(array)
    if images.ndim == 3 and not set(images.shape[1:]) & set(CHANNELS):
        return images.unsqueeze(1)
    if images.ndim == 4 and (images.shape[1] in CHANNELS) == (images.shape[3] in CHANNELS):
        raise DataError(
            f"{name} has the shape {tuple(images.shape)}, which does not tell where the channels are; save images as "
            "(N, H, W, C) or (N, C, H, W) with C = 1 or 3, or as (N, H, W)."
        )
    if images.ndim != 4:
        raise DataError(
            f"{name} has the shape {tuple(images.shape)}; save images as (N, H, W, C), (N, C, H, W) or (N, H, W)."
        )
    return images


def _labels(array: Any, name: str) -> Any:
    """Return labels with one axis; a column (N, 1) is one."""
    labels = array if isinstance(array, Tensor) else np.asarray(array)
    if labels.ndim == 2 and labels.shape[1] == 1:
        return labels[:, 0]
    if not isinstance(labels, Tensor) and labels.dtype.kind in "US":
        raise DataError(f"{name} holds texts; save class numbers from 0, and the names as an array 'classes'.")
    return labels


def _class_names(array: Any) -> list[str]:
    names = np.asarray(array)
    if names.ndim != 1 or names.dtype.kind not in "US":
        raise DataError(f"the class names are {names.dtype} of the shape {names.shape}; save one text for each class.")
    return [name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in names.tolist()]


def as_arrays(value: Any) -> tuple[Any, Any] | None:
    """Return images and labels of a pair of arrays; None for anything else."""
    if not isinstance(value, tuple | list) or len(value) != 2 or not isinstance(value[0], np.ndarray | Tensor):
        return None
    return (_images(value[0], "images"), _labels(value[1], "labels")) if value[0].ndim >= 3 else None
