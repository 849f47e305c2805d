"""What users pass as data in Python, or return from their functions, as a `Dataset`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from atas._utils.console import ProgressCallback
from atas.core.validation import describe
from atas.data.array_files import as_arrays, from_named
from atas.data.arrays import from_arrays
from atas.data.dataset import Dataset, Split
from atas.data.hugging_face import from_splits, is_hugging_face
from atas.data.torch_datasets import from_datasets
from atas.errors import UsageError

_KINDS = (
    "a Dataset, a pair (train, test) of datasets of (image, label), a pair ((x, y), (x_test, y_test)) of arrays, or a "
    "dictionary of arrays x_train, y_train, x_test, y_test"
)


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
