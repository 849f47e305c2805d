"""What an evaluation found, and its file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from atas._files import write_text
from atas.errors import AtasError, DataError
from atas.evaluation._interval import wilson
from atas.evaluation._table import plain_table, rich_table
from atas.threat import Threat, create

_FORMAT = 1


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """Verdicts of every attack on every example, and what follows from them.

    The keys of `correct`, `accuracy`, `interval` and `seconds` are `clean`, the attacks by name, and `worst`: right on
    the clean image and under every attack.

    Attributes:
        threat: the ball that the attacks were confined to.
        correct: for each key a bool tensor (n,) on the CPU, true where the model was right.
        seconds: for each key the time that it took; for `worst` all of it.
        protocol: how it was measured: attacks and their settings, seed, precision, shapes.
        environment: software, hardware and date.
        weights: short hash of the model's state.
        data: short hash of images and labels.
    """

    threat: Threat
    correct: dict[str, Tensor]
    seconds: dict[str, float]
    protocol: dict[str, Any]
    environment: dict[str, Any]
    weights: str
    data: str

    @property
    def n(self) -> int:
        """How many examples there were."""
        return len(self.correct["clean"])

    @cached_property
    def accuracy(self) -> dict[str, float]:
        """The fraction of examples that the model was right on, 0 to 1."""
        return {name: int(verdicts.sum()) / self.n for name, verdicts in self.correct.items()}

    @cached_property
    def interval(self) -> dict[str, tuple[float, float]]:
        """Wilson's 95% interval of each accuracy."""
        return {name: wilson(int(verdicts.sum()), self.n) for name, verdicts in self.correct.items()}

    def table(self) -> Table:
        """A table to print with rich."""
        return rich_table(self)

    def __str__(self) -> str:
        return plain_table(self)

    def __repr__(self) -> str:
        figures = ", ".join(f"{name}={accuracy:.4f}" for name, accuracy in self.accuracy.items())
        return f"Evaluation({self.threat}, n={self.n}, {figures})"

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file; verdicts are strings of 0 and 1, an example a digit."""
        return {
            "format": _FORMAT,
            "threat": {"norm": self.threat.name, "eps": self.threat.eps, "text": str(self.threat)},
            "n": self.n,
            "accuracy": self.accuracy,
            "interval": {name: list(ends) for name, ends in self.interval.items()},
            "seconds": self.seconds,
            "protocol": self.protocol,
            "environment": self.environment,
            "weights": self.weights,
            "data": self.data,
            "correct": {name: _digits(verdicts) for name, verdicts in self.correct.items()},
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the result as JSON; the file is replaced as a whole or not at all."""
        write_text(Path(path), json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Evaluation:
        """Read a result that `save` wrote."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise DataError(f"cannot read the result file {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise DataError(f"the result file {path} is damaged (no JSON); evaluate again") from error
        try:
            return cls._from_json(found)
        except (KeyError, TypeError, AttributeError, ValueError, AtasError) as error:
            raise DataError(f"the result file {path} is damaged ({_cause(error)}); evaluate again") from error

    @classmethod
    def _from_json(cls, found: dict[str, Any]) -> Evaluation:
        if found["format"] != _FORMAT:
            raise ValueError(f"format {found['format']} rather than {_FORMAT}")
        result = cls(
            threat=create(found["threat"]["norm"], float(found["threat"]["eps"])),
            correct={name: _verdicts(digits, found["n"]) for name, digits in found["correct"].items()},
            seconds={name: float(found["seconds"][name]) for name in found["correct"]},
            protocol=dict(found["protocol"]),
            environment=dict(found["environment"]),
            weights=str(found["weights"]),
            data=str(found["data"]),
        )
        if result.accuracy != found["accuracy"]:
            raise ValueError("accuracy and verdicts do not agree")
        return result


def _digits(verdicts: Tensor) -> str:
    return bytes(verdicts.to(torch.uint8).add(ord("0")).tolist()).decode("ascii")


def _verdicts(digits: str, n: int) -> Tensor:
    if len(digits) != n or set(digits) - {"0", "1"}:
        raise ValueError(f"verdicts are not {n} digits of 0 and 1")
    return torch.tensor([digit == "1" for digit in digits], dtype=torch.bool)


def _cause(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
