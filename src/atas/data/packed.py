"""The packed format: images decoded and resized once, stored in large files that are mapped into memory.

A folder has a `plan.json` with the settings, by which packing resumes. Each shard has its data (`train-00000.raw` or
`.jpg`: one image after the other) and its index (`train-00000.json`: file, label, offset, length, size and CRC-32 of
each image). `manifest.json` is written last: a folder with a manifest is complete. Raw images are uint8 (C, H, W) of
one size; JPEG images are encoded files.

A set may come from anywhere: types, names and lengths are checked before anything is read by them. The manifest holds
the checksums of all other files and, unless an earlier version wrote it, of itself.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import mmap
import os
import re
import zlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypedDict

import numpy as np
import torch

from atas._utils.console import ProgressCallback, no_progress
from atas._utils.documents import MalformedError, conform, parse_json, read_bytes
from atas._utils.formatting import describe_failure
from atas.data.dataset import Dataset, Split
from atas.data.decode import decode, error_text, to_chw
from atas.data.lazy_images import LazyImages
from atas.data.worker_pool import imap_unordered, num_workers
from atas.errors import DataError, first_few

MANIFEST = "manifest.json"
KIND, VERSION = "atas-packed", 1
SUFFIXES = {"raw": ".raw", "jpeg": ".jpg"}
REPAIR = "copy the set again from an intact copy, or pack it again"
CHECKSUM = "sha256"  # the manifest's own
SHARD_NAME = re.compile(r"(train|test)-\d{5,}", re.ASCII)  # names of files, which must stay in the folder
_MAX_SIDE = 65_500  # pixels
_MAX_INTEGER = 2**63 - 1


@dataclass(frozen=True)
class Shard:
    """The entry of a shard in the manifest."""

    name: str
    count: int
    bytes: int
    sha256: str
    index_sha256: str


@dataclass(frozen=True)
class Manifest:
    """The description of a packed set; `skipped` has pairs of a damaged file and its error."""

    folder: Path
    classes: tuple[str, ...]
    settings: dict[str, Any]
    source: dict[str, Any]
    splits: dict[str, tuple[Shard, ...]]
    skipped: tuple[tuple[str, str], ...]
    has_checksum: bool

    @property
    def shards(self) -> list[Shard]:
        """The shards of both splits."""
        return [shard for shards in self.splits.values() for shard in shards]

    def data_file(self, shard: Shard) -> Path:
        """Return the path of the images of a shard."""
        return self.folder / f"{shard.name}{SUFFIXES[self.settings['format']]}"

    def index_file(self, shard: Shard) -> Path:
        """Return the path of the index of a shard."""
        return self.folder / f"{shard.name}.json"


class _Shard(TypedDict):
    name: str
    count: int
    bytes: int
    sha256: str
    index_sha256: str


class _Settings(TypedDict):
    size: int
    fit: str
    format: Literal["raw", "jpeg"]
    quality: int | None


class _Source(TypedDict):
    files: int
    sha256: str


class _Splits(TypedDict):
    train: list[_Shard]
    test: list[_Shard]


class _Header(TypedDict):
    kind: str
    version: int


class _Document(_Header):
    made_by: dict[str, str]
    settings: _Settings
    source: _Source
    classes: list[str]
    splits: _Splits
    skipped: list[tuple[str, str]]


def manifest_checksum(document: dict[str, Any]) -> str:
    """Return the SHA-256 of the content of a manifest without its own checksum."""
    content = {key: value for key, value in document.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a packed set."""
    path = folder / MANIFEST
    try:
        document = parse_json(read_bytes(path))
    except FileNotFoundError as error:
        if (folder / "train").is_dir():
            raise DataError(
                f"{folder.absolute()} holds image files, not a packed set; load it with the name imagefolder, or "
                f"pack it with `atas data pack {folder} OUT` and pass OUT"
            ) from error
        raise DataError(
            f"{folder.absolute()} holds no packed set (no {MANIFEST}); make one, or finish one, with `atas data pack "
            f"FOLDER {folder}`; a recipe for packed data names the options in its first lines"
        ) from error
    except (OSError, MalformedError) as error:
        raise DataError(f"cannot read {path} ({describe_failure(error)}); {REPAIR}") from error
    if isinstance(document, dict) and document.get("kind", KIND) != KIND:
        raise DataError(f"{path} does not describe a packed set; pass the folder that `atas data pack` wrote")
    try:
        version = conform(document, _Header)["version"]
        if version != VERSION:
            raise DataError(f"{path} has version {version}, and this atas reads {VERSION}; update atas")
        conform(document, _Document)
        _check_manifest(document)
    except MalformedError as error:
        raise DataError(f"{path} is not a valid manifest ({error}); {REPAIR}") from error
    names = [field.name for field in fields(Shard)]
    splits = {
        split: tuple(Shard(*(shard[name] for name in names)) for shard in shards)
        for split, shards in document["splits"].items()
    }
    skipped = tuple((name, why) for name, why in document["skipped"])
    return Manifest(
        folder,
        tuple(document["classes"]),
        document["settings"],
        document["source"],
        splits,
        skipped,
        has_checksum=CHECKSUM in document,
    )


