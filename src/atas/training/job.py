"""`train()`: from a recipe to a finished run.

It holds the rules for a run's folder: new, resumed or overwritten. Nothing of an earlier run is deleted before all
arguments have been checked.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atas import data as datasets
from atas import recipes
from atas._utils import environment
from atas._utils.files import file_lock, remove_temporaries, write_text
from atas._utils.formatting import shell_quote
from atas._utils.imports import GIVEN
from atas.core.arguments import check_arguments, check_interface
from atas.core.autograd import eval_mode
from atas.core.validation import check_module
from atas.distributed.batchnorm import revert_sync_batchnorm
from atas.distributed.state import gather_rows
from atas.distributed.world import World, init
from atas.errors import UsageError
from atas.methods import AdaptiveStepSizes
from atas.models.weights import is_readable, save_weights
from atas.recipes import Recipe, differences
from atas.recipes.fingerprint import RESUME_MAY_CHANGE
from atas.training.build import build_model, split_rows
from atas.training.callbacks import Callback, Logger
from atas.training.data import eval_view, load_data
from atas.training.examples import measure_examples, write_examples
from atas.training.initial_weights import identify_weights, load_initial_weights
from atas.training.monitor import ProbeResult
from atas.training.monitor_budget import resolve_probe
from atas.training.progress import TrainingProgress
from atas.training.run import ROWS_KEY, Run, RunFolder, load_recipe, write_recipe
from atas.training.trainer import Trainer


@check_arguments
def train(
    recipe: str | Path | Recipe | None = None,
    *,
    out: str | Path | None = None,
    values: Mapping[str, Any] | None = None,
    seed: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    model: nn.Module | None = None,
    data: Any = None,
    live: TrainingProgress | None = None,
    loggers: Sequence[Logger] = (),
    observers: Sequence[Callback] = (),
    rows: Tensor | None = None,
    probe: Callable[[nn.Module], ProbeResult] | None = None,
    trust: bool = False,
) -> Run:
    """Train a robust classifier.

    `recipe` is a recipe's name, its path or a Recipe; `values` overrides keys such as `{"training.epochs": 10}`. The
    run is written to the folder `out`, by default `runs/<recipe>`. With `resume`, a stopped run in that folder
    continues, and the recipe may be left out. `model` and `data` replace the recipe's; `data` is a Dataset, a name that
    `atas.data.load` takes, a pair (train, test) of datasets of (image, label), or a pair ((x, y), (x_test, y_test)) of
    arrays. `loggers` get the metrics of every epoch, in addition to the recipe's own loggers; `observers` are
    called after steps. `rows` are the indices of the training images to use, by default all. `probe` replaces the
    monitor's measurement after each epoch, for example by a stronger attack or one on other images: it gets the
    model in eval mode and returns a `atas.training.ProbeResult`. `trust` allows the recipe of a folder to name
    code, if you resume the folder or pass the recipe of its `Run`; another recipe that you pass may name code
    without it.
    Processes that torchrun started, or that form a group of torch.distributed, train together; rank 0 writes the folder
    and calls `probe`.

    >>> run = train("digits-small-cnn-atas", out="/tmp/run", values={"training.epochs": 1})  # doctest: +SKIP
    """
    if isinstance(data, str | Path):
        values, data = {**(values or {}), "data.name": str(data)}, None
    _check_given(model, data)
    check_interface("a logger", loggers, ("start", "log", "close"))
    check_interface("an observer", observers, ("due", "on_step_end"))
    with init() as world:
        resolved = (
            world.on_rank0(lambda: _recipe_of_run(out, resume, trust)) if recipe is None else recipes.load(recipe)
        )
        resolved = resolved.with_trust() if trust else resolved
        resolved = resolved.with_values(_with_seed(values or {}, seed))
        if probe is not None and resolved.training.probe == "auto":  # the cost of the caller's probe is not known
            resolved = resolved.with_values({"training.probe_every": resolved.training.probe_every or 1})
        resolved = _with_given(resolved, model, data)
        run_folder = RunFolder(_given_folder(out) if out is not None else default_folder(resolved.name))
        known = world.on_rank0(lambda: _automatic_values(resolved, run_folder if resume else None, world.size))
        resolved = resolved.with_values(known)
        resolved = world.on_rank0(lambda: identify_weights(resolved, run_folder, resume))
        options = f"--resume --out {shell_quote(run_folder.path)}{resolved.trust_option}"
        with world.comm_errors(f"continue from the last checkpoint with {options}"):

            def resumes_run() -> bool:
                return check_folder(run_folder, resolved, resume=resume, overwrite=overwrite)

            world.on_rank0(resumes_run)  # before anything is created: the folder may hold something else
            with (
                _locked(run_folder, world),
                live or TrainingProgress(quiet=not world.is_main) as progress,
                deterministic(resolved.engine.deterministic),
            ):
                resumes = world.on_rank0(resumes_run)  # again: another process may have trained here meanwhile
                with progress.timing("loading data"):
                    skipped = world.on_rank0(run_folder.read_skipped) if resumes and data is None else None
                    data = _load(resolved, data, progress, skipped)
                resolved = resolve_probe(resolved, len(data.train))
                new = not (resumes and world.on_rank0(run_folder.last_checkpoint.exists))
                # a module may have a length
                network = build_model(resolved, data, pretrained=new) if model is None else model
                notes = world.on_rank0(lambda: load_initial_weights(network, resolved)) if new else []
                trainer = Trainer(resolved, run_folder, data, network, progress, loggers, observers, rows, probe, world)
                progress.start_run(_headline(trainer))
                for note in notes:
                    progress.log(note)
                if (gap := data.gap) is not None:
                    progress.log(gap)
                if data.skipped:
                    progress.log(f"left out {_count(len(data.skipped))}; {run_folder.skipped} lists them")
                if resumes:
                    _resume(trainer, resolved, run_folder, progress)
                else:  # only now, after all checks, is an earlier run deleted
                    if resume:
                        progress.log(f"there is nothing to resume in {run_folder.path}; starting from the beginning")
                    rows_count = None if rows is None else len(rows)
                    world.on_rank0(lambda: _start_new(run_folder, trainer, rows_count, data.skipped))
                trainer.fit()
                with progress.timing("saving"):
                    _save_weights(trainer, _model_metadata(resolved, data))
                    _save_examples(trainer, eval_view(data, resolved.data).train, rows)
                    run = _finished_run(trainer)
                progress.end_run()
                return run


def _check_given(model: object, data: object) -> None:
    """Raise UsageError if `model` or `data` has the wrong type."""
    if model is not None:
        check_module(model)
    if data is not None:
        datasets.check_given(data)


def _with_given(recipe: Recipe, model: nn.Module | None, data: Any) -> Recipe:
    """Return the recipe with the names of a model and of data that were given in Python."""
    if model is not None:
        name = f"{GIVEN}{type(model).__name__}"
        recipe = dataclasses.replace(
            recipe, model=dataclasses.replace(recipe.model, name=name, pretrained=None, settings={})
        )
    if data is not None:
        name = f"{GIVEN}{datasets.given_name(data)}"
        recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, name=name))
    return recipe


def _load(recipe: Recipe, given: Any, progress: TrainingProgress, skipped: Sequence[str] | None) -> datasets.Dataset:
    """Return the data that was given in Python, or that of the recipe without the images that the run has skipped."""
    if given is None:
        return load_data(recipe, progress=progress.data_loading, skipped=skipped)
    name = datasets.given_name(given)
    return datasets.as_dataset(given, name, size=recipe.data.size, progress=progress.data_loading)


def _count(damaged: int) -> str:
    return f"{damaged:,} damaged image{'s' if damaged > 1 else ''}"


def _with_seed(values: Mapping[str, Any], seed: int | None) -> dict[str, Any]:
    """Return the values with the seed among them."""
    if seed is None:
        return dict(values)
    if values.get("training.seed", seed) != seed:
        raise UsageError(f"the seed is {seed} and training.seed is {values['training.seed']}; pass one of them")
    return {**values, "training.seed": seed}


def _automatic_values(recipe: Recipe, resumed: RunFolder | None, processes: int) -> dict[str, Any]:
    """Return values for what the recipe leaves open: those of the run to resume, and one shard for each process."""
    saved = load_recipe(resumed) if resumed is not None and resumed.recipe.exists() else None
    values: dict[str, Any] = {}
    if recipe.data.shards is None:
        shards = saved.data.shards if saved is not None else processes if processes > 1 else None
        values = {} if shards is None else {"data.shards": shards}
    if recipe.training.probe == "auto" and saved is not None:
        values |= {"training.probe": saved.training.probe, "training.probe_every": saved.training.probe_every}
    return values


def _given_folder(out: str | Path) -> Path:
    """Return the folder of a run; raise UsageError if safetensors cannot open files in it."""
    try:
        str(out).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the path {out} is not UTF-8, as files of weights need it; choose another --out") from error
    return Path(out)


def default_folder(name: str) -> Path:
    """Return the folder of a recipe's run; raise UsageError if its name is not that of a folder."""
    if name in ("", ".", "..") or set(name) & set("/\\\0"):
        raise UsageError(f"the recipe's name {name!r} cannot be the name of a folder in runs; change it or pass --out")
    return Path("runs", name)


