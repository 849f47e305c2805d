"""How far an evaluation is, how long the rest may take, and the file from which it resumes.

The progress file lies beside the result. It is replaced as a whole every few seconds and stays until the result is
saved.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atas._utils.files import write_text
from atas.attacks.scheduler import SearchProgress
from atas.core.fingerprint import LOGITS_KEY, same_logits
from atas.evaluation.result import decode_flags, encode_flags

StageKey = tuple[int, str, int]  # chunk, attack, stage

_FORMAT = 1
SAVE_INTERVAL = 20.0  # seconds


@dataclass(frozen=True)
class Status:
    """What is told to whoever watches."""

    attack: str
    """The attack under way, by the name that it was asked for."""
    stage: str
    """Its stage, or the attack itself where it has none."""
    num_correct: int
    """Examples of this chunk that hold so far, or that are still to be looked at."""
    examples: int
    """Examples of this chunk."""
    done: float
    """Share of all the work, from 0 to 1; the work shrinks when examples break."""
    seconds_left: float | None
    """At most, if it goes on at this pace; None while there is no telling."""
    note: str | None = None
    """A sentence to show."""


ProgressCallback = Callable[[Status], None]


class ProgressMeter:
    """Counts work, in forward passes of the model: done by this process, done before a stop, and left at most."""

    def __init__(self, callback: ProgressCallback | None) -> None:
        self._callback = callback
        self._left: dict[StageKey, float] = {}
        self._made = self._before = 0.0
        self._began: float | None = None
        self._last = Status("", "", 0, 0, 0.0, None)

    def set_remaining(self, key: StageKey, work: float) -> None:
        """So much is left of a task at most. The first time, the clock starts."""
        self._began = self._began or time.monotonic()
        self._left[key] = work

    def resumed(self, work: float) -> None:
        """So much was done before a stop."""
        self._before += work

    def completed(self, work: float) -> None:
        """So much more was done."""
        self._made += work

    def update(self, attack: str, stage: str, num_correct: int, examples: int) -> None:
        """Call the callback, if there is one."""
        left = sum(self._left.values())
        done = self._made + self._before
        seconds = (time.monotonic() - self._began) / self._made * left if self._made and self._began else None
        self._last = Status(attack, stage, num_correct, examples, done / max(done + left, 1), seconds)
        if self._callback is not None:
            self._callback(self._last)

    def notify(self, sentence: str) -> None:
        """A sentence for the callback."""
        if self._callback is not None:
            last = self._last
            self._callback(
                Status(last.attack, last.stage, last.num_correct, last.examples, last.done, last.seconds_left, sentence)
            )


@dataclass
class StageProgress:
    """The results of one stage on one chunk so far, sufficient to resume it."""

    broken: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """Whether this stage or an earlier one broke each example that was attacked (N,)."""
    seconds: float = 0.0
    queries: int = 0
    complete: bool = False
    search: SearchProgress | None = None
    """The progress of a running search; its flags `broken` are the ones above."""

    def start_search(self, progress: SearchProgress) -> SearchProgress:
        """Hold this progress, which the search updates at each poll, and return it."""
        self.search, self.broken = progress, progress.broken
        return progress

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        values: dict[str, Any] = {
            "broken": encode_flags(self.broken),
            "seconds": self.seconds,
            "queries": self.queries,
            "complete": self.complete,
        }
        if self.search is not None:
            values["finished"] = [encode_flags(column) for column in self.search.finished.T]
            values["evaluations"] = self.search.queries_per_example.tolist()
        return values

    @staticmethod
    def from_json(values: dict[str, Any]) -> StageProgress:
        """Read the values that `to_json` returned."""
        stage = StageProgress(
            decode_flags(values["broken"]), float(values["seconds"]), int(values["queries"]), values["complete"]
        )
        if "finished" in values:
            finished = torch.stack([decode_flags(column) for column in values["finished"]], 1)
            queries = torch.tensor(values["evaluations"], dtype=torch.int64)
            if not len(finished) == len(queries) == len(stage.broken):
                raise ValueError("the columns of a search differ in length")
            stage.search = SearchProgress(stage.broken, finished, queries)
        return stage


class ProgressFile:
    """The progress of one evaluation, known by its `identity`: weights, data, attacks and the like."""

    def __init__(self, path: Path | None, identity: dict[str, Any], log: Callable[[str], None]) -> None:
        self._path, self._log = path, log
        self._identity = json.loads(json.dumps(identity))  # as it comes back from a file
        self._saved = time.monotonic()
        self._ours = False

    def read(self) -> dict[StageKey, StageProgress]:
        """What was known when the evaluation stopped; nothing where there is no file, or that of another."""
        if self._path is None:
            return {}
        for stale in self._path.parent.glob(f".{self._path.name}.*.tmp"):  # of a process that was killed in a write
            stale.unlink(missing_ok=True)
        if not self._path.exists():
            return {}
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            if found["format"] != _FORMAT:
                raise ValueError("another format")
            differ = self._differing(found["identity"])
            records = {_parse_key(name): StageProgress.from_json(record) for name, record in found["records"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            self._log(f"the progress file {self._path} cannot be read ({error}); beginning anew")
            return {}
        if differ:
            what = "another number of processes" if differ == ["processes"] else f"other {', '.join(differ)}"
            self._log(f"{self._path} holds the progress of another evaluation ({what}); beginning anew")
            return {}
        self._ours = True
        self._log(f"going on from {self._path}")
        return records

    def _differing(self, found: dict[str, Any]) -> list[str]:
        """What is not the same in another evaluation; the answers are looked at where all else is."""
        ours = self._identity
        names = [name for name in ours if name != LOGITS_KEY and found.get(name) != ours[name]]
        return names or ([] if same_logits(found.get(LOGITS_KEY), ours.get(LOGITS_KEY)) else [LOGITS_KEY])

    def save(self, records: dict[StageKey, StageProgress], *, now: bool = False) -> None:
        """Write if it is time, or at once. An evaluation goes on where that fails: it has only more to lose."""
        if self._path is None or (not now and time.monotonic() - self._saved < SAVE_INTERVAL):
            return
        content = {
            "format": _FORMAT,
            "identity": self._identity,
            "records": {_format_key(key): record.to_json() for key, record in records.items()},
        }
        try:
            write_text(self._path, json.dumps(content) + "\n")
            self._ours = True
        except OSError as error:
            self._log(f"cannot save the progress in {self._path} ({error.strerror or error}); going on without")
        self._saved = time.monotonic()

    @property
    def owned_path(self) -> Path | None:
        """The file, if this evaluation has written or taken over one; that of another evaluation is not ours."""
        return self._path if self._ours else None


def _format_key(key: StageKey) -> str:
    chunk, attack, stage = key
    return f"{chunk}/{stage}/{attack}"


def _parse_key(name: str) -> StageKey:
    chunk, stage, attack = name.split("/", 2)
    return int(chunk), attack, int(stage)
