"""What a study wants to know of a training besides the accuracies of its model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from atas._files import read_json
from atas.data import Dataset
from atas.evaluation._fingerprint import weights_hash
from atas.reproduce.record import Record
from atas.reproduce.store import Store
from atas.reproduce.trial import Trial
from atas.training.observe import Observer
from atas.training.run import Folder


@dataclass(frozen=True)
class Seen:
    """A finished training, to be measured."""

    trial: Trial
    place: Folder
    model: nn.Module
    data: Dataset
    store: Store

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return next(self.model.parameters()).device

    @cached_property
    def about(self) -> dict[str, Any]:
        """The weights and the surroundings that an observation is of."""
        return {"weights": weights_hash(self.model), "environment": read_json(self.place.environment)}


class Observation(ABC):
    """Something to be observed: during the training by observers, then measured, and kept in the trial's record."""

    name: ClassVar[str]

    @property
    def rests_on(self) -> tuple[Trial, ...]:
        """The trials whose results it needs."""
        return ()

    def observers(self, place: Folder) -> list[Observer]:
        """What has to look at the training."""
        return []

    @abstractmethod
    def ready(self, trial: Trial, place: Folder) -> bool:
        """Whether a finished training holds what `measure` needs; otherwise it is done a second time."""

    @abstractmethod
    def measure(self, seen: Seen) -> dict[str, Any]:
        """Plain values, small enough for a record."""


def unobserved(record: Record | None, wanted: Sequence[Observation]) -> list[Observation]:
    """Those that a record does not have yet."""
    return [found for found in wanted if record is None or found.name not in record.observed]
