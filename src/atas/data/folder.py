"""Image folders with one folder per class: decoded into memory, or read lazily."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from atas._utils.console import ProgressCallback
from atas._utils.formatting import format_bytes
from atas._utils.system import available_cpus, host_memory
from atas.data.dataset import Dataset, Split
from atas.data.decode import decode, error_text, is_io_error, to_chw
from atas.data.lazy_images import ImageFiles
from atas.data.listing import SplitFiles, labels_of, list_held_out, list_splits
from atas.errors import DataError, UsageError, first_few

CHUNK = 64
_MIN_BATCH = 32  # images that must fit into memory
_MEMORY_FRACTION = 0.5  # share of the memory that decoded images may take; more are read lazily

Damaged = dict[Path, str]
"""Files that cannot be decoded, with the reason."""


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
    report = progress or (lambda what, done, total: None)
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
