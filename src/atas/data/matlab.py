"""Read the numeric arrays of a MATLAB file of version 5, such as those of SVHN.

The format is described in "MAT-File Format" by MathWorks. Such a file holds no code; cells, structures, texts and
sparse or complex arrays are skipped.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from atas.errors import DataError

_HEADER = 128  # bytes
_MATRIX, _COMPRESSED = 14, 15
_TYPES = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
_NUMERIC = range(6, 16)  # classes of arrays: double, single and the integers
_COMPLEX = 0x08  # a flag
_MAX_BYTES = 1 << 31  # of an unpacked array
_DAMAGE = (ValueError, TypeError, KeyError, IndexError, OverflowError, struct.error, zlib.error, UnicodeDecodeError)


def read_matlab(raw: bytes, path: Path) -> dict[str, np.ndarray]:
    """Return the numeric arrays of a file by name; `path` is for messages."""
    if raw[124:128] != b"\x00\x01IM":
        raise DataError(f"{path} is no MATLAB file of version 5; save it with -v7, or as .npz.")
    arrays: dict[str, np.ndarray] = {}
    try:
        for kind, content in _elements(memoryview(raw)[_HEADER:]):
            if kind == _COMPRESSED:
                kind, content = next(_elements(memoryview(_inflate(content))))
            if kind == _MATRIX:
                arrays |= _matrix(content)
    except (*_DAMAGE, StopIteration) as error:
        raise DataError(f"{path} is damaged ({error or type(error).__name__}); get the original file again.") from error
    return arrays


def _elements(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the type and the content of each element; those of at most 4 bytes are stored within their tag."""
    at = 0
    while at < len(data):
        kind, size = struct.unpack_from("<II", data, at)
        start, end = at + 8, at + 8 + size
        if kind >> 16:
            kind, size = kind & 0xFFFF, kind >> 16
            start, end = at + 4, at + 4 + size
        if end > len(data):
            raise ValueError("an array ends too early")
        yield kind, data[start:end]
        at = end if kind == _COMPRESSED else at + -(-(end - at) // 8) * 8


def _inflate(data: memoryview) -> bytes:
    unpacker = zlib.decompressobj()
    content = unpacker.decompress(data, _MAX_BYTES)
    if unpacker.unconsumed_tail:
        raise ValueError("an array is too large")
    return content


def _matrix(data: memoryview) -> dict[str, np.ndarray]:
    """Return a numeric array by its name; nothing for an array of another kind."""
    elements = _elements(data)
    flags = np.frombuffer(next(elements)[1], "<u4")
    shape = np.frombuffer(next(elements)[1], "<i4").tolist()
    name = bytes(next(elements)[1]).decode()
    if int(flags[0]) & 0xFF not in _NUMERIC or int(flags[0]) >> 8 & _COMPLEX:
        return {}
    kind, content = next(elements)
    values = np.frombuffer(content, _TYPES[kind])
    if min(shape) < 0 or math.prod(shape) != values.size:
        raise ValueError(f"{name} has {values.size} values for the shape {tuple(shape)}")
    return {name: values.reshape(shape, order="F")}
