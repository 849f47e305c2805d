"""`train`: from a recipe to a finished run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from atas import data as data_sets
from atas import environment
from atas._files import held, read_json, write_text
from atas._text import in_shell
from atas.checks import check_module
from atas.errors import UsageError
from atas.processes import Processes, launched
from atas.training import recipe as recipes
from atas.training._determinism import determinism
from atas.training.batchnorm import desynchronise
from atas.training.live import Live
from atas.training.loggers import Logger
from atas.training.observe import Observer
from atas.training.run import ROWS, Folder, Run, build_model, load_data, load_recipe
from atas.training.trainer import Trainer
from atas.training.views import as_tested
from atas.training.weights import GIVEN, is_whole, save_weights


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
    loggers: Sequence[Logger] = (),
    observers: Sequence[Observer] = (),
    rows: Tensor | None = None,
) -> Run:
    """Train a robust classifier.

    `recipe` is a recipe's name, its path or a Recipe; `values` overrides keys such as `{"training.epochs": 10}`. The
    run goes into the folder `out`, `runs/<recipe>` by default. With `resume`, a run that was stopped there goes on, and
    the recipe may be left out. `model` and `data` put your own in place of the recipe's; `loggers` get the metrics of
    every epoch besides the recipe's own, and `observers` look at the training on its way. `rows` are the training
    images to learn from, where that is not all of them. Processes that torchrun started, or that are a group of
    torch.distributed already, train together; the first of them writes the folder.

    >>> run = train("digits-small-cnn-atas", out="/tmp/run", values={"training.epochs": 1})  # doctest: +SKIP
    """
    _check_given(model, data)
    with launched() as peers:
        settings = peers.by_first(lambda: _begun_with(out, resume)) if recipe is None else recipes.load(recipe)
        settings = settings.with_values(_with_seed(values or {}, seed))
        if model is not None:
            given = dataclasses.replace(settings.model, name=f"{GIVEN}{type(model).__name__}")
            settings = dataclasses.replace(settings, model=given)
        if data is not None:
            named = dataclasses.replace(settings.data, name=f"{GIVEN}{data.name}")
            settings = dataclasses.replace(settings, data=named)
        place = Folder(Path(out) if out is not None else _usual_folder(settings.name))
        with peers.reached(f"go on from the last checkpoint with --resume --out {in_shell(place.path)}"):
            going_on = peers.by_first(lambda: _goes_on(place, settings, resume=resume, overwrite=overwrite))
            with live or Live(quiet=not peers.first) as shown, determinism(settings.engine.deterministic):
                data = data or load_data(settings, progress=shown.loading)
                model = model or build_model(settings, data)
                trainer = Trainer(settings, place, data, model, shown, loggers, observers, rows, peers)
                learns_from = None if rows is None else len(rows)
                with _kept(place, peers):
                    shown.open(_undertaking(trainer))
                    if resume and not going_on:
                        shown.say(f"there is nothing in {place.path} to go on with; beginning anew")
                    if going_on:
                        _take_up(trainer, settings, place, shown)
                    else:  # only now, when nothing in the call can be wrong any more, is an earlier run given up
                        peers.by_first(lambda: _begin(place, trainer, learns_from))
                    trainer.fit()
                    return _finished(trainer, _about(settings, data))


def _check_given(model: object, data: object) -> None:
    """An error where what was passed in Python is of another kind."""
    if model is not None:
        check_module(model)
    if data is not None and not isinstance(data, data_sets.Dataset):
        raise UsageError(
            f"data must be an atas.data.Dataset, as atas.data.from_arrays and atas.data.load make it; got "
            f"{type(data).__name__}"
        )


def _with_seed(values: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """The values, and the seed among them."""
    if seed is None:
        return dict(values)
    if values.get("training.seed", seed) != seed:
        raise UsageError(f"the seed is {seed} and training.seed is {values['training.seed']}; give one of them")
    return {**values, "training.seed": seed}


def _usual_folder(name: str) -> Path:
    """Where a recipe's run goes; an error where its name leads to somewhere else."""
    if name in ("", ".", "..") or set(name) & set("/\\\0"):
        raise UsageError(f"the recipe's name {name!r} is not that of a folder below runs; change it or give --out")
    return Path("runs", name)


def _undertaking(trainer: Trainer) -> str:
    """What is about to be done, in a line."""
    settings, engine, images = trainer.settings, trainer.engine, trainer.engine.batches.part.examples
    device = environment.describe(trainer.device)["device"]
    where = device if trainer.peers.alone else f"{trainer.peers.count} x {device}"
    how_long = f"{images:,} images x {settings.training.epochs}"
    how = f"{where}, {engine.kind} in {engine.precision_name}"
    return f"{settings.name}: {settings.method.name}, {settings.threat!r}, {how_long}; {how}; into {trainer.place.path}"


