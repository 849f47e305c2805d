"""What several sub-commands share: `--set section.key=value`, shell completion, and comma-separated lists.

This module must not import torch: completion and mistakes are answered without it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from atas.errors import UsageError
from atas.paper import catalogue
from atas.recipes import loading

T = TypeVar("T")


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Values by dotted key; each is read as TOML, or as it stands where it is not TOML.

    >>> parse_assignments(["training.epochs=10", "method.eps=8/255"])
    {'training.epochs': 10, 'method.eps': '8/255'}
    """
    return dict(map(_parse_assignment, assignments))


def _parse_assignment(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or "." not in key:
        raise UsageError(f"'{text}' is not an assignment; write section.key=value, such as training.epochs=10")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def complete_recipes(incomplete: str) -> list[str]:
    """Recipes that come with the package."""
    return [name for name in loading.names() if name.startswith(incomplete)]


def complete_studies(incomplete: str) -> list[str]:
    """Studies of `atas reproduce`."""
    return [name for name in catalogue.study_names() if name.startswith(incomplete)]


def parse_list(option: str, text: str | None, kind: Callable[[str], T]) -> tuple[T, ...] | None:
    """The parts of a comma-separated option."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError(f"--{option} is empty; give values separated by commas, or leave it out")
    return tuple(dict.fromkeys(map(kind, parts)))


def integer_parser(option: str) -> Callable[[str], int]:
    """A parser of whole numbers for one option, which its errors name."""

    def number(text: str) -> int:
        try:
            return int(text)
        except ValueError:
            raise UsageError(f"{option} takes whole numbers separated by commas; got '{text}'") from None

    return number
