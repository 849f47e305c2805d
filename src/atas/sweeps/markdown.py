"""Markdown for pages of results: aligned tables, the text of their cells, provenance, and warnings."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atas._utils.formatting import format_seconds
from atas.evaluation.seed_stats import SeedStats
from atas.sweeps.record import Record


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 2) -> list[str]:
    """Return the lines of a table with aligned columns, the first `left` of them to the left."""
    lines = [[cell.replace("|", "/") for cell in line] for line in (header, *rows)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * width if column < left else "-" * (width - 1) + ":" for column, width in enumerate(widths)]
    return [line(lines[0]), line(rule), *map(line, lines[1:])]


def provenance(records: Sequence[Record]) -> list[str]:
    """Return a list of the hardware, versions and commits of the records."""
    trained = [record.training["environment"] for record in records]
    trained += [entry["environment"] for record in records for entry in record.observed.values()]
    evaluated = [about["environment"] for record in records for about in record.evaluations]
    parts = {
        "trained on": _distinct(trained, "device"),
        "training in": _distinct(trained, "precision"),
        "evaluated on": _distinct(evaluated, "device"),
        "atas": _distinct([*trained, *evaluated], "atas"),
        "commit": _distinct([*trained, *evaluated], "commit"),
        "torch": _distinct([*trained, *evaluated], "torch"),
    }
    lines = [f"- {name}: {value}" for name, value in parts.items() if value]
    if shared := sum(record.seconds is None for record in records):
        lines.append(f"- not timed: {shared} of {len(records)} trainings, which shared their device with others")
    return lines


def evaluation_warnings(records: Sequence[Record]) -> list[str]:
    """Return each warning of the evaluations once, with its trials."""
    trials: dict[str, list[str]] = {}
    for record in records:
        name = f"{record.trial['network']} {record.trial['method']} {record.trial['eps']} seed {record.seed}"
        for evaluation in record.evaluations:
            for warning in evaluation["warnings"]:
                trials.setdefault(warning, []).append(name)
    return [f"- {', '.join(dict.fromkeys(names))}: {warning}" for warning, names in trials.items()]


def section(title: str, items: Sequence[str]) -> list[str]:
    """Return a section of a page, or nothing if it has no items."""
    return ["", f"## {title}", "", *items] if items else []


def provenance_section(records: Sequence[Record], errors: Sequence[str]) -> list[str]:
    """Return the end of a page: provenance, warnings, and failed trials."""
    return [
        *section("Where these figures come from", provenance(records)),
        *section("Warnings of the evaluations", evaluation_warnings(records)),
        *section("Failed", [f"- {error}" for error in dict.fromkeys(errors)]),
    ]


def reported_overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the overridden values that change results; paths and engine settings do not."""
    return {key: value for key, value in values.items() if not key.startswith("engine.") and key != "data.root"}


def overrides_sentence(values: Mapping[str, Any]) -> str:
    """Return a sentence that lists the overridden values, or an empty text."""
    listed = ", ".join(f"{key} = {value}" for key, value in reported_overrides(values).items())
    return f"Set otherwise than in the recipes: {listed}." if listed else ""


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


def _distinct(environments: Sequence[Mapping[str, Any]], key: str) -> str:
    return ", ".join(dict.fromkeys(str(one[key]) for one in environments if one.get(key)))
