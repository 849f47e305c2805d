"""`train`: from a recipe to a finished run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atas import data as data_sets
from atas import environment, models
from atas._files import write_text
from atas.errors import UsageError
from atas.training import recipe as recipes
from atas.training.live import Live
from atas.training.run import GIVEN, Folder, Run, load_recipe, save_weights
from atas.training.trainer import Trainer

# What may change between a run and its resume: where things are, and what is done after the training.
_MAY_CHANGE = ("engine", "evaluation", "data.root", "training.checkpoint_every")


def train(
    recipe: str | Path | recipes.Recipe | None = None,
    *,
    out: str | Path | None = None,
    values: Mapping[str, Any] | None = None,
    seed: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    model: nn.Module | None = None,
    data: data_sets.Dataset | None = None,
    live: Live | None = None,
) -> Run:
    """Train a robust classifier.

    `recipe` is a recipe's name, its path or a Recipe; `values` overrides keys such as `{"training.epochs": 10}`. The
    run goes into the folder `out`, `runs/<recipe>` by default. With `resume`, a run that was stopped there goes on, and
    the recipe may be left out. `model` and `data` put your own in place of the recipe's.

    >>> run = train("digits-small-cnn-atas", out="/tmp/run", values={"training.epochs": 1})  # doctest: +SKIP
    """
    if recipe is None:
        if not (resume and out is not None):
            raise UsageError("give a recipe, or with resume the folder of a run (out); `atas ls recipes` shows recipes")
        settings = load_recipe(Folder(Path(out)))
    else:
        settings = recipes.load(recipe)
    changes = dict(values or {})
    if seed is not None:
        changes["training.seed"] = seed
    settings = settings.with_values(changes)
    if model is not None:
        given = dataclasses.replace(settings.model, name=f"{GIVEN}{type(model).__name__}")
        settings = dataclasses.replace(settings, model=given)
    if data is not None:
        settings = dataclasses.replace(settings, data=dataclasses.replace(settings.data, name=f"{GIVEN}{data.name}"))
    place = Folder(Path(out) if out is not None else Path("runs") / settings.name)
    going_on = _prepare(place, settings, resume=resume, overwrite=overwrite)
    with live or Live() as shown:
        data = data or _load_data(settings)
        model = model or _build(settings, data)
        trainer = Trainer(settings, place, data, model, shown)
        place.path.mkdir(parents=True, exist_ok=True)
        if not going_on:
            write_text(place.environment, json.dumps(environment.describe(trainer.device), indent=2) + "\n")
            write_text(place.recipe, f"# atas train {place.recipe}\n{settings.to_toml()}")
        if going_on and trainer.resume():
            shown.say(f"going on in {place.path} at epoch {trainer.epoch + 1}, batch {trainer.batch + 1}")
        trainer.fit()
        finished = trainer.engine.best_model
        save_weights(place.model, finished, _about(settings, data, finished))
    return Run.load(place.path, model=finished)


def _prepare(place: Folder, settings: recipes.Recipe, *, resume: bool, overwrite: bool) -> bool:
    """Make the folder ready; True where a run in it goes on."""
    if not place.recipe.exists():
        if place.path.exists() and any(place.path.iterdir()) and not (resume or overwrite):
            raise UsageError(f"{place.path} exists and is not the folder of a run; choose another one with --out")
        return False
    if resume:
        changed = recipes.differences(load_recipe(place), settings, ignore=_MAY_CHANGE)
        if changed:
            raise UsageError(
                f"the run in {place.path} was begun with another recipe ({'; '.join(changed[:3])}); resume it with its "
                f"own (atas train --resume --out {place.path}) or choose another folder with --out"
            )
        return True
    if not overwrite:
        raise UsageError(
            f"there is a run in {place.path} already; go on with --resume, begin anew with --overwrite, "
            f"or choose another folder with --out"
        )
    for path in (place.recipe, place.environment, place.metrics, place.model, place.evaluation):
        path.unlink(missing_ok=True)
    for folder in (place.last.parent, place.board):
        shutil.rmtree(folder, ignore_errors=True)
    return False


def _load_data(settings: recipes.Recipe) -> data_sets.Dataset:
    if settings.data.name.startswith(GIVEN):
        raise UsageError(
            f"this recipe was made with data given in Python ({settings.data.name}); pass it to atas.train(data=...)"
        )
    return data_sets.load(settings.data.name, settings.data.root, size=settings.data.size)


def _build(settings: recipes.Recipe, data: data_sets.Dataset) -> nn.Module:
    if settings.model.name.startswith(GIVEN):
        raise UsageError(
            f"the model of this recipe was given in Python ({settings.model.name}); pass it to atas.train(model=...)"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.training.seed)
        return models.create(
            settings.model.name, data.num_classes, data.shape[0], settings.model.mean, settings.model.std
        )


def _about(settings: recipes.Recipe, data: data_sets.Dataset, model: nn.Module) -> dict[str, Any]:
    return {
        "name": settings.model.name,
        "num_classes": data.num_classes,
        "channels": data.shape[0],
        "mean": settings.model.mean,
        "std": settings.model.std,
        "shape": data.shape,
        "classes": data.train.classes,
        "data": settings.data.name,
        "method": settings.method.name,
        "threat": repr(settings.threat),
    }
