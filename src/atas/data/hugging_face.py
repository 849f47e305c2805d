"""Data sets of the Hugging Face hub, or saved by its package `datasets`, which is an optional one.

A name is `hf:owner/name`, with choices as in an address: `hf:owner/name?label=fine_label&test=validation`. Images are
opened by `open_image`, not by that package.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np

from atas._utils.console import ProgressCallback
from atas.data.dataset import Dataset
from atas.data.decode import error_text, read_image
from atas.data.held_out import hold_out
from atas.data.torch_datasets import check_map_style, from_datasets
from atas.errors import DataError, MissingTestImagesError, UsageError, unknown

PREFIX = "hf:"
MARKERS = ("dataset_dict.json", "dataset_info.json")  # files that `save_to_disk` writes
_OPTIONS = ("image", "label", "train", "test", "config", "revision")
_TRAIN, _TEST = ("train", "training"), ("test", "validation", "valid", "val")
_IMAGE_NAMES, _LABEL_NAMES = ("image", "img", "images", "pixel_values", "x"), ("label", "labels", "target", "y")


def read_hub(
    name: str,
    cache: Path | None = None,
    *,
    size: int | None = None,
    held_out: int | None = None,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> Dataset:
    """Load `hf:owner/name` from the hub or from the folder of its downloads (`cache`, by default the package's), or
    `hf:folder` from a folder that `save_to_disk` wrote."""
    repository, options = parse_name(name)
    if any((Path(repository) / marker).is_file() for marker in MARKERS):
        return read_saved(Path(repository), options, size=size, held_out=held_out, seed=seed, progress=progress)
    library = _library()
    try:
        splits = library.load_dataset(
            repository,
            options.get("config"),
            revision=options.get("revision"),
            cache_dir=None if cache is None else str(cache),
        )
    except Exception as error:  # of the network, of the hub, or of the files
        raise DataError(f"cannot load {repository} from the Hugging Face hub: {_first_line(error)}") from error
    title = repository.rpartition("/")[2]
    return from_splits(splits, title, options, size=size, held_out=held_out, seed=seed, progress=progress, given=name)


def read_saved(
    folder: Path,
    options: Mapping[str, str] | None = None,
    *,
    size: int | None = None,
    held_out: int | None = None,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> Dataset:
    """Load what `save_to_disk` wrote."""
    library = _library()
    try:
        splits = library.load_from_disk(str(folder))
    except Exception as error:  # the package raises errors of many kinds for damaged files
        raise DataError(f"cannot read the data set in {folder} ({_first_line(error)}); save it again.") from error
    title, given = folder.resolve().name, f"{PREFIX}{folder}"
    return from_splits(splits, title, options, size=size, held_out=held_out, seed=seed, progress=progress, given=given)


def parse_name(name: str) -> tuple[str, dict[str, str]]:
    """Return repository and choices of a name.

    >>> parse_name("hf:uoft-cs/cifar100?label=fine_label")
    ('uoft-cs/cifar100', {'label': 'fine_label'})
    """
    repository, _, query = name.removeprefix(PREFIX).partition("?")
    options = dict(parse_qsl(query))
    for key in options:
        if key not in _OPTIONS:
            raise unknown(f"choice in {name}", key, _OPTIONS)
    if not repository:
        raise UsageError("hf: needs the name of a data set, such as hf:uoft-cs/cifar10")
    return repository, options


def is_hugging_face(value: object) -> bool:
    """Return whether a value is a split of the package `datasets`, or a dictionary of such."""
    if isinstance(value, Mapping):
        return bool(value) and all(map(is_hugging_face, value.values()))
    return hasattr(value, "features") and hasattr(value, "column_names") and hasattr(value, "cast_column")


def from_splits(
    splits: Any,
    name: str,
    options: Mapping[str, str] | None = None,
    *,
    size: int | None = None,
    held_out: int | None = None,
    seed: int = 0,
    progress: ProgressCallback | None = None,
    given: str | None = None,
) -> Dataset:
    """Read a DatasetDict of the package `datasets`. `given` is its name in messages.

    With `held_out`, there is no test split, and that number of the training images take its place, drawn by `seed`.
    """
    options, given = options or {}, given or name
    splits = splits if isinstance(splits, Mapping) else {_TRAIN[0]: splits}
    train = splits[_choose_split(splits, "train", _TRAIN, options, given)]
    image, label = _columns(train, options, given)
    classes = getattr(train.features[label], "names", None)
    tests = _test_names(splits, label)
    if held_out is not None:
        if tests or "test" in options:
            raise UsageError(f"{given} has test images of its own; leave out data.held_out")
        rows = _Rows(train, image, label, given)
        whole = from_datasets(rows, [rows[0]], name, classes, size=size, progress=progress).train
        return Dataset(name, *hold_out(whole, held_out, seed))
    test = splits[_choose_split(splits, "test", tests, options, given)]
    both = [_Rows(split, image, label, given) for split in (train, test)]
    return from_datasets(both[0], both[1], name, classes, size=size, progress=progress)


class _Rows:
    """A split as a map-style dataset of (image, label)."""

    def __init__(self, split: Any, image: str, label: str, given: str) -> None:
        check_map_style(split, f"a split of {given}")
        if missing := [column for column in (image, label) if column not in split.column_names]:
            raise DataError(f"a split of {given} lacks the column {missing[0]}, which another has; pass equal columns.")
        if getattr(split, "format", {}).get("type") == "custom":
            raise DataError(
                f"a split of {given} has a transform, which would not be applied; remove it with reset_format(), and "
                "set data.size to resize images."
            )
        split = split.with_format(None).select_columns([image, label])
        self._encoded = type(split.features[image]).__name__ == "Image"
        if self._encoded:  # bytes or the path of a file, decoded here
            split = split.cast_column(image, _library().Image(decode=False))
        self._split, self._image, self._label, self._given = split, image, label, given

    def __len__(self) -> int:
        return len(self._split)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        row = self._split[index]
        image = row[self._image]
        if not self._encoded:
            array = np.asarray(image)
            # Lists hold int64, without the type that the pixels had.
            small = array.dtype == np.int64 and array.size and array.min() >= 0 and array.max() <= 255
            return array.astype(np.uint8) if small else array, row[self._label]
        try:
            source = io.BytesIO(image["bytes"]) if image["bytes"] is not None else Path(image["path"])
            return read_image(source), row[self._label]
        except Exception as error:  # Pillow's decoders raise exceptions of many kinds
            raise DataError(
                f"image {index} of {self._given} cannot be decoded ({error_text(error)}); repair or remove it."
            ) from error


def _choose_split(
    splits: Mapping[str, Any], kind: str, names: Sequence[str], options: Mapping[str, str], given: str
) -> str:
    wanted = [options[kind]] if kind in options else names
    found = next((name for name in wanted if name in splits), None)
    if found is None:
        others = [name for name in splits if kind == "train" or name not in _TRAIN]
        if not others:
            remedy = (
                "set data.held_out to the number of images to test on"
                if given.startswith(PREFIX)
                else "pass a test split as well"
            )
            raise MissingTestImagesError(f"{given} has a training split alone; {remedy}.")
        purpose = "training" if kind == "train" else "testing"
        example = _example(given, kind, others[0])
        raise DataError(f"{given} has the splits {', '.join(splits)}; say which is for {purpose}{example}.")
    return found


def _test_names(splits: Mapping[str, Any], label: str) -> list[str]:
    """Return the names of a test split, without those that have no labels."""
    return [name for name in _TEST if name in splits and not _is_unlabelled(splits[name], label)]


def _is_unlabelled(split: Any, label: str) -> bool:
    if label not in split.column_names:
        return True
    first = split.with_format(None).select_columns([label])[:1][label]
    return first in ([], [None], [-1])


def _columns(split: Any, options: Mapping[str, str], given: str) -> tuple[str, str]:
    """Return the columns of images and of labels."""
    kinds = {name: type(feature).__name__ for name, feature in split.features.items()}
    images = [name for name, kind in kinds.items() if kind == "Image"] or [
        name for name, kind in kinds.items() if name in _IMAGE_NAMES or kind in ("Array2D", "Array3D")
    ]
    labels = [name for name, kind in kinds.items() if kind == "ClassLabel"] or [
        name for name in kinds if name in _LABEL_NAMES
    ]
    return _choose_column("image", images, kinds, options, given), _choose_column(
        "label", labels, kinds, options, given
    )


def _choose_column(
    kind: str, candidates: list[str], kinds: Mapping[str, str], options: Mapping[str, str], given: str
) -> str:
    if kind in options:
        if options[kind] not in kinds:
            raise unknown(f"column of {given}", options[kind], kinds)
        return options[kind]
    if len(candidates) == 1:
        return candidates[0]
    listed = ", ".join(candidates or kinds)
    what = f"the {kind} columns {listed}" if candidates else f"no {kind} column that is known as one, only {listed}"
    raise DataError(f"{given} has {what}; choose one{_example(given, kind, (candidates or list(kinds))[0])}.")


def _example(given: str, kind: str, value: str) -> str:
    if not given.startswith(PREFIX):
        return " in a function that returns a pair of datasets of (image, label)"
    return f", for example {given}{'&' if '?' in given else '?'}{kind}={value}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}"


def _library() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            "Hugging Face data sets need the package datasets; install it with: pip install 'atas[huggingface]'"
        ) from error
    return datasets
