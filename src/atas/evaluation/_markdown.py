"""A result as a page of Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atas.evaluation._table import HEADER, caption, rows_of

if TYPE_CHECKING:
    from atas.evaluation._result import Evaluation


def markdown(result: Evaluation) -> str:
    """Table, warnings, the line for a paper, and how it was measured."""
    protocol, environment = result.protocol, result.environment
    lines = [f"# Evaluation: {caption(result)}", "", _row(HEADER), _row(["---", *["---:"] * (len(HEADER) - 1)])]
    for name in result.correct:
        first, *stages = rows_of(result, name)
        # Without the indentation of the other tables, a stage might be taken for an attack of its own.
        lines += [_row(first), *(_row([f"{name}, {label.strip()}", *cells]) for label, *cells in stages)]
    lines += ["", "Warnings:" if result.warnings else "No warnings."]
    lines += [f"- {caution}" for caution in result.warnings]
    lines += ["", f"> {result.sentence()}", ""]
    for name, value in {
        "verdict": protocol.get("verdict"),
        "search in": protocol.get("search_precision"),
        "image shape": protocol.get("image_shape"),
        "command": f"`{environment['command']}`" if "command" in environment else None,
        "versions": ", ".join(f"{key} {environment[key]}" for key in ("atas", "torch", "python") if key in environment),
        "hardware": environment.get("device"),
        "processes": protocol.get("processes"),
        "date": environment.get("date"),
    }.items():
        if value:
            lines.append(f"- {name}: {value}")
    lines += [f"- {name}: {_settings(settings)}" for name, settings in protocol.get("attacks", {}).items() if settings]
    return "\n".join(lines) + "\n"


def _row(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(cell.replace('|', '/').strip() for cell in cells)} |"


def _settings(settings: dict[str, object]) -> str:
    """Settings in a line; those of the stages in brackets."""
    return ", ".join(
        f"{key} ({_settings(value)})" if isinstance(value, dict) else f"{key} {value}"
        for key, value in settings.items()
    )
