"""`train()`: from a recipe to a finished run.

Here are the rules for a folder: a new run, one that is resumed, and one that is overwritten. Nothing of an earlier run
is deleted before everything in the call has been checked.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atas import data as datasets
from atas import recipes
from atas._utils import environment
from atas._utils.files import file_lock, read_json, write_text
from atas._utils.formatting import shell_quote
from atas.core.validation import check_module
from atas.distributed.batchnorm import revert_sync_batchnorm
from atas.distributed.world import World, init
from atas.errors import UsageError
from atas.models.weights import GIVEN, is_readable, save_weights
from atas.recipes import Recipe, differences
from atas.recipes.fingerprint import RESUME_MAY_CHANGE
from atas.training.build import build_model
from atas.training.callbacks import Callback, Logger
from atas.training.data import eval_view, load_data
from atas.training.progress import TrainingProgress
from atas.training.run import ROWS_KEY, Run, RunFolder, load_recipe
from atas.training.trainer import Trainer


def train(
    recipe: str | Path | Recipe | None = None,
    *,
    out: str | Path | None = None,
    values: Mapping[str, Any] | None = None,
    seed: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    model: nn.Module | None = None,
    data: datasets.Dataset | None = None,
    live: TrainingProgress | None = None,
    loggers: Sequence[Logger] = (),
    observers: Sequence[Callback] = (),
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
    with init() as world:
        resolved = world.on_rank0(lambda: _recipe_of_run(out, resume)) if recipe is None else recipes.load(recipe)
        resolved = resolved.with_values(_with_seed(values or {}, seed))
        if model is not None:
            given = dataclasses.replace(resolved.model, name=f"{GIVEN}{type(model).__name__}")
            resolved = dataclasses.replace(resolved, model=given)
        if data is not None:
            named = dataclasses.replace(resolved.data, name=f"{GIVEN}{data.name}")
            resolved = dataclasses.replace(resolved, data=named)
        run_folder = RunFolder(Path(out) if out is not None else _default_folder(resolved.name))
        with world.comm_errors(f"go on from the last checkpoint with --resume --out {shell_quote(run_folder.path)}"):
            resumes = world.on_rank0(lambda: _resumes(run_folder, resolved, resume=resume, overwrite=overwrite))
            with (
                live or TrainingProgress(quiet=not world.is_main) as progress,
                deterministic(resolved.engine.deterministic),
            ):
                data = data or load_data(resolved, progress=progress.data_loading)
                model = model or build_model(resolved, data)
                trainer = Trainer(resolved, run_folder, data, model, progress, loggers, observers, rows, world)
                rows_count = None if rows is None else len(rows)
                with _locked(run_folder, world):
                    progress.start_run(_headline(trainer))
                    if resume and not resumes:
                        progress.log(f"there is nothing in {run_folder.path} to go on with; beginning anew")
                    if resumes:
                        _resume(trainer, resolved, run_folder, progress)
                    else:  # only now, when nothing in the call can be wrong any more, is an earlier run given up
                        world.on_rank0(lambda: _start_new(run_folder, trainer, rows_count))
                    trainer.fit()
                    return _finish(trainer, _model_metadata(resolved, data))


def _check_given(model: object, data: object) -> None:
    """An error where what was passed in Python is of another kind."""
    if model is not None:
        check_module(model)
    if data is not None and not isinstance(data, datasets.Dataset):
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


def _default_folder(name: str) -> Path:
    """Where a recipe's run goes; an error where its name leads to somewhere else."""
    if name in ("", ".", "..") or set(name) & set("/\\\0"):
        raise UsageError(f"the recipe's name {name!r} is not that of a folder below runs; change it or give --out")
    return Path("runs", name)


def _headline(trainer: Trainer) -> str:
    """What is about to be done, in a line."""
    recipe, engine, images = trainer.recipe, trainer.engine, trainer.engine.loader.shard.examples
    device = environment.environment_info(trainer.device)["device"]
    where = device if trainer.world.size == 1 else f"{trainer.world.size} x {device}"
    how_long = f"{images:,} images x {recipe.training.epochs}"
    how = f"{where}, {engine.kind} in {engine.precision_name}"
    return f"{recipe.name}: {recipe.method.name}, {recipe.threat!r}, {how_long}; {how}; into {trainer.run_folder.path}"


def _recipe_of_run(out: str | Path | None, resume: bool) -> Recipe:
    """The recipe of the run that goes on."""
    if not (resume and out is not None):
        raise UsageError("give a recipe, or with resume the folder of a run (out); `atas ls recipes` shows recipes")
    return load_recipe(RunFolder(Path(out)))


@contextmanager
def _locked(run_folder: RunFolder, world: World) -> Iterator[None]:
    """The folder exists, and no other run writes into it."""
    with ExitStack() as stack:

        def keep() -> None:
            run_folder.path.mkdir(parents=True, exist_ok=True)
            sentence = f"another process trains in {run_folder.path}; wait for it or choose another --out"
            stack.enter_context(file_lock(run_folder.lock, sentence))

        world.on_rank0(keep)
        yield


