"""Folders of image files, one folder a class, decoded once and held in memory."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps

from atas.data._dataset import Dataset, Split
from atas.errors import DataError, UsageError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_UNREAD = {".heic", ".heif", ".avif"}  # images that Pillow may not know by name
SHOWN = 5
CHUNK = 64


def read_folder_of_images(root: Path, size: int, *, root_given: bool = True) -> Dataset:
    """Read root/train/<class>/ and root/test/<class>/ (or root/val/) as RGB images of size x size pixels."""
    if size < 1:
        raise UsageError(f"size is {size}, expected a number of pixels from 1 up, such as 224.")
    train_root, test_root = _halves(root, root_given)
    train, test = _listing(train_root), _listing(test_root)
    if train.keys() != test.keys():
        differences = [
            f"only in {half}: {', '.join(sorted(more))}"
            for half, more in ((train_root, train.keys() - test), (test_root, test.keys() - train))
            if more
        ]
        raise DataError(
            f"training and test folders have different classes ({'; '.join(differences)}); "
            "give both the same class folders."
        )
    files = [path for half in (train, test) for paths in half.values() for path in paths]
    images = _decode_all(files, size)
    classes = tuple(train)
    count = sum(map(len, train.values()))
    return Dataset(
        "imagefolder",
        Split(images[:count], _labels(train), classes),
        Split(images[count:], _labels(test), classes),
    )


def _halves(root: Path, root_given: bool) -> tuple[Path, Path]:
    hint = "" if root_given else " (the default, as no root was given)"
    remedy = "give the folder that holds train/<class>/ and test/<class>/ (or val/<class>/) as root"
    train = root / "train"
    if not train.is_dir():
        raise DataError(f"there is no folder train in {root.absolute()}{hint}; {remedy}.")
    for name in ("test", "val"):
        if (root / name).is_dir():
            return train, root / name
    raise DataError(f"there is neither a folder test nor val in {root.absolute()}{hint}; {remedy}.")


def _listing(half: Path) -> dict[str, list[Path]]:
    """The image files of each class, both sorted by name; hidden ones are left to the tools that made them."""
    folders = sorted(path for path in half.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not folders:
        raise DataError(f"{half} has no class folders; put the images into {half}/<class>/.")
    listing: dict[str, list[Path]] = {}
    others: list[Path] = []
    for folder in folders:
        files = sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
        listing[folder.name] = [path for path in files if path.suffix.lower() in SUFFIXES]
        others += [path for path in files if path.suffix.lower() not in SUFFIXES]
    images = set(Image.registered_extensions()) | _UNREAD
    others = [path for path in others if path.suffix.lower() in images]
    if others:
        more = f" and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        raise DataError(
            f"{len(others)} images are of a kind that is not read: {', '.join(map(str, others[:SHOWN]))}{more}; "
            f"convert them to one of {', '.join(SUFFIXES)} or remove them."
        )
    empty = [str(half / name) for name, paths in listing.items() if not paths]
    if empty:
        raise DataError(f"no images ({', '.join(SUFFIXES)}) in {', '.join(empty)}; add some or remove the folder.")
    return listing


def _labels(half: dict[str, list[Path]]) -> torch.Tensor:
    counts = torch.tensor([len(paths) for paths in half.values()])
    return torch.arange(len(counts)).repeat_interleave(counts)


def _decode_all(files: list[Path], size: int) -> torch.Tensor:
    images = np.empty((len(files), 3, size, size), np.uint8)

    def decode_chunk(start: int) -> list[str]:
        faults = []
        for number in range(start, min(start + CHUNK, len(files))):
            try:
                images[number] = _decode(files[number], size)
            except Exception as error:
                # Pillow's decoders raise many kinds; whichever it is, the file is of no use and must be named.
                faults.append(f"{files[number]} ({_reason(error)})")
        return faults

    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        chunks = pool.map(decode_chunk, range(0, len(files), CHUNK))
        faults = [fault for chunk in chunks for fault in chunk]
    finally:
        pool.shutdown(cancel_futures=True)
    if faults:
        more = f" and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        noun = "image" if len(faults) == 1 else "images"
        raise DataError(
            f"{len(faults)} {noun} of {len(files)} cannot be decoded: {', '.join(faults[:SHOWN])}{more}; "
            "replace or remove them."
        )
    return torch.from_numpy(images)


def _reason(error: Exception) -> str:
    # Pillow repeats the path, which stands right before.
    return str(error).split(" '")[0] or type(error).__name__


def _decode(path: Path, size: int) -> np.ndarray:
    with Image.open(path) as file:
        image = _rgb(ImageOps.exif_transpose(file))
    short = min(image.size)
    width, height = (max(size, round(side * size / short)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    # Pillow's bilinear filter widens with the reduction, so small sizes do not alias.
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(resized.crop((left, top, left + size, top + size))).transpose(2, 0, 1)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # 16-bit grey: a plain conversion would clip everything above 255 to white.
        return Image.fromarray((np.asarray(image) / 257).round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if "transparency" in image.info:
        # A palette with several transparent entries converts to RGB only with a warning.
        image = image.convert("RGBA")
    return image.convert("RGB")