def _check_manifest(document: dict[str, Any]) -> None:
    """Raise MalformedError if the checksum of a manifest is wrong, or values cannot be those of a set."""
    if document.get(CHECKSUM, checksum := manifest_checksum(document)) != checksum:
        raise MalformedError("its checksum is wrong")
    for known, found in ((_Document.__annotations__, document), (_Splits.__annotations__, document["splits"])):
        if extra := sorted(found.keys() - known.keys() - {CHECKSUM}):
            raise MalformedError(f"unknown key {extra[0]!r}")
    settings = document["settings"]
    if not 1 <= settings["size"] <= _MAX_SIDE:
        raise MalformedError(f"settings.size must be 1 to {_MAX_SIDE} pixels; got {settings['size']}")
    shards = [(split, shard) for split, entries in document["splits"].items() for shard in entries]
    names = [shard["name"] for _, shard in shards]
    if len(set(names)) != len(names):
        raise MalformedError("two shards have one name")
    for split, shard in shards:
        name, count = shard["name"], shard["count"]
        if not (SHARD_NAME.fullmatch(name) and name.startswith(split)):
            raise MalformedError(f"a shard of {split} is named {name!r}")
        if not (count >= 1 and count <= shard["bytes"] <= _MAX_INTEGER):
            raise MalformedError(f"shard {name} has {count} images in {shard['bytes']} bytes")
        if settings["format"] == "raw" and shard["bytes"] != count * 3 * settings["size"] ** 2:
            raise MalformedError(f"shard {name} has {count} images in {shard['bytes']} bytes")


def read_index(manifest: Manifest, shard: Shard) -> dict[str, list[Any]]:
    """Read the index of a shard; raise DataError if its files have other sizes or checksums."""
    data, index = manifest.data_file(shard), manifest.index_file(shard)
    try:
        size, raw = data.stat().st_size, read_bytes(index)
    except (OSError, MalformedError) as error:
        if isinstance(error, MalformedError):
            raise DataError(f"{index} of a packed set cannot be used ({error}); {REPAIR}") from error
        raise DataError(f"cannot read {error.filename} of a packed set ({error.strerror}); {REPAIR}") from error
    if size != shard.bytes:
        raise DataError(f"{data} has {size} bytes, expected {shard.bytes}; {REPAIR}")
    if hashlib.sha256(raw).hexdigest() != shard.index_sha256:
        raise DataError(f"{index} has another checksum than in the manifest; {REPAIR}")
    try:
        content: dict[str, list[Any]] = conform(parse_json(raw), dict[str, Any])
        _check_index(content, shard, len(manifest.classes))
    except MalformedError as error:
        raise DataError(f"{index} of a packed set cannot be used ({error}); {REPAIR}") from error
    return content


def _check_index(content: dict[str, list[Any]], shard: Shard, classes: int) -> None:
    """Raise MalformedError unless an index has one entry for each image, of the right type and in bounds."""
    for key in ("files", "labels", "offsets", "lengths", "crc32"):
        if not isinstance(content.get(key), list) or len(content[key]) != shard.count:
            raise MalformedError(f"'{key}' is not a list of {shard.count} entries")
    if not all(isinstance(name, str) for name in content["files"]):
        raise MalformedError("'files' is not a list of texts")
    bounds = {"labels": classes - 1, "offsets": shard.bytes, "lengths": shard.bytes, "crc32": 2**32 - 1}
    for key, largest in bounds.items():
        try:
            values = np.asarray(content[key])  # much faster than a loop over a million images
        except (ValueError, OverflowError) as error:
            raise MalformedError(f"'{key}' is not a list of whole numbers") from error
        if values.ndim != 1 or values.dtype.kind not in "iu":
            raise MalformedError(f"'{key}' is not a list of whole numbers")
        if values.min() < 0 or values.max() > largest:
            raise MalformedError(f"'{key}' has values outside of 0 to {largest}")


def read_packed(folder: Path) -> Dataset:
    """Read a packed set with lazy images; sizes and indices are checked here, pixels only by `verify`."""
    manifest = read_manifest(folder)
    return Dataset("packed", _split(manifest, "train"), _split(manifest, "test"))


