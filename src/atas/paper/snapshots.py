"""Snapshots of the weights around a collapse, several per epoch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from atas._utils.files import write_atomically
from atas.core.autograd import eval_mode
from atas.core.model_state import state_tensors
from atas.models.weights import unshare_storage
from atas.training.callbacks import StepInfo
from atas.training.engine import Engine

_COLLAPSED, _BATCHES = "collapsed", "batches"


@dataclass(frozen=True)
class Snapshot:
    """A file of weights after a training step."""

    path: Path
    step: int
    collapsed: bool

    @property
    def batches(self) -> int:
        """Batches per epoch of the training; 0 if the file does not state them."""
        with safe_open(self.path, "pt") as file:
            return int((file.metadata() or {}).get(_BATCHES, 0))

    def load_into(self, model: nn.Module) -> nn.Module:
        """Load the weights into a model and return it in eval mode."""
        model.load_state_dict(load_file(self.path))
        return eval_mode(model)


class SnapshotRecorder:
    """Callback that saves the weights `an_epoch` times per epoch.

    It keeps the last `before` snapshots before the monitor reports a collapse, or before the end if it reports none,
    and the first `after` snapshots from then on. The monitor may report a collapse an epoch or two late.
    """

    def __init__(self, folder: Path, an_epoch: int = 4, before: int = 16, after: int = 2) -> None:
        self.folder, self._an_epoch, self._before, self._after = folder, an_epoch, before, after

    def due(self, info: StepInfo) -> bool:
        """Return whether to save: at equal distances and at the end of an epoch, until there are enough."""
        here = info.ends_epoch or info.batch % self._distance(info.batches) == 0
        return (
            here and sum(shot.collapsed and shot.step < info.step for shot in list_snapshots(self.folder)) < self._after
        )

    def on_step_end(self, info: StepInfo, engine: Engine) -> None:
        """Save the weights; remove the oldest before a collapse, and later ones that an interrupted run left."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for shot in list_snapshots(self.folder):
            if shot.step >= info.step:
                shot.path.unlink()
        tensors = unshare_storage(state_tensors(engine.final_model))
        name = f"step-{info.step:07}{f'-{_COLLAPSED}' if info.collapsed else ''}.safetensors"
        about = {_BATCHES: str(info.batches)}
        write_atomically(self.folder / name, lambda path: save_file(tensors, path, about))
        for shot in [shot for shot in list_snapshots(self.folder) if not shot.collapsed][: -self._before]:
            shot.path.unlink()

    def complete(self, epochs: int) -> bool:
        """Return whether the snapshots of a finished training are complete, also after a resume."""
        snapshots = list_snapshots(self.folder)
        if not snapshots:
            return False
        batches = snapshots[-1].batches
        inner = [*range(self._distance(batches), batches, self._distance(batches)), batches]
        steps = [epoch * batches + batch for epoch in range(epochs) for batch in inner]
        collapse = next((shot.step for shot in snapshots if shot.collapsed), steps[-1] + 1)
        before = [step for step in steps if step < collapse][-self._before :]
        after = [step for step in steps if step >= collapse][: self._after]
        return [shot.step for shot in snapshots] == before + after

    def _distance(self, batches: int) -> int:
        return max(1, -(-batches // self._an_epoch))


def list_snapshots(folder: Path) -> list[Snapshot]:
    """Return the snapshots of a folder by step."""
    paths = sorted(path for path in folder.glob("step-*.safetensors") if not path.name.startswith("."))
    return [Snapshot(path, int(path.stem.split("-")[1]), path.stem.endswith(_COLLAPSED)) for path in paths]
