"""Comparing a packed set with the checksums that were taken when it was written."""

from __future__ import annotations

import hashlib
import os
import zlib
from pathlib import Path

from atas.data._manifest import MANIFEST, Manifest, Shard, read_index, read_manifest
from atas.data._sources import Progress
from atas.data._team import spread, team_size
from atas.errors import DataError, few


def file_sha256(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(folder: str | os.PathLike[str], *, workers: int | None = None, progress: Progress | None = None) -> Manifest:
    """Read every byte of a packed set and compare its checksums; an error names the shards and images that are damaged.

    >>> verify("packed/imagenette")  # doctest: +SKIP
    """
    processes = team_size(workers)
    manifest = read_manifest(Path(folder))
    shards = manifest.shards
    report = progress or (lambda what, done, total: None)
    total, done, faults = sum(shard.bytes for shard in shards), 0, []
    report("verifying", 0, total)

    def work(number: int) -> tuple[int, str | None]:
        return number, fault(manifest, shards[number])

    for number, found in spread(work, range(len(shards)), processes, "verifies a packed set"):
        done += shards[number].bytes
        report("verifying", done, total)
        if found is not None:
            faults.append(found)
    if faults:
        raise DataError(
            f"{len(faults)} of {len(shards)} shards are damaged: {few(sorted(faults), '; ')}; copy them "
            f"again from where they are whole, or remove {manifest.folder / MANIFEST} and run `atas data pack` as "
            f"before, which makes these alone anew"
        )
    return manifest


def fault(manifest: Manifest, shard: Shard) -> str | None:
    """What is wrong with a shard, in words; None where nothing is."""
    try:
        index = read_index(manifest, shard)
        path = manifest.data_file(shard)
        if file_sha256(path) == shard.sha256:
            return None
        damaged = []
        with path.open("rb") as file:
            for name, length, checksum in zip(index["files"], index["lengths"], index["crc32"], strict=True):
                if zlib.crc32(file.read(length)) != checksum:
                    damaged.append(name)
    except DataError as error:
        return str(error).partition(";")[0]
    except OSError as error:
        return f"{manifest.data_file(shard)} cannot be read ({error.strerror})"
    return f"{path} (images {few(damaged)})"
