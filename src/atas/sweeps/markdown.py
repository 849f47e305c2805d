"""Pages of Markdown: tables that can be read as they stand, and where the figures come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atas.sweeps.record import Record


def table(header: Sequence[str], rows: Iterable[Sequence[str]], left: int = 2) -> list[str]:
    """A table whose columns are aligned in the text too; the first `left` ones to the left."""
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
    """Hardware, versions and commits that the figures were made with."""
    trained = [record.training["environment"] for record in records]
    trained += [seen["environment"] for record in records for seen in record.observed.values()]
    evaluated = [about["environment"] for record in records for about in record.evaluations]
    parts = {
        "trained on": _distinct(trained, "device"),
        "training in": _distinct(trained, "precision"),
        "evaluated on": _distinct(evaluated, "device"),
        "atas": _distinct([*trained, *evaluated], "atas"),
        "commit": _distinct([*trained, *evaluated], "commit"),
        "torch": _distinct([*trained, *evaluated], "torch"),
    }
    said = [f"- {name}: {value}" for name, value in parts.items() if value]
    if shared := sum(record.seconds is None for record in records):
        said.append(f"- not timed: {shared} of {len(records)} trainings, which shared their device with others")
    return said


def evaluation_warnings(records: Sequence[Record]) -> list[str]:
    """Warnings of the evaluations, each once, with the trials that they are about."""
    found: dict[str, list[str]] = {}
    for record in records:
        about = f"{record.trial['network']} {record.trial['method']} {record.trial['eps']} seed {record.seed}"
        for evaluation in record.evaluations:
            for warning in evaluation["warnings"]:
                found.setdefault(warning, []).append(about)
    return [f"- {', '.join(dict.fromkeys(abouts))}: {warning}" for warning, abouts in found.items()]


def section(title: str, items: Sequence[str]) -> list[str]:
    """A part of a page, unless there is nothing in it."""
    return ["", f"## {title}", "", *items] if items else []


def provenance_section(records: Sequence[Record], errors: Sequence[str]) -> list[str]:
    """The end of a page: where its figures come from, what is to be doubted, and what is missing."""
    return [
        *section("Where these figures come from", provenance(records)),
        *section("Warnings of the evaluations", evaluation_warnings(records)),
        *section("Failed", [f"- {error}" for error in dict.fromkeys(errors)]),
    ]


def reported_overrides(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of values that a person set, those that change what is measured, not where or how fast."""
    return {key: value for key, value in values.items() if not key.startswith("engine.") and key != "data.root"}


def overrides_sentence(values: Mapping[str, Any]) -> str:
    """What was set otherwise than in the recipes, in a sentence; nothing where nothing was."""
    listed = ", ".join(f"{key} = {value}" for key, value in reported_overrides(values).items())
    return f"Set otherwise than in the recipes: {listed}." if listed else ""


def _distinct(environments: Sequence[Mapping[str, Any]], key: str) -> str:
    return ", ".join(dict.fromkeys(str(found[key]) for found in environments if found.get(key)))
