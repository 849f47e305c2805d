"""Reading packed sets: their images stay on the disk, mapped into memory."""

from __future__ import annotations

import hashlib
import io
import mmap
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from atas.data._dataset import Dataset, Split
from atas.data._decode import decode, planes, reason
from atas.data._manifest import REPAIR, Manifest, Shard, read_index, read_manifest
from atas.data._stored import Stored
from atas.errors import DataError


def read_packed(folder: Path) -> Dataset:
    """A packed set with its images where they are; sizes and indices are checked, pixels by `verify`."""
    manifest = read_manifest(folder)
    return Dataset("packed", _split(manifest, "train"), _split(manifest, "test"))


def _split(manifest: Manifest, half: str) -> Split:
    shards = manifest.splits[half]
    indices = [read_index(manifest, shard) for shard in shards]
    kind = RawImages if manifest.settings["format"] == "raw" else JpegImages
    labels = torch.tensor([label for index in indices for label in index["labels"]], dtype=torch.int64)
    return Split(kind(manifest, shards, indices), labels, manifest.classes)


class PackedImages(Stored):
    """The images of one split."""

    def __init__(self, manifest: Manifest, shards: tuple[Shard, ...], indices: list[dict[str, list[Any]]]) -> None:
        size = manifest.settings["size"]
        super().__init__(sum(shard.count for shard in shards), (3, size, size), str(manifest.folder))
        self._manifest, self._shards = manifest, shards
        self._ends = np.cumsum([shard.count for shard in shards])
        self._open()

    @property
    def fingerprint(self) -> str:
        """Of the checksums of the shards."""
        return hashlib.sha256("".join(shard.sha256 for shard in self._shards).encode()).hexdigest()

    def _open(self) -> None:
        self._maps = [_mapped(self._manifest.data_file(shard)) for shard in self._shards]

    def __getstate__(self) -> dict[str, Any]:  # maps are opened anew in another process
        return {name: value for name, value in vars(self).items() if name not in ("_maps", "_pixels")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def _places(self, rows: np.ndarray) -> list[tuple[int, int]]:
        """The shards of these images, and their rows there."""
        shards = np.searchsorted(self._ends, rows, side="right")
        starts = np.concatenate([[0], self._ends[:-1]])
        return list(zip(shards.tolist(), (rows - starts[shards]).tolist(), strict=True))


class RawImages(PackedImages):
    """Pixels as they are used."""

    def _open(self) -> None:
        super()._open()
        self._pixels = [np.frombuffer(map, np.uint8).reshape(-1, *self.shape[1:]) for map in self._maps]

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy them out of the maps."""
        for (shard, row), target in zip(self._places(rows), out, strict=True):
            target[...] = self._pixels[shard][row]


class JpegImages(PackedImages):
    """JPEG files one after the other; the checksum of each is compared whenever it is read."""

    def __init__(self, manifest: Manifest, shards: tuple[Shard, ...], indices: list[dict[str, list[Any]]]) -> None:
        super().__init__(manifest, shards, indices)
        self._tables = [
            np.array([index["offsets"], index["lengths"], index["crc32"]], np.int64).reshape(3, -1) for index in indices
        ]

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Decode them; of images that are no squares, the centre."""
        for (shard, row), target in zip(self._places(rows), out, strict=True):
            offset, length, checksum = self._tables[shard][:, row].tolist()
            raw = self._maps[shard][offset : offset + length]
            try:
                if zlib.crc32(raw) != checksum:
                    raise ValueError("its checksum is wrong")
                target[...] = planes(decode(io.BytesIO(raw), self.shape[2]))
            except Exception as error:
                path = self._manifest.data_file(self._shards[shard])
                raise DataError(
                    f"image {row} in {path} is damaged ({reason(error)}); `atas data verify {self.place}` names all "
                    f"that are"
                ) from error


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} of a packed set cannot be opened ({error}); {REPAIR}") from error
