"""A run: a folder with everything that a training was and gave."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from atas import data, models
from atas._text import in_shell
from atas.data._sources import Progress
from atas.errors import DataError, UsageError
from atas.training import recipe
from atas.training.checkpoint import LAST
from atas.training.logs import read_metrics
from atas.training.weights import GIVEN, load_weights, of_all_channels

DIVERGED = "diverged"  # the event that ends the metrics of such a run
ROWS = "rows"  # in the environment of a run on a part of the training images: how many


@dataclass(frozen=True)
class Folder:
    """Where things lie in a run's folder."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.toml"

    @property
    def environment(self) -> Path:
        """Versions and hardware."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """A line an epoch."""
        return self.path / "metrics.jsonl"

    @property
    def last(self) -> Path:
        """The checkpoint to resume from."""
        return self.path / LAST

    @property
    def healthy(self) -> Path:
        """The checkpoint to return to after a collapse."""
        return self.last.with_name("healthy.safetensors")

    @property
    def model(self) -> Path:
        """The weights that the training ended with."""
        return self.path / "model.safetensors"

    @property
    def evaluation(self) -> Path:
        """The result of `atas evaluate`."""
        return self.path / "evaluation.json"

    @property
    def lock(self) -> Path:
        """Held by the process that trains here."""
        return self.path / ".lock"

    @property
    def board(self) -> Path:
        """TensorBoard's files."""
        return self.path / "tensorboard"

    @property
    def wandb(self) -> Path:
        """Files of Weights & Biases."""
        return self.path / "wandb"

    @property
    def page(self) -> Path:
        """What `atas report` wrote."""
        return self.path / "report.html"

    @property
    def exports(self) -> Path:
        """What `atas export` wrote, a folder a format."""
        return self.path / "export"


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, the recipe, the trained model in eval mode, and a row of metrics an epoch."""

    folder: Path
    recipe: recipe.Recipe = field(repr=False)
    model: nn.Module = field(repr=False)
    metrics: list[dict[str, Any]] = field(repr=False)

    @classmethod
    def load(cls, folder: str | Path, model: nn.Module | None = None) -> Run:
        """A run from its folder; `model` is needed only where it was passed in Python at training."""
        place = Folder(Path(folder))
        settings = load_recipe(place)
        rows = read_metrics(place.metrics)
        if not place.model.exists():
            raise DataError(f"the run {folder} has not finished{_way_on(place, settings, rows)}")
        return cls(place.path, settings, load_weights(place.model, model), epochs_of(rows))


def _way_on(place: Folder, settings: recipe.Recipe, rows: list[dict[str, Any]]) -> str:
    """What is left to do with a run that has no weights; one that diverged would do so again."""
    if rows and rows[-1].get("event") == DIVERGED:
        return f": it diverged in epoch {rows[-1]['epoch'] + 1}; begin anew with --overwrite and {calmer(settings)}"
    return f"; go on with: atas train --resume --out {in_shell(place.path)}"


def calmer(settings: recipe.Recipe) -> str:
    """What to set where a training diverges."""
    large = settings.optimizer.weight_decay >= 1
    return "a smaller optimizer.weight_decay or schedule.peak" if large else "a smaller schedule.peak"


def load_recipe(place: Folder) -> recipe.Recipe:
    """The recipe of a run's folder."""
    if not place.recipe.exists():
        why = "it holds no recipe.toml" if place.path.exists() else "there is no such folder"
        raise DataError(f"{place.path} is not the folder of a run: {why}; give one that `atas train` made")
    return recipe.load(place.recipe)


def load_data(
    settings: recipe.Recipe, root: str | None = None, progress: Progress | None = None, *, to_train: bool = True
) -> data.Dataset:
    """The data of a recipe, from its own folder or another; `progress` is told how far the decoding is. Where nothing
    is to be trained, training images are not decoded before they are asked for."""
    if settings.data.name.startswith(GIVEN):
        name = settings.data.name.removeprefix(GIVEN)
        raise UsageError(
            f"the data of this recipe was given in Python ('{name}'); pass it there again, to atas.train(data=...) or "
            f"to atas.evaluate"
        )
    wanted, folder = settings.data, root or settings.data.root
    if wanted.name == "imagefolder":  # other sets are always read in one way
        lazy: bool | Literal["train"] | None = {"resident": False, "streaming": True}.get(wanted.loading)
        if not to_train and not lazy:
            lazy = "train"
        return data.load(wanted.name, folder, size=wanted.size, lazy=lazy, progress=progress)
    if wanted.name != "packed":
        return data.load(wanted.name, folder, size=wanted.size)
    found = data.load(wanted.name, folder)
    side = found.shape[1]
    if wanted.size not in (None, side):
        raise DataError(
            f"the packed set in {folder} has images of {side} pixels, and the recipe wants data.size = {wanted.size}; "
            f"pack it with --size {wanted.size}, or set data.size={side}"
        )
    return found


def build_model(settings: recipe.Recipe, images: data.Dataset) -> nn.Module:
    """The model of a recipe with fresh weights, drawn by the recipe's seed; the caller's random state stays."""
    if settings.model.name.startswith(GIVEN):
        raise UsageError(
            f"the model of this recipe was given in Python ({settings.model.name}); pass it to atas.train(model=...)"
        )
    if images.num_classes == 1:
        raise DataError(
            f"the data has a single class, {images.train.classes[0]}, and nothing to tell it from; give two or more"
        )
    mean, std = of_all_channels(settings.model.mean), of_all_channels(settings.model.std)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.training.seed)
        return models.create(settings.model.name, images.num_classes, images.shape[0], mean, std)


def epochs_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the epochs that count: events are left out, and what a rollback or a stop took back."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        if "event" not in row:
            kept.append(row)
        elif "to_epoch" in row:
            kept = [earlier for earlier in kept if earlier["epoch"] < row["to_epoch"]]
    return kept
