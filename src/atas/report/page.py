"""The page: one self-contained HTML file, for one run or for a comparison of several."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from atas import __version__
from atas._utils.files import check_writable, write_text
from atas._utils.formatting import format_seconds
from atas._utils.imports import GIVEN
from atas.report.elements import Section, Unavailable
from atas.report.formatting import format_interval, percent
from atas.report.run_view import RunView
from atas.report.sections import classes, comparison, examples, notes, seeds, summary, training
from atas.report.sections.summary import Paper
from atas.report.seed_groups import SeedGroup, run_folders, summarise_groups
from atas.report.summary import RunSummary, summarise

if TYPE_CHECKING:
    from jinja2 import Environment

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


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
    return render_page(view.summary.name, subtitle, sections)


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
    return render_page(title, ", ".join(methods), sections)


def render_page(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """Render a whole page."""
    bodies = [(section, Markup(render(f"sections/{section.template}.html", section.context))) for section in sections]
    context = {"title": title, "subtitle": subtitle, "sections": bodies, "version": __version__}
    return render("base.html", context)


def render(template: str, context: Mapping[str, Any]) -> str:
    """Render a file of `templates/`."""
    return _environment().get_template(template).render(context)


@functools.cache
def _environment() -> Environment:
    """Return the environment of the templates: all text is escaped, and what HTML cannot hold is replaced."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # only pages need it

    environment = Environment(
        loader=PackageLoader("atas.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=replace_control_characters,
    )
    environment.filters |= {
        "attributes": attributes,
        "duration": format_seconds,
        "interval": format_interval,
        "percent": percent,
        "to_json": to_json,
    }
    environment.tests["unavailable"] = lambda value: isinstance(value, Unavailable)
    environment.globals["asset"] = _asset
    return environment


def replace_control_characters(value: object) -> object:
    """Return `value` as text that HTML can hold; `Markup` is unchanged.

    >>> replace_control_characters("a\\x00b")
    'a\ufffdb'
    """
    if isinstance(value, Markup):
        return value
    return _CONTROL.sub("\ufffd", str(value).encode("utf-8", "replace").decode("utf-8"))


def attributes(values: Mapping[str, object]) -> Markup:
    """Format attributes of an element; None and False are omitted, True has no value.

    >>> attributes({"class": "a b", "hidden": True, "title": None})
    Markup(' class="a b" hidden')
    """
    formatted = Markup()
    for name, value in values.items():
        if value is True:
            formatted += f" {name}"
        elif value is not None and value is not False:
            formatted += Markup(' {}="{}"').format(name, escape(replace_control_characters(value)))
    return formatted


def to_json(value: Any) -> Markup:
    """Encode data for a script element. No text in it can end the element; NaN and infinity become null.

    >>> to_json({"x": [1 / 3, float("nan")], "y": "</script>"})
    Markup('{"x":[0.333333,null],"y":"\\\\u003c/script\\\\u003e"}')
    """
    text = json.dumps(_json_value(value), allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _json_value(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _json_value(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_json_value(entry) for entry in value]
    return value


def _asset(name: str) -> Markup:
    return Markup(resources.files("atas.report").joinpath("assets", name).read_text(encoding="utf-8"))
