"""Image folders with one folder per class: decoded into memory, or read lazily."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image

from atas._utils.console import ProgressCallback
from atas._utils.formatting import format_bytes
from atas._utils.system import available_cpus, host_memory
from atas.data.dataset import Dataset, Split
from atas.data.decode import decode, error_text, to_chw
from atas.data.lazy_images import ImageFiles
from atas.data.packed import MANIFEST
from atas.errors import DataError, UsageError, first_few

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_UNSUPPORTED = {".heic", ".heif", ".avif"}  # images that Pillow may not list
CHUNK = 64
_MIN_BATCH = 32  # images that must fit into memory
_MEMORY_FRACTION = 0.5  # share of the memory that decoded images may take; more are read lazily


@dataclass(frozen=True)
class SplitFiles:
    """The image files of a split by class, both sorted by name."""

    root: Path
    classes: dict[str, list[Path]]

    @property
    def files(self) -> list[Path]:
        """All files, class by class."""
        return [path for paths in self.classes.values() for path in paths]


def read_image_folder(
    root: Path,
    size: int,
    *,
    root_given: bool = True,
    lazy: bool | Literal["train"] | None = None,
    progress: ProgressCallback | None = None,
) -> Dataset:
    """Read root/train/<class>/ and root/test/<class>/ (or root/val/) as RGB images of size x size pixels.

    `lazy` decodes images when they are accessed: True all of them, "train" only those for training. By default, all
    are lazy if they would take too much memory; False decodes all of them now.
    """
    _check_size(size)
    train, test = list_splits(root, root_given=root_given)
    classes = tuple(train.classes)
    split_files = train, test
    eager = (False, False) if lazy is True else (lazy != "train", True)
    files_now = [split.files if now else [] for split, now in zip(split_files, eager, strict=True)]
    if lazy is not False and sum(map(len, files_now)) * 3 * size * size > _MEMORY_FRACTION * host_memory():
        files_now = [[], []]
    decoded = _decode_all([*files_now[0], *files_now[1]], size, progress).split([len(files) for files in files_now])
    splits = []
    for split, images in zip(split_files, decoded, strict=True):
        files = ImageFiles(split.files, size, root)
        if len(images):
            splits.append(Split(images, labels_of(split), classes, files.fingerprint))
        else:
            splits.append(Split(files, labels_of(split), classes))
    return Dataset("imagefolder", *splits)


def _check_size(size: int) -> None:
    if size < 1:
        raise UsageError(f"size is {size}, expected a number of pixels from 1 up, such as 224.")
    if _MIN_BATCH * 3 * size * size > host_memory():
        raise UsageError(
            f"size is {size}, and a single image of {size} x {size} pixels takes {format_bytes(3 * size * size)}, too "
            f"much for batches in the {format_bytes(host_memory())} of memory here; pass a smaller size, such as 224."
        )


def list_splits(root: Path, *, root_given: bool = True) -> tuple[SplitFiles, SplitFiles]:
    """Return the files of both splits; raise DataError if their classes differ."""
    train_root, test_root = _split_folders(root, root_given)
    train, test = _list_classes(train_root), _list_classes(test_root)
    if train.keys() != test.keys():
        differences = [
            f"only in {split}: {first_few(sorted(extra))}"
            for split, extra in ((train_root, train.keys() - test), (test_root, test.keys() - train))
            if extra
        ]
        raise DataError(
            f"training and test folders have different classes ({'; '.join(differences)}); "
            "make the same class folders in both."
        )
    return SplitFiles(train_root, train), SplitFiles(test_root, test)


def _split_folders(root: Path, root_given: bool) -> tuple[Path, Path]:
    hint = "" if root_given else " (the default, as no root was given)"
    remedy = "pass the folder that holds train/<class>/ and test/<class>/ (or val/<class>/) as root"
    train = root / "train"
    if (root / MANIFEST).is_file():
        raise DataError(f"{root.absolute()} holds a packed set, not image files; load it with the name packed.")
    if not train.is_dir():
        raise DataError(f"there is no folder train in {root.absolute()}{hint}; {remedy}.")
    for name in ("test", "val"):
        if (root / name).is_dir():
            return train, root / name
    raise DataError(f"there is neither a folder test nor val in {root.absolute()}{hint}; {remedy}.")


def _list_classes(split: Path) -> dict[str, list[Path]]:
    """Return the image files of each class, both sorted by name; hidden files are ignored."""
    entries = sorted(path for path in split.iterdir() if not path.name.startswith("."))
    broken = [path for path in entries if path.is_symlink() and not path.exists()]
    if broken:
        raise DataError(f"links to folders are broken: {first_few(broken)}; repair or remove them.")
    folders = [path for path in entries if path.is_dir()]
    if not folders:
        raise DataError(f"{split} has no class folders; put the images into {split}/<class>/.")
    listing: dict[str, list[Path]] = {}
    others: list[Path] = []
    no_files: list[Path] = []
    for folder in folders:
        listing[folder.name] = []
        with os.scandir(folder) as files:  # without a stat call for each of perhaps a million files
            names = sorted((file.name, _is_file(file)) for file in files if not file.name.startswith("."))
        for name, is_file in names:
            is_image = os.path.splitext(name)[1].lower() in SUFFIXES
            ((listing[folder.name] if is_image else others) if is_file else no_files).append(folder / name)
    _check_ignored(no_files)
    images = set(Image.registered_extensions()) | _UNSUPPORTED
    others = [path for path in others if path.suffix.lower() in images]
    if others:
        raise DataError(
            f"{len(others)} images have an unsupported format: {first_few(others)}; "
            f"convert them to one of {', '.join(SUFFIXES)} or remove them."
        )
    empty = [str(split / name) for name, paths in listing.items() if not paths]
    if empty:
        raise DataError(f"no images ({', '.join(SUFFIXES)}) in {first_few(empty)}; add images or remove the folder.")
    return listing


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link to itself
        return False


def _check_ignored(paths: list[Path]) -> None:
    """Raise DataError for images that are broken links, are no files, or lie in deeper folders."""
    images = [path for path in paths if path.suffix.lower() in SUFFIXES]
    if lost := [path for path in images if not path.exists()]:
        raise DataError(f"links to images are broken: {first_few(lost)}; repair or remove them.")
    if odd := [path for path in images if not path.is_dir()]:
        raise DataError(
            f"pipes or devices are named as images, but are not regular files: {first_few(odd)}; remove them."
        )
    deeper = [path for path in paths if any(file.suffix.lower() in SUFFIXES for file in path.rglob("*"))]
    if deeper:
        raise DataError(
            f"class folders contain folders with images: {first_few(deeper)}; move the images up into the class "
            "folder, or elsewhere."
        )


def labels_of(split: SplitFiles) -> torch.Tensor:
    """Return the class number of every file."""
    counts = torch.tensor([len(paths) for paths in split.classes.values()])
    return torch.arange(len(counts)).repeat_interleave(counts)


def _decode_all(files: Sequence[Path], size: int, progress: ProgressCallback | None) -> torch.Tensor:
    report = progress or (lambda what, done, total: None)
    images = np.empty((len(files), 3, size, size), np.uint8)
    if not files:
        return torch.from_numpy(images)

    def decode_chunk(start: int) -> list[str]:
        errors = []
        for number in range(start, min(start + CHUNK, len(files))):
            try:
                images[number] = to_chw(decode(files[number], size))
            except Exception as error:
                # Pillow's decoders raise exceptions of many kinds; each means that the file is unusable.
                errors.append(f"{files[number]} ({error_text(error)})")
        return errors

    errors: list[str] = []
    pool = ThreadPoolExecutor(available_cpus())
    try:
        report("decoding images", 0, len(files))
        for number, chunk_errors in enumerate(pool.map(decode_chunk, range(0, len(files), CHUNK)), 1):
            errors += chunk_errors
            report("decoding images", min(number * CHUNK, len(files)), len(files))
    finally:
        pool.shutdown(cancel_futures=True)
    if errors:
        noun = "image" if len(errors) == 1 else "images"
        raise DataError(
            f"{len(errors)} {noun} of {len(files)} cannot be decoded: {first_few(errors)}; "
            f"replace or remove {'it' if len(errors) == 1 else 'them'}."
        )
    return torch.from_numpy(images)
