"""CIFAR-10 and CIFAR-100 from either official layout; nothing is used whose content is not known to be right."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import numpy as np
import torch

from atas.data._cifar_spec import CifarSpec, Layout
from atas.data._dataset import Dataset, Split, content_sha256
from atas.data._unpickle import loads_dict
from atas.errors import DataError

IMAGE = (3, 32, 32)
PIXELS = 3 * 32 * 32


def read_cifar(spec: CifarSpec, root: Path) -> Dataset:
    """The set under `root`, or in `root` itself."""
    return read_folder(spec, *locate(spec, root))


def locate(spec: CifarSpec, root: Path) -> tuple[Layout, Path]:
    """The folder to read and its layout; a complete one wins over one that lacks files."""
    places = [
        (layout, folder)
        for layout in (spec.binary, spec.python)
        for folder in (root / layout.folder, root)
        if any((folder / name).is_file() for name in layout.files)
    ]
    missing = [[name for name in layout.files if not (folder / name).is_file()] for layout, folder in places]
    for place, names in zip(places, missing, strict=True):
        if not names:
            return place
    if places:
        raise DataError(f"{places[0][1]} lacks {', '.join(missing[0])}; {_remedy(spec)}.")
    raise DataError(
        f"no {spec.name} in {root.absolute()}: looked for {spec.binary.folder}/ with {_listed(spec.binary)}, and "
        f"{spec.python.folder}/ with {_listed(spec.python)}; {_remedy(spec)}, or give the folder that has it as root."
    )


def read_folder(spec: CifarSpec, layout: Layout, folder: Path) -> Dataset:
    """The set in a folder of that layout, checked."""
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
    # A file that was written again (another pickle protocol, other file names inside) is as good when its content is.
    if unofficial and (found := content_sha256(images, labels)) != sha256:
        md5s = [f"MD5 {layout.md5[path.name]}" for path in unofficial if path.name in layout.md5]
        expected = " or ".join([", ".join(md5s), f"SHA-256 {sha256}"] if md5s else [f"SHA-256 {sha256}"])
        raise DataError(
            f"{', '.join(map(str, unofficial))}: this is not the content of {spec.name}, expected {expected} over all "
            f"pixels and labels, found {found}; {_remedy(spec)}."
        )
    return Split(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)), spec.classes)


def _read_binary(spec: CifarSpec, path: Path, raw: bytes, count: int) -> tuple[np.ndarray, np.ndarray]:
    record = spec.label_bytes + PIXELS
    if len(raw) != count * record:
        fault = "truncated" if len(raw) < count * record else "too long"
        raise DataError(f"{path} is {fault}: expected {count * record} bytes, found {len(raw)}; {_remedy(spec)}.")
    records = np.frombuffer(raw, np.uint8).reshape(count, record)
    return records[:, spec.label_bytes :].reshape(count, *IMAGE), records[:, spec.label_bytes - 1]


def _read_pickled(spec: CifarSpec, path: Path, raw: bytes, count: int) -> tuple[np.ndarray, np.ndarray]:
    if len(raw) < count * PIXELS:
        raise DataError(
            f"{path} is truncated: expected at least {count * PIXELS} bytes, found {len(raw)}; {_remedy(spec)}."
        )
    try:
        batch = loads_dict(raw)
    except pickle.UnpicklingError as error:
        raise DataError(f"{path} ({len(raw)} bytes) is not used: {error}; {_remedy(spec)}.") from error
    images, labels = _array(batch.get("data")), _array(batch.get(spec.label_key))
    if images.dtype != np.uint8 or images.shape != (count, PIXELS):
        raise DataError(
            f"{path} holds {images.dtype} images of the shape {images.shape} under 'data', expected uint8 "
            f"{(count, PIXELS)}; {_remedy(spec)}."
        )
    if labels.shape != (count,) or labels.dtype.kind not in "ui" or labels.min() < 0 or labels.max() > 255:
        raise DataError(f"{path} does not hold {count} class numbers under '{spec.label_key}'; {_remedy(spec)}.")
    return images.reshape(count, *IMAGE), labels.astype(np.uint8)


def _array(value: object) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError:  # lists of unequal lengths
        return np.empty(0, object)


def _remedy(spec: CifarSpec) -> str:
    return f"get it with: atas data get {spec.name}"


def _listed(layout: Layout) -> str:
    return ", ".join(layout.files)
