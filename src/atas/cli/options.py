"""Options that several sub-commands share, and parsers of `--set section.key=value` and of comma-separated lists.

This module must not import torch, so that completion and wrong options are answered at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import typer

from atas._utils.documents import MalformedError, parse_toml
from atas.cli.completion import complete_assignments, find_key
from atas.errors import UsageError

T = TypeVar("T")
TRUST: bool = typer.Option(
    False, "--trust", help="Import and run the code that the folder or file names as its model or method."
)
QUIET_HELP = "Print only errors and the result; no progress."
QUIET: bool = typer.Option(False, "--quiet", "-q", help=QUIET_HELP)
SET: list[str] = typer.Option(
    [], "--set", metavar="KEY=VALUE", help="Override a recipe key; repeatable.", autocompletion=complete_assignments
)


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Return values by dotted key. A value is parsed as TOML, or kept as a string if it is not TOML.

    >>> parse_assignments(["training.epochs=10", "method.eps=8/255"])
    {'training.epochs': 10, 'method.eps': '8/255'}
    """
    return dict(map(_parse_assignment, assignments))


def _parse_assignment(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or "." not in key:
        meant = find_key(key.strip()) if equals and key.strip() else None
        hint = f"; did you mean --set {meant}={value.strip()}?" if meant else ", such as training.epochs=10"
        raise UsageError(f"'{text}' is not an assignment; write section.key=value{hint}")
    try:
        return key.strip(), parse_toml(f"value = {value}")["value"]
    except MalformedError:
        return key.strip(), value.strip()


def parse_list(option: str, text: str | None, kind: Callable[[str], T]) -> tuple[T, ...] | None:
    """Parse a comma-separated option; None if it was not given."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError(f"--{option} is empty; pass values separated by commas, or leave it out")
    return tuple(dict.fromkeys(map(kind, parts)))


def integer_parser(option: str) -> Callable[[str], int]:
    """Return a parser of integers whose errors name the option."""

    def number(text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise UsageError(f"{option} takes integers separated by commas; got '{text}'") from None

    return number
