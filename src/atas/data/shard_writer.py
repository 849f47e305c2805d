"""Cut image files into shards, and write one shard."""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from atas._utils.files import write_atomically, write_text
from atas.data.decode import decode, error_text, is_io_error, to_chw
from atas.data.packed import SUFFIXES, Shard, file_sha256
from atas.errors import DataError

_MAX_BYTES = 1 << 30  # raw pixels in a shard
_MIN_IMAGES = 256  # in a shard
_TARGET_SHARDS = 64  # in a split, unless it is small or very large


@dataclass(frozen=True)
class PackSettings:
    """How images are stored: `size` in pixels of the short side, how they `fit`, format, and quality of JPEG files."""

    size: int
    fit: str
    format: str
    quality: int | None


@dataclass(frozen=True)
class ShardJob:
    """A shard to write: its files, relative to the root, their labels, and a hash of names, sizes and times."""

    name: str
    root: Path
    files: tuple[str, ...]
    labels: tuple[int, ...]
    source: str


@dataclass(frozen=True)
class ShardResult:
    """The result of a shard: its entry in the manifest, or None if it could not be written, and its damaged files."""

    name: str
    shard: Shard | None
    errors: tuple[tuple[str, str], ...]


def plan_shards(
    split: str, root: Path, files: list[Path], labels: list[int], size: int, images_per_shard: int | None = None
) -> list[ShardJob]:
    """Cut the files of one split into shards."""
    count = images_per_shard or max(_MIN_IMAGES, -(-len(files) // _TARGET_SHARDS))
    count = max(1, min(count, _MAX_BYTES // (3 * size * size)))
    shards = []
    for number, first in enumerate(range(0, len(files), count)):
        digest, names = hashlib.sha256(), []
        for path in files[first : first + count]:
            info = path.stat()
            names.append(path.relative_to(root).as_posix())
            digest.update(os.fsencode(f"{names[-1]}\t{info.st_size}\t{info.st_mtime_ns}\n"))
        job_labels = tuple(labels[first : first + count])
        shards.append(ShardJob(f"{split}-{number:05}", root, tuple(names), job_labels, digest.hexdigest()))
    return shards


def write_shard(
    job: ShardJob, out: Path, settings: PackSettings, *, skip: bool, count: Callable[[int], None]
) -> ShardResult:
    """Write a shard, or keep an intact one; `count` is called with the number of processed images."""
    reused = _reuse(job, out, settings, skip=skip)
    if reused is not None:
        count(len(job.files))
        return reused
    path, index = _paths(job, out, settings)
    index.unlink(missing_ok=True)  # a shard without an index does not count
    writer = _ShardWriter(job, settings, skip=skip, count=count)
    try:
        write_atomically(path, writer.write)
        if writer.discard:
            path.unlink()
            return ShardResult(job.name, None, tuple(writer.errors))
        text = json.dumps({"source": job.source, "sha256": writer.sha256, "skipped": writer.errors, **writer.columns})
        write_text(index, text)
    except OSError as error:
        raise write_error(path, error) from error
    return ShardResult(job.name, _entry(job, path, writer.sha256, text), tuple(writer.errors))


def _reuse(job: ShardJob, out: Path, settings: PackSettings, *, skip: bool) -> ShardResult | None:
    """Return the existing shard if it was made from these files and is intact, else None."""
    path, index = _paths(job, out, settings)
    try:
        text = index.read_text(encoding="utf-8")
        content = json.loads(text)
        errors = tuple((name, why) for name, why in content["skipped"])
        if content["source"] != job.source or (errors and not skip) or file_sha256(path) != content["sha256"]:
            return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return ShardResult(job.name, _entry(job, path, content["sha256"], text), errors)


def _paths(job: ShardJob, out: Path, settings: PackSettings) -> tuple[Path, Path]:
    return out / f"{job.name}{SUFFIXES[settings.format]}", out / f"{job.name}.json"


def _entry(job: ShardJob, path: Path, sha256: str, index: str) -> Shard:
    count = len(json.loads(index)["labels"])
    return Shard(job.name, count, path.stat().st_size, sha256, hashlib.sha256(index.encode()).hexdigest())


class _ShardWriter:
    """Writes the images of a shard and collects its index."""

    def __init__(self, job: ShardJob, settings: PackSettings, *, skip: bool, count: Callable[[int], None]) -> None:
        self._job, self._settings, self._skip, self._count = job, settings, skip, count
        self._parent = os.getppid()
        self._digest = hashlib.sha256()
        self.errors: list[tuple[str, str]] = []
        self.columns: dict[str, list[object]] = {
            name: [] for name in ("files", "labels", "offsets", "lengths", "sizes", "crc32")
        }

    @property
    def sha256(self) -> str:
        """SHA-256 of the written bytes."""
        return self._digest.hexdigest()

    @property
    def discard(self) -> bool:
        """Whether the file must be removed."""
        return not self.columns["files"] or (bool(self.errors) and not self._skip)

    def write(self, path: Path) -> None:
        """Write all images; after a damaged one without `skip`, the others are only checked."""
        with path.open("wb") as file:
            for number, (name, label) in enumerate(zip(self._job.files, self._job.labels, strict=True)):
                if os.getppid() != self._parent:
                    sys.exit()  # the parent process is gone
                try:
                    raw, size = _encode(self._job.root / name, self._settings)
                except Exception as error:
                    if is_io_error(error):
                        raise _read_error(self._job.root / name, error) from error
                    # Pillow's decoders raise exceptions of many kinds; each means that the file is unusable.
                    self.errors.append((name, error_text(error)))
                else:
                    if not self.errors or self._skip:
                        self._add(file, name, label, raw, size)
                self._count(number + 1)

    def _add(self, file: BinaryIO, name: str, label: int, raw: bytes, size: tuple[int, int]) -> None:
        row = (name, label, file.tell(), len(raw), size, zlib.crc32(raw))
        file.write(raw)
        self._digest.update(raw)
        for column, value in zip(self.columns.values(), row, strict=True):
            column.append(value)


def _encode(path: Path, settings: PackSettings) -> tuple[bytes, tuple[int, int]]:
    """Return an image as stored, with its height and width."""
    image = decode(path, settings.size, settings.fit)
    size = image.height, image.width
    if settings.format == "raw":
        return to_chw(image).tobytes(), size
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=settings.quality)
    return stream.getvalue(), size


def _read_error(path: Path, error: OSError) -> DataError:
    """Return the error for an unreadable image, which may be intact and must not be skipped as damaged."""
    return DataError(
        f"cannot read {path} ({error.strerror}), which may be intact; check the disk and the permissions, and run the "
        f"same command again: finished shards are kept"
    )


def write_error(path: Path, error: OSError) -> DataError:
    """Return the error for a file that cannot be written."""
    return DataError(
        f"cannot write {path} ({error.strerror}); free space and run the same command again: finished shards are kept"
    )