def _split(manifest: Manifest, split: str) -> Split:
    shards = manifest.splits[split]
    indices = [read_index(manifest, shard) for shard in shards]
    kind = RawImages if manifest.settings["format"] == "raw" else JpegImages
    labels = torch.tensor([label for index in indices for label in index["labels"]], dtype=torch.int64)
    return Split(kind(manifest, shards, indices), labels, manifest.classes)


class PackedImages(LazyImages):
    """The images of one split, read from memory maps."""

    def __init__(self, manifest: Manifest, shards: tuple[Shard, ...], indices: list[dict[str, list[Any]]]) -> None:
        size = manifest.settings["size"]
        super().__init__(sum(shard.count for shard in shards), (3, size, size), str(manifest.folder))
        self._manifest, self._shards = manifest, shards
        self._ends = np.cumsum([shard.count for shard in shards])
        self._open()

    @property
    def fingerprint(self) -> str:
        """A hash of the checksums of the shards."""
        return hashlib.sha256("".join(shard.sha256 for shard in self._shards).encode()).hexdigest()

    def _open(self) -> None:
        self._maps = [_open_map(self._manifest.data_file(shard)) for shard in self._shards]

    def __getstate__(self) -> dict[str, Any]:  # another process opens its own maps
        return {name: value for name, value in vars(self).items() if name not in ("_maps", "_pixels")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def _locate(self, rows: np.ndarray) -> list[tuple[int, int]]:
        """Return the shard of each image and its row in the shard."""
        shards = np.searchsorted(self._ends, rows, side="right")
        starts = np.concatenate([[0], self._ends[:-1]])
        return list(zip(shards.tolist(), (rows - starts[shards]).tolist(), strict=True))


class RawImages(PackedImages):
    """Pixels as they are used."""

    def _open(self) -> None:
        super()._open()
        self._pixels = [np.frombuffer(map, np.uint8).reshape(-1, *self.shape[1:]) for map in self._maps]

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy the images out of the maps."""
        for (shard, row), target in zip(self._locate(rows), out, strict=True):
            target[...] = self._pixels[shard][row]


class JpegImages(PackedImages):
    """JPEG files one after the other; the checksum of each is compared at every read."""

    def __init__(self, manifest: Manifest, shards: tuple[Shard, ...], indices: list[dict[str, list[Any]]]) -> None:
        super().__init__(manifest, shards, indices)
        self._tables = [
            np.array([index["offsets"], index["lengths"], index["crc32"]], np.int64).reshape(3, -1) for index in indices
        ]

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Decode the images and crop the central square."""
        for (shard, row), target in zip(self._locate(rows), out, strict=True):
            offset, length, checksum = self._tables[shard][:, row].tolist()
            raw = self._maps[shard][offset : offset + length]
            try:
                if zlib.crc32(raw) != checksum:
                    raise ValueError("its checksum is wrong")
                target[...] = to_chw(decode(io.BytesIO(raw), self.shape[2]))
            except Exception as error:
                path = self._manifest.data_file(self._shards[shard])
                raise DataError(
                    f"image {row} in {path} is damaged ({error_text(error)}); `atas data verify {self.location}` lists "
                    f"all damaged images"
                ) from error


def _open_map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise  # not the fault of the set
        raise DataError(f"cannot open {path} of a packed set ({error}); {REPAIR}") from error


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(
    folder: str | os.PathLike[str], *, workers: int | None = None, progress: ProgressCallback | None = None
) -> Manifest:
    """Compare all checksums of a packed set; raise DataError with the damaged shards and images.

    >>> verify("packed/imagenette")  # doctest: +SKIP
    """
    processes = num_workers(workers)
    manifest = read_manifest(Path(folder))
    shards = manifest.shards
    report = progress or no_progress
    total, done, damaged_shards = sum(shard.bytes for shard in shards), 0, []
    report("verifying", 0, total)

    def work(number: int) -> tuple[int, str | None]:
        return number, find_damage(manifest, shards[number])

    for number, damage in imap_unordered(work, range(len(shards)), processes, "verifies a packed set"):
        done += shards[number].bytes
        report("verifying", done, total)
        if damage is not None:
            damaged_shards.append(damage)
    if damaged_shards:
        raise DataError(
            f"{len(damaged_shards)} of {len(shards)} shards are damaged: {first_few(sorted(damaged_shards), '; ')}; "
            f"copy them again from an intact copy, or remove {manifest.folder / MANIFEST} and run the same `atas data "
            f"pack` again, which writes only the damaged shards"
        )
    return manifest


def find_damage(manifest: Manifest, shard: Shard) -> str | None:
    """Return the damage of a shard in words, or None."""
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
        return f"cannot read {manifest.data_file(shard)} ({error.strerror})"
    return f"{path} (images {first_few(damaged)})"
