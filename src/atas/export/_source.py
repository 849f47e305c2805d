"""All that is known of a run and worth telling outside of it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atas import models
from atas._files import read_json
from atas.errors import DataError
from atas.evaluation import Evaluation
from atas.evaluation._fingerprint import weights_hash
from atas.evaluation._folder import results_in
from atas.training import Run
from atas.training.recipe import fingerprint
from atas.training.run import Folder
from atas.training.weights import read_weights

FORMAT = 1  # of what the files say about their model


@dataclass(frozen=True)
class Source:
    """A finished run with the model on the CPU, and what was measured of exactly these weights."""

    run: Run
    model: nn.Module
    about: dict[str, Any]
    environment: dict[str, Any]
    evaluations: tuple[Evaluation, ...]

    @classmethod
    def of(cls, run: Run | str | Path) -> Source:
        """Read what lies in the run's folder."""
        if not isinstance(run, Run):
            run = Run.load(run)
        place = Folder(run.folder)
        model = copy.deepcopy(run.model).cpu().eval()
        environment, weights = read_json(place.environment), weights_hash(model)
        known, _ = read_weights(place.model)
        if "shape" not in known or "classes" not in known:
            raise DataError(f"{place.model} does not say which images it is for; train again with this version of atas")
        return cls(
            run,
            model,
            known | _identity(run, model, environment, weights),
            environment,
            tuple(found for found in results_in(place.path) if found.weights == weights),
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.about["shape"]
        return channels, height, width

    @property
    def built_in(self) -> bool:
        """Whether the library can build the network from its name."""
        return self.run.recipe.model.name in models.names()

    @cached_property
    def best(self) -> Evaluation | None:
        """The evaluation against the threat that the model was trained for: with AutoAttack if there is one, then on
        the most images."""
        same = [found for found in self.evaluations if found.threat == self.run.recipe.threat]
        return max(same, key=lambda found: ("autoattack" in found.accuracy, found.n), default=None)

    @property
    def collapsed_in(self) -> int | None:
        """The first epoch, counted from 1, that the monitor found collapsed and the run kept."""
        return next((row["epoch"] + 1 for row in self.run.metrics if row.get("collapsed")), None)

    @property
    def seconds(self) -> float | None:
        """Time spent in training steps."""
        return float(self.run.metrics[-1]["seconds"]) if self.run.metrics else None


def _identity(run: Run, model: nn.Module, environment: dict[str, Any], weights: str) -> dict[str, Any]:
    """What a file says besides what the training wrote: which recipe, which code, and the constants as they are."""
    ball = run.recipe.threat
    found: dict[str, Any] = {
        "format": FORMAT,
        "threat": repr(ball),
        "norm": ball.name,
        "eps": ball.eps,
        "recipe": run.recipe.name,
        "recipe_hash": fingerprint(run.recipe),
        "seed": run.recipe.training.seed,
        "weights": weights,
        "atas": environment.get("atas"),
        "commit": environment.get("commit"),
    }
    normalize = getattr(model, "normalize", None)
    if isinstance(normalize, models.Normalize):
        found |= {name: getattr(normalize, name).double().flatten().tolist() for name in ("mean", "std")}
    return found


def example(shape: tuple[int, int, int], count: int = 2) -> torch.Tensor:
    """Pixels to trace a model with; two images, as one would fix the batch at one."""
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(0))
