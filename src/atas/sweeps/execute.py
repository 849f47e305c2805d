"""Run one trial: train, evaluate, measure, and save its record.

Costs estimate how long a plan takes. Their unit is a forward pass of one image through PreActResNet-18. A backward pass
to the image costs as much again, a backward pass to the weights too costs twice that.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from atas.attacks import Clean
from atas.core.fingerprint import weights_hash
from atas.core.rng import Stream, generator_seed
from atas.data import Dataset, Split
from atas.distributed.world import select_device
from atas.errors import UsageError
from atas.evaluation import evaluate
from atas.models.weights import load_weights
from atas.report import summarise
from atas.sweeps.padded_evaluation import pad_split, with_released_pooling
from atas.sweeps.progress import PlanProgress
from atas.sweeps.record import Record
from atas.sweeps.store import SHARED, Store
from atas.sweeps.trial import FinishedTraining, Measurement, Trial, missing_measurements, unique_measurements
from atas.training import train
from atas.training.callbacks import StepInfo
from atas.training.data import eval_view
from atas.training.engine import Engine
from atas.training.run import RunFolder

LoadData = Callable[[Trial], Dataset]
IsShared = Callable[[], bool]
DefaultMeasurements = Callable[[Trial], tuple[Measurement, ...]]
"""Returns measurements for a trial besides its own; they cost almost nothing."""


def is_done(trial: Trial, store: Store) -> bool:
    """Return whether the record has all attacks and measurements of the trial."""
    record = store.record(trial)
    return (
        record is not None
        and not record.missing_attacks(trial.attacks)
        and not missing_measurements(record, trial.measurements)
    )


def remaining_cost(trial: Trial, store: Store, data: Dataset) -> tuple[float, float]:
    """Return the cost of the training and of the evaluation that a trial still needs."""
    trained, known = _training_folder(trial, store).model.exists(), store.record(trial)
    attacks = _attacks_to_run(trial, known, same=trained)
    test = trial.held_out or len(data.test)
    images = test if trial.examples is None else min(test, trial.examples)
    train_images = (len(data.train) - trial.held_out) * (1.0 if trial.subset is None else trial.subset.share)
    training = 0.0 if trained else training_cost(trial, round(train_images))
    return training, evaluation_cost(trial, attacks, images)


def execute(
    trial: Trial,
    store: Store,
    load: LoadData,
    progress: PlanProgress,
    is_shared: IsShared,
    default_measurements: DefaultMeasurements = lambda _: (),
) -> Record:
    """Train, evaluate and measure, skipping what is done. After a stop at any moment, the same call resumes.

    `is_shared` returns whether another process uses the device; the time of such a training is not reported.
    """
    defaults = default_measurements(trial)
    training, evaluation = remaining_cost(trial, store, load(trial))
    progress.start_phase(training)
    run_folder = _training_folder(trial, store)
    model = _train(trial, store, run_folder, load, progress, is_shared, defaults)
    if (repeated := _training_folder(trial, store)).path != run_folder.path:
        # The training resumed a checkpoint of a process without these measurements, so it lacks their data: repeat it.
        run_folder = repeated
        model = _train(trial, store, run_folder, load, progress, is_shared, defaults)
    free_memory()  # CUDA graphs of the training are not needed any more
    progress.start_phase(evaluation)
    record = _evaluate(trial, store, run_folder, model, load, progress)
    record = _measure(trial, store, run_folder, model, load, record, defaults)
    store.remove_checkpoints(run_folder)
    return record


def _training_folder(trial: Trial, store: Store) -> RunFolder:
    """Return the run folder of a training that has the data of all missing measurements, or a new one."""
    missing = missing_measurements(store.record(trial), trial.measurements)
    return store.training_folder(trial, lambda folder: all(one.is_available(trial, folder) for one in missing))


def free_memory() -> None:
    """Free the memory of a finished trial, on the device too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _train(
    trial: Trial,
    store: Store,
    run_folder: RunFolder,
    load: LoadData,
    progress: PlanProgress,
    is_shared: IsShared,
    defaults: tuple[Measurement, ...],
) -> nn.Module:
    recipe = trial.resolved_recipe
    device = select_device(recipe.engine.device)
    if run_folder.model.exists():
        return load_weights(run_folder.model, trust=recipe.model.name).to(device)
    run_folder.path.parent.mkdir(parents=True, exist_ok=True)
    data = held_out_as_test(load(trial), trial.held_out) if trial.held_out else None
    sharing = DeviceSharing(run_folder.path / SHARED, is_shared)
    measurements = unique_measurements((*trial.measurements, *defaults))
    run = train(
        recipe,
        out=run_folder.path,
        resume=run_folder.recipe.exists(),
        data=data,
        live=progress.live(),
        observers=[sharing, *(callback for one in measurements for callback in one.callbacks(run_folder))],
        rows=None if trial.subset is None else trial.subset.rows(store),
    )
    sharing.mark()
    return run.model.to(device)


class DeviceSharing:
    """Callback that checks whether another process uses the device: at the start, after each epoch and at the end.

    If so, it writes a file into the run folder.
    """

    def __init__(self, file: Path, is_shared: IsShared) -> None:
        self._file, self._is_shared = file, is_shared
        self._seen = is_shared()

    def due(self, info: StepInfo) -> bool:
        """Return whether an epoch ends."""
        return info.ends_epoch

    def on_step_end(self, info: StepInfo, engine: Engine) -> None:
        """Check the device."""
        self.mark()

    def mark(self) -> None:
        """Write the file if another process uses the device or used it at an earlier check."""
        self._seen = self._seen or self._is_shared()
        if self._seen:
            self._file.touch()


