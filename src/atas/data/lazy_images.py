"""Images that are read when they are accessed."""

from __future__ import annotations

import contextlib
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from atas._utils.system import available_cpus
from atas.data.decode import decode, error_text, is_io_error, open_image, to_chw
from atas.errors import DataError

_CHUNK = 32  # images that a thread reads at a time
_SIDES = 64  # files whose sides are measured, about


class LazyImages(ABC):
    """Images of one size that are read on access, as uint8 tensors (N, C, H, W).

    Indexing returns a tensor, as with tensors: `images[5]`, `images[:100]`, `images[torch.tensor([3, 1])]`.
    """

    dtype, ndim, device = torch.uint8, 4, torch.device("cpu")

    def __init__(self, count: int, shape: Sequence[int], location: str) -> None:
        self.shape, self.location = torch.Size((count, *shape)), location

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A hash that identifies the images without reading every pixel."""

    @abstractmethod
    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Read these images into an array (len(rows), C, H, W). Works in any process and thread."""

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, item: int | slice | Tensor | list[int]) -> Tensor:
        rows = np.arange(len(self))[item.cpu().numpy() if isinstance(item, Tensor) else item]
        images = torch.empty(rows.size, *self.shape[1:], dtype=torch.uint8)
        self.read(rows.reshape(-1), images.numpy())
        return images.view(*rows.shape, *self.shape[1:])

    def subset(self, rows: Tensor | slice) -> LazyImages:
        """Return the images of these rows, still lazy."""
        return LazySubset(self, np.arange(len(self))[rows.cpu().numpy() if isinstance(rows, Tensor) else rows])

    def to(self, device: torch.device) -> Tensor:
        """Read all images into the memory of a device, with several threads."""
        whole = torch.empty(self.shape, dtype=torch.uint8, device=device)
        threads = available_cpus()
        with ThreadPoolExecutor(threads) as pool:
            step = _CHUNK * threads
            for first in range(0, len(self), step):
                starts = range(first, min(first + step, len(self)), _CHUNK)
                chunks = pool.map(lambda start: self[start : start + _CHUNK], starts)
                for start, chunk in zip(starts, chunks, strict=True):
                    whole[start : start + _CHUNK] = chunk
        return whole


class LazySubset(LazyImages):
    """A selection of other lazy images."""

    def __init__(self, whole: LazyImages, rows: np.ndarray) -> None:
        super().__init__(len(rows), whole.shape[1:], whole.location)
        self._whole, self._rows = whole, rows

    @property
    def fingerprint(self) -> str:
        """A hash of the fingerprint of all images and of the rows."""
        return hashlib.sha256(self._whole.fingerprint.encode() + self._rows.tobytes()).hexdigest()

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Read the images."""
        self._whole.read(self._rows[rows], out)


class CentreCrop(LazyImages):
    """The centres of other lazy images."""

    def __init__(self, whole: LazyImages, size: int) -> None:
        super().__init__(len(whole), (whole.shape[1], size, size), whole.location)
        self._whole, self._size = whole, size

    @property
    def fingerprint(self) -> str:
        """A hash of the fingerprint of the whole images and of the size."""
        return hashlib.sha256(f"{self._whole.fingerprint} {self._size}".encode()).hexdigest()

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Read the whole images and crop them."""
        whole = np.empty((len(rows), *self._whole.shape[1:]), np.uint8)
        self._whole.read(rows, whole)
        out[...] = centre_crop(whole, self._size)


Pixels = TypeVar("Pixels", np.ndarray, Tensor)


def centre_crop(images: Pixels, size: int) -> Pixels:
    """Return the central `size` x `size` pixels of images (..., H, W), without a copy."""
    top, left = ((side - size) // 2 for side in images.shape[-2:])
    if min(top, left) < 0:
        raise DataError(
            f"images of {images.shape[-2]} x {images.shape[-1]} pixels have no centre of {size} x {size}; choose a "
            "smaller size"
        )
    return images[..., top : top + size, left : left + size]


class InMemoryImages(LazyImages):
    """Lazy images over a tensor in memory."""

    def __init__(self, images: Tensor) -> None:
        super().__init__(len(images), images.shape[1:], "memory")
        self._images = images.cpu().numpy()

    @property
    def fingerprint(self) -> str:
        """A hash of every pixel."""
        return hashlib.sha256(np.ascontiguousarray(self._images).reshape(-1).data).hexdigest()

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Copy the images."""
        np.take(self._images, rows, axis=0, out=out, mode="clip")  # other modes make a copy first


class ImageFiles(LazyImages):
    """Image files that are decoded when they are read."""

    def __init__(self, files: Sequence[Path], size: int, root: Path) -> None:
        super().__init__(len(files), (3, size, size), str(root))
        self._files, self._size, self._root = files, size, root

    @property
    def fingerprint(self) -> str:
        """A hash of the names and sizes of the files."""
        digest = hashlib.sha256(f"{self._size}\n".encode())
        prefix = str(self._root / "_")[:-1]  # text is faster than paths for a million names
        for name in map(str, self._files):
            digest.update(os.fsencode(f"{name.removeprefix(prefix)}\t{os.stat(name).st_size}\n"))
        return digest.hexdigest()

    def median_side(self) -> int | None:
        """Return the median of the short sides in pixels of some of the files; None if none of them can be opened."""
        sides = []
        for path in self._files[:: max(1, len(self._files) // _SIDES)]:
            with contextlib.suppress(OSError, ValueError), open_image(path) as file:
                sides.append(min(file.size))
        return int(np.median(sides)) if sides else None

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Decode the images."""
        for row, target in zip(rows, out, strict=True):
            path = self._files[row]
            try:
                target[...] = to_chw(decode(path, self._size))
            except Exception as error:
                if is_io_error(error):
                    raise DataError(f"cannot read {path} ({error.strerror}); check the disk and start again") from error
                # Pillow's decoders raise exceptions of many kinds; each means that the file is unusable.
                raise DataError(
                    f"cannot decode {path} ({error_text(error)}); replace or remove it, or leave out damaged "
                    f"images with --skip-damaged"
                ) from error
