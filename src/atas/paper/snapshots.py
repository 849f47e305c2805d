"""Weights at the moments around a collapse, a few an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from atas._utils.files import write_atomically
from atas.models.weights import unshare_storage
from atas.training.callbacks import StepInfo
from atas.training.engine import Engine

_COLLAPSED, _BATCHES = "collapsed", "batches"


@dataclass(frozen=True)
class Snapshot:
    """A file of weights, taken after so many steps."""

    path: Path
    step: int
    collapsed: bool

    @property
    def batches(self) -> int:
        """Of an epoch of its training; 0 where the file does not say."""
        with safe_open(self.path, "pt") as file:
            return int((file.metadata() or {}).get(_BATCHES, 0))

    def load_into(self, model: nn.Module) -> nn.Module:
        """The model with these weights."""
        model.load_state_dict(load_file(self.path))
        return model.eval()


class SnapshotRecorder:
    """An observer that keeps weights of `an_epoch` moments of each epoch: the last `before` that a collapse was found,
    or of the training where none was, and the first `after`. The monitor may find a collapse an epoch or two late."""

    def __init__(self, folder: Path, an_epoch: int = 4, before: int = 16, after: int = 2) -> None:
        self.folder, self._an_epoch, self._before, self._after = folder, an_epoch, before, after

    def due(self, info: StepInfo) -> bool:
        """At equal distances, and at the end of an epoch; not when there are enough."""
        here = info.ends_epoch or info.batch % self._distance(info.batches) == 0
        return (
            here and sum(shot.collapsed and shot.step < info.step for shot in list_snapshots(self.folder)) < self._after
        )

    def on_step_end(self, info: StepInfo, engine: Engine) -> None:
        """Write the weights; of those before a collapse the oldest go. So do later ones, which an attempt left that was
        cut off."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for shot in list_snapshots(self.folder):
            if shot.step >= info.step:
                shot.path.unlink()
        tensors = unshare_storage(engine.final_model.state_dict())
        name = f"step-{info.step:07}{f'-{_COLLAPSED}' if info.collapsed else ''}.safetensors"
        about = {_BATCHES: str(info.batches)}
        write_atomically(self.folder / name, lambda path: save_file(tensors, path, about))
        for shot in [shot for shot in list_snapshots(self.folder) if not shot.collapsed][: -self._before]:
            shot.path.unlink()

    def complete(self, epochs: int) -> bool:
        """Whether a finished training was looked at whenever it had to be, also where it was stopped and went on."""
        found = list_snapshots(self.folder)
        if not found:
            return False
        batches = found[-1].batches
        inner = [*range(self._distance(batches), batches, self._distance(batches)), batches]
        moments = [epoch * batches + batch for epoch in range(epochs) for batch in inner]
        fallen = next((shot.step for shot in found if shot.collapsed), moments[-1] + 1)
        before = [step for step in moments if step < fallen][-self._before :]
        after = [step for step in moments if step >= fallen][: self._after]
        return [shot.step for shot in found] == before + after

    def _distance(self, batches: int) -> int:
        return max(1, -(-batches // self._an_epoch))


def list_snapshots(folder: Path) -> list[Snapshot]:
    """Those in a folder, by step."""
    found = sorted(path for path in folder.glob("step-*.safetensors") if not path.name.startswith("."))
    return [Snapshot(path, int(path.stem.split("-")[1]), path.stem.endswith(_COLLAPSED)) for path in found]
