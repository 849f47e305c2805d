"""The Jinja environment of the report's templates.

All text is escaped. Characters that HTML cannot hold are replaced. Only this module imports Jinja.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from atas import __version__
from atas._utils.formatting import format_seconds
from atas.report.elements import Section, Unavailable
from atas.report.formatting import format_interval, percent

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


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
