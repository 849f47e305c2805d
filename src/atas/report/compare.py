"""Several runs against each other: the ranking, the table for the terminal, and a plot of the training curves.

Runs are ranked under the attacks that all of them were evaluated with, on the same images. The interval of a difference
is paired, so it is narrower than the intervals of the two accuracies suggest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from atas._utils.plotting import BLUE, ORANGE, RED, new_figure, save_figure, style_axes
from atas.evaluation import Evaluation, wilson
from atas.evaluation.intervals import paired_difference
from atas.report.formatting import attack_names
from atas.report.summary import RunSummary

_WORST_CASE_MARGIN = 0.015  # share of the examples that all attacks together break beyond the best of them
_CURVES = (("clean", "clean", "#999999", ":"), ("fgsm", "FGSM", ORANGE, "--"), ("pgd10", "PGD-10", BLUE, "-"))


@dataclass(frozen=True)
class RankedRun:
    """A run's robust accuracy under the common attacks, and its difference to the best with a 95% interval."""

    run: RunSummary
    correct: int
    n: int
    gap: float
    gap_interval: tuple[float, float]

    @property
    def accuracy(self) -> float:
        """Right under every common attack."""
        return self.correct / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval of the accuracy."""
        return wilson(self.correct, self.n)


@dataclass(frozen=True)
class Ranking:
    """Runs from best to worst, and the attacks that all of them were put to."""

    attacks: list[str]
    runs: list[RankedRun]


def rank(runs: Sequence[RunSummary]) -> Ranking | str:
    """The ranking, or the sentence that says why there is none."""
    evaluated = [(run, run.evaluation) for run in runs if run.evaluation is not None]
    if len(evaluated) < 2:
        return "Fewer than two of the runs have been evaluated."
    first = evaluated[0][1]
    if any(one.data != first.data for _, one in evaluated):
        return "The runs were evaluated on different images, so their figures cannot be set against each other."
    if any(one.threat != first.threat for _, one in evaluated):
        budgets = ", ".join(dict.fromkeys(str(one.threat) for _, one in evaluated))
        return f"The runs were evaluated against different threats ({budgets})."
    common = [name for name in attack_names(first) if all(name in one.correct for _, one in evaluated)]
    if not common:
        return "No attack was run against all of them."
    verdicts = {
        run.name: torch.stack([one.correct[name] for name in ("clean", *common)]).all(0) for run, one in evaluated
    }
    ordered = sorted(evaluated, key=lambda pair: -int(verdicts[pair[0].name].sum()))
    best = verdicts[ordered[0][0].name]
    ranked = []
    for run, one in ordered:
        own = verdicts[run.name]
        ranked.append(
            RankedRun(run, int(own.sum()), one.n, int(own.sum() - best.sum()) / one.n, paired_difference(own, best))
        )
    return Ranking(common, ranked)


def table(runs: Sequence[RunSummary]) -> Table:
    """Accuracy in percent with its 95% interval, time, and where training collapsed. Figures of other weights than the
    run's have a star."""
    results = [one for run in runs for one in run.results]
    attacks = list(dict.fromkeys(key for one in results for key in one.accuracy if key != "worst"))
    attacks.sort(key=lambda name: name.startswith("autoattack"))  # the strongest last
    attacks += ["worst"] if any(map(_worst_is_lower, results)) else []
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
            run.collapse_status,
        )
    notes = {
        "a dash: not evaluated yet; run atas evaluate": any(run.evaluation is None for run in runs),
        "a star: of other weights than those in the folder; evaluate again": any(run.weights_differ for run in runs),
    }
    shown.caption = "\n".join(note for note, needed in notes.items() if needed) or None
    return shown


def _accuracy(run: RunSummary, attack: str) -> Text:
    found = next((one for one in run.results if attack in one.accuracy), None)
    if found is None:
        return Text("-")
    low, high = found.interval[attack]
    mark = "*" if run.weights_differ else "" if found.n == run.results[0].n else f" of {found.n}"
    return Text(f"{100 * found.accuracy[attack]:.1f} [{100 * low:.1f}, {100 * high:.1f}]{mark}")


def _worst_is_lower(found: Evaluation) -> bool:
    """Whether attacks together break more than each of them does, by more than a point or so."""
    single = min(value for name, value in found.accuracy.items() if name != "worst")
    return single - found.accuracy["worst"] >= _WORST_CASE_MARGIN


def plot_curves(runs: Sequence[RunSummary], path: Path) -> None:
    """Draw the monitor's accuracies by epoch; the moment of a collapse is marked. PNG, SVG or PDF by the name."""
    columns = min(len(runs), 3)
    rows = -(-len(runs) // columns)
    figure = new_figure(4.2 * columns, 3.2 * rows + 0.5)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes in grid.flat[len(runs) :]:
        axes.set_visible(False)
    for axes, run in zip(grid.flat, runs, strict=False):
        epochs = [row["epoch"] + 1 for row in run.epochs]
        for key, label, colour, style in _CURVES:
            axes.plot(epochs, [100 * row[key] for row in run.epochs], style, color=colour, label=label, linewidth=1.8)
        if run.collapse_epoch:
            axes.axvline(run.collapse_epoch, color=RED, linewidth=1)
            late = run.collapse_epoch > 0.6 * epochs[-1]
            axes.annotate(
                "collapse",
                (run.collapse_epoch, 103),
                xytext=(-4 if late else 4, 0),
                textcoords="offset points",
                color=RED,
                fontsize=9,
                ha="right" if late else "left",
                va="top",
            )
        what = f"{run.recipe.method.name}, {run.recipe.threat!r}"
        axes.set_title(what if run.name == run.recipe.method.name else f"{run.name}\n{what}", fontsize=11)
        axes.set_xlabel("epoch")
        axes.set_ylim(0, 104)
        style_axes(axes)
    for row in grid:
        row[0].set_ylabel("accuracy on the probe, %")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(_CURVES), frameon=False)
    save_figure(figure, path)
