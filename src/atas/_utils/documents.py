"""Read JSON and TOML from files that may be damaged or of another program, and check the types of what they hold.

Whatever the bytes are, the result has the promised type, or `MalformedError` says in a few words what is wrong.
"""

from __future__ import annotations

import errno
import functools
import json
import stat
import sys
import tomllib
import zlib
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

CHECKSUM = "checksum"  # the key
MAX_BYTES = 1 << 28  # the largest files, results on ImageNet, have a few megabytes
_MAX_SHOWN = 40  # characters of a wrong value in a message
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "null"}


class MalformedError(ValueError):
    """The content of a file is not what its readers rely on."""


def read_json(path: Path, kind: Any) -> Any:
    """Return the content of a JSON file, of this type; see `conform`. Raises MalformedError or OSError."""
    return conform(parse_json(read_bytes(path)), kind)


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file of a size that a document may have."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a pipe waits forever, and a device has no end
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if status.st_size > MAX_BYTES:
        raise MalformedError(f"it is larger than {MAX_BYTES >> 20} MiB")
    return path.read_bytes()


def parse_json(content: bytes | str) -> Any:
    """Parse JSON in UTF-8."""
    try:
        return json.loads(decode(content))
    except ValueError as error:  # neither JSON nor UTF-8; a number of 5,000 digits is no JSONDecodeError
        raise MalformedError("not JSON") from error
    except RecursionError as error:
        raise MalformedError("it is nested too deeply") from error


def parse_toml(content: bytes | str) -> dict[str, Any]:
    """Parse TOML in UTF-8."""
    try:
        return tomllib.loads(decode(content))
    except MalformedError:
        raise
    except ValueError as error:
        raise MalformedError(str(error)) from error
    except RecursionError as error:
        raise MalformedError("it is nested too deeply") from error


def checksum(content: dict[str, Any]) -> str:
    """Return the CRC-32 of what a JSON object holds, but for its own checksum, whatever the file's spaces and lines.

    >>> checksum({"a": 1}) == checksum({"a": 1, "checksum": "x"})
    True
    """
    values = {key: value for key, value in content.items() if key != CHECKSUM}
    return f"{zlib.crc32(json.dumps(values).encode()):08x}"


def verify_checksum(content: dict[str, Any]) -> None:
    """Raise MalformedError if an object is not what its checksum was written for; earlier versions wrote none."""
    if content.get(CHECKSUM) is None:
        return
    try:
        found = checksum(content)
    except RecursionError as error:
        raise MalformedError("it is nested too deeply") from error
    if content[CHECKSUM] != found:
        raise MalformedError("its checksum is wrong")


def decode(content: bytes | str) -> str:
    """Decode UTF-8."""
    try:
        return content if isinstance(content, str) else content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedError(f"byte {error.start} is not UTF-8") from error


def conform(value: Any, kind: Any, name: str = "") -> Any:
    """Return a value that was read from JSON; raise MalformedError, with its name, unless it is of a type.

    A type is a class, a union, a Literal, `list[...]`, `tuple[...]` (a list in JSON), `dict[str, ...]`, `Any`, or a
    TypedDict. An object may have more keys than its TypedDict declares, and lack those that are `NotRequired`. A whole
    number is a `float` as well; a bool is no number.

    >>> conform({"a": [1, 2.5]}, dict[str, list[float]])
    {'a': [1, 2.5]}
    >>> conform({"a": [1, "2"]}, dict[str, list[float]])
    Traceback (most recent call last):
    atas._utils.documents.MalformedError: a[1] is '2', not a number
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if len(union_members(kind)) > 1:
        return _conform_union(value, kind, name)
    if is_typeddict(kind):
        return _conform_typed_dict(value, kind, name)
    if origin is NotRequired:
        return conform(value, inner[0], name)
    if origin is Literal:
        matches = value in inner
    elif origin is list:
        matches = isinstance(value, list)
        for number, item in enumerate(value if matches else []):
            conform(item, inner[0], f"{name}[{number}]")
    elif origin is tuple:
        matches = isinstance(value, list) and len(value) == len(inner)
        for number, (item, item_kind) in enumerate(zip(value, inner, strict=True) if matches else []):
            conform(item, item_kind, f"{name}[{number}]")
    elif origin is dict:
        matches = isinstance(value, dict)
        for key, item in value.items() if matches else ():
            conform(item, inner[1], _join(name, key))
    elif kind is float:
        matches = isinstance(value, int | float) and not isinstance(value, bool) and _fits_float(value)
    else:
        matches = isinstance(value, kind) and (kind is not int or not isinstance(value, bool))
    if not matches:
        raise MalformedError(_wrong(value, kind, name))
    return value


def union_members(kind: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the type alone."""
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _conform_union(value: Any, kind: Any, name: str) -> Any:
    options = get_args(kind)
    for option in options:
        try:
            return conform(value, option, name)
        except MalformedError:
            if len(options) == 2 and type(None) in options and option is not type(None) and value is not None:
                raise  # says where in the value
    raise MalformedError(_wrong(value, kind, name))


def check_keys(value: dict[str, Any], kind: Any) -> None:
    """Raise MalformedError if a value of a TypedDict has a key that the type does not declare: a damaged name."""
    unknown = sorted(value.keys() - _hints(kind).keys())
    if unknown:
        raise MalformedError(f"the key '{_join('', unknown[0])}' is unknown")


def _conform_typed_dict(value: Any, kind: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise MalformedError(_wrong(value, dict, name))
    kinds = _hints(kind)
    # Where annotations are strings, Python counts the keys that are NotRequired among the required ones.
    required = {key for key in kind.__required_keys__ if get_origin(kinds[key]) is not NotRequired}
    if missing := sorted(required - value.keys()):
        raise MalformedError(f"'{_join(name, missing[0])}' is missing")
    for key, item_kind in kinds.items():
        if key in value:
            conform(value[key], item_kind, _join(name, key))
    return value


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _fits_float(value: float) -> bool:
    return not isinstance(value, int) or abs(value) <= sys.float_info.max


def _join(name: str, key: str) -> str:
    key = key if key.isprintable() else repr(key)
    return _shorten(f"{name}.{key}" if name else key)


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _wrong(value: Any, kind: Any, name: str) -> str:
    got = _describe(type(value)) if isinstance(value, dict | list) else _shorten(repr(value))
    return f"{name or 'it'} is {got}, not {_describe(kind)}"


def _describe(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if len(union_members(kind)) > 1:
        return " or ".join(_describe(option) for option in inner)
    if origin is Literal:
        return " or ".join(repr(option) for option in inner)
    if origin is tuple:
        return f"a list of {len(inner)}"
    if origin is list or kind is list:
        return "a list"
    if origin is dict or kind is dict or is_typeddict(kind):
        return "an object"
    return _NAMES.get(kind, str(kind))
