"""The sections of a comparison: three answers with a table of all runs, their curves in common charts, and warnings."""

from __future__ import annotations

from collections.abc import Callable

from atas._utils.formatting import format_seconds
from atas.attacks.registry import display_name
from atas.report.charts import EPOCH_SYNC, Chart, ChartLine, Mark
from atas.report.compare import RankedRun, Ranking, rank
from atas.report.elements import Cell, DataTable, Section, Whisker
from atas.report.formatting import attack_names, format_interval, join_names, percent
from atas.report.headline import comparison_answers
from atas.report.run_view import RunView
from atas.report.sections.notes import caveats
from atas.report.sections.training import column
from atas.report.summary import RunSummary

_COLOURS = ("c2", "c1", "c3", "c4", "c6", "c5", "c7", "c0")
_SOLID = 4  # lines; later ones are dashed, so that readers need not rely on colour alone
_CURVES = (
    ("pgd10", "PGD-10 accuracy", "accuracy, %", 100, 1),
    ("fgsm", "FGSM accuracy", "accuracy, %", 100, 1),
    ("clean", "Clean accuracy", "accuracy, %", 100, 1),
    ("loss", "Training loss", "loss", 1, 3),
)


def comparison_section(views: list[RunView]) -> Section:
    """Return three answers and the table of all runs."""
    ranking = rank([view.summary for view in views])
    context = {
        "answers": comparison_answers(views, ranking),
        "runs": runs_table([view.summary for view in views], ranking),
    }
    return Section("summary", "Side by side", "comparison", context)


def curves_section(views: list[RunView]) -> Section:
    """Return one chart for each metric, with all runs in it; the legends hide and show runs."""
    num_epochs = max(len(view.summary.epochs) for view in views)
    collapses = [
        Mark(view.summary.collapse_epoch, f"{view.summary.name} collapses")
        for view in views
        if view.summary.collapse_epoch
    ]
    charts = []
    for key, title, label, scale, digits in _CURVES:
        lines = []
        for number, view in enumerate(views):
            values = column(view.summary.epochs, key, scale)
            values += [None] * (num_epochs - len(values))
            lines.append(
                ChartLine(view.summary.name, values, _COLOURS[number % len(_COLOURS)], dashed=number >= _SOLID)
            )
        charts.append(
            Chart(
                title,
                "epoch",
                label,
                list(range(1, num_epochs + 1)),
                lines,
                marks=collapses if key == "pgd10" else [],
                limits=(0, 100) if scale == 100 else (0, None),
                digits=digits,
                sync=EPOCH_SYNC,
            )
        )
    return Section("training", "The training", "comparison_curves", {"charts": charts})


def comparison_warnings_section(views: list[RunView]) -> Section:
    """Return the warnings and limitations of each run; runs that share them are listed together."""
    runs: dict[tuple[str, ...], list[str]] = {}
    for view in views:
        sentences = (*(f"{warning.kind}: {warning}." for warning in view.summary.warnings), *caveats(view))
        runs.setdefault(sentences, []).append(view.summary.name)
    named = [(", ".join(names), sentences) for sentences, names in runs.items()]
    return Section("warnings", "Warnings and limitations", "comparison_warnings", {"runs": named})


def runs_table(runs: list[RunSummary], ranking: Ranking | str) -> DataTable:
    """Return the table of all runs, with their differences to the best."""
    attacks = list(dict.fromkeys(name for run in runs if run.evaluation for name in attack_names(run.evaluation)))
    ranked = {entry.run.name: entry for entry in ranking.runs} if isinstance(ranking, Ranking) else {}
    texts: dict[str, Callable[[RunSummary], str]] = {
        "method": lambda run: run.recipe.method.name,
        "trained against": lambda run: repr(run.recipe.threat),
    }
    texts = {title: text for title, text in texts.items() if len({text(run) for run in runs}) > 1}
    if all(run.name == run.recipe.method.name for run in runs):
        texts.pop("method", None)
    rows: list[list[Cell | str]] = [
        [
            run.name,
            *(text(run) for text in texts.values()),
            *(_accuracy_cell(run, name) for name in ("clean", *attacks)),
            _worst_case_cell(run),
            _gap_cell(ranked.get(run.name)),
            Cell(format_seconds(run.seconds), sort=run.seconds),
            Cell(run.collapse_status, sort=run.collapse_epoch or 0),
        ]
        for run in runs
    ]
    head = ["run", *texts, *map(display_name, ("clean", *attacks, "worst")), "to the best", "time", "collapse"]
    caption = "Accuracy in percent with 95% intervals"
    if "trained against" not in texts:
        caption += f", trained against {runs[0].recipe.threat}"
    counts = {run.evaluation.n for run in runs if run.evaluation}
    if len(counts) == 1:
        caption += f", on {counts.pop():,} test images"
    caption += ". The worst case counts images that are robust to all attacks that were run on the model"
    if isinstance(ranking, Ranking):
        together = join_names(ranking.attacks)
        caption += f"; differences to the best run are in points, under {together} together, on the same images"
    return DataTable(head, rows, caption, text_columns=1 + len(texts), sortable=True, class_="runs")


def _accuracy_cell(run: RunSummary, attack: str) -> Cell:
    if run.evaluation is None or attack not in run.evaluation.accuracy:
        return Cell("-", sort=-1)
    value, interval = run.evaluation.accuracy[attack], run.evaluation.interval[attack]
    return Cell(percent(value), note=format_interval(interval), whisker=Whisker(value, interval), sort=value)


def _worst_case_cell(run: RunSummary) -> Cell:
    verdict = run.verdict
    if verdict.accuracy is None:
        return Cell("-", sort=-1)
    if verdict.kind == "unknown":
        return Cell(str(verdict), note=verdict.figure, sort=verdict.accuracy, title=verdict.reason)
    return Cell(
        str(verdict).rstrip("%"),
        note=format_interval(verdict.interval),
        whisker=Whisker(verdict.accuracy, verdict.interval),
        sort=verdict.accuracy,
        title=verdict.reason or None,
    )


def _gap_cell(ranked: RankedRun | None) -> Cell:
    if ranked is None:
        return Cell("-", sort=-1000)
    if ranked.gap == 0 and ranked.gap_interval[0] == -ranked.gap_interval[1]:
        return Cell("best", sort=0)
    low, high = (100 * end for end in ranked.gap_interval)
    return Cell(f"{100 * ranked.gap:+.1f}", note=f"{low:.1f} to {high:.1f}", sort=ranked.gap)
