"""Comparison of runs: ranking, table for the terminal, and plot of the training curves.

Runs are ranked by their accuracy under the attacks that all of them were evaluated with, on the same images. Intervals
of differences are paired, so they are narrower than the intervals of the two accuracies suggest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from atas._utils.formatting import printable
from atas._utils.plotting import BLUE, ORANGE, RED, new_figure, save_figure, style_axes
from atas.attacks.registry import display_name
from atas.evaluation import wilson
from atas.evaluation.intervals import paired_difference
from atas.report.formatting import attack_names
from atas.report.seed_groups import SeedGroup
from atas.report.summary import RunSummary
from atas.report.verdict import most_doubtful

_CURVES = {"clean": ("#999999", ":"), "fgsm": (ORANGE, "--"), "pgd10": (BLUE, "-")}


@dataclass(frozen=True)
class RankedRun:
    """A run's robust accuracy under the common attacks, and its difference to the best run with a 95% interval."""

    run: RunSummary
    correct: int
    n: int
    gap: float
    gap_interval: tuple[float, float]

    @property
    def accuracy(self) -> float:
        """Share of examples that are correct under every common attack."""
        return self.correct / self.n

    @property
    def interval(self) -> tuple[float, float]:
        """The Wilson 95% interval of the accuracy."""
        return wilson(self.correct, self.n)


@dataclass(frozen=True)
class Ranking:
    """Runs from best to worst, and the attacks that all of them were evaluated with."""

    attacks: list[str]
    runs: list[RankedRun]


def rank(runs: Sequence[RunSummary]) -> Ranking | str:
    """Rank the runs; return the reason as a sentence if they cannot be compared."""
    evaluated = [(run, run.evaluation) for run in runs if run.evaluation is not None]
    if len(evaluated) < 2:
        return "Fewer than two of the runs have been evaluated."
    first = evaluated[0][1]
    if any(result.data != first.data for _, result in evaluated):
        return "The runs were evaluated on different images, so their results cannot be compared."
    if any(result.threat != first.threat for _, result in evaluated):
        budgets = ", ".join(dict.fromkeys(str(result.threat) for _, result in evaluated))
        return f"The runs were evaluated against different threats ({budgets})."
    common = [name for name in attack_names(first) if all(name in result.correct for _, result in evaluated)]
    if not common:
        return "There is no attack that all runs were evaluated with."
    verdicts = {
        run.name: torch.stack([result.correct[name] for name in ("clean", *common)]).all(0) for run, result in evaluated
    }
    ordered = sorted(evaluated, key=lambda pair: -int(verdicts[pair[0].name].sum()))
    best = verdicts[ordered[0][0].name]
    ranked = []
    for run, result in ordered:
        own = verdicts[run.name]
        gap = int(own.sum() - best.sum()) / result.n
        ranked.append(RankedRun(run, int(own.sum()), result.n, gap, paired_difference(own, best)))
    return Ranking(common, ranked)


def table(runs: Sequence[RunSummary | SeedGroup]) -> Table:
    """Return a table of accuracies with 95% intervals, training times and collapses.

    The last accuracy is the worst case over all attacks of the run's first result. A group of seeds is one row with the
    mean and the range over its seeds. A star marks results of other weights than the run's.
    """
    results = [result for run in runs for one in run.runs for result in one.results]
    attacks = list(dict.fromkeys(key for result in results for key in result.accuracy if key != "worst"))
    attacks.sort(key=lambda name: name.startswith("autoattack"))  # the strongest attack last
    groups = [run for run in runs if isinstance(run, SeedGroup)]
    columns = ["run", "method", "threat", *(["seeds"] if groups else []), "n"]
    columns += [*(f"{name} %" for name in attacks), "worst case %", "time", "collapse"]
    rich_table = Table(*columns, box=box.SIMPLE, padding=(0, 1, 0, 0), caption_justify="left")
    for run in runs:
        rich_table.add_row(
            Text(printable(run.name)),  # a plain string would be parsed as markup
            Text(printable(run.recipe.method.name)),
            repr(run.recipe.threat),
            *([str(len(run.runs))] if groups else []),
            _count(run),
            *(_accuracy(run, name) for name in attacks),
            _worst_case(run),
            f"{run.seconds:.0f} s",
            run.collapse_status,
        )
    single = [one for run in runs for one in run.runs]
    notes = {
        "[ ]: the range over seeds; for one run its 95% interval": bool(groups),
        "-: not evaluated; run atas evaluate": any(run.evaluation is None for run in single),
        "*: result of other weights than those in the folder; evaluate again": any(run.weights_differ for run in runs),
        "at most: without AutoAttack, an upper bound": any(run.verdict.kind == "bound" for run in single),
        "not known: signs of masked gradients": any(_is_masked(run) for run in single),
    }
    rich_table.caption = "\n".join(note for note, needed in notes.items() if needed) or None
    return rich_table


