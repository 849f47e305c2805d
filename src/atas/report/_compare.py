"""Several runs side by side: one row each, from what is in their folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from atas.errors import AtasError, DataError
from atas.evaluation import Evaluation
from atas.evaluation._cautions import Caution
from atas.evaluation._fingerprint import state_hash
from atas.evaluation._folder import results_in
from atas.training.logs import read_metrics
from atas.training.recipe import Recipe
from atas.training.run import Folder, epochs_of, load_recipe
from atas.training.weights import read_weights

_MORE = 0.015  # of the examples: what attacks break together, beyond each of them


@dataclass(frozen=True)
class Summary:
    """What a comparison shows of a run. `weights` is the hash of those in its folder, where they can be read; in `more`
    are further results of the same weights and budget."""

    name: str
    recipe: Recipe
    epochs: list[dict[str, Any]]
    events: list[dict[str, Any]]
    evaluation: Evaluation | None
    weights: str | None
    more: tuple[Evaluation, ...] = ()

    @property
    def by_autoattack(self) -> Evaluation | None:
        """The result with AutoAttack, on the most images; None where it was not run."""
        found = [one for one in self.results if one.has_autoattack]
        return max(found, key=lambda one: one.n, default=None)

    @property
    def warnings(self) -> list[Caution]:
        """Of all results."""
        return list({str(caution): caution for one in self.results for caution in one.warnings}.values())

    @property
    def results(self) -> list[Evaluation]:
        """All, the one to show first."""
        return [one for one in (self.evaluation, *self.more) if one is not None]

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
            "other_weights": self.weights_differ,
            "accuracy": dict(found.accuracy) if found else None,
            "interval": {key: list(value) for key, value in found.interval.items()} if found else None,
            "more": [
                {"n": one.n, "accuracy": dict(one.accuracy), "interval": {k: list(v) for k, v in one.interval.items()}}
                for one in self.more
            ],
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
            raise DataError(f"the run in {path} has no epoch to show yet; let it train for one at least")
        results = results_in(path)
        weights = _weights_of(place) if results else None
        chosen = _chosen(results, weights, recipe)
        evaluation, more = next(iter(chosen), None), tuple(chosen[1:])
        name = path.resolve().name if unique else str(path)
        found.append(Summary(name, recipe, rows, events, evaluation, weights, more))
    return found


def _chosen(results: list[Evaluation], weights: str | None, recipe: Recipe) -> list[Evaluation]:
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


def _weights_of(place: Folder) -> str | None:
    """The hash of a run's weights; None where there are none, or none that can be read."""
    try:
        about, tensors = read_weights(place.model)
    except AtasError:
        return None
    return about.get("weights") or state_hash(tensors)


def table(runs: Sequence[Summary]) -> Table:
    """Accuracy in percent with its 95% interval, time, and where training collapsed. Figures of other weights than the
    run's have a star."""
    results = [one for run in runs for one in run.results]
    attacks = list(dict.fromkeys(key for one in results for key in one.accuracy if key != "worst"))
    attacks.sort(key=lambda name: name.startswith("autoattack"))  # the strongest last
    attacks += ["worst"] if any(map(_adds_up, results)) else []
    columns = ["run", "method", "threat", "n", *(f"{name} %" for name in attacks), "time", "collapse"]
    shown = Table(*columns, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for run in runs:
        cells = [_accuracy(run, name) for name in attacks]
        shown.add_row(
            Text(run.name),  # not read as markup
            run.recipe.method.name,
            repr(run.recipe.threat),
            str(run.evaluation.n) if run.evaluation else "-",
            *cells,
            f"{run.seconds:.0f} s",
            run.collapse,
        )
    notes = {
        "a dash: not evaluated yet; run atas evaluate": any(run.evaluation is None for run in runs),
        "a star: of other weights than those in the folder; evaluate again": any(run.weights_differ for run in runs),
    }
    shown.caption = "\n".join(note for note, needed in notes.items() if needed) or None
    return shown


def _accuracy(run: Summary, attack: str) -> Text:
    found = next((one for one in run.results if attack in one.accuracy), None)
    if found is None:
        return Text("-")
    low, high = found.interval[attack]
    mark = "*" if run.weights_differ else "" if found.n == run.results[0].n else f" of {found.n}"
    return Text(f"{100 * found.accuracy[attack]:.1f} [{100 * low:.1f}, {100 * high:.1f}]{mark}")


def _adds_up(found: Evaluation) -> bool:
    """Whether attacks together break more than each of them does, by more than a point or so."""
    single = min(value for name, value in found.accuracy.items() if name != "worst")
    return single - found.accuracy["worst"] >= _MORE
