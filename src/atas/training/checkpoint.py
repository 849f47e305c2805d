"""Checkpoints: everything that the next step depends on, in one safetensors file.

Each tensor has a checksum; counters and the monitor are JSON in the header. The file is written under a temporary name,
synced and renamed, so a crash in the middle of a write leaves the last checkpoint as it was. `CheckpointManager` writes
from one process for all, and restores a checkpoint only into the run that it belongs to.
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

from atas._utils.files import write_atomically
from atas.distributed.state import gather_state, scatter_state
from atas.errors import CheckpointError
from atas.models.weights import unshare_storage
from atas.recipes import recipe_fingerprint
from atas.training.engine import Engine

_KEY = "atas-checkpoint-1"  # the one entry of the header: with several, their order would change from file to file


def save(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write a checkpoint; if that fails, the one before it stays."""
    tensors = unshare_storage(tensors)
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


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} is damaged ({why}); restore it from a copy, or begin anew with --overwrite"
    )


def _describe(tensor: Tensor) -> list[Any]:
    """Checksum, type and shape."""
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().data if tensor.numel() else b""
    return [zlib.crc32(data), str(tensor.dtype), list(tensor.shape)]


class CheckpointManager:
    """Between a training and its files: what the engine holds goes out and in, beside a `state` of plain values.

    `data_fingerprints` are those of the images that the run learns from; a checkpoint with one of them is of the same
    run.
    """

    def __init__(self, folder: Path, engine: Engine, data_fingerprints: tuple[str, ...]) -> None:
        self._folder, self._engine, self._data_fingerprints = folder, engine, data_fingerprints
        self._shard, self._world = engine.loader.shard, engine.world
        self._recipe = recipe_fingerprint(engine.recipe)

    def save(self, path: Path, state: dict[str, Any]) -> None:
        """Keep the engine as it is now."""
        state = {**state, "updates": self._engine.updates, "recipe": self._recipe, "data": self._data_fingerprints}
        tensors = gather_state(self._engine.state_tensors(), self._shard, self._world)
        self._world.on_rank0(lambda: save(path, tensors, state))

    def restore(self, path: Path) -> dict[str, Any]:
        """Put the engine back to where a checkpoint was taken; the state that was kept beside it."""
        tensors: dict[str, Tensor] = {}

        def read() -> dict[str, Any]:
            loaded, state = load(path)
            tensors.update(loaded)
            return state

        state = self._world.on_rank0(read)
        saved = state["data"]  # one of them in checkpoints from before there were several
        if not {*self._data_fingerprints} & {*([saved] if isinstance(saved, str) else saved)}:
            raise CheckpointError(
                f"the checkpoint in {self._folder} was made with other training images; resume with the same data"
            )
        if state["recipe"] != self._recipe:
            raise CheckpointError(
                f"the checkpoint in {self._folder} belongs to another run or model; put back what this run wrote"
            )
        mine = scatter_state(tensors, self._shard, self._world)
        try:
            self._engine.load_state_tensors(mine, state["updates"])
        except (RuntimeError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint in {self._folder} belongs to another run or model "
                f"({str(error).splitlines()[-1].strip()}); resume with the recipe that made it"
            ) from error
        return state
