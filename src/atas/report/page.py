"""The page: one self-contained HTML file, for one run or for a comparison of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atas._utils.files import check_writable, write_text
from atas.models.weights import GIVEN
from atas.report.elements import Section
from atas.report.run_view import RunView
from atas.report.sections import classes, comparison, examples, notes, seeds, summary, training
from atas.report.sections.summary import Paper
from atas.report.seed_groups import SeedGroup, run_folders, summarise_groups
from atas.report.summary import RunSummary, summarise


def write_page(folders: Sequence[str | Path], out: Path, *, paper: Paper | None = None) -> None:
    """Write the page of these runs, from the files in their folders alone; a folder of runs stands for all runs in it.

    `paper` looks up the paper's results.
    """
    paths, rows = run_folders(folders), summarise_groups(folders)
    views = [RunView(run, folder) for run, folder in zip(summarise(paths), paths, strict=True)]
    check_writable(out)
    write_text(out, render_run(views[0], paper) if len(views) == 1 else render_comparison(views, rows))


def render_run(view: RunView, paper: Paper | None = None) -> str:
    """Return the page of one run."""
    recipe = view.recipe
    subtitle = (
        f"{recipe.method.name} on {recipe.data.label}, {recipe.model.name.removeprefix(GIVEN)}, "
        f"{recipe.threat!r}, {len(view.summary.epochs)} epochs, seed {recipe.training.seed}"
    )
    sections = [
        summary.summary_section(view, paper),
        training.training_section(view),
        training.steps_section(view),
        examples.gallery_section(view),
        examples.surface_section(view),
        classes.classes_section(view),
        notes.warnings_section(view),
        notes.repeat_section([view]),
    ]
    return _render(view.summary.name, subtitle, sections)


def render_comparison(views: list[RunView], rows: Sequence[RunSummary | SeedGroup] = ()) -> str:
    """Return the page of several runs; `rows` has the groups of seeds among them."""
    methods = dict.fromkeys(view.recipe.method.name for view in views)
    groups = [row for row in rows if isinstance(row, SeedGroup)]
    first = (
        [seeds.seeds_section(list(rows), views), seeds.each_run_section(views)]
        if groups
        else [comparison.comparison_section(views)]
    )
    sections = [
        *first,
        comparison.curves_section(views),
        comparison.comparison_warnings_section(views),
        notes.repeat_section(views),
    ]
    title = f"{rows[0].name}: {len(views)} seeds" if len(rows) == 1 and groups else f"{len(views)} runs compared"
    return _render(title, ", ".join(methods), sections)


def _render(title: str, subtitle: str, sections: list[Section]) -> str:
    from atas.report.templating import render_page  # imports Jinja, which only pages need

    return render_page(title, subtitle, sections)
