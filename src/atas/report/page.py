"""The page: one self-contained HTML file, for one run or for a comparison of several."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from atas import __version__
from atas._utils.files import check_writable, write_text
from atas.distributed.world import select_device
from atas.models.weights import GIVEN
from atas.ops.precision import strict_float32
from atas.report.html import Content, Markup, Section, tag
from atas.report.paper import Paper
from atas.report.run_view import RunView
from atas.report.sections import classes, comparison, examples, notes, summary, training
from atas.report.summary import summarise

# Nothing is fetched: whatever a name or a class in the page may say, the browser is told so.
_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; "
    "form-action 'none'"
)


def write_page(
    folders: Sequence[str | Path], out: Path, *, root: str | None = None, paper: Paper | None = None
) -> None:
    """Write the page of these runs. `root` is the data's folder where it is not that of the training; `paper` looks up
    the paper's figures."""
    views = [RunView(found, Path(folder), root) for found, folder in zip(summarise(folders), folders, strict=True)]
    check_writable(out)
    with strict_float32(select_device("auto")):  # what is computed for the page agrees with the evaluation
        text = render_run(views[0], paper) if len(views) == 1 else render_comparison(views)
    write_text(out, text)


def render_run(view: RunView, paper: Paper | None = None) -> str:
    """The page of a run."""
    recipe = view.recipe
    about = (
        f"{recipe.method.name} on {recipe.data.name.removeprefix(GIVEN)}, {recipe.model.name.removeprefix(GIVEN)}, "
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
    return _render_document(view.summary.name, about, sections)


def render_comparison(views: list[RunView]) -> str:
    """The page of several runs."""
    methods = dict.fromkeys(view.recipe.method.name for view in views)
    title = f"{len(views)} runs compared"
    sections = [
        comparison.comparison_section(views),
        comparison.curves_section(views),
        comparison.comparison_warnings_section(views),
        notes.repeat_section(views),
    ]
    return _render_document(title, ", ".join(methods), sections)


def _render_document(title: str, about: str, sections: list[Section]) -> str:
    links = [tag("li", tag("a", section.title, href=f"#{section.id}")) for section in sections]
    head: Content = [
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="generator", content=f"atas {__version__}"),
        tag("title", f"{title} - robustness report"),
        tag("style", _asset("uPlot.min.css"), _asset("page.css")),
    ]
    body: Content = [
        tag("a", "Skip to the contents", href="#summary", class_="skip"),
        tag(
            "header",
            tag("p", "Robustness report", class_="kicker"),
            tag("h1", title),
            tag("p", about, class_="about"),
            tag("nav", tag("ul", links), aria_label="Contents"),
        ),
        tag("main", [section.html() for section in sections]),
        tag(
            "footer",
            tag("p", f"Made by atas {__version__}. Charts by uPlot, © 2022 Leon Sorokin, MIT licence."),
        ),
        tag("script", Markup("/*\n"), _asset("uPlot.LICENSE.txt"), Markup("*/\n"), _asset("uPlot.iife.min.js")),
        tag("script", _asset("page.js")),
    ]
    return f"<!doctype html>\n{tag('html', tag('head', head), tag('body', body), lang='en')}\n"


def _asset(name: str) -> Markup:
    return Markup(resources.files("atas.report").joinpath("assets", name).read_text(encoding="utf-8"))
