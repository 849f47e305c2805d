"""Metrics of a run: `metrics.jsonl`, and TensorBoard where it is installed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Metrics:
    """Lines of JSON, one an epoch or an event. A resume cuts the file back to where the checkpoint was taken."""

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        self.path = path
        path.touch()
        with path.open("rb+") as file:
            file.truncate(min(keep_bytes, path.stat().st_size))

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self.path.stat().st_size

    def write(self, row: dict[str, Any]) -> None:
        """Append one line and see it onto the disk."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


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


class Board:
    """TensorBoard scalars, or nothing where it is not installed."""

    def __init__(self, folder: Path, first_epoch: int) -> None:
        self._writer = None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._writer = SummaryWriter(str(folder), purge_step=first_epoch)

    def write(self, row: dict[str, Any]) -> None:
        """All numbers of an epoch's row."""
        if self._writer is None:
            return
        for key, value in row.items():
            if isinstance(value, int | float) and key != "epoch":
                self._writer.add_scalar(key, value, row["epoch"])
        self._writer.flush()

    def close(self) -> None:
        """Finish the files."""
        if self._writer is not None:
            self._writer.close()