def _evaluate(
    trial: Trial, store: Store, run_folder: RunFolder, model: nn.Module, load: LoadData, progress: PlanProgress
) -> Record:
    """Return the record with all attacks of the trial; attacks known for these weights are not repeated."""
    recipe = trial.resolved_recipe
    known = store.record(trial)
    if known is not None and not known.missing_attacks(trial.attacks):
        return known
    same = known is not None and known.weights == weights_hash(model)
    attacks = _attacks_to_run(trial, known, same)
    test = _test_split(trial, load(trial))
    result = evaluate(
        with_released_pooling(model) if trial.padding else model,
        test,
        threat=recipe.threat,
        attacks=attacks,
        batch_size=recipe.evaluation.batch_size,
        progress=progress.watch,
        progress_file=store.progress_file(trial),
    )
    result.save(store.evaluation_file(trial, attacks), keep_progress=True)
    if known is not None and same:
        record = known.with_evaluation(result)
    else:
        (summary,) = summarise([run_folder.path])
        shared = (run_folder.path / SHARED).exists()
        record = Record.from_run(trial, summary, run_folder.read_environment(), result, shared)
        record = record if known is None else record.merge(known)  # keeps the measurements
    store.save(trial, record)  # before measurements, which may take long
    result.forget_progress()
    return record


def _attacks_to_run(trial: Trial, known: Record | None, same: bool) -> tuple[str, ...]:
    """Return the attacks to run: all of the record too if the weights are others, because a record is of one model."""
    if known is None:
        return trial.attacks
    missing = known.missing_attacks(trial.attacks)
    return missing if same or not missing else (*(name for name in known.attacks if name != Clean.name), *missing)


def _measure(
    trial: Trial,
    store: Store,
    run_folder: RunFolder,
    model: nn.Module,
    load: LoadData,
    record: Record,
    defaults: tuple[Measurement, ...],
) -> Record:
    """Return the record with all measurements; each is saved before the next one runs."""
    finished = FinishedTraining(trial, run_folder, model, load(trial), store)
    extra = [one for one in defaults if one not in trial.measurements and one.is_available(trial, run_folder)]
    for measurement in missing_measurements(record, (*extra, *trial.measurements)):
        entry = finished.metadata | measurement.stated_settings | measurement.measure(finished)
        record = record.with_measurement(measurement.record_key(record), entry)
        store.save(trial, record)
    return record


def _test_split(trial: Trial, data: Dataset) -> Split:
    """Return the split that the model is evaluated on."""
    whole = held_out_as_test(data, trial.held_out) if trial.held_out else data
    split = eval_view(whole, trial.resolved_recipe.data).test
    return pad_split(split.subset(slice(trial.examples)), trial.padding)


_NETWORKS = {"preact-resnet18": 1.0, "wrn-28-10": 9.4, "resnet18": 3.3, "resnet50": 7.4, "small-cnn": 0.005}
_METHODS = {"standard": 3.0, "fgsm-ga": 12.0, "ssat": 7.0, "free": 24.0, "yopo": 18.0, "pgd": 23.0, "trades": 26.0}
_METHODS |= {"multigrad": 9.0, "elle": 14.0, "gat": 9.0, "nuat": 9.0, "fgsm-pgi": 8.0, "tdat": 8.0, "liet": 8.0}
_METHODS |= {"mart": 26.0, "fgsm-pco": 11.0, "fgsm-uap": 8.0, "fgsm-pgk": 8.0, "fgsm-rs-cs": 8.0, "fgsm-mep-cs": 8.0}
_ONE_STEP = 5.0
_ATTACKS = {"fgsm": 2.0, "autoattack": 4000.0, "autoattack-rand": 3000.0}  # if half of the examples are robust
_SEARCH = 1000.0


def training_cost(trial: Trial, images: int) -> float:
    """Return the cost of the training on a number of images."""
    recipe = trial.resolved_recipe
    each = _METHODS.get(recipe.method.name, _ONE_STEP)
    return recipe.training.epochs * images * each * _NETWORKS.get(recipe.model.name, 1.0)


def evaluation_cost(trial: Trial, attacks: tuple[str, ...], images: int) -> float:
    """Return the cost of an evaluation with these attacks on a number of images."""
    size = (1 + trial.padding / 16) ** 2  # images of 32 pixels a side
    return images * size * sum(map(_passes, attacks)) * _NETWORKS.get(trial.resolved_recipe.model.name, 1.0)


def _passes(attack: str) -> float:
    if match := re.fullmatch(r"pgd(\d+)(?:x(\d+))?", attack):
        return 2.0 * int(match[1]) * int(match[2] or 1)
    return _ATTACKS.get(attack, _SEARCH)


def held_out_as_test(data: Dataset, count: int) -> Dataset:
    """Return a data set whose test split is `count` of the training images, the same in every trial."""
    if not 0 < count < len(data.train):
        raise UsageError(f"cannot hold out {count} of {len(data.train)} training images; choose fewer")
    generator = torch.Generator().manual_seed(generator_seed(0, 0, Stream.PROBE))
    order = torch.randperm(len(data.train), generator=generator)
    held, rest = order[:count].sort().values, order[count:].sort().values
    return Dataset(data.name, data.train.subset(rest), data.train.subset(held))
