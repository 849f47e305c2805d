"""The sections of a comparison of seeds: three answers with a table of all groups, and the table of single runs."""

from __future__ import annotations

from collections.abc import Sequence

from atas._utils.formatting import format_seconds
from atas.attacks.registry import display_name
from atas.evaluation.seed_stats import SeedStats
from atas.report.compare import Ranking, rank
from atas.report.elements import Cell, DataTable, Section, Whisker
from atas.report.formatting import join_names
from atas.report.headline import HeadlineAnswer, comparison_answers
from atas.report.run_view import RunView
from atas.report.sections.comparison import runs_table
from atas.report.seed_groups import SeedGroup
from atas.report.summary import RunSummary
from atas.report.verdict import NO_ROBUSTNESS, Kind, most_doubtful

_WORST = "worst"
_NONE = 100 * NO_ROBUSTNESS


def seeds_section(rows: list[RunSummary | SeedGroup], views: list[RunView]) -> Section:
    """Return three answers and the table with one row for each group of seeds."""
    summaries = [view.summary for view in views]
    ranking = rank(summaries)
    trust = comparison_answers(views, ranking)[-1]
    if isinstance(ranking, str):
        answers = [HeadlineAnswer("Which is the most robust?", "Not known", ranking, "care")]
    else:
        doubtful = {row.name for row in rows if _kind(row) == "unknown"}
        answers = _answers(_stats_by_row(rows, summaries, ranking), ranking.attacks, doubtful)
    return Section("summary", "Over seeds", "comparison", {"answers": [*answers, trust], "runs": _table(rows)})


def each_run_section(views: list[RunView]) -> Section:
    """Return the table of all single runs."""
    summaries = [view.summary for view in views]
    return Section("runs", "Each run", "comparison", {"answers": [], "runs": runs_table(summaries, rank(summaries))})


def _stats_by_row(
    rows: list[RunSummary | SeedGroup], summaries: list[RunSummary], ranking: Ranking
) -> dict[str, SeedStats]:
    """Return the statistics of each row under the attacks that all runs have, on the same images."""
    ranked, remaining = {entry.run.name: entry for entry in ranking.runs}, iter(summaries)
    found = {}
    for row in rows:
        names = [next(remaining).name for _ in row.runs]
        if entries := [ranked[name] for name in names if name in ranked]:
            values = [100 * entry.accuracy for entry in entries]
            found[row.name] = SeedStats.of(values, [100 * end for end in entries[0].interval], entries[0].n)
    return found


def _answers(stats: dict[str, SeedStats], attacks: Sequence[str], doubtful: set[str]) -> list[HeadlineAnswer]:
    """Answer which row is the most robust, and whether seeds explain its lead. Rows that are `doubtful` have signs of
    masked gradients."""
    first, *others = sorted(stats, key=lambda name: -stats[name].value)
    best = stats[first]
    described = f"Robust accuracy of {first} under {join_names(list(attacks))} is {_describe(best)}"
    if not others:
        width = f"{best.high - best.low:.1f} points"
        with_autoattack = any(name.startswith("autoattack") for name in attacks)
        word, tone = _robust(best, with_autoattack, first in doubtful)
        return [
            HeadlineAnswer("How robust is it?", word, f"{described}.", tone),
            HeadlineAnswer("How much do seeds matter?", width, "From the worst to the best seed.", "plain"),
        ]
    second = stats[others[0]]
    pair, is_clear = f"{first} and {others[0]}", best.low > second.high
    why = f"The ranges of {pair} {'do not overlap' if is_clear else 'overlap, so seeds may explain the difference'}."
    word, tone = ("Yes, over these seeds", "good") if is_clear else ("Not shown", "care")
    which, which_tone = first, "plain"
    if best.value <= _NONE:
        which, which_tone = "None of them", "bad"
    elif first in doubtful:
        which, which_tone = "Not known", "care"
    leader = f"{described}; next is {others[0]} with {_describe(second)}."
    return [
        HeadlineAnswer("Which is the most robust?", which, leader, which_tone),
        HeadlineAnswer("Is its lead real?", word, why, tone),
    ]


def _robust(stats: SeedStats, has_autoattack: bool, is_doubtful: bool) -> tuple[str, str]:
    """Say how robust one group is, with the tone, by the rule of a single run."""
    figure = f"{'' if has_autoattack else 'at most '}{stats.value:.1f}%"
    if stats.high < _NONE:
        return f"No: {figure}", "bad"
    if is_doubtful:
        return "Not known", "care"
    return (figure, "plain") if has_autoattack else (f"{figure[:1].upper()}{figure[1:]}", "care")


def _kind(row: RunSummary | SeedGroup) -> Kind | None:
    return most_doubtful(run.verdict for run in row.runs)


def _describe(stats: SeedStats) -> str:
    spread = f"over {stats.runs} seeds" if stats.runs > 1 else "with 95% confidence, one seed"
    return f"{stats.value:.1f}% ({stats.low:.1f} to {stats.high:.1f} {spread}, {stats.n:,} images)"


def _table(rows: list[RunSummary | SeedGroup]) -> DataTable:
    known = {name: None for row in rows for name in row.stats}
    attacks = sorted(known, key=lambda name: name == _WORST)
    cells: list[list[Cell | str]] = [
        [
            row.name,
            Cell(str(len(row.runs))),
            *(_cell(row.stats.get(name), _num_images(row), _kind(row) if name == _WORST else None) for name in attacks),
            Cell(format_seconds(row.seconds), sort=row.seconds),
            row.collapse_status,
        ]
        for row in rows
    ]
    head = ["run", "seeds", *map(display_name, attacks), "time", "collapse"]
    caption = "Accuracy in percent: mean and range over the seeds; for one run its 95% interval"
    return DataTable(head, cells, caption, sortable=True, class_="runs")


def _num_images(row: RunSummary | SeedGroup) -> int | None:
    """Return the smallest number of images of the runs' first results."""
    return min((run.evaluation.n for run in row.runs if run.evaluation is not None), default=None)


def _cell(stats: SeedStats | None, num_images: int | None, kind: Kind | None) -> Cell:
    """Return the cell of an accuracy, with the number of images if it is another one; `kind` says how to read that of
    the worst case."""
    if stats is None:
        return Cell("-", sort=-1)
    if kind == "unknown":
        return Cell("not known", note=f"at most {stats.value:.1f}%", sort=stats.value)
    whisker = Whisker(stats.value / 100, (stats.low / 100, stats.high / 100))
    value = f"{'at most ' if kind == 'bound' else ''}{stats.value:.1f}"
    of = "" if stats.n == num_images else f" of {stats.n:,}"
    return Cell(value, note=f"{stats.low:.1f} to {stats.high:.1f}{of}", whisker=whisker, sort=stats.value)
