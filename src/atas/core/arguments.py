"""Checks of arguments: numbers, texts and the like, by the annotations of functions and dataclasses."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from atas._utils.documents import union_members
from atas.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

_PLAIN_TYPES = (int, float, bool, str, Path, type(None), torch.dtype, torch.device)
_MAX_SHOWN = 60  # characters of a wrong value in a message


def check_argument(name: str, value: object, kind: Any) -> None:
    """Raise UsageError unless a value has the type of an annotation. Numbers must be finite.

    >>> check_argument("step_size", 8 / 255, float | None)
    >>> check_argument("step_size", "8/255", float | None)
    Traceback (most recent call last):
    atas.errors.UsageError: step_size must be a finite number or None; got '8/255'
    """
    options = union_members(kind)
    if not any(_is_of(value, option) for option in options):
        expected = " or ".join(dict.fromkeys(_describe_kind(option) for option in options))
        raise UsageError(f"{name} must be {expected}; got {describe(value)}")


@functools.cache
def plain_types(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function's arguments that `check_argument` can check; none if they have no value."""
    try:
        kinds = get_type_hints(function)
    except NameError:  # a user's annotations for type checkers alone
        return {}
    return {name: kind for name, kind in kinds.items() if name != "return" and all(map(_is_plain, union_members(kind)))}


def check_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Check the numbers, texts and the like among the arguments of each call against their annotations.

    >>> @check_arguments
    ... def halve(size: int) -> int:
    ...     return size // 2
    >>> halve("8")
    Traceback (most recent call last):
    atas.errors.UsageError: size must be a whole number; got '8'
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with contextlib.suppress(TypeError):  # Python's own error for arguments that are missing or unknown
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                if name in (kinds := plain_types(function)):
                    check_argument(name, value, kinds[name])
        return function(*args, **kwargs)

    return call


def check_fields(settings: Any) -> None:
    """Check the numbers, texts and the like among the fields of a dataclass against their annotations."""
    for name, kind in plain_types(type(settings).__init__).items():
        check_argument(name, getattr(settings, name), kind)


def check_interface(name: str, values: Sequence[object], methods: Sequence[str]) -> None:
    """Raise UsageError unless every value is an object, not a class, with these methods."""
    for value in values:
        if isinstance(value, type):
            raise UsageError(f"{name} must be an object; got the class {value.__name__}: create it, {value.__name__}()")
        if not all(callable(getattr(value, method, None)) for method in methods):
            raise UsageError(f"{name} must have the methods {', '.join(methods)}; got {describe(value)}")


def check_count(name: str, value: object, minimum: int = 1) -> int:
    """Return a whole number of at least `minimum`, else raise UsageError."""
    check_argument(name, value, int)
    number = int(value)  # type: ignore[call-overload]
    if number < minimum:
        raise UsageError(f"{name} must be at least {minimum}; got {number}")
    return number


def check_seed(value: object) -> int:
    """Return a seed as an int, else raise UsageError; any whole number of 64 bits is one."""
    check_argument("seed", value, int)
    seed = int(value)  # type: ignore[call-overload]
    if not -(2**63) <= seed < 2**64:
        raise UsageError(f"seed must fit 64 bits; got {seed}")
    return seed


def check_device(device: torch.device | str | None) -> torch.device | None:
    """Return the device of a name; raise UsageError if there is none on this machine."""
    if device is None:
        return None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise UsageError(f"there is no device {describe(device)}; use cpu or cuda") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("this machine has no CUDA device, or this PyTorch was built without CUDA; use device cpu")
    return found


def describe(value: object) -> str:
    """Return a value for a message, in one line."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and {value.dtype}"
    lines = repr(value).splitlines() or [type(value).__name__]
    return lines[0] if len(lines) == 1 and len(lines[0]) <= _MAX_SHOWN else f"a {type(value).__name__}"


def _is_plain(kind: Any) -> bool:
    if get_origin(kind) is tuple:
        return all(element is Ellipsis or all(map(_is_plain, union_members(element))) for element in get_args(kind))
    return kind in _PLAIN_TYPES or get_origin(kind) in (Literal, Mapping)


def _is_of(value: Any, kind: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is None or kind is type(None):
        return value is None
    if origin is Literal:
        return any(type(value) is type(option) and value == option for option in inner)
    if origin is tuple:
        fits = isinstance(value, tuple | list) and (inner[-1] is Ellipsis or len(value) == len(inner))
        kinds = itertools.repeat(inner[0]) if inner[-1] is Ellipsis else inner
        return fits and all(_is_of(*pair) for pair in zip(value, kinds, strict=False))
    if kind in (int, float):
        number = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
        return number and math.isfinite(value)
    return not isinstance(origin or kind, type) or isinstance(value, origin or kind)


def _describe_kind(kind: Any) -> str:
    inner = get_args(kind)
    if get_origin(kind) is Literal:
        return " or ".join(repr(option) for option in inner)
    if get_origin(kind) is tuple:
        elements = f"{_describe_kind(inner[0]).removeprefix('a ')}s"
        return f"a tuple of {elements}" if inner[-1] is Ellipsis else f"a tuple of {len(inner)} {elements}"
    names = {int: "a whole number", float: "a finite number", bool: "True or False", str: "a text", type(None): "None"}
    return names.get(kind) or f"a {'torch.' * (getattr(kind, '__module__', '') == 'torch')}{kind.__name__}"
