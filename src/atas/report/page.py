"""The page: one HTML file that holds everything it shows, for one run or for several side by side."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from atas._files import make_ready, write_text
from atas._version import __version__
from atas.evaluation._precision import full_precision
from atas.report._compare import summarise
from atas.report._expected import Paper
from atas.report._html import Content, Markup, tag
from atas.report._section import Section
from atas.report._subject import Subject
from atas.report.sections import classes, comparison, doubts, gallery, repeat, steps, summary, surface, training
from atas.training.engine import choose_device
from atas.training.weights import GIVEN

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
    subjects = [Subject(found, Path(folder), root) for found, folder in zip(summarise(folders), folders, strict=True)]
    make_ready(out)
    with full_precision(choose_device("auto")):  # what is computed for the page agrees with the evaluation
        text = one(subjects[0], paper) if len(subjects) == 1 else several(subjects)
    write_text(out, text)


def one(subject: Subject, paper: Paper | None = None) -> str:
    """The page of a run."""
    recipe = subject.recipe
    about = (
        f"{recipe.method.name} on {recipe.data.name.removeprefix(GIVEN)}, {recipe.model.name.removeprefix(GIVEN)}, "
        f"{recipe.threat!r}, {len(subject.summary.epochs)} epochs, seed {recipe.training.seed}"
    )
    sections = [
        summary.section(subject, paper),
        training.section(subject),
        steps.section(subject),
        gallery.section(subject),
        surface.section(subject),
        classes.section(subject),
        doubts.section(subject),
        repeat.section([subject]),
    ]
    return _document(subject.summary.name, about, sections)


def several(subjects: list[Subject]) -> str:
    """The page of several runs."""
    methods = dict.fromkeys(subject.recipe.method.name for subject in subjects)
    title = f"{len(subjects)} runs compared"
    sections = [
        comparison.summary(subjects),
        comparison.curves(subjects),
        comparison.doubts(subjects),
        repeat.section(subjects),
    ]
    return _document(title, ", ".join(methods), sections)


def _document(title: str, about: str, sections: list[Section]) -> str:
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
