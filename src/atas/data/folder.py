"""Image folders with one folder per class: their files, decoded into memory or read lazily."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image

from atas._utils.console import ProgressCallback, no_progress
from atas._utils.formatting import format_bytes
from atas._utils.system import available_cpus, host_memory
from atas.data import tiny_imagenet
from atas.data.dataset import Dataset, Split
from atas.data.decode import decode, error_text, is_io_error, to_chw
from atas.data.held_out import check_held_out, stratified_rows
from atas.data.lazy_images import ImageFiles
from atas.data.packed import MANIFEST
from atas.errors import DataError, MissingTestImagesError, UsageError, first_few

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_TEST_FOLDERS = ("test", "val")
_UNSUPPORTED = {".heic", ".heif", ".avif"}  # images that Pillow may not list
CHUNK = 64
_MIN_BATCH = 32  # images that must fit into memory
_MEMORY_FRACTION = 0.5  # share of the memory that decoded images may take; more are read lazily

Damaged = dict[Path, str]
"""Files that cannot be decoded, with the reason."""


@dataclass(frozen=True)
class SplitFiles:
    """The image files of a split by class, both sorted by name."""

    root: Path
    classes: dict[str, list[Path]]

    @property
    def files(self) -> list[Path]:
        """All files, class by class."""
        return [path for paths in self.classes.values() for path in paths]

    def without(self, files: Collection[Path]) -> SplitFiles:
        """Return the files except these; raise DataError if nothing remains of a class."""
        left = {name: [path for path in paths if path not in files] for name, paths in self.classes.items()}
        if empty := [name for name, paths in left.items() if self.classes[name] and not paths]:
            raise DataError(
                f"all images of {first_few(empty)} in {self.root} are damaged; repair them, or remove the class from "
                "both splits."
            )
        return SplitFiles(self.root, left)


def read_image_folder(
    root: Path,
    size: int,
    *,
    root_given: bool = True,
    lazy: bool | Literal["train"] | None = None,
    skip_damaged: bool | Collection[str] = False,
    test_only: bool = False,
    held_out: int | None = None,
    seed: int = 0,
    progress: ProgressCallback | None = None,
) -> Dataset:
    """Read root/train/<class>/ and root/test/<class>/ (or root/val/) as RGB images of size x size pixels.

    `lazy` decodes images when they are accessed: True all of them, "train" only those for training. By default, all
    are lazy if they would take too much memory; False decodes all of them now. With `skip_damaged`, images that cannot
    be decoded are left out: True finds them, except among training images that are lazy alone; a collection names
    them, as `Dataset.skipped` does, relative to `root`. With `held_out`, that number of the images in root/train/, or
    in root/<class>/, are the test images, drawn by `seed`. With `test_only`, root/test/<class>/ or root/<class>/ may be
    alone, and is both splits.
    """
    _check_size(size)
    splits = (
        list_splits(root, root_given=root_given, test_only=test_only)
        if held_out is None
        else list_held_out(root, held_out, seed)
    )
    listed = {} if isinstance(skip_damaged, bool) else {root / name: "skipped before" for name in skip_damaged}
    train, test = (split.without(listed) for split in splits) if listed else splits
    eager = (False, False) if lazy is True else (lazy != "train", True)
    now = [split.files if is_eager else [] for split, is_eager in zip((train, test), eager, strict=True)]
    if lazy is not False and sum(map(len, now)) * 3 * size * size > _MEMORY_FRACTION * host_memory():
        now = [[], []]
    images, damaged = _decode_all([*now[0], *now[1]], size, progress)
    if skip_damaged is True:
        later = [*(train.files if not now[0] and lazy != "train" else []), *(test.files if not now[1] else [])]
        damaged |= _find_damaged(later, size, progress)
    elif damaged:
        raise DataError(_describe(damaged, len(now[0]) + len(now[1])))
    kept = torch.tensor([path not in damaged for path in (*now[0], *now[1])], dtype=torch.bool)
    images = images if kept.all() else images[kept]
    train_count = int(kept[: len(now[0])].sum())
    train, test = (split.without(damaged) for split in (train, test)) if damaged else (train, test)
    return Dataset(
        "imagefolder",
        _split(train, images[:train_count], size, root),
        _split(test, images[train_count:], size, root),
        tuple(sorted((path.relative_to(root).as_posix(), why) for path, why in (listed | damaged).items())),
    )


def _split(files: SplitFiles, decoded: torch.Tensor, size: int, root: Path) -> Split:
    """Return a split with the decoded images, or with lazy ones if there are none."""
    lazy, classes = ImageFiles(files.files, size, root), tuple(files.classes)
    if len(decoded):
        return Split(decoded, labels_of(files), classes, lazy.fingerprint)
    return Split(lazy, labels_of(files), classes)


def _check_size(size: int) -> None:
    if size < 1:
        raise UsageError(f"size is {size}, expected a number of pixels from 1 up, such as 224.")
    if _MIN_BATCH * 3 * size * size > host_memory():
        raise UsageError(
            f"size is {size}, and a single image of {size} x {size} pixels takes {format_bytes(3 * size * size)}, too "
            f"much for batches in the {format_bytes(host_memory())} of memory here; pass a smaller size, such as 224."
        )


def _decode_all(files: Sequence[Path], size: int, progress: ProgressCallback | None) -> tuple[torch.Tensor, Damaged]:
    """Return the pixels of all images, and the images that cannot be decoded."""
    images = np.empty((len(files), 3, size, size), np.uint8)

    def keep(number: int, pixels: np.ndarray) -> None:
        images[number] = pixels

    damaged = _decode_each(files, size, keep, "decoding images", progress)
    return torch.from_numpy(images), damaged


def _find_damaged(files: Sequence[Path], size: int, progress: ProgressCallback | None) -> Damaged:
    """Return the images that cannot be decoded."""
    return _decode_each(files, size, lambda number, pixels: None, "checking images", progress)


def _decode_each(
    files: Sequence[Path],
    size: int,
    keep: Callable[[int, np.ndarray], None],
    task: str,
    progress: ProgressCallback | None,
) -> Damaged:
    """Call `keep` with the number and the pixels of each image, in several threads; return those that are damaged."""
    report = progress or no_progress
    if not files:
        return {}

    def decode_chunk(start: int) -> Damaged:
        damaged = {}
        for number in range(start, min(start + CHUNK, len(files))):
            try:
                keep(number, to_chw(decode(files[number], size)))
            except Exception as error:
                if is_io_error(error):
                    raise DataError(
                        f"cannot read {files[number]} ({error.strerror}); check the disk and start again."
                    ) from error
                # Pillow's decoders raise exceptions of many kinds; each means that the file is unusable.
                damaged[files[number]] = error_text(error)
        return damaged

    damaged: Damaged = {}
    pool = ThreadPoolExecutor(available_cpus())
    try:
        report(task, 0, len(files))
        for number, chunk in enumerate(pool.map(decode_chunk, range(0, len(files), CHUNK)), 1):
            damaged |= chunk
            report(task, min(number * CHUNK, len(files)), len(files))
    finally:
        pool.shutdown(cancel_futures=True)
    return damaged


def _describe(damaged: Damaged, total: int) -> str:
    noun, them = ("image", "it") if len(damaged) == 1 else ("images", "them")
    listed = first_few([f"{path} ({why})" for path, why in damaged.items()])
    return (
        f"{len(damaged)} {noun} of {total} cannot be decoded: {listed}; replace or remove {them}, or leave {them} out "
        "with --skip-damaged (in Python, skip_damaged=True)."
    )


def is_class_folder(root: Path) -> bool:
    """Return whether a folder holds two or more folders with images in them, one for each class."""
    folders = (path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    with_images = (folder for folder in folders if any(path.suffix.lower() in SUFFIXES for path in folder.iterdir()))
    return len(list(itertools.islice(with_images, 2))) == 2


def list_held_out(root: Path, count: int, seed: int) -> tuple[SplitFiles, SplitFiles]:
    """Return training files and `count` held-out test files of root/train/<class>/, or of root/<class>/."""
    if (root / tiny_imagenet.MARKER).is_file() or find_test_folder(root) is not None:
        raise UsageError(f"{root} has test images of its own; leave out data.held_out")
    whole = root / "train" if (root / "train").is_dir() else root
    listed = SplitFiles(whole, _list_classes(whole))
    files, labels = listed.files, labels_of(listed)
    check_held_out(count, len(files))
    held = {files[row] for row in stratified_rows(labels, count, seed).tolist()}
    return listed.without(held), SplitFiles(
        whole, {name: [path for path in paths if path in held] for name, paths in listed.classes.items()}
    )


def find_test_folder(root: Path) -> Path | None:
    """Return the folder of the test images in a folder, if it has one."""
    return next((root / name for name in _TEST_FOLDERS if (root / name).is_dir()), None)


def list_splits(root: Path, *, root_given: bool = True, test_only: bool = False) -> tuple[SplitFiles, SplitFiles]:
    """Return the files of both splits; raise DataError if their classes differ.

    With `test_only`, root/test/<class>/ or root/<class>/ alone is both of them.
    """
    if test_only and root.is_dir() and not (root / "train").is_dir() and not (root / MANIFEST).is_file():
        whole = find_test_folder(root) or root
        if is_class_folder(whole):
            split = SplitFiles(whole, _list_classes(whole))
            return split, split
    if (root / tiny_imagenet.MARKER).is_file():
        train, test = tiny_imagenet.train_files(root), tiny_imagenet.val_files(root)
        return SplitFiles(root / "train", train), SplitFiles(root / "val", test)
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
    hold_out = f"{remedy}, or train with data.held_out, the number of images to hold out as test images"
    train = root / "train"
    if (root / MANIFEST).is_file():
        raise DataError(f"{root.absolute()} holds a packed set, not image files; load it with the name packed.")
    if not train.is_dir():
        missing = f"there is no folder train in {root.absolute()}{hint}"
        if root.is_dir() and is_class_folder(root):
            raise MissingTestImagesError(f"{missing}; {hold_out}.")
        raise DataError(f"{missing}; {remedy}.")
    if (test := find_test_folder(root)) is not None:
        return train, test
    raise MissingTestImagesError(f"there is neither a folder test nor val in {root.absolute()}{hint}; {hold_out}.")


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
