"""The examples of an evaluation, as many at a time as memory holds with ease."""

from __future__ import annotations

import torch
from torch import Tensor

from atas.evaluation._data import Source
from atas.evaluation._fingerprint import DataHash

_BYTES = 2**30  # of images; searches keep about twice as much beside them


class Reader:
    """Reads rows of a source as tensors, and keeps what it read last: often that is all there is."""

    def __init__(self, source: Source, dtype: torch.dtype) -> None:
        self._source, self._dtype = source, dtype
        self._rows: range | None = None
        self.shape = torch.Size(self.read(range(1))[0].shape[1:])

    def __len__(self) -> int:
        return len(self._source)

    def read(self, rows: range) -> tuple[Tensor, Tensor]:
        """Images and labels, on the CPU."""
        if rows != self._rows:
            x, y = self._source.read(rows, self._dtype)
            # What was made in inference mode cannot take part in a backward pass; a copy can.
            self._held = tuple(part.clone() if part.is_inference() else part for part in (x, y))
            self._rows = rows
        x, y = self._held
        return x, y

    def sample(self, count: int) -> tuple[range, Tensor, Tensor]:
        """At most so many rows, evenly spread, as a set may be sorted by class, and what is in them; what is kept
        stays."""
        rows = range(0, len(self), -(-len(self) // count))
        if self._rows == range(len(self)):
            x, y = self._held
            return rows, x[:: rows.step], y[:: rows.step]
        return rows, *Reader(self._source, self._dtype).read(rows)

    def portions(self, rows: range) -> list[range]:
        """The rows in pieces."""
        most = max(_BYTES // (self.shape.numel() * self._dtype.itemsize), 1)
        return [rows[first : first + most] for first in range(0, len(rows), most)]

    def digest(self) -> str:
        """The hash of all images and labels."""
        found = DataHash()
        for rows in self.portions(range(len(self))):
            found.update(*self.read(rows))
        return found.hexdigest()
