"""The image files of a folder with one folder per class."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image

from atas.data import tiny_imagenet
from atas.data.held_out import check_held_out, stratified_rows
from atas.data.packed import MANIFEST
from atas.errors import DataError, MissingTestImagesError, UsageError, first_few

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_TEST_FOLDERS = ("test", "val")
_UNSUPPORTED = {".heic", ".heif", ".avif"}  # images that Pillow may not list


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
    hold_out = f"{remedy}, or set data.held_out to the number of images to test on"
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
