"""The progress file: what an evaluation knows so far, so that it can go on after a stop.

It lies beside the result, is replaced as a whole every few seconds, and stays until the result is saved.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atas._files import write_text
from atas.evaluation._answers import ANSWERS, same_answers
from atas.evaluation._records import Record
from atas.evaluation._status import Key

_FORMAT = 1
SECONDS = 20.0


class Journal:
    """The progress of one evaluation, known by its `identity`: weights, data, attacks and the like."""

    def __init__(self, path: Path | None, identity: dict[str, Any], say: Callable[[str], None]) -> None:
        self._path, self._say = path, say
        self._identity = json.loads(json.dumps(identity))  # as it comes back from a file
        self._saved = time.monotonic()
        self._ours = False

    def read(self) -> dict[Key, Record]:
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
            records = {_key(name): Record.from_json(record) for name, record in found["records"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            self._say(f"the progress file {self._path} cannot be read ({error}); beginning anew")
            return {}
        if differ:
            what = "another number of processes" if differ == ["processes"] else f"other {', '.join(differ)}"
            self._say(f"{self._path} holds the progress of another evaluation ({what}); beginning anew")
            return {}
        self._ours = True
        self._say(f"going on from {self._path}")
        return records

    def _differing(self, found: dict[str, Any]) -> list[str]:
        """What is not the same in another evaluation; the answers are looked at where all else is."""
        ours = self._identity
        names = [name for name in ours if name != ANSWERS and found.get(name) != ours[name]]
        return names or ([] if same_answers(found.get(ANSWERS), ours.get(ANSWERS)) else [ANSWERS])

    def save(self, records: dict[Key, Record], *, now: bool = False) -> None:
        """Write if it is time, or at once. An evaluation goes on where that fails: it has only more to lose."""
        if self._path is None or (not now and time.monotonic() - self._saved < SECONDS):
            return
        content = {
            "format": _FORMAT,
            "identity": self._identity,
            "records": {_name(key): record.to_json() for key, record in records.items()},
        }
        try:
            write_text(self._path, json.dumps(content) + "\n")
            self._ours = True
        except OSError as error:
            self._say(f"cannot save the progress in {self._path} ({error.strerror or error}); going on without")
        self._saved = time.monotonic()

    @property
    def kept(self) -> Path | None:
        """The file, if this evaluation has written or taken over one; that of another evaluation is not ours."""
        return self._path if self._ours else None


def _name(key: Key) -> str:
    portion, attack, stage = key
    return f"{portion}/{stage}/{attack}"


def _key(name: str) -> Key:
    portion, stage, attack = name.split("/", 2)
    return int(portion), attack, int(stage)
