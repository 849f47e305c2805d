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

_FORMAT = "atas-checkpoint-1"


def save(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write a checkpoint; if that fails, the one before it stays."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {
        "format": _FORMAT,
        "state": json.dumps(state),
        "checksums": json.dumps({name: _checksum(tensor) for name, tensor in tensors.items()}),
    }
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
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise CheckpointError(
                    f"{path} is not a training checkpoint of this version of atas; give a run's folder"
                )
            checksums = json.loads(metadata["checksums"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            state = json.loads(metadata["state"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    for name, tensor in tensors.items():
        if _checksum(tensor) != checksums.get(name):
            raise _damaged(path, f"the checksum of {name} is wrong")
    if set(tensors) != set(checksums):
        raise _damaged(path, "tensors are missing")
    return tensors, state


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} is damaged ({why}); restore it from a copy, or begin anew with --overwrite"
    )


def _checksum(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data) if tensor.numel() else 0
