"""The data of `robustify`: training and test images from whatever was given, images of folders read lazily."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from atas import data as datasets
from atas._utils.console import ProgressCallback
from atas.autotrain import settings
from atas.autotrain.plan import stored_side
from atas.data import Dataset, ImageFiles, Split, find_source
from atas.errors import MissingTestImagesError, UsageError

_FEW = 32  # images to look for colours in


@dataclass(frozen=True)
class Inputs:
    """Training and test images, and the values of a recipe that name them; empty if they were given in Python.

    `held_out` is the number of training images that serve as test images, if there were none. `original_side` is the
    median side of the photos in a folder, which can be resized; None for other data.
    """

    dataset: Dataset
    values: Mapping[str, Any]
    held_out: int | None = None
    original_side: int | None = None

    @property
    def given(self) -> bool:
        """Whether the images were given in Python."""
        return not self.values

    @functools.cached_property
    def grey(self) -> bool:
        """Whether a sample of the images has no colours: one channel, or three equal ones, as grey files have."""
        few = self.dataset.train.images[:: max(1, len(self.dataset.train) // _FEW)]
        return few.shape[1] == 1 or bool((few == few[:, :1]).all())

    def resized(self, side: int, seed: int) -> Inputs:
        """Return the photos at another side."""
        values = {**self.values, "data.size": side}
        damaged = [name for name, _ in self.dataset.skipped] or None  # known since the first reading
        return dataclasses.replace(self, dataset=_load(values, True, seed, damaged), values=values)


def open_inputs(
    train: Any, test: Any, values: Mapping[str, Any], seed: int, progress: ProgressCallback | None = None
) -> Inputs:
    """Return the images of a name or path, or those given in Python; hold some out if there are no test images.

    `values` are the recipe keys that the user set, such as data.root and data.size.
    """
    if train is None:
        raise UsageError(
            "the training images are missing; pass a dataset, a pair of arrays, or the name or path of data"
        )
    if isinstance(train, str | Path):
        if test is not None:
            raise UsageError(f"{train} has its own test images; leave out test, or pass both as datasets or arrays")
        return _open_named(str(train), {key: value for key, value in values.items() if key.startswith("data.")}, seed)
    size = values.get("data.size")
    if isinstance(train, Mapping) and len(train) == 1:  # what the package datasets loads where there is no test split
        (train,) = train.values()
    if test is None and (isinstance(train, Dataset | Mapping) or _is_pair_of_splits(train)):
        datasets.check_given(train)
        return Inputs(datasets.as_dataset(train, datasets.given_name(train), size=size, progress=progress), {})
    if isinstance(train, Dataset | Mapping):
        raise UsageError("train holds test images too; leave out test, or pass train.train in its place")
    name = datasets.given_name((train, test))
    if test is not None:
        return Inputs(datasets.as_dataset((train, test), name, size=size, progress=progress), {})
    whole = datasets.as_dataset((train, _beginning(train)), name, size=size, progress=progress).train
    count = values.get("data.held_out") or settings.held_out_images(len(whole))
    return Inputs(Dataset(name, *datasets.hold_out(whole, count, seed)), {}, count)


def _is_pair_of_splits(value: Any) -> bool:
    """Return whether a value is a pair (train, test), and not a pair of arrays (images, labels)."""
    return isinstance(value, tuple | list) and len(value) == 2 and not _is_array(value[0])


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | Tensor)


def _beginning(train: Any) -> Any:
    """Return the first image of a training set as a set of the same kind."""
    if isinstance(train, Split):
        return train.subset(slice(1))
    if isinstance(train, tuple | list) and len(train) == 2 and _is_array(train[0]):
        return train[0][:1], train[1][:1]
    if hasattr(train, "cast_column"):  # of the package datasets
        return train.select([0])
    return [train[0]] if hasattr(train, "__getitem__") and hasattr(train, "__len__") and len(train) else train


def _open_named(name: str, values: Mapping[str, Any], seed: int) -> Inputs:
    values = {**values, "data.name": name}
    files = find_source(name, values.get("data.root")).kind in datasets.FOLDERS
    resizable = files and "data.size" not in values
    if resizable:
        values["data.size"] = stored_side(None)
    lazy: Literal[True] | None = True if files else None
    held_out: int | None = values.get("data.held_out")
    try:
        dataset = _load(values, lazy, seed)
    except MissingTestImagesError:
        images = len(_load({**values, "data.held_out": 1}, lazy, seed).train) + 1
        held_out = values["data.held_out"] = settings.held_out_images(images)
        dataset = _load(values, lazy, seed)
    inputs = Inputs(dataset, values, held_out)
    if resizable and isinstance(dataset.train.images, ImageFiles):
        original = dataset.train.images.median_side()
        inputs, side = dataclasses.replace(inputs, original_side=original), stored_side(original)
        return inputs if side == dataset.shape[1] else inputs.resized(side, seed)
    return inputs


def _load(
    values: Mapping[str, Any], lazy: Literal[True] | None = None, seed: int = 0, damaged: list[str] | None = None
) -> Dataset:
    return datasets.load(
        values["data.name"],
        values.get("data.root"),
        size=values.get("data.size"),
        lazy=lazy,
        skip_damaged=bool(values.get("data.skip_damaged")) if damaged is None else damaged,
        held_out=values.get("data.held_out"),
        seed=seed,
        trusted=True,  # the caller named it
    )


def sample(split: Split, count: int, seed: int) -> Split:
    """Return at most `count` images of a split, decoded and stratified by class."""
    rows = datasets.stratified_rows(split.labels, min(count, len(split)), seed)
    images: Tensor = split.images[rows]
    return Split(images, split.labels[rows], split.classes)
