"""A run's folder read into a `RunSummary`: recipe, metrics, events, and the evaluation to show.

A folder may hold several results. `summarise` picks the one to show and keeps the others of the same weights and
budget.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atas.core.fingerprint import state_hash
from atas.errors import AtasError, DataError
from atas.evaluation import Evaluation
from atas.evaluation.result import load_results
from atas.evaluation.warnings import EvaluationWarning
from atas.models.weights import read_weights
from atas.recipes import Recipe
from atas.training.metrics import completed_epochs, read_metrics
from atas.training.run import RunFolder, load_recipe


@dataclass(frozen=True)
class RunSummary:
    """What a run's folder tells about it. `weights` is the hash of the weights in it, if they can be read;
    `other_results` are further results of the same weights and budget."""

    name: str
    recipe: Recipe
    epochs: list[dict[str, Any]]
    events: list[dict[str, Any]]
    evaluation: Evaluation | None
    weights: str | None
    other_results: tuple[Evaluation, ...] = ()

    @property
    def autoattack_result(self) -> Evaluation | None:
        """The result with AutoAttack, on the most images; None if AutoAttack was not run."""
        return strongest_result(result for result in self.results if result.has_autoattack)

    @property
    def warnings(self) -> list[EvaluationWarning]:
        """Of all results."""
        return list({str(caution): caution for one in self.results for caution in one.warnings}.values())

    @property
    def results(self) -> list[Evaluation]:
        """All, the one to show first."""
        return [one for one in (self.evaluation, *self.other_results) if one is not None]

    @property
    def weights_differ(self) -> bool | None:
        """Whether the evaluation is of other weights than the run's; None where that cannot be told."""
        if self.evaluation is None or self.weights is None:
            return None
        return self.weights != self.evaluation.weights

    @property
    def seconds(self) -> float:
        """Time spent in training steps."""
        return float(self.epochs[-1]["seconds"]) if self.epochs else 0.0

    @property
    def collapse_epoch(self) -> int | None:
        """The first epoch, counted from 1, in which the monitor saw a collapse."""
        return first_collapse(self.epochs)

    @property
    def collapse_status(self) -> str:
        """What became of a collapse, in a word or two."""
        taken_back = [row for row in self.events if "to_epoch" in row]
        if taken_back and taken_back[-1]["event"] == "stop":
            return f"stopped after epoch {taken_back[-1]['to_epoch']}"
        if taken_back:
            return f"{len(taken_back)} rolled back"
        return f"epoch {self.collapse_epoch}" if self.collapse_epoch else "no"

    def to_json(self) -> dict[str, Any]:
        """The row as plain values."""
        found = self.evaluation
        return {
            "run": self.name,
            "recipe": self.recipe.name,
            "method": self.recipe.method.name,
            "threat": repr(self.recipe.threat),
            "epochs": len(self.epochs),
            "seconds": self.seconds,
            "collapsed_in_epoch": self.collapse_epoch,
            "rollbacks": sum(row["event"] == "rollback" for row in self.events),
            "n": found.n if found else None,
            "other_weights": self.weights_differ,
            "accuracy": dict(found.accuracy) if found else None,
            "interval": {key: list(value) for key, value in found.interval.items()} if found else None,
            "more": [
                {"n": one.n, "accuracy": dict(one.accuracy), "interval": {k: list(v) for k, v in one.interval.items()}}
                for one in self.other_results
            ],
        }


def summarise(folders: Sequence[str | Path]) -> list[RunSummary]:
    """Read the runs in these folders; they are named by their own folder where that tells them apart."""
    paths = [Path(folder) for folder in folders]
    unique = len({path.resolve().name for path in paths}) == len(paths)
    found = []
    for path in paths:
        folder = RunFolder(path)
        recipe, lines = load_recipe(folder), read_metrics(folder.metrics)
        rows, events = completed_epochs(lines), [line for line in lines if "event" in line]
        if not rows:
            raise DataError(f"the run in {path} has no epoch to show yet; let it train for one at least")
        results = load_results(path)
        weights = _weights_hash(folder) if results else None
        chosen = _select_results(results, weights, recipe)
        evaluation, other_results = next(iter(chosen), None), tuple(chosen[1:])
        name = path.resolve().name if unique else str(path)
        found.append(RunSummary(name, recipe, rows, events, evaluation, weights, other_results))
    return found


def strongest_result(results: Iterable[Evaluation]) -> Evaluation | None:
    """Return the result with AutoAttack if there is one, then the one on the most images; None if there are none."""
    return max(results, key=lambda result: (result.has_autoattack, result.n), default=None)


def first_collapse(epochs: Iterable[dict[str, Any]]) -> int | None:
    """Return the first collapsed epoch, counted from 1, of rows of metrics."""
    return next((row["epoch"] + 1 for row in epochs if row.get("collapsed")), None)


def _select_results(results: list[Evaluation], weights: str | None, recipe: Recipe) -> list[Evaluation]:
    """The result to show, and after it others of the same weights and budget. It is the run's own, the first, unless
    that is of other weights; or unless AutoAttack, in another one, leaves less of it than chance explains."""
    if not results:
        return []
    of_run = [one for one in results if one.weights == (weights or results[0].weights)] or results[:1]
    threat = of_run[0].threat if of_run[0] is results[0] else recipe.threat
    first, *others = [one for one in of_run if one.threat == threat] or of_run[:1]
    worse = [one for one in others if one.has_autoattack and one.interval["worst"][1] < first.accuracy["worst"]]
    if worse and not first.has_autoattack:
        first, others = worse[0], [first, *(one for one in others if one is not worse[0])]
    return [first, *others]


def _weights_hash(folder: RunFolder) -> str | None:
    """The hash of a run's weights; None where there are none, or none that can be read."""
    try:
        metadata, tensors = read_weights(folder.model)
    except AtasError:
        return None
    return metadata.get("weights") or state_hash(tensors)
