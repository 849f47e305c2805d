"""What an evaluation found, and its file."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from atas._files import write_text
from atas.errors import AtasError, DataError
from atas.evaluation._breaks import decode, encode
from atas.evaluation._cautions import Caution
from atas.evaluation._interval import wilson
from atas.evaluation._markdown import markdown
from atas.evaluation._records import digits, flags
from atas.evaluation._sentence import sentence
from atas.evaluation._table import plain_table, rich_table
from atas.threat import Threat, create

WORST = "worst"
_FORMAT = 1


@dataclass(frozen=True)
class Stage:
    """How a model stands after one stage of an attack that has several, such as AutoAttack.

    A stage sees only the examples that held before it, so this is not what the stage would find on all of them.
    """

    name: str
    right: int
    """Examples that hold after it."""
    n: int
    seconds: float
    queries: int

    @property
    def accuracy(self) -> float:
        """After this stage, of all examples."""
        return self.right / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval of the accuracy."""
        return wilson(self.right, self.n)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "after": self.name,
            "accuracy": self.accuracy,
            "interval": list(self.interval),
            "right": self.right,
            "seconds": self.seconds,
            "queries": self.queries,
        }

    @staticmethod
    def from_json(found: dict[str, Any], n: int) -> Stage:
        """What `to_json` gave."""
        return Stage(str(found["after"]), int(found["right"]), n, float(found["seconds"]), int(found["queries"]))


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """Verdicts of every attack on every example, and what follows from them.

    The keys of `correct`, `accuracy`, `interval`, `seconds` and `queries` are `clean`, the attacks by name, and
    `worst`: right on the clean image and under every attack.

    Attributes:
        threat: the ball that the attacks were confined to.
        correct: for each key a bool tensor (n,) on the CPU, true where the model was right.
        seconds: for each key the time that it took; for `worst` all of it.
        protocol: how it was measured: attacks and their settings, seed, precision, shapes.
        environment: software, hardware and date.
        weights: short hash of the model's state.
        data: short hash of images and labels.
        queries: for each key how often an image was put before the model to search; verdicts are not counted.
        stages: for each attack of several stages, how the model stands after each of them.
        broken_by: for each of these attacks, and for `worst`, what broke each example first: `clean` where the model is
            wrong without an attack, a stage or an attack by name, or None where the example holds.
        warnings: reasons to doubt the figures; see docs/evaluation.md.
        progress_files: what was kept on the way, until the result is saved.
    """

    threat: Threat
    correct: dict[str, Tensor]
    seconds: dict[str, float]
    protocol: dict[str, Any]
    environment: dict[str, Any]
    weights: str
    data: str
    queries: dict[str, int] = field(default_factory=dict)
    stages: dict[str, tuple[Stage, ...]] = field(default_factory=dict)
    broken_by: dict[str, list[str | None]] = field(default_factory=dict)
    warnings: tuple[Caution, ...] = ()
    progress_files: tuple[Path, ...] = ()

    @property
    def has_autoattack(self) -> bool:
        """Whether AutoAttack, of whatever version, is among the attacks."""
        return any(name.startswith("autoattack") for name in self.correct)

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

    def markdown(self) -> str:
        """The whole result as a page of Markdown."""
        return markdown(self)

    def sentence(self) -> str:
        """A line for a paper: figures with their intervals, and what someone needs to check them."""
        return sentence(self)

    def __str__(self) -> str:
        return "\n".join([plain_table(self), *(f"warning: {caution}" for caution in self.warnings)])

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
            "queries": self.queries,
            "stages": {name: [stage.to_json() for stage in stages] for name, stages in self.stages.items()},
            "warnings": [asdict(caution) for caution in self.warnings],
            "sentence": self.sentence(),
            "protocol": self.protocol,
            "environment": self.environment,
            "weights": self.weights,
            "data": self.data,
            "correct": {name: digits(verdicts) for name, verdicts in self.correct.items()},
            "broken_by": {name: encode(names) for name, names in self.broken_by.items()},
        }

    def save(self, path: str | os.PathLike[str], *, keep_progress: bool = False) -> None:
        """Write the result as JSON; the file is replaced as a whole or not at all.

        Then the progress file is not needed any more and goes, unless it is to be kept.
        """
        write_text(Path(path), json.dumps(self.to_json(), indent=1) + "\n")
        if not keep_progress:
            self.forget_progress()

    def forget_progress(self) -> None:
        """Remove what was kept on the way, now that the result is safe."""
        for path in self.progress_files:
            path.unlink(missing_ok=True)

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
            correct={name: _verdicts(text, found["n"]) for name, text in found["correct"].items()},
            seconds={name: float(found["seconds"][name]) for name in found["correct"]},
            protocol=dict(found["protocol"]),
            environment=dict(found["environment"]),
            weights=str(found["weights"]),
            data=str(found["data"]),
            # Results of earlier versions do not have the rest.
            queries={name: int(count) for name, count in found.get("queries", {}).items()},
            stages={
                name: tuple(Stage.from_json(stage, found["n"]) for stage in stages)
                for name, stages in found.get("stages", {}).items()
            },
            broken_by={name: decode(names, found["n"]) for name, names in found.get("broken_by", {}).items()},
            warnings=tuple(Caution(**caution) for caution in found.get("warnings", [])),
        )
        for name, names in result.broken_by.items():
            if result.correct[name].tolist() != [label is None for label in names]:
                raise ValueError("verdicts and what broke the examples do not agree")
        if result.accuracy != found["accuracy"]:
            raise ValueError("accuracy and verdicts do not agree")
        return result


def _verdicts(text: str, n: int) -> Tensor:
    if len(text) != n:
        raise ValueError(f"verdicts are not {n} digits of 0 and 1")
    return flags(text)


def _cause(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
