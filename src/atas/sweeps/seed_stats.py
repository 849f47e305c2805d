"""Figures of several runs: a mean with its spread, beside the paper's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atas._utils.formatting import format_seconds
from atas.sweeps.record import Record


@dataclass(frozen=True)
class SeedStats:
    """An accuracy in percent: of one run with its 95% interval, or the mean of several with their range."""

    value: float
    low: float
    high: float
    runs: int
    n: int

    def __str__(self) -> str:
        if self.runs > 1:
            return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"
        return f"{self.value:.2f} [{self.low:.1f}, {self.high:.1f}]"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        spread = "range over seeds" if self.runs > 1 else "95% interval"
        ends = {"low": self.low, "high": self.high, "spread": spread}
        return {"percent": self.value, **ends, "runs": self.runs, "n": self.n}


def summarize_seeds(records: Sequence[Record], attack: str) -> SeedStats | None:
    """What records of one row say of an attack; None where none of them has it."""
    found = [record for record in records if attack in record.attacks]
    if not found:
        return None
    values = [100 * record.attacks[attack]["accuracy"] for record in found]
    low, high = min(values), max(values)
    if len(found) == 1:
        low, high = (100 * end for end in found[0].attacks[attack]["interval"])
    return SeedStats(statistics.fmean(values), low, high, len(found), found[0].n)


def format_difference(ours: SeedStats | None, paper: float | None) -> str:
    """Ours less the paper's, in points."""
    return "" if ours is None or paper is None else f"{ours.value - paper:+.2f}"


def format_training_time(records: Sequence[Record]) -> str:
    """Of a training, the mean over those that had their device to themselves."""
    found = [record.seconds for record in records if record.seconds is not None]
    return format_seconds(statistics.fmean(found)) if found else "-" if records else ""


def format_collapses(records: Sequence[Record]) -> str:
    """In which epoch training collapsed, or in how many runs."""
    return format_collapse_epochs([record.collapsed_in for record in records])


def format_collapse_epochs(epochs: Sequence[int | None]) -> str:
    """The same of the epochs of several runs, None for one that did not.

    >>> [format_collapse_epochs(epochs) for epochs in ([], [None], [21], [None, 21])]
    ['', 'no', 'epoch 21', '1 of 2']
    """
    found = [epoch for epoch in epochs if epoch is not None]
    if len(epochs) > 1:
        return f"{len(found)} of {len(epochs)}" if found else "no"
    return "" if not epochs else f"epoch {found[0]}" if found else "no"
