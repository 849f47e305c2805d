"""A run's folder read into a `RunSummary`: recipe, metrics, events, and the evaluation to show.

A folder may hold several results. `summarise` selects the one to show and keeps the others with the same weights and
threat model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atas.core.fingerprint import state_hash
from atas.errors import AtasError, DataError
from atas.evaluation import Evaluation
from atas.evaluation.result import load_results
from atas.evaluation.seed_stats import SeedStats, stats_by_attack
from atas.evaluation.warnings import EvaluationWarning
from atas.models.weights import read_weights
from atas.recipes import Recipe
from atas.report.verdict import Verdict, judge
from atas.training.metrics import completed_epochs, first_collapse, missing_epochs
from atas.training.run import RunFolder, load_recipe


@dataclass(frozen=True)
class RunSummary:
    """The content of a run's folder. `weights` is the hash of its weights, if they can be read; `other_results` have
    the same weights and threat model as `evaluation`."""

    name: str
    recipe: Recipe
    epochs: list[dict[str, Any]]
    events: list[dict[str, Any]]
    evaluation: Evaluation | None
    weights: str | None
    other_results: tuple[Evaluation, ...] = ()

    @property
    def runs(self) -> tuple[RunSummary, ...]:
        """The run alone, as a `SeedGroup` has several."""
        return (self,)

    @property
    def stats(self) -> dict[str, SeedStats]:
        """The accuracy by attack, as that of a `SeedGroup`."""
        return stats_by_attack([] if self.evaluation is None else [self.evaluation])

    def first_result(self, attack: str) -> Evaluation | None:
        """Return the first result that has this attack."""
        return next((result for result in self.results if attack in result.accuracy), None)

    @property
    def autoattack_result(self) -> Evaluation | None:
        """The result with AutoAttack, on the most images; None if AutoAttack was not run."""
        return max((result for result in self.results if result.has_autoattack), key=lambda one: one.n, default=None)

    @property
    def corruption_result(self) -> Evaluation | None:
        """The result with common corruptions, on the most images; None if there is none."""
        return max((result for result in self.results if result.corruptions), key=lambda one: one.n, default=None)

    @property
    def verdict(self) -> Verdict:
        """The worst case, and how to read it."""
        return judge(self.results)

    @property
    def warnings(self) -> list[EvaluationWarning]:
        """The warnings of all results, without duplicates."""
        return list({str(warning): warning for result in self.results for warning in result.warnings}.values())

    @property
    def results(self) -> list[Evaluation]:
        """All results, the one to show first."""
        return [result for result in (self.evaluation, *self.other_results) if result is not None]

    @property
    def weights_differ(self) -> bool | None:
        """Whether the evaluation used other weights than the run's; None if unknown."""
        if self.evaluation is None or self.weights is None:
            return None
        return self.weights != self.evaluation.weights

    @property
    def seconds(self) -> float:
        """Seconds spent in training steps."""
        return float(self.epochs[-1]["seconds"]) if self.epochs else 0.0

    @property
    def collapse_epoch(self) -> int | None:
        """The first epoch, counted from 1, in which the monitor saw a collapse."""
        return first_collapse(self.epochs)

    @property
    def collapse_status(self) -> str:
        """The first collapse and the reaction to it, in two or three words."""
        reactions = [row for row in self.events if "to_epoch" in row]
        if reactions and reactions[-1]["event"] == "stop":
            return f"stopped after epoch {reactions[-1]['to_epoch']}"
        if reactions:
            return f"{len(reactions)} rolled back"
        if self.collapse_epoch:
            return f"epoch {self.collapse_epoch}"
        return "unknown" if missing_epochs(self.epochs) else "no"

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        shown = self.evaluation
        return {
            "run": self.name,
            "recipe": self.recipe.name,
            "method": self.recipe.method.name,
            "threat": repr(self.recipe.threat),
            "epochs": len(self.epochs),
            "seconds": self.seconds,
            "collapsed_in_epoch": self.collapse_epoch,
            "rollbacks": sum(row["event"] == "rollback" for row in self.events),
            "n": shown.n if shown else None,
            "other_weights": self.weights_differ,
            "accuracy": dict(shown.accuracy) if shown else None,
            "interval": {key: list(value) for key, value in shown.interval.items()} if shown else None,
            "worst_case": str(self.verdict),
            "more": [
                {
                    "n": other.n,
                    "accuracy": dict(other.accuracy),
                    "interval": {k: list(v) for k, v in other.interval.items()},
                }
                for other in self.other_results
            ],
        }


def summarise(folders: Sequence[str | Path]) -> list[RunSummary]:
    """Read the runs in these folders. A run is named after its folder, or by its path if two folders share a name."""
    paths = [Path(folder) for folder in folders]
    unique = len({path.resolve().name for path in paths}) == len(paths)
    runs = []
    for path in paths:
        folder = RunFolder(path)
        recipe, lines = load_recipe(folder), folder.read_metrics()
        rows, events = completed_epochs(lines), [line for line in lines if "event" in line]
        if not rows:
            raise DataError(f"the run in {path} has no finished epoch; train it for at least one")
        results = load_results(path)
        weights = _weights_hash(folder) if results else None
        selected = select_results(results, weights, recipe)
        evaluation, other_results = next(iter(selected), None), tuple(selected[1:])
        name = path.resolve().name if unique else str(path)
        runs.append(RunSummary(name, recipe, rows, events, evaluation, weights, other_results))
    return runs


def select_results(results: list[Evaluation], weights: str | None, recipe: Recipe) -> list[Evaluation]:
    """Return the result to show and to quote, then others with the same weights and threat model.

    The result to show is the first with the run's weights. Another one replaces it if it has AutoAttack, the first has
    not, and AutoAttack's robust accuracy is significantly lower.
    """
    if not results:
        return []
    of_run = [result for result in results if result.weights == (weights or results[0].weights)] or results[:1]
    threat = of_run[0].threat if of_run[0] is results[0] else recipe.threat
    first, *others = [result for result in of_run if result.threat == threat] or of_run[:1]
    lower = [other for other in others if other.has_autoattack and other.interval["worst"][1] < first.accuracy["worst"]]
    if lower and not first.has_autoattack:
        first, others = lower[0], [first, *(other for other in others if other is not lower[0])]
    return [first, *others]


def _weights_hash(folder: RunFolder) -> str | None:
    """Return the hash of a run's weights; None if they cannot be read."""
    try:
        metadata, tensors = read_weights(folder.model)
    except AtasError:
        return None
    return metadata.get("weights") or state_hash(tensors)