def _begun_with(out: str | Path | None, resume: bool) -> recipes.Recipe:
    """The recipe of the run that goes on."""
    if not (resume and out is not None):
        raise UsageError("give a recipe, or with resume the folder of a run (out); `atas ls recipes` shows recipes")
    return load_recipe(Folder(Path(out)))


@contextmanager
def _kept(place: Folder, peers: Processes) -> Iterator[None]:
    """The folder exists, and no other run writes into it."""
    with ExitStack() as stack:

        def keep() -> None:
            place.path.mkdir(parents=True, exist_ok=True)
            sentence = f"another process trains in {place.path}; wait for it or choose another --out"
            stack.enter_context(held(place.lock, sentence))

        peers.by_first(keep)
        yield


def _finished(trainer: Trainer, about: dict[str, Any]) -> Run:
    """Write the weights that the training ended with; the run, whose folder the first process alone must see."""
    model, place, peers = desynchronise(trainer.engine.best_model), trainer.place, trainer.peers
    peers.by_first(lambda: save_weights(place.model, model, about))
    if peers.first:
        return Run.load(place.path, model=model)
    return Run(place.path, trainer.settings, model.eval(), [])


def _goes_on(place: Folder, settings: recipes.Recipe, *, resume: bool, overwrite: bool) -> bool:
    """Whether a run in the folder goes on; an error where it holds what must not be lost."""
    if not place.recipe.exists():
        if place.path.exists() and any(not path.name.startswith(".") for path in place.path.iterdir()):
            raise UsageError(
                f"{place.path} is not empty and not the folder of a run (no recipe.toml in it); choose another --out"
            )
        return False
    if resume and overwrite:
        raise UsageError("--resume goes on with a run and --overwrite gives it up; leave one of them out")
    if resume:
        changed = recipes.differences(load_recipe(place), settings, ignore=recipes.MAY_CHANGE)
        if changed:
            raise UsageError(
                f"the run in {place.path} was begun with another recipe ({'; '.join(changed[:3])}); resume it with its "
                f"own (atas train --resume --out {in_shell(place.path)}) or choose another folder with --out"
            )
        return True
    if not overwrite:
        raise UsageError(
            f"there is a run in {place.path} already; go on with --resume, begin anew with --overwrite, "
            f"or choose another folder with --out"
        )
    return False


def _begin(place: Folder, trainer: Trainer, learns_from: int | None) -> None:
    """Give up what an earlier run left, its recipe last, when the new one replaces it."""
    results = [path for kind in ("json*", "md") for path in place.path.glob(f"{place.evaluation.stem}*.{kind}")]
    for path in (place.metrics, place.model, place.environment, place.page, *results):
        path.unlink(missing_ok=True)
    for folder in (place.last.parent, place.board, place.wandb, place.exports):
        shutil.rmtree(folder, ignore_errors=True)
    write_text(place.recipe, f"# atas train {place.recipe}\n{trainer.settings.to_toml()}")
    part = {} if learns_from is None else {ROWS: learns_from}
    write_text(place.environment, json.dumps(_surroundings(trainer) | part, indent=2) + "\n")


def _take_up(trainer: Trainer, settings: recipes.Recipe, place: Folder, shown: Live) -> None:
    """Go on from the last checkpoint, and say where."""
    if trainer.peers.first:
        for stale in place.path.rglob(".*.tmp"):  # a process that was killed in the middle of a write left them
            stale.unlink()
    if not trainer.resume():
        shown.say(f"there is no checkpoint in {place.path} yet; beginning anew")
    elif trainer.epoch == settings.training.epochs:
        lost = trainer.peers.first and not is_whole(place.model)
        more = "; its weights, missing or damaged, are written anew from the last checkpoint" if lost else ""
        shown.say(f"the run in {place.path} has finished already{more}")
    else:
        shown.say(f"going on in {place.path} at epoch {trainer.epoch + 1}, batch {trainer.batch + 1}")
    if trainer.peers.first:
        before, now = read_json(place.environment), _surroundings(trainer)
        keys = ("atas", "torch", "device", "cuda", "engine", "precision", "processes")
        changed = {key: now[key] for key in keys if key in before and before[key] != now[key]}
        if changed:
            trainer.note({"event": "resume", "epoch": trainer.epoch, **changed})


def _surroundings(trainer: Trainer) -> dict[str, Any]:
    engine = trainer.engine
    found = environment.describe(trainer.device) | {"engine": engine.kind, "precision": engine.precision_name}
    return found | {"processes": trainer.peers.count}


def _about(settings: recipes.Recipe, data: data_sets.Dataset) -> dict[str, Any]:
    return {
        "name": settings.model.name,
        "num_classes": data.num_classes,
        "channels": data.shape[0],
        "mean": settings.model.mean,
        "std": settings.model.std,
        "shape": as_tested(data, settings.data).shape,
        "classes": data.train.classes,
        "data": settings.data.name,
        "method": settings.method.name,
        "threat": repr(settings.threat),
    }
