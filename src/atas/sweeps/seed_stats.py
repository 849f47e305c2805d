"""Statistics over the seeds of one row of records: accuracy, training time and collapses, as text for tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from atas._utils.formatting import format_seconds
from atas.evaluation.seed_stats import SeedStats
from atas.sweeps.record import Record


def summarize_seeds(records: Sequence[Record], attack: str) -> SeedStats | None:
    """Return the accuracy under an attack over the records of one row, or None if no record has the attack."""
    attacked = [record for record in records if attack in record.attacks]
    if not attacked:
        return None
    values = [100 * record.attacks[attack]["accuracy"] for record in attacked]
    return SeedStats.of(values, [100 * end for end in attacked[0].attacks[attack]["interval"]], attacked[0].n)


def format_difference(ours: SeedStats | None, paper: float | None) -> str:
    """Return our accuracy minus the paper's, in points, or an empty text."""
    return "" if ours is None or paper is None else f"{ours.value - paper:+.2f}"


def format_training_time(records: Sequence[Record]) -> str:
    """Return the mean training time over the runs that did not share their device."""
    seconds = [record.seconds for record in records if record.seconds is not None]
    return format_seconds(statistics.fmean(seconds)) if seconds else "-" if records else ""


def format_collapses(records: Sequence[Record]) -> str:
    """Return the epoch of the collapse of one run, or the number of collapsed runs."""
    return format_collapse_epochs([record.collapsed_in for record in records])


def format_collapse_epochs(epochs: Sequence[int | None]) -> str:
    """Return the same for the collapse epochs of several runs; None stands for a run without a collapse.

    >>> [format_collapse_epochs(epochs) for epochs in ([], [None], [21], [None, 21])]
    ['', 'no', 'epoch 21', '1 of 2']
    """
    collapsed = [epoch for epoch in epochs if epoch is not None]
    if len(epochs) > 1:
        return f"{len(collapsed)} of {len(epochs)}" if collapsed else "no"
    return "" if not epochs else f"epoch {collapsed[0]}" if collapsed else "no"
