"""Values of a recipe: parse them into the type of their key, such as the fraction "8/255", and format them as TOML."""

from __future__ import annotations

import contextlib
import math
import numbers
import re
from typing import Any, Literal, TypeGuard, get_args, get_origin

import torch

from atas._utils.documents import union_members
from atas.errors import UsageError
from atas.threat import EpsMultiple

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_FRACTION = re.compile(rf"\s*({_NUMBER})\s*/\s*({_NUMBER})\s*")
_NONE = "none"  # TOML has no null
_MAX_SHOWN = 200  # characters of a wrong value in a message
_MAX_INTEGER = 2**64
_DTYPES = {"int8": torch.int8, "float16": torch.float16, "float32": torch.float32}


def parse_fraction(text: str) -> float | None:
    """Return the value of a fraction or number in a text; None if it is neither.

    >>> parse_fraction("8/255") == 8 / 255
    True
    """
    if match := _FRACTION.fullmatch(text):
        divisor = float(match[2])
        return float(match[1]) / divisor if divisor else None
    return float(text) if re.fullmatch(rf"\s*{_NUMBER}\s*", text) else None


def parse_value(value: Any, kind: Any, key: str) -> Any:
    """Convert a value to the type of a key; raise UsageError with the key if that is not possible.

    >>> parse_value("4/255", float, "method.step_size") == 4 / 255
    True
    """
    parsed = _parse_as_any(value, kind)
    if parsed is _MISMATCH:
        expected = " or ".join(dict.fromkeys(_describe_type(option) for option in union_members(kind)))
        if isinstance(value, int) and not _is_finite(value):
            expected += " of at most 64 bits"
        raise UsageError(f"{key} must be {expected}; got {_shorten(value)}")
    return parsed


_MISMATCH: Any = object()


def _parse_as_any(value: Any, kind: Any) -> Any:
    """Return the value as the first type of a union that it fits, or `_MISMATCH`."""
    parsed = (_parse_as(value, option) for option in union_members(kind))
    return next((value for value in parsed if value is not _MISMATCH), _MISMATCH)


def _shorten(value: Any) -> str:
    """Return a value as text for a message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or lists in lists in lists
        text = type(value).__name__
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _parse_as(value: Any, kind: Any) -> Any:
    """Return the value as this type, or `_MISMATCH`."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return _parse_untyped(value)
    if kind is type(None):
        return None if value is None or value == _NONE else _MISMATCH
    if origin is Literal:
        return value if value in inner else _MISMATCH
    if origin is tuple:
        if isinstance(value, str) and inner[0] is str:
            value = [part.strip() for part in value.split(",")]
        values = value if isinstance(value, list | tuple) else [value]
        kinds = [inner[0]] * len(values) if inner[-1] is Ellipsis else list(inner)
        parsed = [_parse_as_any(*pair) for pair in zip(values, kinds, strict=False)]
        return _MISMATCH if len(values) != len(kinds) or _MISMATCH in parsed else tuple(parsed)
    if kind is EpsMultiple:
        with contextlib.suppress(ValueError):
            return EpsMultiple(value) if isinstance(value, str) else _MISMATCH
        return _MISMATCH
    if kind is torch.dtype:
        name = str(value).removeprefix("torch.")
        return name if name in _DTYPES else _MISMATCH
    if kind is bool:
        return value if isinstance(value, bool) else _MISMATCH
    if isinstance(value, bool):
        return _MISMATCH
    if kind is str:
        return str(value) if isinstance(value, str | int) and _is_text(str(value)) else _MISMATCH
    number = parse_fraction(value) if isinstance(value, str) else value
    if not _is_finite(number):
        return _MISMATCH
    if kind is int:
        if isinstance(number, numbers.Integral):
            return int(number)
        whole = not isinstance(value, str) and float(number).is_integer() and _is_finite(int(float(number)))
        return int(float(number)) if whole else _MISMATCH
    return float(number) if kind is float else _MISMATCH


def _is_finite(number: Any) -> TypeGuard[float]:
    """Return whether this is a number that a float or a 64-bit integer can hold."""
    if isinstance(number, numbers.Integral):
        return abs(int(number)) <= _MAX_INTEGER
    return isinstance(number, numbers.Real) and math.isfinite(number)


def _is_text(text: str) -> bool:
    """Return whether a text can be saved; the name of a file that is not UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse_untyped(value: Any) -> Any:
    """Return a value whose key has no known type, as if it had the type of what `format_toml` wrote."""
    if isinstance(value, list | tuple):
        parsed = tuple(_MISMATCH if isinstance(item, list | tuple) else _parse_untyped(item) for item in value)
        return _MISMATCH if _MISMATCH in parsed else parsed
    if isinstance(value, str):
        number = parse_fraction(value) if _FRACTION.fullmatch(value) else None
        if value == _NONE:
            return None
        return number if number is not None and _is_finite(number) else value if _is_text(value) else _MISMATCH
    return value if value is None or (isinstance(value, bool | int | float) and _is_finite(value)) else _MISMATCH


def _describe_type(kind: Any) -> str:
    if kind is float:
        return "a number or a fraction such as 8/255"
    if get_origin(kind) is Literal:
        return " or ".join(f"'{option}'" for option in get_args(kind))
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        elements = "names" if inner[0] is str else "numbers" if inner[0] is float else "numbers or multiples of eps"
        return f"a list of {elements}" if inner[-1] is Ellipsis else f"a list of {len(inner)} {elements}"
    names = {
        Any: "a number, a text or a list of them",
        int: "a whole number",
        bool: "true or false",
        str: "a text",
        EpsMultiple: "a multiple of eps such as '2 eps'",
        type(None): f"'{_NONE}'",
    }
    return names.get(kind) or " or ".join(f"'{name}'" for name in _DTYPES)


def format_toml(value: Any, as_255ths: bool = False) -> str:
    """Format a value as TOML. With `as_255ths`, for budgets and step sizes, write k/255 if that is exact."""
    if value is None:
        return f'"{_NONE}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        if as_255ths and 0 < abs(value) < 1 and round(value * 255) / 255 == value:
            return f'"{round(value * 255)}/255"'
        return repr(value)
    if isinstance(value, int):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_toml(item, as_255ths) for item in value) + "]"
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    escaped = "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in escaped)
    return f'"{escaped}"'