def _headline(trainer: Trainer) -> str:
    """Return one line about the training that starts."""
    recipe, engine, images = trainer.recipe, trainer.engine, trainer.engine.loader.shard.examples
    device = environment.environment_info(trainer.device)["device"]
    where = device if trainer.world.size == 1 else f"{trainer.world.size} x {device}"
    how_long = f"{images:,} images of {recipe.data.label} x {recipe.training.epochs}"
    how = f"{where}, {engine.kind} in {engine.precision_name}"
    return f"{recipe.name}: {recipe.method.name}, {recipe.threat!r}, {how_long}; {how}; into {trainer.run_folder.path}"


def _recipe_of_run(out: str | Path | None, resume: bool, trust: bool) -> Recipe:
    """Return the recipe of the run to resume."""
    if not (resume and out is not None):
        raise UsageError("pass a recipe, or with resume the folder of a run (out); `atas ls recipes` shows recipes")
    return load_recipe(RunFolder(Path(out)), trust=trust)


@contextmanager
def _locked(run_folder: RunFolder, world: World) -> Iterator[None]:
    """Keep other processes from training in the folder. It is created, and removed again if it stays empty."""
    with ExitStack() as stack:

        def lock() -> None:
            created = [folder for folder in (run_folder.path, *run_folder.path.parents) if not folder.exists()]
            stack.callback(_remove_empty, created)
            sentence = f"another process trains in {run_folder.path}; wait for it or choose another --out"
            stack.enter_context(file_lock(run_folder.lock, sentence))

        world.on_rank0(lock)
        yield


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove the folders in this order, up to the first that is not empty."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


