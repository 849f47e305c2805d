"""A plan: trials carried out one after the other, that can be stopped at any moment and gone on with."""

from __future__ import annotations

import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch

from atas._screen import clock
from atas.data import Dataset
from atas.errors import AtasError, UsageError
from atas.processes import started
from atas.reproduce.claims import Claims
from atas.reproduce.execute import execute, is_done, make_room, work
from atas.reproduce.progress import PlanProgress
from atas.reproduce.record import Record
from atas.reproduce.store import Store
from atas.reproduce.trial import Trial
from atas.reproduce.turns import turns
from atas.training.engine import choose_device
from atas.training.run import load_data
from atas.training.trainer import Interrupted

WAIT = 1.0  # seconds between looks at what other processes are at


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

    def __init__(self, trials: Sequence[Trial], store: Store) -> None:
        merged: dict[str, Trial] = {}
        for trial in trials:
            known = merged.setdefault(trial.key, trial)
            merged[trial.key] = replace(
                known,
                attacks=tuple(dict.fromkeys((*known.attacks, *trial.attacks))),
                observe=tuple({found.name: found for found in (*known.observe, *trial.observe)}.values()),
            )
        trainings: dict[str, list[Trial]] = {}
        for trial in merged.values():
            trainings.setdefault(trial.training_key, []).append(trial)
        needed = {other.training_key for trial in merged.values() for other in trial.rests_on}
        ordered = sorted(trainings.values(), key=lambda some: some[0].training_key not in needed)
        self.trials = [trial for some in ordered for trial in sorted(some, key=lambda one: not one.observe)]
        self.store = store
        self._data: dict[tuple[str, str | None, int | None], Dataset] = {}

    def left(self) -> list[Trial]:
        """The trials that are not done yet."""
        return [trial for trial in self.trials if not is_done(trial, self.store)]

    def run(self, progress: PlanProgress, after_each: Callable[[Trial], object] = lambda _: None) -> list[Failure]:
        """Carry out what is left; a trial that fails is written down, and the next one begins.

        What no trial can do without, such as its data, is looked at first.
        """
        if started() > 1:
            raise UsageError(
                "a plan is not for torchrun, whose processes train one model; start the same command once for each GPU "
                "(CUDA_VISIBLE_DEVICES=0, 1, ...) with the same --out, and they share its runs"
            )
        self.adopt()
        left = self.left()
        if done := len(self.trials) - len(left):
            progress.say(f"{done} of {len(self.trials)} runs are done already")
        failures = self._carry_out(left, progress, after_each) if left else []
        self.adopt()
        return failures

    def adopt(self) -> None:
        """Write down here what other folders know of these trials: pages are made of this folder alone."""
        if not self.store.reuses:
            return
        with self.store.claims() as claims:
            for trial in self.trials:
                with claims.claim(trial.training_key) as free:
                    if free:
                        self.store.adopt(trial)

    def _carry_out(
        self, left: Sequence[Trial], progress: PlanProgress, after_each: Callable[[Trial], object]
    ) -> list[Failure]:
        """What is left, when it is its turn."""
        expected = dict(zip((trial.key for trial in left), self._work(left), strict=True))
        progress.expect(sum(expected.values()))
        failures: list[Failure] = []
        over: set[str] = set()
        with (
            progress,
            self.store.claims() as claims,
            closing(turns(left, self.store, claims, lambda count: _wait(progress, count))) as mine,
        ):
            for trial in mine:
                for other in left:
                    if other.key not in over and is_done(other, self.store):
                        progress.elsewhere(self._title(other), expected[other.key])
                        over.add(other.key)
                if trial.key in over:
                    continue
                progress.begin(self._title(trial), expected[trial.key])
                failure = self._one(trial, progress, claims)
                failures += [failure] if failure else []
                over.add(trial.key)
                after_each(trial)
        return failures

    def _title(self, trial: Trial) -> str:
        return f"{self.trials.index(trial) + 1}/{len(self.trials)} {trial.label}"

    def _work(self, trials: Sequence[Trial]) -> list[float]:
        """Of each of these trials; a training that several share is that of the first."""
        found, trained = [], set()
        for trial in trials:
            training, evaluation = work(trial, self.store, self._load(trial))
            found.append(evaluation + (0.0 if trial.training_key in trained else training))
            trained.add(trial.training_key)
        return found

    def _one(self, trial: Trial, progress: PlanProgress, claims: Claims) -> Failure | None:
        began = time.monotonic()
        failure = None
        try:
            with claims.presence(_name(choose_device(trial.settings.engine.device))) as others:
                record = execute(trial, self.store, self._load, progress, others)
        except (Interrupted, KeyboardInterrupt):
            raise AtasError(f"stopped in {trial.label}; all is saved, and the same command goes on there") from None
        except Exception as error:
            sentence = str(error) if isinstance(error, AtasError) else f"{type(error).__name__}: {error}"
            failure = Failure(trial, " ".join(sentence.split()))
            self.store.fail(trial, failure.sentence, traceback.format_exc())
        progress.end()
        make_room()
        took = f"took {clock(time.monotonic() - began)}"
        if failure is not None:
            progress.close(f"failed: {failure.sentence}", took, style="bold red")
        else:
            progress.close(_figures(trial, record), took)
        return failure

    def _load(self, trial: Trial) -> Dataset:
        """The trial's data; read once for all trials that share it."""
        wanted = trial.settings.data
        key = (wanted.name, wanted.root, wanted.size)
        if key not in self._data:
            self._data = {key: load_data(trial.settings)}  # one at a time: some are large
        return self._data[key]


def _name(device: torch.device) -> str:
    """By which processes know that they work on the same one."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else socket.gethostname()


def _figures(trial: Trial, record: Record) -> str:
    return ", ".join(f"{name} {100 * record.attacks[name]['accuracy']:.2f}%" for name in ("clean", *trial.attacks))


def _wait(progress: PlanProgress, count: int) -> None:
    """Until other processes may have done something."""
    progress.wait(f"waiting for {count} run{'s' * (count > 1)} that other processes are at")
    try:
        time.sleep(WAIT)
    except KeyboardInterrupt:
        raise AtasError("stopped while other processes are at the last runs; the same command shows them") from None
