"""What broke each example, as a short text for a file: a character an example, and a list of what they stand for."""

from __future__ import annotations

import string
from typing import Any

from atas.errors import UsageError

_HOLDS = "-"
_CHARACTERS = string.digits + string.ascii_letters


def encode(names: list[str | None]) -> dict[str, Any]:
    """Names in the order of their first example.

    >>> encode(["clean", None, "apgd-t", "clean"])
    {'names': ['clean', 'apgd-t'], 'examples': '0-10'}
    """
    order = list(dict.fromkeys(name for name in names if name is not None))
    if len(order) > len(_CHARACTERS):
        raise UsageError(f"a result file tells at most {len(_CHARACTERS)} attacks apart; run fewer at a time")
    character = dict(zip(order, _CHARACTERS, strict=False))
    return {"names": order, "examples": "".join(_HOLDS if name is None else character[name] for name in names)}


def decode(found: dict[str, Any], n: int) -> list[str | None]:
    """What `encode` was given.

    >>> decode({"names": ["clean", "apgd-t"], "examples": "0-10"}, 4)
    ['clean', None, 'apgd-t', 'clean']
    """
    name: dict[str, str | None] = dict(zip(_CHARACTERS, found["names"], strict=False))
    name[_HOLDS] = None
    if len(found["examples"]) != n:
        raise ValueError(f"what broke them is not known of {n} examples")
    return [name[character] for character in found["examples"]]