def _save_weights(trainer: Trainer, metadata: dict[str, Any]) -> None:
    """Write the final weights. Only rank 0 needs access to the folder."""
    model, run_folder, world = revert_sync_batchnorm(trainer.engine.final_model), trainer.run_folder, trainer.world
    others = list(trainer.engine.averages.items())[1:]

    def save() -> None:
        again = "continue with --resume"
        for decay, average in others:
            save_weights(run_folder.average(decay), revert_sync_batchnorm(average.model), metadata, again=again)
        save_weights(run_folder.model, model, metadata, again=again)

    world.on_rank0(save)


def _save_examples(trainer: Trainer, train: datasets.Split, rows: Tensor | None) -> None:
    """Write training examples by gradient norm for the report, if the method has norms."""
    engine, recipe, world = trainer.engine, trainer.recipe, trainer.world
    if not isinstance(engine.method, AdaptiveStepSizes):
        return
    values = engine.method.gradient_norms, engine.method.step_sizes
    norms, step_sizes = (gather_rows(value, engine.loader.shard, world) for value in values)

    def save() -> None:
        examples = measure_examples(
            revert_sync_batchnorm(engine.final_model),
            train,
            split_rows(recipe, len(train), rows)[1],
            norms,
            step_sizes,
            recipe.threat,
            epochs=recipe.training.epochs,
            batch_size=engine.eval_batch_size,
        )
        write_examples(trainer.run_folder.training_examples, examples)

    world.on_rank0(save)


def _finished_run(trainer: Trainer) -> Run:
    engine, run_folder, world = trainer.engine, trainer.run_folder, trainer.world
    for averaged, trained in zip(engine.final_model.parameters(), engine.model.parameters(), strict=True):
        averaged.requires_grad_(trained.requires_grad)  # or a model with averaged weights could not be trained further
    model = revert_sync_batchnorm(engine.final_model)
    if world.is_main:
        return Run.load(run_folder.path, model=model, trust=trainer.recipe.trusted)
    return Run(run_folder.path, trainer.recipe, eval_mode(model), [])


