"""`Evaluation`: what an evaluation found, its JSON file, and all results in a run's folder."""

from __future__ import annotations

import json
import os
import string
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from atas._utils.files import read_json, write_text
from atas.errors import AtasError, DataError, UsageError
from atas.evaluation.intervals import wilson
from atas.evaluation.rendering import markdown, plain_table, rich_table, sentence
from atas.evaluation.warnings import EvaluationWarning
from atas.threat import Threat, create

WORST = "worst"
_FORMAT = 1
_MAIN_RESULT = "evaluation"
_RESULT_KEYS = {"format", "threat", "correct", "weights", "data"}
_ROBUST = "-"
_CHARACTERS = string.digits + string.ascii_letters


@dataclass(frozen=True)
class Stage:
    """How a model stands after one stage of an attack that has several, such as AutoAttack.

    A stage sees only the examples that held before it, so this is not what the stage would find on all of them.
    """

    name: str
    num_correct: int
    """Examples that hold after it."""
    n: int
    seconds: float
    queries: int

    @property
    def accuracy(self) -> float:
        """After this stage, of all examples."""
        return self.num_correct / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval of the accuracy."""
        return wilson(self.num_correct, self.n)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "after": self.name,
            "accuracy": self.accuracy,
            "interval": list(self.interval),
            "right": self.num_correct,
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
    warnings: tuple[EvaluationWarning, ...] = ()
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
        return "\n".join([plain_table(self), *(f"warning: {warning}" for warning in self.warnings)])

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
            "warnings": [asdict(warning) for warning in self.warnings],
            "sentence": self.sentence(),
            "protocol": self.protocol,
            "environment": self.environment,
            "weights": self.weights,
            "data": self.data,
            "correct": {name: encode_flags(verdicts) for name, verdicts in self.correct.items()},
            "broken_by": {name: encode_labels(names) for name, names in self.broken_by.items()},
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
            broken_by={name: decode_labels(names, found["n"]) for name, names in found.get("broken_by", {}).items()},
            warnings=tuple(EvaluationWarning(**warning) for warning in found.get("warnings", [])),
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
    return decode_flags(text)


def _cause(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def encode_flags(values: Tensor) -> str:
    """Flags as a string of 0 and 1.

    >>> encode_flags(torch.tensor([True, False, True]))
    '101'
    """
    return bytes(values.to(torch.uint8).add(ord("0")).tolist()).decode("ascii")


def decode_flags(text: str) -> Tensor:
    """A string of 0 and 1 as flags."""
    if set(text) - {"0", "1"}:
        raise ValueError("verdicts are not digits of 0 and 1")
    return torch.tensor([digit == "1" for digit in text], dtype=torch.bool)


def encode_labels(names: list[str | None]) -> dict[str, Any]:
    """Names in the order of their first example.

    >>> encode_labels(["clean", None, "apgd-t", "clean"])
    {'names': ['clean', 'apgd-t'], 'examples': '0-10'}
    """
    order = list(dict.fromkeys(name for name in names if name is not None))
    if len(order) > len(_CHARACTERS):
        raise UsageError(f"a result file tells at most {len(_CHARACTERS)} attacks apart; run fewer at a time")
    character = dict(zip(order, _CHARACTERS, strict=False))
    return {"names": order, "examples": "".join(_ROBUST if name is None else character[name] for name in names)}


def decode_labels(found: dict[str, Any], n: int) -> list[str | None]:
    """What `encode_labels` was given.

    >>> decode_labels({"names": ["clean", "apgd-t"], "examples": "0-10"}, 4)
    ['clean', None, 'apgd-t', 'clean']
    """
    name: dict[str, str | None] = dict(zip(_CHARACTERS, found["names"], strict=False))
    name[_ROBUST] = None
    if len(found["examples"]) != n:
        raise ValueError(f"what broke them is not known of {n} examples")
    return [name[character] for character in found["examples"]]


def load_results(folder: Path) -> list[Evaluation]:
    """The run's own first, then the others on its images, by name: those that were given one with `--out`, too."""
    paths = sorted(folder.glob("*.json"), key=lambda path: (path.stem != _MAIN_RESULT, path))
    found = [Evaluation.load(path) for path in paths if _is_result(path)]
    return [one for one in found if _same_images(found[0], one)]


def _is_result(path: Path) -> bool:
    """Also one that is damaged, where its name says so; but not one on other data, nor progress."""
    if path.name.startswith(".") or path.name.endswith((".progress.json", f"-{_MAIN_RESULT}.json")):
        return False
    return path.stem == _MAIN_RESULT or read_json(path).keys() >= _RESULT_KEYS


def _same_images(one: Evaluation, other: Evaluation) -> bool:
    """Whether one may be of the first images of the other: a model that gives other answers is shown other images."""
    count = min(one.n, other.n)
    same = torch.equal(one.correct["clean"][:count], other.correct["clean"][:count])
    return same or one.weights != other.weights
