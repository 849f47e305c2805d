"""A plan: trials that run one after the other. It can be stopped at any moment and resumed.

Processes that run a plan in the same folder divide its trials: each locks the next free training.
"""

from __future__ import annotations

import socket
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from atas._utils.formatting import format_duration
from atas.data import Dataset
from atas.distributed.world import launched_world_size, select_device
from atas.errors import AtasError, UsageError
from atas.sweeps.execute import DefaultMeasurements, execute, free_memory, is_done, remaining_cost
from atas.sweeps.locks import Locks
from atas.sweeps.progress import PlanProgress
from atas.sweeps.record import Record
from atas.sweeps.store import Store
from atas.sweeps.trial import Trial, unique_measurements
from atas.training.data import load_data
from atas.training.trainer import Interrupted

WAIT_SECONDS = 1.0  # between checks of what other processes have finished


@dataclass(frozen=True)
class Failure:
    """A trial that failed, and why."""

    trial: Trial
    sentence: str


class Plan:
    """Trials and the store of their results.

    Trials with equal keys run once. Trials that share a training are grouped, those with measurements first, so the
    training need not be repeated. Dependencies run before their dependents. Processes that share a folder divide the
    work: each locks the next free training and waits when none is free.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        store: Store,
        default_measurements: DefaultMeasurements = lambda _: (),
    ) -> None:
        merged: dict[str, Trial] = {}
        for trial in trials:
            known = merged.setdefault(trial.key, trial)
            merged[trial.key] = replace(
                known,
                attacks=tuple(dict.fromkeys((*known.attacks, *trial.attacks))),
                measurements=unique_measurements((*known.measurements, *trial.measurements)),
            )
        trainings: dict[str, list[Trial]] = {}
        for trial in merged.values():
            trainings.setdefault(trial.training_key, []).append(trial)
        needed = {other.training_key for trial in merged.values() for other in trial.depends_on}
        ordered = sorted(trainings.values(), key=lambda group: group[0].training_key not in needed)
        self.trials = [trial for group in ordered for trial in sorted(group, key=lambda one: not one.measurements)]
        self.store = store
        self._default_measurements = default_measurements
        self._data: dict[tuple[str, str | None, int | None], Dataset] = {}

    def remaining(self) -> list[Trial]:
        """Return the trials that are not done."""
        return [trial for trial in self.trials if not is_done(trial, self.store)]

    def run(self, progress: PlanProgress, after_each: Callable[[Trial], object] = lambda _: None) -> list[Failure]:
        """Run the remaining trials and return those that failed; a failure does not stop the plan.

        Data that a trial needs is loaded first, so missing data raises before anything is trained. `after_each` is
        called with every trial that this process ran.
        """
        if launched_world_size() > 1:
            raise UsageError(
                "a plan cannot run under torchrun, whose processes train one model; start the same command once for "
                "each GPU (CUDA_VISIBLE_DEVICES=0, 1, ...) with the same --out, and they share the runs"
            )
        self.import_records()
        remaining = self.remaining()
        if done := len(self.trials) - len(remaining):
            progress.log(f"{done} of {len(self.trials)} runs are done already")
        failures = self._run_trials(remaining, progress, after_each) if remaining else []
        self.import_records()
        return failures

    def import_records(self) -> None:
        """Copy records of these trials from other folders, because pages are made of this folder alone."""
        if not self.store.reuses:
            return
        with self.store.locks() as locks:
            for trial in self.trials:
                with locks.try_lock(trial.training_key) as free:
                    if free:
                        self.store.import_records(trial)

    def _run_trials(
        self, remaining: Sequence[Trial], progress: PlanProgress, after_each: Callable[[Trial], object]
    ) -> list[Failure]:
        expected = dict(zip((trial.key for trial in remaining), self._costs(remaining), strict=True))
        progress.expect(sum(expected.values()))
        failures: list[Failure] = []
        over: set[str] = set()
        with (
            progress,
            self.store.locks() as locks,
            closing(next_trials(remaining, self.store, locks, lambda count: _wait(progress, count))) as mine,
        ):
            for trial in mine:
                for other in remaining:
                    if other.key not in over and is_done(other, self.store):
                        progress.done_by_other(self._title(other), expected[other.key])
                        over.add(other.key)
                if trial.key in over:
                    continue
                progress.start_trial(self._title(trial), expected[trial.key])
                failure = self._run_trial(trial, progress, locks)
                failures += [failure] if failure else []
                over.add(trial.key)
                after_each(trial)
        return failures

    def _title(self, trial: Trial) -> str:
        return f"{self.trials.index(trial) + 1}/{len(self.trials)} {trial.label}"

    def _costs(self, trials: Sequence[Trial]) -> list[float]:
        """Return the cost of each trial; the first of those that share a training has the cost of the training."""
        costs, trained = [], set()
        for trial in trials:
            training, evaluation = remaining_cost(trial, self.store, self._load(trial))
            costs.append(evaluation + (0.0 if trial.training_key in trained else training))
            trained.add(trial.training_key)
        return costs

    def _run_trial(self, trial: Trial, progress: PlanProgress, locks: Locks) -> Failure | None:
        began = time.monotonic()
        failure = None
        try:
            with locks.device_in_use(_device_name(select_device(trial.resolved_recipe.engine.device))) as is_shared:
                record = execute(trial, self.store, self._load, progress, is_shared, self._default_measurements)
        except (Interrupted, KeyboardInterrupt):
            raise AtasError(f"stopped in {trial.label}; progress is saved, and the same command resumes it") from None
        except Exception as error:
            sentence = str(error) if isinstance(error, AtasError) else f"{type(error).__name__}: {error}"
            failure = Failure(trial, " ".join(sentence.split()))
            self.store.save_error(trial, failure.sentence, traceback.format_exc())
        progress.end()
        free_memory()
        took = f"took {format_duration(time.monotonic() - began)}"
        if failure is not None:
            progress.close(f"failed: {failure.sentence}", took, style="bold red")
        else:
            progress.close(_accuracies(trial, record), took)
        return failure

    def _load(self, trial: Trial) -> Dataset:
        """Return the data of a trial, loaded once for consecutive trials that share it."""
        config = trial.resolved_recipe.data
        key = (config.name, config.root, config.size)
        if key not in self._data:
            self._data = {key: load_data(trial.resolved_recipe)}  # one at a time, because data sets can be large
        return self._data[key]


def _device_name(device: torch.device) -> str:
    """Return a name by which processes know that they use the same device."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else socket.gethostname()


