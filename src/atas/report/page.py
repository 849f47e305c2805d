"""The page: one self-contained HTML file, for one run or for a comparison of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atas._utils.files import check_writable, write_text
from atas.distributed.world import select_device
from atas.models.weights import GIVEN
from atas.ops.precision import strict_float32
from atas.report.elements import Section
from atas.report.paper import Paper
from atas.report.run_view import RunView, SampleSizes
from atas.report.sections import classes, comparison, examples, notes, summary, training
from atas.report.summary import summarise


def write_page(
    folders: Sequence[str | Path],
    out: Path,
    *,
    root: str | None = None,
    paper: Paper | None = None,
    sample_sizes: SampleSizes | None = None,
    trust: bool = False,
) -> None:
    """Write the page of these runs.

    `root` is the data directory, if different from training. `paper` looks up the paper's results. `sample_sizes`
    limits how many images are attacked for the page. Without `trust`, code that a folder names as its model is not
    imported, and the page says so where it needs the model.
    """
    runs = zip(summarise(folders), folders, strict=True)
    views = [RunView(run, Path(folder), root, sample_sizes, trust=trust) for run, folder in runs]
    check_writable(out)
    with strict_float32(select_device("auto")):  # as in the evaluation, so that both give the same predictions
        text = render_run(views[0], paper) if len(views) == 1 else render_comparison(views)
    write_text(out, text)


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


def render_comparison(views: list[RunView]) -> str:
    """Return the page of several runs."""
    methods = dict.fromkeys(view.recipe.method.name for view in views)
    sections = [
        comparison.comparison_section(views),
        comparison.curves_section(views),
        comparison.comparison_warnings_section(views),
        notes.repeat_section(views),
    ]
    return _render(f"{len(views)} runs compared", ", ".join(methods), sections)


def _render(title: str, subtitle: str, sections: list[Section]) -> str:
    from atas.report.templating import render_page  # imports Jinja, which only pages need

    return render_page(title, subtitle, sections)
