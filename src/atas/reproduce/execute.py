"""One trial from beginning to end: train, evaluate, write down."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import nn

from atas._files import read_json
from atas.data import Dataset, Split
from atas.evaluation import evaluate
from atas.evaluation._fingerprint import weights_hash
from atas.report import summarise
from atas.reproduce import cost
from atas.reproduce.holding_out import hold_out
from atas.reproduce.progress import PlanProgress
from atas.reproduce.record import Record
from atas.reproduce.released import as_released, padded
from atas.reproduce.store import Store
from atas.reproduce.trial import Trial
from atas.training import train
from atas.training.engine import choose_device
from atas.training.run import Folder
from atas.training.weights import load_weights

Load = Callable[[Trial], Dataset]


def is_done(trial: Trial, store: Store) -> bool:
    """Whether there is nothing left to do."""
    record = store.record(trial)
    return record is not None and not record.missing(trial.attacks)


def work(trial: Trial, store: Store, data: Dataset) -> tuple[float, float]:
    """What is left of a trial: its training and its evaluation."""
    trained, known = store.training(trial).model.exists(), store.record(trial)
    attacks = trial.attacks if known is None else known.missing(trial.attacks)
    test = trial.held_out or len(data.test)
    images = test if trial.examples is None else min(test, trial.examples)
    training = 0.0 if trained else cost.training_cost(trial, len(data.train) - trial.held_out)
    return training, cost.evaluation_cost(trial, attacks, images)


def execute(trial: Trial, store: Store, load: Load, progress: PlanProgress) -> Record:
    """Do what is left to do of a trial. After a stop at any moment, the same call goes on where it was."""
    training, evaluation = work(trial, store, load(trial))
    progress.part(training)
    place = store.training(trial)
    model = _trained(trial, place, load, progress)
    store.tidy(place)
    progress.part(evaluation)
    record = _evaluated(trial, store, place, model, load, progress)
    store.save(trial, record)
    return record


def make_room() -> None:
    """Give back the memory of a trial that is over, on the device too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _trained(trial: Trial, place: Folder, load: Load, progress: PlanProgress) -> nn.Module:
    settings = trial.settings
    if place.model.exists():
        return load_weights(place.model)
    place.path.parent.mkdir(parents=True, exist_ok=True)
    given = hold_out(load(trial), trial.held_out) if trial.held_out else None
    return train(settings, out=place.path, resume=place.recipe.exists(), data=given, live=progress.live()).model


def _evaluated(
    trial: Trial, store: Store, place: Folder, model: nn.Module, load: Load, progress: PlanProgress
) -> Record:
    """The trial's record with all its attacks; those that are known of these weights are not run again."""
    settings = trial.settings
    known = store.record(trial)
    if known is not None and known.weights != weights_hash(model):
        known = None  # of another training
    attacks = trial.attacks if known is None else known.missing(trial.attacks)
    test = _images(trial, load(trial))
    model = model.to(choose_device(settings.engine.device))
    result = evaluate(
        as_released(model) if trial.padding else model,
        test,
        threat=settings.threat,
        attacks=attacks,
        batch_size=settings.evaluation.batch_size,
        progress=progress.watch,
        progress_file=store.progress_file(trial),
    )
    result.save(store.evaluation_file(trial, attacks))
    if known is not None:
        return known.with_evaluation(result)
    (summary,) = summarise([place.path])
    return Record.of(trial, summary, read_json(place.environment), result)


def _images(trial: Trial, data: Dataset) -> Split:
    """What the model is evaluated on."""
    split = hold_out(data, trial.held_out).test if trial.held_out else data.test
    return padded(split.part(slice(trial.examples)), trial.padding)
