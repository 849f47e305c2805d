"""Packed sets: image files decoded and resized once, in a few large files that are mapped into memory.

A folder holds a `plan.json` (the settings, by which packing goes on where it was stopped), for each shard its data
(`train-00000.raw`, or `.jpg`: one image after the other) and its index (`train-00000.json`: file, label, offset,
length, size and CRC-32 of each image), and a `manifest.json`, which is written last: a folder that has one is complete.
Raw images are planes of uint8 of one size; JPEG ones are files as they were encoded.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atas.errors import DataError

MANIFEST = "manifest.json"
KIND, VERSION = "atas-packed", 1
SUFFIXES = {"raw": ".raw", "jpeg": ".jpg"}
REPAIR = "copy the set again from where it is whole, or pack it anew"


@dataclass(frozen=True)
class Shard:
    """What the manifest says of a shard."""

    name: str
    count: int
    bytes: int
    sha256: str
    index_sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a packed set says of itself; `skipped` are pairs of a damaged file and what is wrong with it."""

    folder: Path
    classes: tuple[str, ...]
    settings: dict[str, Any]
    source: dict[str, Any]
    splits: dict[str, tuple[Shard, ...]]
    skipped: tuple[tuple[str, str], ...]

    @property
    def shards(self) -> list[Shard]:
        """Of both splits."""
        return [shard for shards in self.splits.values() for shard in shards]

    def data_file(self, shard: Shard) -> Path:
        """Where the images of a shard are."""
        return self.folder / f"{shard.name}{SUFFIXES[self.settings['format']]}"

    def index_file(self, shard: Shard) -> Path:
        """Where the index of a shard is."""
        return self.folder / f"{shard.name}.json"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a packed set."""
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if (folder / "train").is_dir():
            raise DataError(
                f"{folder.absolute()} holds image files, not a packed set; load it by the name imagefolder, or pack it "
                f"with `atas data pack {folder} OUT` and give OUT"
            ) from error
        raise DataError(
            f"{folder.absolute()} holds no packed set (no {MANIFEST}); make one with `atas data pack FOLDER {folder}` "
            f"and the options that the recipe names at its top, which also goes on where an earlier one was stopped"
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); {REPAIR}") from error
    try:
        if found["kind"] != KIND:
            raise DataError(f"{path} does not describe a packed set; give the folder that `atas data pack` wrote")
        if found["version"] != VERSION:
            raise DataError(f"{path} is of version {found['version']}, and this atas reads {VERSION}; update atas")
        if found["settings"]["format"] not in SUFFIXES:
            raise ValueError(f"format {found['settings']['format']}")
        splits = {half: tuple(Shard(**shard) for shard in found["splits"][half]) for half in ("train", "test")}
        skipped = tuple((name, why) for name, why in found["skipped"])
        return Manifest(folder, tuple(found["classes"]), found["settings"], found["source"], splits, skipped)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is not as atas writes it ({type(error).__name__}: {error}); {REPAIR}") from error


def read_index(manifest: Manifest, shard: Shard) -> dict[str, list[Any]]:
    """The index of a shard whose files are of the right size."""
    data, index = manifest.data_file(shard), manifest.index_file(shard)
    try:
        size, raw = data.stat().st_size, index.read_bytes()
    except OSError as error:
        raise DataError(f"{error.filename} of a packed set cannot be read ({error.strerror}); {REPAIR}") from error
    if size != shard.bytes:
        raise DataError(f"{data} has {size} bytes, expected {shard.bytes}; {REPAIR}")
    if hashlib.sha256(raw).hexdigest() != shard.index_sha256:
        raise DataError(f"{index} is not the index that was written; {REPAIR}")
    return json.loads(raw)
