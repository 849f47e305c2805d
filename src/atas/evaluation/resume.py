"""The state of an unfinished evaluation, from which the same command resumes.

The progress file lies beside the result. It is replaced atomically every 20 seconds, until the result is saved. It has
a checksum, because a damaged digit would be a wrong verdict.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from atas._utils import documents
from atas._utils.documents import MalformedError, conform
from atas._utils.files import remove_temporaries, write_text
from atas.attacks.scheduler import SearchProgress
from atas.core.fingerprint import LOGITS_KEY, same_logits
from atas.evaluation.progress import StageKey
from atas.evaluation.result_format import decode_flags, encode_flags

_FORMAT = 1
SAVE_INTERVAL = 20.0  # seconds


class _StageValues(TypedDict):
    broken: str
    seconds: float
    queries: int
    complete: bool
    finished: NotRequired[list[str]]  # of a running search, like the next
    evaluations: NotRequired[list[int]]
    predicted: NotRequired[list[int]]  # earlier versions did not write it


class _Values(TypedDict):
    """The content of a progress file."""

    format: int
    identity: dict[str, Any]
    records: dict[str, _StageValues]
    checksum: NotRequired[str]  # earlier versions did not write it


@dataclass
class StageProgress:
    """The results of one stage on one chunk so far, sufficient to resume it."""

    broken: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    """Whether this stage or an earlier one broke each example that was attacked (N,)."""
    seconds: float = 0.0
    queries: int = 0
    complete: bool = False
    search: SearchProgress | None = None
    """The progress of a running search; its tensors `broken` and `predicted` are the ones of this object."""
    predicted: Tensor | None = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    """The class predicted at what this stage found (N,); None in the progress of earlier versions."""

    def start_search(self, progress: SearchProgress) -> SearchProgress:
        """Hold this progress, which the search updates at each poll, and return it."""
        self.search, self.broken, self.predicted = progress, progress.broken, progress.predicted
        return progress

    def fits(self, examples: int) -> bool:
        """Return whether this is the progress on a chunk with this number of examples."""
        whole = self.complete or self.search is not None
        return len(self.broken) == examples if whole else len(self.broken) <= examples

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        values: dict[str, Any] = {
            "broken": encode_flags(self.broken),
            "seconds": self.seconds,
            "queries": self.queries,
            "complete": self.complete,
        }
        if self.predicted is not None:
            values["predicted"] = self.predicted[self.broken].tolist()
        if self.search is not None:
            values["finished"] = [encode_flags(column) for column in self.search.finished.T]
            values["evaluations"] = self.search.queries_per_example.tolist()
        return values

    @staticmethod
    def from_json(values: dict[str, Any]) -> StageProgress:
        """Read the values that `to_json` returned."""
        stage = StageProgress(
            decode_flags(values["broken"]), float(values["seconds"]), values["queries"], values["complete"]
        )
        stage.predicted = _predicted(stage.broken, values["predicted"]) if "predicted" in values else None
        if "finished" in values:
            finished = torch.stack([decode_flags(column) for column in values["finished"]], 1)
            queries = torch.tensor(values["evaluations"], dtype=torch.int64)
            if not len(finished) == len(queries) == len(stage.broken):
                raise MalformedError("the columns of a search differ in length")
            stage.search = SearchProgress(stage.broken, finished, queries, predicted=stage.predicted)
        return stage


def _predicted(broken: Tensor, values: list[int]) -> Tensor:
    if len(values) != int(broken.sum()):
        raise MalformedError("the predictions are not those of the broken examples")
    predicted = torch.full((len(broken),), -1)
    predicted[broken] = torch.tensor(values, dtype=torch.int64)
    return predicted


class ProgressFile:
    """The progress of one evaluation in a file.

    The evaluation is recognised by its `identity`: weights, data, attacks and other values on which verdicts depend.
    """

    def __init__(
        self,
        path: Path | None,
        identity: dict[str, Any],
        log: Callable[[str], None],
        *,
        interval: float = SAVE_INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path, self._log = path, log
        self._identity = json.loads(json.dumps(identity))  # tuples become lists, as in the file
        self._interval, self._clock = interval, clock
        self._saved = clock()
        self._ours = False

    def read(self) -> dict[StageKey, StageProgress]:
        """Return the progress in the file; empty if there is no file or it belongs to another evaluation."""
        if self._path is None:
            return {}
        remove_temporaries(self._path)
        if not self._path.exists():
            return {}
        try:
            content = conform(documents.read_json(self._path, dict[str, Any]), _Values)
            documents.check_keys(content, _Values)
            if content["format"] != _FORMAT:
                raise MalformedError("another format")
            documents.verify_checksum(content)
            different = self._differences(content["identity"])
            stages = {_parse_key(name): StageProgress.from_json(stage) for name, stage in content["records"].items()}
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            self._log(f"cannot read the progress file {self._path} ({error}); starting over")
            return {}
        if different:
            reason = (
                "another number of processes" if different == ["processes"] else f"different {', '.join(different)}"
            )
            self._log(f"{self._path} holds the progress of another evaluation ({reason}); starting over")
            return {}
        self._ours = True
        self._log(f"resuming from {self._path}")
        return stages

    def discard(self, reason: str) -> None:
        """Log that the progress that was read cannot be used."""
        self._ours = False
        self._log(f"cannot use the progress in {self._path} ({reason}); starting over")

    def _differences(self, identity: dict[str, Any]) -> list[str]:
        """Return the names of values that differ in another identity; compare logits only if all else is equal."""
        ours = self._identity
        names = [name for name in ours if name != LOGITS_KEY and identity.get(name) != ours[name]]
        return names or ([] if same_logits(identity.get(LOGITS_KEY), ours.get(LOGITS_KEY)) else ["logits"])

    def save(self, stages: dict[StageKey, StageProgress], *, now: bool = False) -> None:
        """Write the file if the interval has passed, or at once with `now`. Log an error of the disk and continue."""
        if self._path is None or (not now and self._clock() - self._saved < self._interval):
            return
        content = {
            "format": _FORMAT,
            "identity": self._identity,
            "records": {_format_key(key): stage.to_json() for key, stage in stages.items()},
        }
        try:
            write_text(self._path, json.dumps(content | {documents.CHECKSUM: documents.checksum(content)}) + "\n")
            self._ours = True
        except OSError as error:
            self._log(
                f"cannot save the progress in {self._path} ({error.strerror or error}); continuing without saving"
            )
        self._saved = self._clock()

    @property
    def fingerprint(self) -> str:
        """A hash of the identity of the evaluation without its logits, which rounding may change."""
        values = {name: value for name, value in self._identity.items() if name != LOGITS_KEY}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def owned_path(self) -> Path | None:
        """The path of the file if this evaluation wrote it or resumed from it, else None."""
        return self._path if self._ours else None


def _format_key(key: StageKey) -> str:
    chunk, attack, stage = key
    return f"{chunk}/{stage}/{attack}"


def _parse_key(name: str) -> StageKey:
    chunk, stage, attack = name.split("/", 2)
    return int(chunk), attack, int(stage)
