"""The JSON format of a result: its keys and their types, and verdicts and labels as compact strings."""

from __future__ import annotations

import math
import string
from fractions import Fraction
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from atas._utils.documents import MalformedError
from atas._utils.environment import Environment
from atas.errors import UsageError

FORMAT = 1
_ROBUST = "-"
_CHARACTERS = string.digits + string.ascii_letters
MAX_LABELS = len(_CHARACTERS)
"""The number of different attacks and stages that may break examples."""


class _ThreatValues(TypedDict):
    norm: str
    eps: float


class _StageValues(TypedDict):
    after: str
    right: int
    seconds: float
    queries: int


class _WarningValues(TypedDict):
    kind: str
    text: str


class _CorruptionValues(TypedDict):
    right: list[int]


class _LabelValues(TypedDict):
    names: list[str]
    examples: str


class _MaskValues(TypedDict):
    share: float
    hash: str


class _ProtocolValues(TypedDict, total=False):
    attacks: dict[str, dict[str, Any]]
    seed: int
    precision: str
    search_notes: list[str]
    image_shape: list[int]
    targets: dict[str, Any]
    mask: _MaskValues


class ResultValues(TypedDict):
    """The content of a result file; the first versions did not write what is not required."""

    format: int
    threat: _ThreatValues
    n: int
    accuracy: dict[str, float]
    seconds: dict[str, float]
    protocol: _ProtocolValues
    environment: Environment
    weights: str
    data: str
    correct: dict[str, str]
    interval: NotRequired[dict[str, tuple[float, float]]]
    queries: NotRequired[dict[str, int]]
    stages: NotRequired[dict[str, list[_StageValues]]]
    warnings: NotRequired[list[_WarningValues]]
    sentence: NotRequired[str]
    broken_by: NotRequired[dict[str, _LabelValues]]
    corruptions: NotRequired[dict[str, _CorruptionValues]]
    checksum: NotRequired[str]


def encode_flags(values: Tensor) -> str:
    """Return flags as a string of 0 and 1.

    >>> encode_flags(torch.tensor([True, False, True]))
    '101'
    """
    return bytes(values.to(torch.uint8).add(ord("0")).tolist()).decode("ascii")


def decode_flags(text: str) -> Tensor:
    """Return the flags of a string of 0 and 1."""
    if set(text) - {"0", "1"}:
        raise MalformedError("verdicts are not digits of 0 and 1")
    return torch.tensor([digit == "1" for digit in text], dtype=torch.bool)


def encode_labels(names: list[str | None]) -> dict[str, Any]:
    """Return names, in the order of their first example, and one character per example.

    >>> encode_labels(["clean", None, "apgd-t", "clean"])
    {'names': ['clean', 'apgd-t'], 'examples': '0-10'}
    """
    order = list(dict.fromkeys(name for name in names if name is not None))
    if len(order) > MAX_LABELS:
        raise UsageError(f"a result file holds at most {MAX_LABELS} attacks and stages; evaluate fewer at a time")
    character = dict(zip(order, _CHARACTERS, strict=False))
    return {"names": order, "examples": "".join(_ROBUST if name is None else character[name] for name in names)}


def decode_labels(values: dict[str, Any], n: int) -> list[str | None]:
    """Return the names that `encode_labels` was given.

    >>> decode_labels({"names": ["clean", "apgd-t"], "examples": "0-10"}, 4)
    ['clean', None, 'apgd-t', 'clean']
    """
    name: dict[str, str | None] = dict(zip(_CHARACTERS, values["names"], strict=False))
    name[_ROBUST] = None
    if len(values["examples"]) != n:
        raise MalformedError(f"broken_by does not have {n} examples")
    if unknown := sorted(set(values["examples"]) - name.keys()):
        raise MalformedError(f"broken_by has the character {unknown[0]!r}, which stands for no attack")
    return [name[character] for character in values["examples"]]


def decode_verdicts(text: str, n: int) -> Tensor:
    """Return the flags of a string of 0 and 1, one for each of n examples."""
    if len(text) != n:
        raise MalformedError(f"verdicts are not {n} digits of 0 and 1")
    return decode_flags(text)


def states_budget(text: object, eps: float) -> bool:
    """Return whether a text gives this budget, to its number of digits.

    >>> states_budget("Linf(8/255)", 8 / 255), states_budget("Linf(8/255)", 0.0814)
    (True, False)
    """
    try:
        stated = float(Fraction(str(text).partition("(")[2].rstrip(")")))
    except (ValueError, ZeroDivisionError):
        return False
    return math.isclose(stated, eps, rel_tol=1e-4)
