"""The checkpoints of a run: written by one process for all, and taken up only where they are its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from atas.errors import CheckpointError
from atas.training import checkpoint, recipe
from atas.training.engine import Engine
from atas.training.gathering import gather, scatter


class Checkpoints:
    """Between a training and its files: what the engine holds goes out and in, beside a `state` of plain values.

    `images` are fingerprints of those that the run learns from; a checkpoint that has one of them is of the same.
    """

    def __init__(self, folder: Path, engine: Engine, images: tuple[str, ...]) -> None:
        self._folder, self._engine, self._images = folder, engine, images
        self._part, self._peers = engine.batches.part, engine.peers
        self._recipe = recipe.fingerprint(engine.settings)

    def write(self, path: Path, state: dict[str, Any]) -> None:
        """Keep the engine as it is now."""
        state = {**state, "updates": self._engine.updates, "recipe": self._recipe, "data": self._images}
        tensors = gather(self._engine.tensors(), self._part, self._peers)
        self._peers.by_first(lambda: checkpoint.save(path, tensors, state))

    def restore(self, path: Path) -> dict[str, Any]:
        """Put the engine back to where a checkpoint was taken; the state that was kept beside it."""
        tensors: dict[str, Tensor] = {}

        def read() -> dict[str, Any]:
            found, state = checkpoint.load(path)
            tensors.update(found)
            return state

        state = self._peers.by_first(read)
        known = state["data"]  # one of them in checkpoints from before there were several
        if not {*self._images} & {*([known] if isinstance(known, str) else known)}:
            raise CheckpointError(
                f"the checkpoint in {self._folder} was made with other training images; resume with the same data"
            )
        if state["recipe"] != self._recipe:
            raise CheckpointError(
                f"the checkpoint in {self._folder} belongs to another run or model; put back what this run wrote"
            )
        mine = scatter(tensors, self._part, self._peers)
        try:
            self._engine.load_tensors(mine, state["updates"])
        except (RuntimeError, KeyError) as error:
            raise CheckpointError(
                f"the checkpoint in {self._folder} belongs to another run or model "
                f"({str(error).splitlines()[-1].strip()}); resume with the recipe that made it"
            ) from error
        return state