def _finish(trainer: Trainer, metadata: dict[str, Any]) -> Run:
    """Write the weights that the training ended with; the run, whose folder the first process alone must see."""
    model, run_folder, world = revert_sync_batchnorm(trainer.engine.final_model), trainer.run_folder, trainer.world
    world.on_rank0(lambda: save_weights(run_folder.model, model, metadata))
    if world.is_main:
        return Run.load(run_folder.path, model=model)
    return Run(run_folder.path, trainer.recipe, model.eval(), [])


def _resumes(run_folder: RunFolder, recipe: Recipe, *, resume: bool, overwrite: bool) -> bool:
    """Whether a run in the folder goes on; an error where it holds what must not be lost."""
    if not run_folder.recipe.exists():
        if run_folder.path.exists() and any(not path.name.startswith(".") for path in run_folder.path.iterdir()):
            raise UsageError(
                f"{run_folder.path} is not empty and not the folder of a run (no recipe.toml in it); choose another "
                f"--out"
            )
        return False
    if resume and overwrite:
        raise UsageError("--resume goes on with a run and --overwrite gives it up; leave one of them out")
    if resume:
        changed = differences(load_recipe(run_folder), recipe, ignore=RESUME_MAY_CHANGE)
        if changed:
            raise UsageError(
                f"the run in {run_folder.path} was begun with another recipe ({'; '.join(changed[:3])}); resume it "
                f"with its own (atas train --resume --out {shell_quote(run_folder.path)}) or choose another folder "
                f"with --out"
            )
        return True
    if not overwrite:
        raise UsageError(
            f"there is a run in {run_folder.path} already; go on with --resume, begin anew with --overwrite, "
            f"or choose another folder with --out"
        )
    return False


def _start_new(run_folder: RunFolder, trainer: Trainer, rows_count: int | None) -> None:
    """Give up what an earlier run left, its recipe last, when the new one replaces it."""
    results = [
        path for kind in ("json*", "md") for path in run_folder.path.glob(f"{run_folder.evaluation.stem}*.{kind}")
    ]
    for path in (run_folder.metrics, run_folder.model, run_folder.environment, run_folder.report, *results):
        path.unlink(missing_ok=True)
    for folder in (run_folder.last_checkpoint.parent, run_folder.tensorboard, run_folder.wandb, run_folder.exports):
        shutil.rmtree(folder, ignore_errors=True)
    write_text(run_folder.recipe, f"# atas train {run_folder.recipe}\n{trainer.recipe.to_toml()}")
    part = {} if rows_count is None else {ROWS_KEY: rows_count}
    write_text(run_folder.environment, json.dumps(_environment(trainer) | part, indent=2) + "\n")


def _resume(trainer: Trainer, recipe: Recipe, run_folder: RunFolder, progress: TrainingProgress) -> None:
    """Go on from the last checkpoint, and say where."""
    if trainer.world.is_main:
        for stale in run_folder.path.rglob(".*.tmp"):  # a process that was killed in the middle of a write left them
            stale.unlink()
    if not trainer.resume():
        progress.log(f"there is no checkpoint in {run_folder.path} yet; beginning anew")
    elif trainer.epoch == recipe.training.epochs:
        lost = trainer.world.is_main and not is_readable(run_folder.model)
        more = "; its weights, missing or damaged, are written anew from the last checkpoint" if lost else ""
        progress.log(f"the run in {run_folder.path} has finished already{more}")
    else:
        progress.log(f"going on in {run_folder.path} at epoch {trainer.epoch + 1}, batch {trainer.batch + 1}")
    if trainer.world.is_main:
        before, now = read_json(run_folder.environment), _environment(trainer)
        keys = ("atas", "torch", "device", "cuda", "engine", "precision", "processes")
        changed = {key: now[key] for key in keys if key in before and before[key] != now[key]}
        if changed:
            trainer.log_event({"event": "resume", "epoch": trainer.epoch, **changed})


def _environment(trainer: Trainer) -> dict[str, Any]:
    engine = trainer.engine
    described = environment.environment_info(trainer.device) | {
        "engine": engine.kind,
        "precision": engine.precision_name,
    }
    return described | {"processes": trainer.world.size}


def _model_metadata(recipe: Recipe, data: datasets.Dataset) -> dict[str, Any]:
    return {
        "name": recipe.model.name,
        "num_classes": data.num_classes,
        "channels": data.shape[0],
        "mean": recipe.model.mean,
        "std": recipe.model.std,
        "shape": eval_view(data, recipe.data).shape,
        "classes": data.train.classes,
        "data": recipe.data.name,
        "method": recipe.method.name,
        "threat": repr(recipe.threat),
    }


@contextmanager
def deterministic(enabled: bool) -> Iterator[None]:
    """Inside, where enabled, only algorithms whose results do not change from run to run.

    An operation of a user's model that has none raises an error that names it. cuDNN's search for the fastest algorithm
    is off, since its choice hangs on timings; enabled or not, it is put back to what it was.
    """
    algorithms, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        if enabled:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            torch.backends.cudnn.benchmark = False
        yield
    finally:
        if enabled:  # the call imports torch's compiler, which takes a second
            torch.use_deterministic_algorithms(algorithms)
        torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = benchmark
