"""Values of a recipe: fractions such as "8/255", conversion to a field's type, and TOML text."""

from __future__ import annotations

import math
import re
import types
from typing import Any, Union, get_args, get_origin

from atas.errors import UsageError

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_FRACTION = re.compile(rf"\s*({_NUMBER})\s*/\s*({_NUMBER})\s*")


def fraction(text: str) -> float | None:
    """The value of a fraction or number in writing, or None where it is neither.

    >>> fraction("8/255") == 8 / 255
    True
    """
    if match := _FRACTION.fullmatch(text):
        divisor = float(match[2])
        return float(match[1]) / divisor if divisor else None
    return float(text) if re.fullmatch(rf"\s*{_NUMBER}\s*", text) else None


def loosely(value: Any) -> Any:
    """Fractions in writing become numbers, anywhere inside; all else stays."""
    if isinstance(value, list | tuple):
        return tuple(loosely(item) for item in value)
    if isinstance(value, str) and (number := fraction(value)) is not None:
        return number
    return value


def convert(value: Any, kind: Any, key: str) -> Any:
    """The value as the type that a recipe's field has, or an error that names the key."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        (kind,) = [option for option in inner if option is not type(None)]
        return convert(value, kind, key)
    if origin is tuple:
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(convert(item, inner[0], key) for item in values)
    if kind is float:
        number = fraction(value) if isinstance(value, str) else value
        if isinstance(number, int | float) and not isinstance(number, bool) and math.isfinite(number):
            return float(number)
        raise UsageError(f"{key} must be a number or a fraction such as 8/255; got {value!r}")
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise UsageError(f"{key} must be of type {kind.__name__}; got {value!r}")


def to_toml(value: Any) -> str:
    """A value as TOML; budgets and steps as k/255 where that is the very same number."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        levels = round(value * 255, 6)
        if value and abs(value) < 1 and levels == round(levels) and round(levels) / 255 == value:
            return f'"{round(levels)}/255"'
        return repr(value)
    if isinstance(value, int):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(to_toml(item) for item in value) + "]"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    escaped = "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped)
    return f'"{escaped}"'
