"""What the writer of a format gives back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atas.export._check import Check


@dataclass(frozen=True)
class Written:
    """The files, how to load them (for the card), and how they were checked."""

    files: tuple[Path, ...]
    usage: str
    check: Check | None = None
    notes: tuple[str, ...] = ()
