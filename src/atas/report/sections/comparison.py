"""The sections of a comparison: three answers with a table of all runs, their curves in common charts, and warnings."""

from __future__ import annotations

from atas.attacks.registry import display_name
from atas.report.charts import Chart, Line, Mark
from atas.report.compare import RankedRun, Ranking, rank
from atas.report.formatting import attack_names, format_interval, format_seconds, join_names, percent, whisker
from atas.report.headline import comparison_answers
from atas.report.html import Cell, Content, Section, html_table, tag
from atas.report.run_view import RunView
from atas.report.sections.notes import caveats
from atas.report.sections.summary import answer_list
from atas.report.sections.training import column

_COLOURS = ("c2", "c1", "c3", "c4", "c6", "c5", "c7", "c0")
_SOLID = 4  # lines; later ones are dashed, so that colour is not all that tells them apart
_CURVES = (
    ("pgd10", "PGD-10 accuracy", "accuracy, %", 100, 1),
    ("fgsm", "FGSM accuracy", "accuracy, %", 100, 1),
    ("clean", "Clean accuracy", "accuracy, %", 100, 1),
    ("loss", "Training loss", "loss", 1, 3),
)


def comparison_section(views: list[RunView]) -> Section:
    """Three answers and the table."""
    ranking = rank([view.summary for view in views])
    return Section("summary", "Side by side", [answer_list(comparison_answers(views, ranking)), _table(views, ranking)])


def curves_section(views: list[RunView]) -> Section:
    """The same figure of all runs in one chart; the legends switch runs."""
    longest = max(len(view.summary.epochs) for view in views)
    marks = [
        Mark(view.summary.collapse_epoch, f"{view.summary.name} collapses")
        for view in views
        if view.summary.collapse_epoch
    ]
    charts = []
    for key, title, label, scale, digits in _CURVES:
        lines = []
        for place, view in enumerate(views):
            values = column(view.summary.epochs, key, scale)
            values += [None] * (longest - len(values))
            lines.append(Line(view.summary.name, values, _COLOURS[place % len(_COLOURS)], dashed=place >= _SOLID))
        limits = (0, 100) if scale == 100 else (0, None)
        epochs = list(range(1, longest + 1))
        shown = marks if key == "pgd10" else []
        charts.append(
            Chart(title, "epoch", label, epochs, lines, marks=shown, limits=limits, digits=digits, sync="epochs").html()
        )
    lead = "After every epoch, on training images that the monitor attacks."
    return Section("training", "The training", [tag("p", lead), charts[0], tag("div", charts[1:], class_="pair")])


def comparison_warnings_section(views: list[RunView]) -> Section:
    """The warnings of each run."""
    rows: list[Content] = []
    for view in views:
        said = [f"{caution.kind}: {caution}." for caution in view.summary.warnings]
        said += caveats(view)
        rows.append(tag("h3", view.summary.name))
        rows.append(tag("ul", [tag("li", text) for text in said]) if said else tag("p", "None."))
    return Section("warnings", "Warnings", rows)


def _table(views: list[RunView], ranking: Ranking | str) -> Content:
    runs = [view.summary for view in views]
    attacks = list(dict.fromkeys(key for run in runs if run.evaluation for key in attack_names(run.evaluation)))
    ranks = {ranked.run.name: ranked for ranked in ranking.runs} if isinstance(ranking, Ranking) else {}
    told = {  # what all have in common is said once
        "method": lambda run: run.recipe.method.name,
        "trained against": lambda run: repr(run.recipe.threat),
    }
    texts = {title: tell for title, tell in told.items() if len({tell(run) for run in runs}) > 1}
    if all(run.name == run.recipe.method.name for run in runs):
        texts.pop("method", None)
    rows: list[list[Cell | Content]] = []
    for run in runs:
        cells: list[Cell | Content] = [run.name, *(tell(run) for tell in texts.values())]
        for name in ("clean", *attacks):
            if run.evaluation is None or name not in run.evaluation.accuracy:
                cells.append(Cell("-", sort=-1))
                continue
            value, ends = run.evaluation.accuracy[name], run.evaluation.interval[name]
            cells.append(Cell([percent(value), tag("small", format_interval(ends)), whisker(value, ends)], sort=value))
        cells.append(_gap(ranks.get(run.name)))
        cells.append(Cell(format_seconds(run.seconds), sort=run.seconds))
        cells.append(Cell(run.collapse_status, sort=run.collapse_epoch or 0))
        rows.append(cells)
    head = ["run", *texts, *map(display_name, ("clean", *attacks)), "to the best", "time", "collapse"]
    caption = "Accuracy in percent with 95% intervals"
    if "trained against" not in texts:
        caption += f", trained against {runs[0].recipe.threat}"
    counts = {run.evaluation.n for run in runs if run.evaluation}
    if len(counts) == 1:
        caption += f", on {counts.pop():,} test images"
    if ranks and isinstance(ranking, Ranking):
        together = join_names(ranking.attacks)
        caption += f"; the difference, in points, to the best is under {together} together, on the same images"
    return html_table(head, rows, caption=caption, texts=1 + len(texts), sortable=True, class_="runs")


def _gap(ranked: RankedRun | None) -> Cell:
    if ranked is None:
        return Cell("-", sort=-1000)
    if ranked.gap == 0 and ranked.gap_interval[0] == -ranked.gap_interval[1]:
        return Cell("best", sort=0)
    low, high = (100 * end for end in ranked.gap_interval)
    return Cell([f"{100 * ranked.gap:+.1f}", tag("small", f"{low:.1f} to {high:.1f}")], sort=ranked.gap)
