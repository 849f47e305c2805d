"""Checkpoints: everything that the next step depends on, in one safetensors file.

Each tensor has a checksum; counters and the monitor are JSON in the header. The file is written under a temporary name,
synced and renamed, so a crash during a write leaves the previous checkpoint as it was. `CheckpointManager` writes on
rank 0 for all ranks, and restores a checkpoint only into the run that it belongs to.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from atas._utils.documents import MalformedError, conform, parse_json
from atas._utils.files import write_atomically
from atas._utils.formatting import describe_failure
from atas.distributed.state import gather_state, scatter_state
from atas.errors import CheckpointError
from atas.models.weights import unshare_storage
from atas.recipes import recipe_fingerprint
from atas.training.engine import Engine

_KEY = "atas-checkpoint-1"  # one entry: with several, their order would differ between files


class _Header(TypedDict):
    state: dict[str, Any]
    tensors: dict[str, list[Any]]


class _State(TypedDict):
    """What a run saves beside its tensors; `CheckpointManager` adds the last three."""

    epoch: int
    batch: int
    rollbacks: int
    seconds: float
    metrics_bytes: int
    monitor: dict[str, Any]
    updates: int
    recipe: str
    data: list[str] | str  # older checkpoints hold one fingerprint


def save(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Write a checkpoint; if that fails, the previous one stays."""
    tensors = unshare_storage(tensors)
    body = json.dumps({"state": state, "tensors": {name: _describe(tensor) for name, tensor in tensors.items()}})
    metadata = {_KEY: f"{zlib.crc32(body.encode()):08x}{body}"}
    stays = "the previous checkpoint is unchanged" if path.exists() else "there is no previous checkpoint"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the checkpoint {path} ({describe_failure(error)}); {stays}: "
            f"make room on the disk or choose another folder, then continue with --resume"
        ) from error


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a checkpoint and verify its checksums; return its tensors and state."""
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if header is None:
        raise CheckpointError(f"{path} is not a training checkpoint of this version of atas; pass a run's folder")
    body = header[8:]
    if header[:8] != f"{zlib.crc32(body.encode()):08x}":
        raise _damaged(path, "the checksum of its header is wrong")
    try:
        content = conform(parse_json(body), _Header)
    except MalformedError as error:
        raise _damaged(path, f"its header: {error}") from error
    actual, saved = {name: _describe(tensor) for name, tensor in tensors.items()}, content["tensors"]
    if actual != saved:
        wrong = [name for name in {**actual, **saved} if actual.get(name) != saved.get(name)]
        raise _damaged(path, f"the checksum of {wrong[0]} is wrong")
    state: dict[str, Any] = content["state"]
    return tensors, state


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} is damaged ({why}); restore it from a copy, or start again with --overwrite"
    )


def _describe(tensor: Tensor) -> list[Any]:
    """Return checksum, type and shape."""
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().data if tensor.numel() else b""
    return [zlib.crc32(data), str(tensor.dtype), list(tensor.shape)]


class CheckpointManager:
    """Saves and restores the tensors of an engine, with a `state` of plain values.

    `data_fingerprints` identify the training images; a checkpoint that holds one of them belongs to the same run.
    """

    def __init__(self, folder: Path, engine: Engine, data_fingerprints: tuple[str, ...]) -> None:
        self._folder, self._engine, self._data_fingerprints = folder, engine, data_fingerprints
        self._shard, self._world = engine.loader.shard, engine.world
        self._recipe = recipe_fingerprint(engine.recipe)

    def save(self, path: Path, state: dict[str, Any]) -> None:
        """Write the state of the engine."""
        state = {**state, "updates": self._engine.updates, "recipe": self._recipe, "data": self._data_fingerprints}
        engine = self._engine
        tensors = gather_state(engine.state_tensors(), engine.sharded_tensors(), self._shard, self._world)
        self._world.on_rank0(lambda: save(path, tensors, state))

    def restore(self, path: Path) -> dict[str, Any]:
        """Restore the engine from a checkpoint; return the state that was saved with it."""
        tensors: dict[str, Tensor] = {}

        def read() -> dict[str, Any]:
            loaded, state = load(path)
            try:
                conform(state, _State)
            except MalformedError as error:
                raise _damaged(path, f"its state: {error}") from error
            tensors.update(loaded)
            return state

        state = self._world.on_rank0(read)
        saved = state["data"]
        if not {*self._data_fingerprints} & {*([saved] if isinstance(saved, str) else saved)}:
            raise CheckpointError(
                f"the checkpoint in {self._folder} was made with other training images; resume with the same data"
            )
        if state["recipe"] != self._recipe:
            raise CheckpointError(
                f"the checkpoint in {self._folder} belongs to another run or model; restore this run's own file"
            )
        local = scatter_state(tensors, self._engine.sharded_tensors(), self._shard, self._world)
        try:
            self._engine.load_state_tensors(local, state["updates"])
        except (RuntimeError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint in {self._folder} belongs to another run or model "
                f"({str(error).splitlines()[-1].strip()}); resume with the recipe that made it"
            ) from error
        return state
