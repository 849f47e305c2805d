"""Pack a folder of image files into a packed set.

Several processes write shards. Packing can be stopped at any moment; the same call resumes and keeps finished shards.
The output folder is checked first: its settings, its disk space, and that nothing else is in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import PIL

from atas import __version__
from atas._utils.console import ProgressCallback, no_progress
from atas._utils.documents import MalformedError, read_json
from atas._utils.files import file_lock, remove_temporaries_in, write_text
from atas._utils.formatting import format_bytes
from atas.data.decode import FITS
from atas.data.folder import labels_of, list_splits
from atas.data.packed import (
    CHECKSUM,
    KIND,
    MANIFEST,
    SHARD_NAME,
    SUFFIXES,
    VERSION,
    Manifest,
    manifest_checksum,
    read_manifest,
)
from atas.data.shard_writer import PackSettings, ShardJob, ShardResult, plan_shards, write_error, write_shard
from atas.data.worker_pool import imap_unordered, num_workers, shared_array
from atas.errors import MAX_LISTED, DataError, UsageError, first_few, unknown

DAMAGED = "damaged.txt"
_POLL_SECONDS = 0.2  # between progress reports


def pack(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    size: int = 256,
    fit: str = "crop",
    format: str = "raw",
    quality: int = 90,
    skip_damaged: bool = False,
    images_per_shard: int | None = None,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> Manifest:
    """Pack folder/train/<class>/ and folder/test/<class>/ (or val/) into `out`, for `load("packed", out)`.

    Images become RGB with `size` pixels along the short side. `fit` decides the long side: `crop` keeps the centre, as
    `load("imagefolder")` does; `squash` resizes the whole image to a square; `keep`, only for `jpeg`, stores the whole
    image, and readers get its centre. `raw` stores pixels, `jpeg` stores files of that `quality`. `images_per_shard`
    is chosen by the size of the set by default. After an interruption, the same call resumes; finished shards are
    verified and kept. Damaged images raise an error that lists them, or with `skip_damaged` are left out and listed in
    the manifest.

    >>> pack("imagenette", "packed/imagenette", size=256)  # doctest: +SKIP
    """
    source, target = Path(folder), Path(out)
    settings = make_settings(size, fit, format, quality)
    if images_per_shard is not None and images_per_shard < 1:
        raise UsageError(f"images_per_shard must be at least 1; got {images_per_shard}")
    processes = num_workers(workers)
    train, test = list_splits(source)
    for split in (train, test):
        if target.resolve().is_relative_to(split.root.resolve()):
            raise UsageError(f"{target} lies inside the folder of images {split.root}; choose a folder elsewhere")
    shards = [
        job
        for name, split in (("train", train), ("test", test))
        for job in plan_shards(name, source, split.files, labels_of(split).tolist(), settings.size, images_per_shard)
    ]
    fingerprint = hashlib.sha256("".join(job.source for job in shards).encode()).hexdigest()
    source_info: dict[str, Any] = {"files": sum(len(job.files) for job in shards), "sha256": fingerprint}
    make_folder(target)
    with file_lock(target / ".lock", f"another process packs into {target}; wait for it or choose another folder"):
        remove_temporary(target)
        if (target / MANIFEST).exists():
            return load_finished(target, settings, source_info)
        write_plan(target, settings)
        check_disk_space(target, settings, shards)
        try:
            results = _write_shards(shards, target, settings, skip_damaged, processes, progress)
        finally:
            remove_temporary(target)
        _report_damaged(target, source_info["files"], results, skip=skip_damaged)
        return _write_manifest(target, settings, tuple(train.classes), source_info, results)


def _write_shards(
    shards: list[ShardJob],
    target: Path,
    settings: PackSettings,
    skip: bool,
    workers: int,
    progress: ProgressCallback | None,
) -> list[ShardResult]:
    processed = shared_array((len(shards),), np.int64)
    total = sum(len(job.files) for job in shards)
    report = progress or no_progress

    def work(number: int) -> ShardResult:
        def count(done: int) -> None:
            processed[number] = done

        return write_shard(shards[number], target, settings, skip=skip, count=count)

    results = {}
    report("packing", 0, total)
    for result in imap_unordered(work, range(len(shards)), workers, "packs images", _POLL_SECONDS):
        report("packing", int(processed.sum()), total)
        if result is not None:
            results[result.name] = result
    return [results[job.name] for job in shards]


def _report_damaged(target: Path, files: int, results: list[ShardResult], *, skip: bool) -> None:
    damaged = [error for result in results for error in result.errors]
    report = target / DAMAGED
    if not damaged or skip:
        report.unlink(missing_ok=True)
        return
    lines = "".join(f"{name}\t{why}\n" for name, why in damaged)
    write_file(report, lines.encode(errors="replace").decode())  # file names may be invalid UTF-8
    shown = first_few([f"{name} ({why})" for name, why in damaged])
    listed = f", all listed in {report}" if len(damaged) > MAX_LISTED else ""
    noun, them = ("image", "it") if len(damaged) == 1 else ("images", "them")
    raise DataError(
        f"{len(damaged)} {noun} of {files} cannot be decoded: {shown}{listed}; repair or remove {them}, or skip {them} "
        f"with --skip-damaged, and run the command again: the other shards are kept"
    )


def _write_manifest(
    target: Path,
    settings: PackSettings,
    classes: tuple[str, ...],
    source_info: dict[str, Any],
    results: list[ShardResult],
) -> Manifest:
    made = {
        split: [result.shard for result in results if result.shard and result.name.startswith(split)]
        for split in ("train", "test")
    }
    for split, shards in made.items():
        if not shards:
            raise DataError(f"no {split} image could be decoded; check the files")
    document = {
        "kind": KIND,
        "version": VERSION,
        "made_by": {"atas": __version__, "pillow": PIL.__version__},
        "settings": asdict(settings),
        "source": source_info,
        "classes": classes,
        "splits": {split: [asdict(shard) for shard in shards if shard] for split, shards in made.items()},
        "skipped": [error for result in results for error in result.errors],
    }
    names = {result.shard.name for result in results if result.shard}
    for path in target.iterdir():  # an earlier attempt with more files may have left shards
        if path.name.startswith(("train-", "test-")) and path.stem not in names:
            path.unlink()
    document[CHECKSUM] = manifest_checksum(document)
    write_file(target / MANIFEST, json.dumps(document, indent=1) + "\n")
    return read_manifest(target)


PLAN = "plan.json"  # the settings, written first


def make_settings(size: int, fit: str, format: str, quality: int) -> PackSettings:
    """Return the settings; raise UsageError if they are invalid."""
    if fit not in FITS:
        raise unknown("fit", fit, FITS)
    if format not in SUFFIXES:
        raise unknown("format", format, SUFFIXES)
    if not isinstance(size, int) or size < 1:
        raise UsageError(f"size is {size}, expected a number of pixels from 1 up, such as 256")
    if not 1 <= quality <= 100:
        raise UsageError(f"quality is {quality}, expected 1 to 100, such as 90")
    if fit == "keep" and format == "raw":
        raise UsageError("raw images are all of one size, so fit must be crop or squash; keep is for format jpeg")
    return PackSettings(size, fit, format, quality if format == "jpeg" else None)


def make_folder(target: Path) -> None:
    """Make the output folder; raise UsageError if it holds other files."""
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {target} ({error.strerror}); choose another one") from error
    is_packed_set = any((target / name).exists() for name in (MANIFEST, PLAN))
    if not is_packed_set and any(not path.name.startswith(".") for path in target.iterdir()):
        raise UsageError(f"{target} is not empty and holds no packed set; choose another folder")


def load_finished(target: Path, settings: PackSettings, source_info: dict[str, Any]) -> Manifest:
    """Return the manifest of a finished set; raise UsageError if its settings or files differ."""
    manifest = read_manifest(target)
    _check_same_settings(target, manifest.settings, settings)
    if manifest.source != source_info:
        raise UsageError(
            f"{target} was packed from {manifest.source['files']} files that have changed since; pack into another "
            f"folder, or remove {target / MANIFEST} to update it"
        )
    return manifest


def write_plan(target: Path, settings: PackSettings) -> None:
    """Write the settings; raise UsageError if an earlier attempt had others."""
    plan = target / PLAN
    with contextlib.suppress(OSError, MalformedError):  # without a readable plan, there is no earlier attempt
        _check_same_settings(target, read_json(plan, dict[str, Any]), settings)
    write_file(plan, json.dumps(asdict(settings)))


def write_file(path: Path, text: str) -> None:
    """Write a small file of a set atomically."""
    try:
        write_text(path, text)
    except OSError as error:
        raise write_error(path, error) from error


def remove_temporary(target: Path) -> None:
    """Remove temporary files of processes that were killed."""
    remove_temporaries_in(target, _is_written)


def _is_written(name: str) -> bool:
    """Return whether packing writes a file of this name, also with other images or in another format."""
    stem, ending = os.path.splitext(name)
    if SHARD_NAME.fullmatch(stem):
        return ending in (*SUFFIXES.values(), ".json")
    return name in (MANIFEST, PLAN, DAMAGED)


def _check_same_settings(target: Path, earlier: dict[str, Any], settings: PackSettings) -> None:
    now = asdict(settings)
    changed = [f"{key} {earlier.get(key)} became {value}" for key, value in now.items() if earlier.get(key) != value]
    if changed:
        raise UsageError(
            f"{target} holds a set with other settings ({', '.join(changed)}); use the same options, choose another "
            f"folder, or remove this one"
        )


def check_disk_space(target: Path, settings: PackSettings, shards: list[ShardJob]) -> None:
    """Raise DataError if the disk is too small for raw images; the size of JPEG images is not known in advance."""
    if settings.format != "raw":
        return
    missing = [job for job in shards if not (target / f"{job.name}.json").exists()]
    needed = sum(len(job.files) for job in missing) * 3 * settings.size**2
    free = shutil.disk_usage(target).free
    if needed > free:
        raise DataError(
            f"{target} needs {format_bytes(needed)} more and its disk has {format_bytes(free)} left; free space, "
            f"choose another folder, or pack with --format jpeg, which takes about an eighth"
        )
