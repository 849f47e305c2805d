"""`Evaluation`: the result of an evaluation, its JSON file, and all results in a run's folder."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from atas._utils import documents
from atas._utils.documents import MalformedError, conform
from atas._utils.files import check_json_path, write_text
from atas.attacks.registry import is_autoattack
from atas.errors import AtasError, DataError
from atas.evaluation.adversarial import save_adversarial
from atas.evaluation.details import EvaluationDetails, details_path, read_details, write_details
from atas.evaluation.intervals import wilson
from atas.evaluation.rendering import corruption_table, markdown, plain_table, rich_table, sentence
from atas.evaluation.result_format import (
    FORMAT,
    ResultValues,
    decode_labels,
    decode_verdicts,
    encode_flags,
    encode_labels,
    states_budget,
)
from atas.evaluation.warnings import EvaluationWarning
from atas.threat import Threat, create

WORST = "worst"
CURVE_KIND = "accuracy curve"
"""The kind in the file of a curve, which is not a result."""
_MAIN_RESULT = "evaluation"
_TELLING_KEYS = ("format", "threat", "accuracy", "interval", "correct", "broken_by", "weights")
_ENOUGH_KEYS = 3  # damage may have taken some


@dataclass(frozen=True)
class Stage:
    """The accuracy after one stage of an attack that has several, such as AutoAttack.

    A stage attacks only the examples that earlier stages did not break, so this is not its result on all examples.
    """

    name: str
    num_correct: int
    """Examples that are correct after it."""
    n: int
    seconds: float
    queries: int

    @property
    def accuracy(self) -> float:
        """The fraction of all examples that are correct after this stage."""
        return self.num_correct / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval of the accuracy."""
        return wilson(self.num_correct, self.n)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "after": self.name,
            "accuracy": self.accuracy,
            "interval": list(self.interval),
            "right": self.num_correct,
            "seconds": self.seconds,
            "queries": self.queries,
        }

    @staticmethod
    def from_json(values: dict[str, Any], n: int) -> Stage:
        """Read the values that `to_json` returned."""
        if not 0 <= values["right"] <= n:
            raise MalformedError(f"{values['right']} of {n} examples are right after {values['after']}")
        if values.get("accuracy", values["right"] / n) != values["right"] / n:
            raise MalformedError(f"the accuracy after {values['after']} is not that of {values['right']} of {n}")
        return Stage(values["after"], values["right"], n, float(values["seconds"]), values["queries"])


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """Verdicts of every attack on every example, with accuracies, intervals and warnings.

    The keys of `correct`, `accuracy`, `interval`, `seconds` and `queries` are `clean`, the names of the attacks, and
    `worst`: correct on the clean image and under every attack.

    Attributes:
        threat: the threat model of the attacks.
        correct: for each key a bool tensor (n,) on the CPU, true where the model was correct.
        seconds: for each key the time; for `worst` the sum.
        protocol: the settings of the measurement: attacks, seed, precision, shapes.
        environment: software, hardware and date.
        weights: short hash of the model's state.
        data: short hash of images and labels.
        queries: for each key the number of images that the search passed through the model; verdicts are not counted.
        stages: for each attack of several stages, the accuracy after each stage.
        broken_by: for each of these attacks and for `worst`, the first attack or stage that broke each example:
            `clean` if the model is wrong without an attack, None if nothing broke it.
        warnings: reasons to doubt the accuracies; see docs/evaluation.md.
        progress_files: the progress files, which `save` removes.
        details: labels, predictions, and pictures of a few examples; None in results of earlier versions, and in those
            with target classes or a mask.
        adversarial: with `keep=True`, the perturbed images (n, C, H, W) of each attack; not in the JSON file.
        labels: with `keep=True`, the labels (n,).
        corruptions: for each common corruption, the number of correct examples at severities 1 to 5.
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
    details: EvaluationDetails | None = None
    adversarial: dict[str, Tensor] = field(default_factory=dict)
    labels: Tensor | None = None
    corruptions: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def has_autoattack(self) -> bool:
        """Whether a version of AutoAttack is among the attacks."""
        return any(map(is_autoattack, self.correct))

    @property
    def targeted(self) -> bool:
        """Whether the attacks pushed images towards target classes; `correct` then means: not pushed there."""
        return self.protocol.get("targets") is not None

    @property
    def restricted(self) -> bool:
        """Whether the attacks had target classes or a mask, so that the result is no robust accuracy."""
        return self.targeted or self.protocol.get("mask") is not None

    @property
    def n(self) -> int:
        """The number of examples."""
        return len(self.correct["clean"])

    @cached_property
    def accuracy(self) -> dict[str, float]:
        """The fraction of examples that are correct, from 0 to 1, by attack."""
        return {name: int(verdicts.sum()) / self.n for name, verdicts in self.correct.items()}

    @cached_property
    def interval(self) -> dict[str, tuple[float, float]]:
        """Wilson's 95% interval of each accuracy, by attack."""
        return {name: wilson(int(verdicts.sum()), self.n) for name, verdicts in self.correct.items()}

    def table(self) -> Table:
        """Return a table to print with rich."""
        return rich_table(self)

    def corruption_table(self) -> Table:
        """Return a table of the accuracies under common corruptions."""
        return corruption_table(self)

    def markdown(self) -> str:
        """Return the whole result as a page of Markdown."""
        return markdown(self)

    def sentence(self) -> str:
        """Return a sentence for a paper: accuracies with intervals, and the settings to reproduce them."""
        return sentence(self)

    def __str__(self) -> str:
        return "\n".join([plain_table(self), *(f"warning: {warning}" for warning in self.warnings)])

    def __repr__(self) -> str:
        figures = ", ".join(f"{name}={accuracy:.4f}" for name, accuracy in self.accuracy.items())
        return f"Evaluation({self.threat}, n={self.n}, {figures})"

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file; verdicts are strings of 0 and 1, one digit per example."""
        values = {
            "format": FORMAT,
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
            **({"corruptions": self._corruption_values()} if self.corruptions else {}),
        }
        return values | {documents.CHECKSUM: documents.checksum(values)}

    def _corruption_values(self) -> dict[str, Any]:
        return {
            name: {
                "right": list(counts),
                "accuracy": [count / self.n for count in counts],
                "interval": [list(wilson(count, self.n)) for count in counts],
            }
            for name, counts in self.corruptions.items()
        }

    def save(self, path: str | os.PathLike[str], *, keep_progress: bool = False) -> None:
        """Write the result as JSON, atomically; then remove the progress files unless `keep_progress`.

        The `details` are written first, to a file beside it with the ending `.safetensors`.
        """
        check_json_path(Path(path), "the result")
        text = json.dumps(self.to_json(), indent=1) + "\n"
        if self.details is not None:
            write_details(Path(path), self.details, self.weights, self.data, self._fingerprint())
        write_text(Path(path), text)
        if not keep_progress:
            self.forget_progress()

    def save_adversarial(self, path: str | os.PathLike[str]) -> None:
        """Write the perturbed images, labels and verdicts to a file, .npz or .safetensors."""
        save_adversarial(self, path)

    def forget_progress(self) -> None:
        """Remove the progress files."""
        for path in self.progress_files:
            path.unlink(missing_ok=True)

    def _fingerprint(self) -> str:
        """Return a hash of the verdicts, which binds the details to them."""
        verdicts = {name: encode_flags(values) for name, values in self.correct.items()}
        values = [self.weights, self.data, self.threat.name, self.threat.eps, verdicts]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, details: bool = True) -> Evaluation:
        """Read a result that `save` wrote, with its `details` if there are any and they are wanted."""
        result = cls._load_verdicts(Path(path))
        if not details or result.restricted:
            return result
        try:
            stored = read_details(Path(path), result.correct, result.weights, result.data, result._fingerprint())
        except OSError as error:
            raise DataError(f"cannot read the images of the result {path}: {error.strerror or error}") from error
        except MalformedError as error:
            raise DataError(f"{details_path(Path(path))} is damaged ({error}); remove it, or evaluate again") from error
        return replace(result, details=stored)

    @classmethod
    def _load_verdicts(cls, path: Path) -> Evaluation:
        try:
            return cls._from_json(documents.read_json(path, dict[str, Any]))
        except OSError as error:
            raise DataError(f"cannot read the result file {path}: {error.strerror or error}") from error
        except (KeyError, ValueError, AtasError) as error:
            raise DataError(f"the result file {path} is damaged ({_cause(error)}); evaluate again") from error

    @classmethod
    def _from_json(cls, values: dict[str, Any]) -> Evaluation:
        if values["format"] != FORMAT:
            raise MalformedError(f"format {str(values['format'])[:9]}, expected {FORMAT}")
        documents.check_keys(conform(values, ResultValues), ResultValues)
        documents.verify_checksum(values)
        if values["n"] < 1:
            raise MalformedError("it has no examples")
        result = cls(
            threat=create(values["threat"]["norm"], float(values["threat"]["eps"])),
            correct={name: decode_verdicts(text, values["n"]) for name, text in values["correct"].items()},
            seconds={name: float(values["seconds"][name]) for name in values["correct"]},
            protocol=values["protocol"],
            environment=values["environment"],
            weights=values["weights"],
            data=values["data"],
            # Results of earlier versions lack the keys below.
            queries=values.get("queries", {}),
            stages={
                name: tuple(Stage.from_json(stage, values["n"]) for stage in stages)
                for name, stages in values.get("stages", {}).items()
            },
            broken_by={name: decode_labels(names, values["n"]) for name, names in values.get("broken_by", {}).items()},
            corruptions={name: tuple(one["right"]) for name, one in values.get("corruptions", {}).items()},
            warnings=tuple(EvaluationWarning(one["kind"], one["text"]) for one in values.get("warnings", [])),
        )
        for name, names in result.broken_by.items():
            if result.correct[name].tolist() != [label is None for label in names]:
                raise MalformedError("correct and broken_by do not agree")
        for name, counts in result.corruptions.items():
            if any(not 0 <= count <= result.n for count in counts):
                raise MalformedError(f"a corruption has more than {result.n} correct examples, or fewer than none")
            if values["corruptions"][name].get("accuracy") != [count / result.n for count in counts]:
                raise MalformedError(f"the accuracies under {name} are not those of the counts")
        if not states_budget(values["threat"].get("text", str(result.threat)), result.threat.eps):
            raise MalformedError("the budget and its text do not agree")
        if result.accuracy != values["accuracy"]:
            raise MalformedError("correct and accuracy do not agree")
        return result


def _cause(error: Exception) -> str:
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)


def load_results(folder: Path) -> list[Evaluation]:
    """Return the results in a run's folder: `evaluation.json` first, then others on the same images, by file name."""
    paths = sorted(folder.glob("*.json"), key=lambda path: (path.stem != _MAIN_RESULT, path))
    results = [result for path in paths if _is_result(path) if not (result := Evaluation.load(path)).restricted]
    return [result for result in results if _same_images(results[0], result)]


def _is_result(path: Path) -> bool:
    """Return whether a file is a result, damaged or not; results on other data and progress files are not."""
    if path.name.startswith(".") or path.name.endswith((".progress.json", f"-{_MAIN_RESULT}.json")):
        return False
    if path.stem == _MAIN_RESULT:
        return True
    try:
        content = documents.read_bytes(path)
    except (OSError, MalformedError):
        return False
    if f'"kind": "{CURVE_KIND}"'.encode() in content:
        return False
    return sum(f'"{key}":'.encode() in content for key in _TELLING_KEYS) >= _ENOUGH_KEYS


def _same_images(a: Evaluation, b: Evaluation) -> bool:
    """Return whether both may be on the same first images: with equal weights, clean verdicts must be equal."""
    count = min(a.n, b.n)
    same = torch.equal(a.correct["clean"][:count], b.correct["clean"][:count])
    return same or a.weights != b.weights
