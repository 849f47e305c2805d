"""Weights & Biases: the same scalars and histograms on its page."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from atas._files import write_text
from atas.errors import UsageError
from atas.training.logs import read_metrics
from atas.training.recipe import Recipe

if TYPE_CHECKING:
    from atas.training.run import Folder

_PROJECT = "atas"


class WeightsAndBiases:
    """One run there for one run here, also over stops and resumes.

    Its step is the number of the row among the epochs in metrics.jsonl: rows that were sent before a crash have a step
    that is known there, and are not sent again; an epoch that is trained once more after a collapse has a new one. The
    charts are drawn over the epoch.
    """

    def __init__(self, place: Folder, settings: Recipe) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UsageError(
                f"training.loggers names wandb, which is not installed ({error}); pip install 'atas[wandb]', "
                f"or leave it out"
            ) from error
        self._wandb: Any = wandb
        self._place, self._settings = place, settings
        self._run: Any = None

    def start(self, epoch: int) -> None:
        """Open the run, or go on with it; a return to an earlier epoch only adds rows."""
        if self._run is not None:
            return
        self._place.wandb.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            id=self._id(),
            resume="allow",
            name=self._place.path.resolve().name,
            dir=str(self._place.path),
            config=self._settings.to_dict(),
        )
        self._run.define_metric("*", step_metric="epoch")
        self._known = int(self._run.step)

    def log(self, epoch: int, scalars: Mapping[str, float], histograms: Mapping[str, Tensor]) -> None:
        """The row that metrics.jsonl has got just now, unless it is known there."""
        step = sum("event" not in row for row in read_metrics(self._place.metrics)) - 1
        if step < self._known:
            return
        drawn = {name: self._wandb.Histogram(values.numpy()) for name, values in histograms.items()}
        self._run.log({"epoch": epoch, **scalars, **drawn}, step=step, commit=True)

    def close(self) -> None:
        """Send the rest."""
        if self._run is not None:
            self._run.finish()

    def _id(self) -> str:
        """Drawn once for a run, and kept in its folder."""
        path = self._place.wandb / "run-id"
        if not path.exists():
            write_text(path, uuid.uuid4().hex[:12])
        return path.read_text(encoding="utf-8").strip()
