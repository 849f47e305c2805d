"""`--set section.key=value`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from typing import Any

from atas.errors import UsageError


def parse(assignments: Iterable[str]) -> dict[str, Any]:
    """Values by dotted key; each is read as TOML, or as it stands where it is not TOML.

    >>> parse(["training.epochs=10", "method.eps=8/255"])
    {'training.epochs': 10, 'method.eps': '8/255'}
    """
    return dict(map(_one, assignments))


def _one(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or "." not in key:
        raise UsageError(f"'{text}' is not an assignment; write section.key=value, such as training.epochs=10")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()