def _count(run: RunSummary | SeedGroup) -> str:
    """Return the number of examples; of seeds with different numbers, the smallest and the largest."""
    if isinstance(run, SeedGroup):
        return " to ".join(map(str, dict.fromkeys([*run.counts[:1], *run.counts[-1:]]))) or "-"
    return str(run.evaluation.n) if run.evaluation else "-"


def _accuracy(run: RunSummary | SeedGroup, attack: str) -> Text:
    if isinstance(run, SeedGroup):
        return _group_accuracy(run, attack)
    result = run.first_result(attack)
    if result is None:
        return Text("-")
    low, high = result.interval[attack]
    mark = "*" if run.weights_differ else "" if result.n == run.results[0].n else f" of {result.n}"
    return Text(f"{100 * result.accuracy[attack]:.1f} [{100 * low:.1f}, {100 * high:.1f}]{mark}")


def _group_accuracy(group: SeedGroup, attack: str) -> Text:
    stats = group.stats.get(attack)
    if stats is None:
        return Text("-")
    part = "" if stats.n in group.counts[:1] else f" of {stats.n}"
    part += "" if stats.runs == len(group.runs) else f", {stats.runs} of {len(group.runs)} seeds"
    mark = "*" if group.weights_differ else ""
    return Text(f"{stats.value:.1f} [{stats.low:.1f}, {stats.high:.1f}]{part}{mark}")


def _worst_case(run: RunSummary | SeedGroup) -> Text:
    """Return the worst case as the page and the model card say it; of seeds, as the most doubtful of them says it."""
    kind = most_doubtful(one.verdict for one in run.runs)
    if kind is None:
        return Text("-")
    if kind == "unknown":
        return Text("not known")
    bound = "at most " if kind == "bound" else ""
    if isinstance(run, SeedGroup):
        return Text(bound).append_text(_group_accuracy(run, "worst"))
    (low, high), accuracy = run.verdict.interval, 100 * run.results[0].accuracy["worst"]
    return Text(f"{bound}{accuracy:.1f} [{100 * low:.1f}, {100 * high:.1f}]{'*' if run.weights_differ else ''}")


def _is_masked(run: RunSummary) -> bool:
    return run.verdict.kind == "unknown" and run.verdict.accuracy is not None


def plot_curves(runs: Sequence[RunSummary], path: Path) -> None:
    """Plot the monitor's accuracies by epoch, with collapses marked, to a PNG, SVG or PDF file."""
    columns = min(len(runs), 3)
    rows = -(-len(runs) // columns)
    figure = new_figure(3.4 * columns, 2.8 * rows + 0.4)
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for axes in grid.flat[len(runs) :]:
        axes.set_visible(False)
    for axes, run in zip(grid.flat, runs, strict=False):
        probed = [row for row in run.epochs if "pgd10" in row]
        epochs = [row["epoch"] + 1 for row in probed]
        for key, (colour, style) in _CURVES.items():
            accuracy = [100 * row[key] for row in probed]
            axes.plot(epochs, accuracy, style, color=colour, label=display_name(key), linewidth=1.8)
        if run.collapse_epoch:
            axes.axvline(run.collapse_epoch, color=RED, linewidth=1)
            late = run.collapse_epoch > 0.6 * (run.epochs[-1]["epoch"] + 1)
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
        what = f"{printable(run.recipe.method.name)}, {run.recipe.threat!r}"
        title = what if run.name == run.recipe.method.name else f"{printable(run.name)}\n{what}"
        axes.set_title(title, fontsize=10, parse_math=False)
        axes.set_xlabel("epoch")
        axes.set_ylim(0, 104)
        style_axes(axes)
    for row in grid:
        row[0].set_ylabel("accuracy, %")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(_CURVES), frameon=False)
    save_figure(figure, path)
