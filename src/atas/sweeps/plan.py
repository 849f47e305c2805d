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

from atas._utils.console import format_duration
from atas.data import Dataset
from atas.distributed.world import launched_world_size, select_device
from atas.errors import AtasError, UsageError
from atas.sweeps.execute import DefaultMeasurements, execute, free_memory, is_done, remaining_cost
from atas.sweeps.locks import Locks
from atas.sweeps.progress import PlanProgress
from atas.sweeps.record import Record
from atas.sweeps.store import Store
from atas.sweeps.trial import Trial
from atas.training.data import load_data
from atas.training.trainer import Interrupted

WAIT_SECONDS = 1.0  # seconds between looks at what other processes are at


@dataclass(frozen=True)
class Failure:
    """A trial that could not be carried out, and why."""

    trial: Trial
    sentence: str


class Plan:
    """Trials and the store that their results go to. Trials that come to the same are carried out once; those of one
    training follow each other, what is to be observed of it first, so that it is not done a second time for that. A
    training that others rest on comes before them.

    Processes that run a plan in the same folder share its work: each takes what nobody is at, and waits for the rest.
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
                measurements=tuple(
                    {found.name: found for found in (*known.measurements, *trial.measurements)}.values()
                ),
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
        """The trials that are not done yet."""
        return [trial for trial in self.trials if not is_done(trial, self.store)]

    def run(self, progress: PlanProgress, after_each: Callable[[Trial], object] = lambda _: None) -> list[Failure]:
        """Carry out what is left; a trial that fails is written down, and the next one begins.

        What no trial can do without, such as its data, is looked at first.
        """
        if launched_world_size() > 1:
            raise UsageError(
                "a plan is not for torchrun, whose processes train one model; start the same command once for each GPU "
                "(CUDA_VISIBLE_DEVICES=0, 1, ...) with the same --out, and they share its runs"
            )
        self.import_records()
        left = self.remaining()
        if done := len(self.trials) - len(left):
            progress.log(f"{done} of {len(self.trials)} runs are done already")
        failures = self._run_trials(left, progress, after_each) if left else []
        self.import_records()
        return failures

    def import_records(self) -> None:
        """Write down here what other folders know of these trials: pages are made of this folder alone."""
        if not self.store.reuses:
            return
        with self.store.locks() as locks:
            for trial in self.trials:
                with locks.try_lock(trial.training_key) as free:
                    if free:
                        self.store.import_records(trial)

    def _run_trials(
        self, left: Sequence[Trial], progress: PlanProgress, after_each: Callable[[Trial], object]
    ) -> list[Failure]:
        """What is left, when it is its turn."""
        expected = dict(zip((trial.key for trial in left), self._costs(left), strict=True))
        progress.expect(sum(expected.values()))
        failures: list[Failure] = []
        over: set[str] = set()
        with (
            progress,
            self.store.locks() as locks,
            closing(next_trials(left, self.store, locks, lambda count: _wait(progress, count))) as mine,
        ):
            for trial in mine:
                for other in left:
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
        """Of each of these trials; a training that several share is that of the first."""
        found, trained = [], set()
        for trial in trials:
            training, evaluation = remaining_cost(trial, self.store, self._load(trial))
            found.append(evaluation + (0.0 if trial.training_key in trained else training))
            trained.add(trial.training_key)
        return found

    def _run_trial(self, trial: Trial, progress: PlanProgress, locks: Locks) -> Failure | None:
        began = time.monotonic()
        failure = None
        try:
            with locks.device_in_use(_device_name(select_device(trial.resolved_recipe.engine.device))) as is_shared:
                record = execute(trial, self.store, self._load, progress, is_shared, self._default_measurements)
        except (Interrupted, KeyboardInterrupt):
            raise AtasError(f"stopped in {trial.label}; all is saved, and the same command goes on there") from None
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
        """The trial's data; read once for all trials that share it."""
        wanted = trial.resolved_recipe.data
        key = (wanted.name, wanted.root, wanted.size)
        if key not in self._data:
            self._data = {key: load_data(trial.resolved_recipe)}  # one at a time: some are large
        return self._data[key]


def _device_name(device: torch.device) -> str:
    """By which processes know that they work on the same one."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else socket.gethostname()


def _accuracies(trial: Trial, record: Record) -> str:
    return ", ".join(f"{name} {100 * record.attacks[name]['accuracy']:.2f}%" for name in ("clean", *trial.attacks))


def _wait(progress: PlanProgress, count: int) -> None:
    """Until other processes may have done something."""
    progress.wait(f"waiting for {count} run{'s' * (count > 1)} that other processes are at")
    try:
        time.sleep(WAIT_SECONDS)
    except KeyboardInterrupt:
        raise AtasError("stopped while other processes are at the last runs; the same command shows them") from None


def next_trials(trials: Sequence[Trial], store: Store, locks: Locks, wait: Callable[[int], object]) -> Generator[Trial]:
    """The trials, one after the other, while no other process is at their training.

    Those that others are at, or that rest on such, are put off; where nothing else is left, `wait` is called with their
    number. A trial that another process gave up, finished or not, has its turn here.
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
    """Whether another process is at a trial."""
    with locks.try_lock(trial.training_key) as free:
        return not free
