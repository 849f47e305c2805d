"""Several runs side by side: one row each, from what is in their folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from atas.errors import DataError
from atas.evaluation import Evaluation
from atas.training.logs import read_metrics
from atas.training.recipe import Recipe
from atas.training.run import Folder, epochs_of, load_recipe


@dataclass(frozen=True)
class Summary:
    """What a comparison shows of a run."""

    name: str
    recipe: Recipe
    epochs: list[dict[str, Any]]
    events: list[dict[str, Any]]
    evaluation: Evaluation | None

    @property
    def seconds(self) -> float:
        """Time spent in training steps."""
        return float(self.epochs[-1]["seconds"]) if self.epochs else 0.0

    @property
    def collapsed_in(self) -> int | None:
        """The first epoch, counted from 1, that the monitor found collapsed."""
        return next((row["epoch"] + 1 for row in self.epochs if row["collapsed"]), None)

    @property
    def collapse(self) -> str:
        """What became of a collapse, in a word or two."""
        taken_back = [row for row in self.events if "to_epoch" in row]
        if taken_back and taken_back[-1]["event"] == "stop":
            return f"stopped after epoch {taken_back[-1]['to_epoch']}"
        if taken_back:
            return f"{len(taken_back)} rolled back"
        return f"epoch {self.collapsed_in}" if self.collapsed_in else "no"

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
            "collapsed_in_epoch": self.collapsed_in,
            "rollbacks": sum(row["event"] == "rollback" for row in self.events),
            "n": found.n if found else None,
            "accuracy": dict(found.accuracy) if found else None,
            "interval": {key: list(value) for key, value in found.interval.items()} if found else None,
        }


def summarise(folders: Sequence[str | Path]) -> list[Summary]:
    """Read the runs in these folders; they are named by their own folder where that tells them apart."""
    paths = [Path(folder) for folder in folders]
    unique = len({path.resolve().name for path in paths}) == len(paths)
    found = []
    for path in paths:
        place = Folder(path)
        recipe, lines = load_recipe(place), read_metrics(place.metrics)
        rows, events = epochs_of(lines), [line for line in lines if "event" in line]
        if not rows:
            raise DataError(f"the run in {path} has no epoch to compare yet; let it train for one at least")
        evaluation = Evaluation.load(place.evaluation) if place.evaluation.exists() else None
        found.append(Summary(path.resolve().name if unique else str(path), recipe, rows, events, evaluation))
    return found


def table(runs: Sequence[Summary]) -> Table:
    """Accuracy in percent with its 95% interval, time, and where training collapsed."""
    attacks = list(dict.fromkeys(key for run in runs if run.evaluation for key in run.evaluation.accuracy))
    attacks = [name for name in attacks if name != "worst"]
    columns = ["run", "method", "threat", "n", *(f"{name} %" for name in attacks), "time", "collapse"]
    shown = Table(*columns, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for run in runs:
        cells = [_accuracy(run.evaluation, name) for name in attacks]
        shown.add_row(
            run.name,
            run.recipe.method.name,
            repr(run.recipe.threat),
            str(run.evaluation.n) if run.evaluation else "-",
            *cells,
            f"{run.seconds:.0f} s",
            run.collapse,
        )
    if any(run.evaluation is None for run in runs):
        shown.caption = "a dash: not evaluated yet; run atas evaluate"
    return shown


def _accuracy(evaluation: Evaluation | None, attack: str) -> str:
    if evaluation is None or attack not in evaluation.accuracy:
        return "-"
    low, high = evaluation.interval[attack]
    return f"{100 * evaluation.accuracy[attack]:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