def check_folder(run_folder: RunFolder, recipe: Recipe, *, resume: bool, overwrite: bool) -> bool:
    """Return whether to resume the run in a folder; raise UsageError if the folder must not be overwritten."""
    if not run_folder.recipe.exists():
        if run_folder.path.exists() and not run_folder.path.is_dir():
            raise UsageError(f"{run_folder.path} is a file, not the folder of a run; choose another --out")
        if run_folder.path.exists() and any(not path.name.startswith(".") for path in run_folder.path.iterdir()):
            raise UsageError(
                f"{run_folder.path} is not empty and not the folder of a run (no recipe.toml in it); choose another "
                f"--out"
            )
        return False
    if resume and overwrite:
        raise UsageError("--resume continues a run and --overwrite deletes it; leave one of them out")
    if resume:
        changed = differences(load_recipe(run_folder), recipe, ignore=(*RESUME_MAY_CHANGE, "model.weights"))
        if changed:
            raise UsageError(
                f"the run in {run_folder.path} was started with another recipe ({'; '.join(changed[:3])}); resume it "
                f"with its own (atas train --resume --out {shell_quote(run_folder.path)}{recipe.trust_option}) or "
                f"choose another folder with --out"
            )
        return True
    if not overwrite:
        raise UsageError(
            f"there is a run in {run_folder.path} already; continue it with --resume, start again with "
            f"--overwrite, or choose another folder with --out"
        )
    return False


def _start_new(
    run_folder: RunFolder, trainer: Trainer, rows_count: int | None, skipped: Sequence[tuple[str, str]] = ()
) -> None:
    """Delete the files of an earlier run, and write recipe and environment of the new one. The earlier recipe stays
    until the new one replaces it."""
    results = [
        path
        for kind in ("json*", "md", "safetensors")
        for path in run_folder.path.glob(f"{run_folder.evaluation.stem}*.{kind}")
    ]
    weights = (run_folder.model, *run_folder.averages)
    others = (
        run_folder.metrics,
        run_folder.environment,
        run_folder.report,
        run_folder.skipped,
        run_folder.training_examples,
    )
    for path in (*others, *weights, *results):
        path.unlink(missing_ok=True)
    for folder in (run_folder.last_checkpoint.parent, run_folder.tensorboard, run_folder.wandb, run_folder.exports):
        shutil.rmtree(folder, ignore_errors=True)
    if skipped or trainer.recipe.data.skip_damaged:  # before the recipe: with that, the folder can be resumed
        write_text(run_folder.skipped, json.dumps({"skipped": skipped}, indent=1) + "\n")
    write_recipe(run_folder, trainer.recipe)
    part = {} if rows_count is None else {ROWS_KEY: rows_count}
    write_text(run_folder.environment, json.dumps(_environment(trainer) | part, indent=2) + "\n")


def _resume(trainer: Trainer, recipe: Recipe, run_folder: RunFolder, progress: TrainingProgress) -> None:
    """Resume from the last checkpoint, and log the position."""
    if trainer.world.is_main:
        for path in run_folder.written:
            remove_temporaries(path)
    if not trainer.resume():
        progress.log(f"there is no checkpoint in {run_folder.path} yet; starting from the beginning")
    elif trainer.epoch == recipe.training.epochs:
        lost = trainer.world.is_main and not is_readable(run_folder.model)
        more = "; its weights, missing or damaged, are restored from the last checkpoint" if lost else ""
        progress.log(f"the run in {run_folder.path} has finished already{more}")
    else:
        progress.log(f"resuming {run_folder.path} at epoch {trainer.epoch + 1}, batch {trainer.batch + 1}")
    trainer.world.on_rank0(lambda: _log_changes(trainer, run_folder))


def _log_changes(trainer: Trainer, run_folder: RunFolder) -> None:
    """Write a row to the metrics if the rest is trained with other versions or hardware than the run began with."""
    before, now = run_folder.read_environment(), _environment(trainer)
    keys = ("atas", "torch", "device", "cuda", "engine", "precision", "processes")
    changed = {key: now[key] for key in keys if key in before and before[key] != now[key]}
    if changed and trainer.epoch < trainer.recipe.training.epochs:
        trainer.log_event({"event": "resume", "epoch": trainer.epoch, **changed})


def _environment(trainer: Trainer) -> dict[str, Any]:
    engine = trainer.engine
    described = environment.environment_info(trainer.device) | {
        "engine": engine.kind,
        "precision": engine.precision_name,
    }
    return described | {"processes": trainer.world.size}


def _model_metadata(recipe: Recipe, data: datasets.Dataset) -> dict[str, Any]:
    options = {"options": dict(recipe.model.settings)} if recipe.model.settings else {}
    return options | {
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
    """Use only deterministic algorithms in this context, if enabled.

    An operation without a deterministic algorithm raises an error that names it. cuDNN's benchmark mode is off, because
    its choice depends on timings; it is restored at the end, enabled or not.
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
