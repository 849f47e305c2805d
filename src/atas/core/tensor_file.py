"""Tensors with metadata in one safetensors file: written atomically, and checked when they are read.

The header holds one entry, named after the kind of the file: a checksum, then JSON with the metadata and the hash, type
and shape of the tensors.
"""

from __future__ import annotations

import errno
import json
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from atas._utils.documents import MAX_BYTES, MalformedError, conform, parse_json
from atas._utils.files import write_atomically
from atas.core.fingerprint import state_hash


class _Header(TypedDict):
    metadata: dict[str, Any]
    tensors: dict[str, tuple[str, list[int]]]
    hash: str


def write_tensors(path: Path, kind: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write a file of this kind; raise OSError if that fails, and leave an earlier file as it was."""
    on_host = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in sorted(tensors.items())}
    body = json.dumps({"metadata": dict(metadata), "tensors": _layout(on_host), "hash": state_hash(on_host)})
    header = {kind: f"{zlib.crc32(body.encode()):08x}{body}"}
    try:
        write_atomically(path, lambda temporary: save_file(on_host, temporary, header))
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from error


def read_tensors(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Return metadata and tensors of a file of this kind; None if the file is of another kind.

    Raises MalformedError if the file is damaged, and OSError if it cannot be read.
    """
    header = _read_header(path, kind)
    if header is None:
        return None
    body = header[8:]
    if header[:8] != f"{zlib.crc32(body.encode()):08x}":
        raise MalformedError("the checksum of its header is wrong")
    content = conform(parse_json(body), _Header)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise MalformedError(str(error).splitlines()[0]) from error
    if json.loads(json.dumps(_layout(tensors))) != content["tensors"] or state_hash(tensors) != content["hash"]:
        raise MalformedError("the hash of its tensors is wrong")
    return content["metadata"], tensors


def is_of_other_kind(path: Path, kind: str) -> bool:
    """Return whether a path holds a file that can be read and is of another kind, which must not be replaced."""
    try:
        return path.exists() and _read_header(path, kind) is None
    except MalformedError:
        return False


def take_tensor(tensors: dict[str, Tensor], name: str, kinds: tuple[torch.dtype, ...], *shape: int | None) -> Tensor:
    """Return a tensor that was read; raise MalformedError unless it has one of these types, and this shape.

    None in a shape stands for any length.
    """
    if name not in tensors:
        raise MalformedError(f"{name} is missing")
    tensor = tensors[name]
    matches = [expected in (None, length) for expected, length in zip(shape, tensor.shape, strict=False)]
    if tensor.dtype not in kinds or tensor.dim() != len(shape) or not all(matches):
        raise MalformedError(f"{name} is {str(tensor.dtype).removeprefix('torch.')} of the shape {list(tensor.shape)}")
    return tensor


def _read_header(path: Path, kind: str) -> str | None:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a pipe waits forever, and a device has no end
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if status.st_size > MAX_BYTES:
        return None  # weights, perhaps
    with path.open("rb"):  # reports a missing permission as an OSError
        pass
    try:
        with safe_open(path, framework="pt") as file:
            header: str | None = (file.metadata() or {}).get(kind)
    except (SafetensorError, ValueError) as error:
        raise MalformedError(str(error).splitlines()[0]) from error
    return header


def _layout(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int]]]:
    return {name: (str(tensor.dtype), list(tensor.shape)) for name, tensor in sorted(tensors.items())}
