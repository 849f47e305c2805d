"""Checkpoints: everything that the next step depends on, in one safetensors file.

Tensors carry a checksum each; counters and the monitor travel in the header as JSON. The file is written under a
temporary name, synced and renamed, so a crash in the middle of a write leaves the last checkpoint as it was.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from atas._files import write_atomically
from atas.errors import CheckpointError

LAST = Path("checkpoints", "last.safetensors")  # in a run's folder, the one to resume from
_KEY = "atas-checkpoint-1"  # the one entry of the header: with several, their order would change from file to file


def save(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write a checkpoint; if that fails, the one before it stays."""
    tensors = separate(tensors)
    body = json.dumps({"state": state, "tensors": {name: _describe(tensor) for name, tensor in tensors.items()}})
    metadata = {_KEY: f"{zlib.crc32(body.encode()):08x}{body}"}
    stays = "the checkpoint before it stays as it was" if path.exists() else "there is none before it"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the checkpoint {path} ({error}); {stays}: "
            f"make room on the disk or choose another folder, then go on with --resume"
        ) from error


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint, verified."""
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if header is None:
        raise CheckpointError(f"{path} is not a training checkpoint of this version of atas; give a run's folder")
    body = header[8:]
    if header[:8] != f"{zlib.crc32(body.encode()):08x}":
        raise _damaged(path, "the checksum of its header is wrong")
    content = json.loads(body)
    found = {name: _describe(tensor) for name, tensor in tensors.items()}
    if found != content["tensors"]:
        wrong = [name for name in {**found, **content["tensors"]} if found.get(name) != content["tensors"].get(name)]
        raise _damaged(path, f"the checksum of {wrong[0]} is wrong")
    return tensors, content["state"]


def separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the host, no two in the same memory: tied weights are written once for each of their names."""
    found: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in places else tensor
        places.add(place)
    return found


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} is damaged ({why}); restore it from a copy, or begin anew with --overwrite"
    )


def _describe(tensor: Tensor) -> list[Any]:
    """Checksum, type and shape."""
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().data if tensor.numel() else b""
    return [zlib.crc32(data), str(tensor.dtype), list(tensor.shape)]
