"""Tiny-ImageNet in its official layout.

Training images are in train/<wnid>/images/; the validation images, the field's test set, are all in val/images/, with
their classes in val/val_annotations.txt. The images in test/ have no labels. `words.txt` describes each wnid.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from atas.data.dataset import Dataset
from atas.data.official import TINY_IMAGENET
from atas.errors import DataError, first_few

NAME, FOLDER, SIZE = TINY_IMAGENET.name, TINY_IMAGENET.folder, 64
MARKER = "val/val_annotations.txt"
_CLASSES, TRAIN, _TEST = 200, 100_000, 10_000
_REMEDY = TINY_IMAGENET.remedy


def locate_tiny_imagenet(root: Path) -> Path:
    """Return the folder of the set: `root` or its folder in `root`."""
    for folder in (root / FOLDER, root):
        if (folder / MARKER).is_file() and (folder / "train").is_dir():
            return folder
    archive = root / f"{FOLDER}.zip"
    if archive.is_file():
        raise DataError(f"{archive} is not unpacked; unpack it with: atas data get tiny-imagenet --root {root}")
    raise DataError(
        f"no tiny-imagenet in {root.absolute()}: looked for {FOLDER}/ with train/ and {MARKER}; {_REMEDY}, or pass the "
        "folder that has it as root."
    )


def train_files(root: Path) -> dict[str, list[Path]]:
    """Return the training images of each wnid, both sorted by name."""
    folders = sorted(path for path in (root / "train").iterdir() if path.is_dir() and not path.name.startswith("."))
    files = {folder.name: _images(folder / "images") for folder in folders}
    if empty := [name for name, paths in files.items() if not paths]:
        raise DataError(f"there are no images in {root}/train/<class>/images/ of {first_few(empty)}; {_REMEDY}.")
    if not files:
        raise DataError(f"{root / 'train'} has no class folders; {_REMEDY}.")
    return files


def val_files(root: Path) -> dict[str, list[Path]]:
    """Return the validation images of each class, both sorted by name, for the classes of the training images."""
    path, images = root / MARKER, root / "val" / "images"
    classes = {folder.name for folder in (root / "train").iterdir() if folder.is_dir()}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path} ({error}); {_REMEDY}.") from error
    rows = [line.split("\t") for line in lines if line.strip()]
    if wrong := [
        number for number, row in enumerate(rows, 1) if len(row) < 2 or "/" in row[0] or row[1] not in classes
    ]:
        raise DataError(
            f"line {wrong[0]} of {path} does not name an image and a class of the training images; {_REMEDY}."
        )
    present = {file.name: file for file in _images(images)}
    if missing := [name for name, *_ in rows if name not in present]:
        raise DataError(f"{images} lacks {first_few(missing)}, which {path.name} lists; {_REMEDY}.")
    files: dict[str, list[Path]] = {name: [] for name in sorted(classes) if not name.startswith(".")}
    for name, wnid, *_ in sorted(rows):
        files[wnid].append(present[name])
    if empty := [name for name, paths in files.items() if not paths]:
        raise DataError(f"{path} lists no images of {first_few(empty)}; {_REMEDY}.")
    return files


def _images(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpeg", ".jpg", ".png"))


def named(dataset: Dataset, root: Path) -> Dataset:
    """Check the counts of the official set, and name its classes by the first words of their description."""
    counts = len(dataset.train.classes), len(dataset.train), len(dataset.test)
    if not dataset.skipped and counts != (_CLASSES, TRAIN, _TEST):
        raise DataError(
            f"{root} has {counts[0]} classes, {counts[1]:,} training and {counts[2]:,} validation images, and "
            f"Tiny-ImageNet {_CLASSES}, {TRAIN:,} and {_TEST:,}; {_REMEDY}, or load it with the name imagefolder."
        )
    classes = class_names(root, dataset.train.classes)
    train, test = (replace(split, classes=classes) for split in (dataset.train, dataset.test))
    return replace(dataset, name=NAME, train=train, test=test)


def class_names(root: Path, wnids: tuple[str, ...]) -> tuple[str, ...]:
    """Return the first words of each wnid in words.txt, or the wnid where they are missing or not unique."""
    words = root / "words.txt"
    if not words.is_file():
        return wnids
    lines = words.read_text(encoding="utf-8", errors="replace").splitlines()
    described = dict(line.split("\t", 1) for line in lines if "\t" in line)
    names = [described.get(wnid, wnid).split(",")[0].strip() or wnid for wnid in wnids]
    return tuple(name if names.count(name) == 1 else wnid for name, wnid in zip(names, wnids, strict=True))