def _accuracies(trial: Trial, record: Record) -> str:
    return ", ".join(f"{name} {100 * record.attacks[name]['accuracy']:.2f}%" for name in ("clean", *trial.attacks))


def _wait(progress: PlanProgress, count: int) -> None:
    """Sleep until other processes may have finished a trial."""
    progress.wait(f"waiting for {count} run{'s' * (count > 1)} of other processes")
    try:
        time.sleep(WAIT_SECONDS)
    except KeyboardInterrupt:
        raise AtasError(
            "stopped while waiting for runs of other processes; the same command shows their results"
        ) from None


def next_trials(trials: Sequence[Trial], store: Store, locks: Locks, wait: Callable[[int], object]) -> Generator[Trial]:
    """Yield the trials one after the other, each while this process holds the lock of its training.

    Trials that another process runs, and their dependents, are deferred. If only deferred trials are left, `wait` is
    called with their number. A trial is yielded once its lock is free, whether the other process finished it or not.
    """
    left = [list(group) for _, group in groupby(trials, key=lambda trial: trial.training_key)]
    while left:
        later: list[list[Trial]] = []
        for group in left:
            deferred = {one[0].training_key for one in later}
            missing = [other for trial in group for other in trial.depends_on if not is_done(other, store)]
            if any(other.training_key in deferred or _is_locked(other, locks) for other in missing):
                later.append(group)
                continue
            with locks.try_lock(group[0].training_key) as free:
                if free:
                    yield from group
                else:
                    later.append(group)
        if len(later) == len(left):
            wait(sum(map(len, later)))
        left = later


def _is_locked(trial: Trial, locks: Locks) -> bool:
    """Return whether another process runs a trial."""
    with locks.try_lock(trial.training_key) as free:
        return not free
