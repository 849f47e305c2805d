"""Metrics of a run: `metrics.jsonl`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from atas.errors import AtasError


class Metrics:
    """Lines of JSON, one an epoch or an event. A resume cuts the file back to where the checkpoint was taken. Without a
    path nothing is written: of several processes one keeps the file."""

    def __init__(self, path: Path | None, keep_bytes: int = 0) -> None:
        self.path = path
        if path is None:
            return
        path.touch()
        with path.open("rb+") as file:
            file.truncate(min(keep_bytes, path.stat().st_size))

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return 0 if self.path is None else self.path.stat().st_size

    def write(self, row: dict[str, Any]) -> None:
        """Append one line and see it onto the disk."""
        if self.path is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise AtasError(
                f"cannot write {self.path} ({error.strerror}); make room on the disk and go on with --resume"
            ) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a metrics file; a line that a crash cut off is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if isinstance(row, dict):
            rows.append(row)
    return rows
