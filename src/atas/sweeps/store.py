"""A results folder: records, the trainings behind them, and errors.

runs/<recipe>-seed<n>-<key>.json                     the record of a trial
runs/<recipe>-seed<n>-<key>.error.json               why a trial failed
trainings/<recipe>-seed<n>-<key>/                    the run folder of a training, with its weights
trainings/<recipe>-seed<n>-again-<key>/              a second training, if the first lacks data for a measurement
evaluations/<recipe>-seed<n>-<key>-<attacks>.json    the verdict on every example
<study>.md, <study>.json                             the page of a study
.claims                                              the lock file
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path

from atas._utils.documents import MalformedError, read_json
from atas._utils.files import write_text
from atas.errors import DataError, UsageError
from atas.sweeps.locks import Locks
from atas.sweeps.record import Record
from atas.sweeps.trial import Trial
from atas.training.run import RunFolder

RUNS, TRAININGS, EVALUATIONS = "runs", "trainings", "evaluations"
LOCKS = ".claims"
SNAPSHOTS = "snapshots"  # in a run folder: weights during the training, for measurements
SHARED = "shared"  # in a run folder: an empty file that marks a device shared with another process


class Store:
    """Results in one folder; finished results in the folders `reuse` count as well."""

    def __init__(self, folder: Path, reuse: Sequence[Path] = ()) -> None:
        for other in reuse:
            if not (other / RUNS).is_dir() and not (other / TRAININGS).is_dir():
                raise UsageError(
                    f"{other} holds no results to reuse; pass a folder that an earlier command wrote to with --out"
                )
        self.folder, self._others = folder, tuple(reuse)
        self._loaded: dict[str, tuple[tuple[int, int, int], Record]] = {}

    def record(self, trial: Trial) -> Record | None:
        """Return the record of a trial, merged from all folders, or None."""
        records = [self._load(file) for folder in self._folders for file in _result_files(folder, f"-{trial.key}.json")]
        return reduce(Record.merge, records) if records else None

    def _load(self, path: Path) -> Record:
        """Read a record, unless its file is the one that was read before: plans ask for every record often."""
        info = path.stat()
        version = (info.st_ino, info.st_mtime_ns, info.st_size)
        known = self._loaded.get(str(path))
        if known is None or known[0] != version:
            known = self._loaded[str(path)] = version, Record.load(path)
        return known[1]

    @property
    def reuses(self) -> bool:
        """Whether other folders count as well."""
        return bool(self._others)

    def import_records(self, trial: Trial) -> None:
        """Copy the records of a trial from other folders; the caller holds the lock of its training."""
        known, path = self.record(trial), self._record_path(trial)
        if known is not None and not (path.exists() and self._load(path) == known):
            known.save(path)

    def by_row(self) -> dict[str, list[Record]]:
        """Return all records of this folder by row, each row sorted by seed."""
        records = {record.key: record for record in map(self._load, _result_files(self.folder, ".json"))}
        rows: dict[str, list[Record]] = {}
        for record in sorted(records.values(), key=lambda record: record.seed):
            rows.setdefault(record.row, []).append(record)
        return rows

    def save(self, trial: Trial, record: Record) -> None:
        """Write the record of a trial and remove its earlier error."""
        record.save(self._record_path(trial))
        self._error_path(trial).unlink(missing_ok=True)

    def save_error(self, trial: Trial, sentence: str, trace: str) -> None:
        """Write why a trial failed."""
        path = self._error_path(trial)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"key": trial.key, "row": trial.row, "trial": trial.label, "error": sentence, "trace": trace}
        write_text(path, json.dumps(metadata, indent=1) + "\n")

    def locks(self) -> Locks:
        """Return the locks that processes of this folder share."""
        return Locks(self.folder / LOCKS)

    def errors_by_row(self) -> dict[str, list[str]]:
        """Return the errors of failed trials by row."""
        rows: dict[str, list[str]] = {}
        for path in _result_files(self.folder, ".error.json", errors=True):
            try:
                error = read_json(path, dict[str, str])
                rows.setdefault(error["row"], []).append(f"{error['trial']}: {error['error']}")
            except (OSError, MalformedError, KeyError) as why:
                raise DataError(f"the error file {path} is damaged ({why}); remove it and run the study again") from why
        return rows

    def training_folder(self, trial: Trial, suits: Callable[[RunFolder], bool] = lambda _: True) -> RunFolder:
        """Return the run folder of a finished training that `suits`, in any folder, else a new one in this folder."""
        for folder in self._folders:
            for path in sorted((folder / TRAININGS).glob(f"*-{trial.training_key}")):
                if RunFolder(path).model.exists() and suits(RunFolder(path)):
                    return RunFolder(path)
        names = itertools.chain([trial.slug], (f"{trial.slug}-again{'-again' * more}" for more in itertools.count()))
        new = (RunFolder(self.folder / TRAININGS / f"{name}-{trial.training_key}") for name in names)
        return next(run_folder for run_folder in new if not run_folder.model.exists())

    def remove_checkpoints(self, training: RunFolder) -> None:
        """Remove the checkpoints of a finished training, the larger part of its folder."""
        if training.path.is_relative_to(self.folder) and training.model.exists():
            shutil.rmtree(training.last_checkpoint.parent, ignore_errors=True)
            shutil.rmtree(training.path / SNAPSHOTS, ignore_errors=True)

    def progress_file(self, trial: Trial) -> Path:
        """Return the path of an evaluation's progress file."""
        path = self.folder / RUNS / f".{trial.slug}-{trial.key}.progress.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def evaluation_file(self, trial: Trial, attacks: Sequence[str]) -> Path:
        """Return the path of a complete evaluation, with the verdict on every example."""
        path = self.folder / EVALUATIONS / f"{trial.slug}-{trial.key}-{'-'.join(attacks) or 'clean'}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def _folders(self) -> tuple[Path, ...]:
        return (self.folder, *self._others)

    def _record_path(self, trial: Trial) -> Path:
        """Return the path of a record; an equal trial of another recipe may have named the file."""
        files = _result_files(self.folder, f"-{trial.key}.json")
        return files[0] if files else self.folder / RUNS / f"{trial.slug}-{trial.key}.json"

    def _error_path(self, trial: Trial) -> Path:
        return self.folder / RUNS / f"{trial.slug}-{trial.key}.error.json"


def _result_files(folder: Path, ending: str, errors: bool = False) -> list[Path]:
    """Return the files of records, or of errors, whose names end so; hidden files are interrupted writes."""
    try:
        names = sorted(os.listdir(folder / RUNS))
    except FileNotFoundError:
        return []
    return [
        folder / RUNS / name
        for name in names
        if name.endswith(ending) and name[0] != "." and name.endswith(".error.json") == errors
    ]
