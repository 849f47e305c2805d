"""One trial from beginning to end: train, evaluate, write down."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from atas._files import read_json
from atas.attacks import Clean
from atas.data import Dataset, Split
from atas.evaluation import evaluate
from atas.evaluation._fingerprint import weights_hash
from atas.report import summarise
from atas.reproduce import cost
from atas.reproduce.holding_out import hold_out
from atas.reproduce.observation import Seen, unobserved
from atas.reproduce.observations import usual
from atas.reproduce.progress import PlanProgress
from atas.reproduce.record import Record
from atas.reproduce.released import as_released, padded
from atas.reproduce.store import SHARED, Store
from atas.reproduce.trial import Trial
from atas.training import train
from atas.training.engine import Engine, choose_device
from atas.training.observe import Moment
from atas.training.run import Folder
from atas.training.views import as_tested
from atas.training.weights import load_weights

Load = Callable[[Trial], Dataset]
Others = Callable[[], bool]


def is_done(trial: Trial, store: Store) -> bool:
    """Whether there is nothing left to do."""
    record = store.record(trial)
    return record is not None and not record.missing(trial.attacks) and not unobserved(record, trial.observe)


def work(trial: Trial, store: Store, data: Dataset) -> tuple[float, float]:
    """What is left of a trial: its training and its evaluation."""
    trained, known = _place(trial, store).model.exists(), store.record(trial)
    attacks = _attacks(trial, known, same=trained)
    test = trial.held_out or len(data.test)
    images = test if trial.examples is None else min(test, trial.examples)
    learnt = (len(data.train) - trial.held_out) * (1.0 if trial.part is None else trial.part.share)
    training = 0.0 if trained else cost.training_cost(trial, round(learnt))
    return training, cost.evaluation_cost(trial, attacks, images)


def execute(trial: Trial, store: Store, load: Load, progress: PlanProgress, others: Others) -> Record:
    """Do what is left to do of a trial. After a stop at any moment, the same call goes on where it was.

    `others` says whether another process works on the same device, which makes a training's time say nothing.
    """
    training, evaluation = work(trial, store, load(trial))
    progress.part(training)
    place = _place(trial, store)
    model = _trained(trial, store, place, load, progress, others)
    if (anew := _place(trial, store)).path != place.path:
        # It went on from where others had not observed what is wanted here, so once more, from the beginning.
        place = anew
        model = _trained(trial, store, place, load, progress, others)
    make_room()  # the training's records of its steps are not wanted any more
    progress.part(evaluation)
    record = _evaluated(trial, store, place, model, load, progress)
    record = _observed(trial, store, place, model, load, record)
    store.tidy(place)
    return record


def _place(trial: Trial, store: Store) -> Folder:
    """The folder of the training: one that holds what is still to be observed."""
    left = unobserved(store.record(trial), trial.observe)
    return store.training(trial, lambda place: all(found.ready(trial, place) for found in left))


def make_room() -> None:
    """Give back the memory of a trial that is over, on the device too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _trained(
    trial: Trial, store: Store, place: Folder, load: Load, progress: PlanProgress, others: Others
) -> nn.Module:
    settings = trial.settings
    device = choose_device(settings.engine.device)
    if place.model.exists():
        return load_weights(place.model).to(device)
    place.path.parent.mkdir(parents=True, exist_ok=True)
    given = hold_out(load(trial), trial.held_out) if trial.held_out else None
    beside = _Beside(place.path / SHARED, others)
    wanted = {found.name: found for found in (*trial.observe, *usual(trial))}.values()
    run = train(
        settings,
        out=place.path,
        resume=place.recipe.exists(),
        data=given,
        live=progress.live(),
        observers=[beside, *(observer for found in wanted for observer in found.observers(place))],
        rows=None if trial.part is None else trial.part.rows(store),
    )
    beside.mark()
    return run.model.to(device)


class _Beside:
    """Looks whether another process works on the same device, when a training begins, after each of its epochs and at
    its end; leaves a file where one does."""

    def __init__(self, file: Path, others: Others) -> None:
        self._file, self._others = file, others
        self._seen = others()

    def due(self, moment: Moment) -> bool:
        return moment.ends_epoch

    def look(self, moment: Moment, engine: Engine) -> None:
        self.mark()

    def mark(self) -> None:
        self._seen = self._seen or self._others()
        if self._seen:
            self._file.touch()


def _evaluated(
    trial: Trial, store: Store, place: Folder, model: nn.Module, load: Load, progress: PlanProgress
) -> Record:
    """The trial's record with all its attacks; those that are known of these weights are not run again."""
    settings = trial.settings
    known = store.record(trial)
    if known is not None and not known.missing(trial.attacks):
        return known
    same = known is not None and known.weights == weights_hash(model)
    attacks = _attacks(trial, known, same)
    test = _images(trial, load(trial))
    result = evaluate(
        as_released(model) if trial.padding else model,
        test,
        threat=settings.threat,
        attacks=attacks,
        batch_size=settings.evaluation.batch_size,
        progress=progress.watch,
        progress_file=store.progress_file(trial),
    )
    result.save(store.evaluation_file(trial, attacks), keep_progress=True)
    if known is not None and same:
        record = known.with_evaluation(result)
    else:
        (summary,) = summarise([place.path])
        shared = (place.path / SHARED).exists()
        record = Record.of(trial, summary, read_json(place.environment), result, shared)
        record = record if known is None else record.joined(known)  # what was observed stays
    store.save(trial, record)  # before anything is observed, which may take long
    result.forget_progress()
    return record


def _attacks(trial: Trial, known: Record | None, same: bool) -> tuple[str, ...]:
    """Those that are left to run. Figures of a record are of the same weights, so those of others are made anew."""
    if known is None:
        return trial.attacks
    missing = known.missing(trial.attacks)
    return missing if same or not missing else (*(name for name in known.attacks if name != Clean.name), *missing)


def _observed(trial: Trial, store: Store, place: Folder, model: nn.Module, load: Load, record: Record) -> Record:
    """The record with all that is to be observed, and with what costs nothing; each is safe before the next."""
    seen = Seen(trial, place, model, load(trial), store)
    also = [found for found in usual(trial) if found not in trial.observe and found.ready(trial, place)]
    for observation in unobserved(record, (*also, *trial.observe)):
        record = record.with_observation(observation.name, seen.about | observation.measure(seen))
        store.save(trial, record)
    return record


def _images(trial: Trial, data: Dataset) -> Split:
    """What the model is evaluated on."""
    whole = hold_out(data, trial.held_out) if trial.held_out else data
    split = as_tested(whole, trial.settings.data).test
    return padded(split.part(slice(trial.examples)), trial.padding)
