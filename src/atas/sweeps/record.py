"""The record of a trial: a small JSON file with its settings, results and environment."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from atas._utils.documents import MalformedError, check_keys, conform, read_json
from atas._utils.environment import Environment
from atas._utils.files import write_text
from atas.errors import DataError
from atas.evaluation import Evaluation
from atas.evaluation.result import WORST
from atas.evaluation.seed_stats import SeedStats
from atas.report import RunSummary
from atas.sweeps.trial import Trial, format_eps

_FORMAT = 1


class _Figures(TypedDict):
    accuracy: float
    interval: tuple[float, float]
    right: NotRequired[int]
    seconds: NotRequired[float]


class _Training(TypedDict):
    seconds: float
    collapsed_in_epoch: int | None
    environment: Environment


class _Measurement(TypedDict):
    environment: Environment


class _Values(TypedDict):
    """The content of a record's file."""

    format: int
    key: str
    row: str
    training_key: str
    seed: int
    trial: dict[str, Any]
    settings: dict[str, Any]
    training: _Training
    weights: str
    n: int
    attacks: dict[str, _Figures]
    evaluations: NotRequired[list[dict[str, Any]]]
    observed: NotRequired[dict[str, _Measurement]]


@dataclass(frozen=True)
class Record:
    """The results of a trial.

    `attacks` holds accuracy, interval, count and seconds of each attack. `observed` holds the measurements, each with
    the hash of the measured weights, because the training may have been repeated for it.
    """

    key: str
    row: str
    training_key: str
    seed: int
    trial: dict[str, Any]
    settings: dict[str, Any]
    training: dict[str, Any]
    weights: str
    n: int
    attacks: dict[str, dict[str, Any]]
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    observed: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def from_run(
        cls,
        trial: Trial,
        summary: RunSummary,
        environment: dict[str, Any],
        evaluation: Evaluation,
        shared: bool = False,
    ) -> Record:
        """Make the record of a finished training and its first evaluation."""
        recipe = trial.resolved_recipe
        training = {
            "seconds": summary.seconds,
            "shared": shared,
            "epochs": len(summary.epochs),
            "collapsed_in_epoch": summary.collapse_epoch,
            "last_epoch": summary.epochs[-1],
            "environment": environment,
        }
        return cls(
            key=trial.key,
            row=trial.row,
            training_key=trial.training_key,
            seed=trial.seed,
            trial={
                "recipe": trial.recipe,
                "values": {key: value for key, value in trial.values.items() if key != "data.root"},
                "data": recipe.data.name,
                "network": recipe.model.name,
                "method": recipe.method.name,
                "eps": format_eps(recipe.method.eps),
                "padding": trial.padding,
                "examples": trial.examples,
                "held_out": trial.held_out,
                "part": None if trial.subset is None else trial.subset.to_json(),
            },
            settings=recipe.to_dict() | {"data": {k: v for k, v in recipe.to_dict()["data"].items() if k != "root"}},
            training=training,
            weights=evaluation.weights,
            n=evaluation.n,
            attacks=_attacks(evaluation),
            evaluations=[_metadata(evaluation)],
        )

    @property
    def seconds(self) -> float | None:
        """Time spent in training steps; None if other processes used the same device."""
        return None if self.training.get("shared") else float(self.training["seconds"])

    @property
    def collapsed_in(self) -> int | None:
        """The first collapsed epoch by the monitor, counted from 1, or None."""
        epoch: int | None = self.training["collapsed_in_epoch"]
        return epoch

    @property
    def hardware(self) -> str:
        """The device of the training."""
        return str(self.training["environment"].get("device", "unknown hardware"))

    def missing_attacks(self, attacks: Iterable[str]) -> tuple[str, ...]:
        """Return the attacks that the record does not have."""
        return tuple(name for name in attacks if name not in self.attacks)

    def merge(self, other: Record) -> Record:
        """Return this record with what another record of the same trial adds; attacks only of the same weights."""
        if other.key != self.key:
            return self
        merged = replace(self, observed=other.observed | self.observed)
        new = {name: figures for name, figures in other.attacks.items() if name not in self.attacks}
        if not new or other.weights != self.weights:
            return merged
        return replace(merged, attacks=self.attacks | new, evaluations=self.evaluations + other.evaluations)

    def with_measurement(self, name: str, values: dict[str, Any]) -> Record:
        """Return the record with a measurement added."""
        return replace(self, observed=self.observed | {name: values})

    def with_evaluation(self, evaluation: Evaluation) -> Record:
        """Return the record with the attacks of another evaluation added."""
        attacks = self.attacks | _attacks(evaluation)
        return replace(self, attacks=attacks, evaluations=[*self.evaluations, _metadata(evaluation)])

    def save(self, path: Path) -> None:
        """Write the record atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"format": _FORMAT, **self.__dict__}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Record:
        """Read a record that `save` wrote."""
        try:
            document = conform(read_json(path, dict[str, Any]), _Values)
            if document["format"] != _FORMAT:
                raise MalformedError("another format")
            check_keys(document, _Values)
            for name, figures in document["attacks"].items():
                right = figures.get("right")
                if right is not None and not math.isclose(right, figures["accuracy"] * document["n"], abs_tol=1e-6):
                    raise MalformedError(f"the accuracy under {name} does not agree with its count")
        except (OSError, MalformedError) as error:
            raise DataError(f"the record {path} is damaged ({error}); remove it and run the study again") from error
        return cls(**{key: value for key, value in document.items() if key != "format"})


def summarize_seeds(records: Sequence[Record], attack: str) -> SeedStats | None:
    """Return the accuracy under an attack over the records of one row, or None if no record has the attack."""
    attacked = [record for record in records if attack in record.attacks]
    if not attacked:
        return None
    values = [100 * record.attacks[attack]["accuracy"] for record in attacked]
    return SeedStats.of(values, [100 * end for end in attacked[0].attacks[attack]["interval"]], attacked[0].n)


def _attacks(evaluation: Evaluation) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "accuracy": evaluation.accuracy[name],
            "interval": list(evaluation.interval[name]),
            "right": int(verdicts.sum()),
            "seconds": evaluation.seconds[name],
        }
        for name, verdicts in evaluation.correct.items()
        if name != WORST  # it covers only the attacks of one evaluation
    }


def _metadata(evaluation: Evaluation) -> dict[str, Any]:
    return {
        "attacks": [name for name in evaluation.correct if name != WORST],
        "protocol": evaluation.protocol,
        "environment": evaluation.environment,
        "data": evaluation.data,
        "warnings": [str(warning) for warning in evaluation.warnings],
    }
