"""HTML builders: escaped elements, tables that sort, and sections of the page.

All text is escaped unless it is `Markup`, which only this module makes. A section whose model or data is not available
shows the reason instead.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from atas.report.run_view import Unavailable

_VOID = {"br", "col", "hr", "img", "input", "link", "meta"}
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_SCROLL_ABOVE_ROWS = 30  # rows; a table of more scrolls by itself


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Content = str | Iterable["Content"] | None


def escape(text: object) -> Markup:
    """Any text as HTML; what no page can hold, such as half a character of a file's name, is replaced.

    >>> escape('<b title="x">')
    '&lt;b title=&quot;x&quot;&gt;'
    """
    if isinstance(text, Markup):
        return text
    whole = str(text).encode("utf-8", "replace").decode("utf-8")
    return Markup(html.escape(_CONTROL.sub("\ufffd", whole)))


def join(content: Content) -> Markup:
    """Pieces one after the other; None is nothing."""
    if content is None:
        return Markup()
    if isinstance(content, str):
        return escape(content)
    return Markup("".join(join(piece) for piece in content))


def tag(name: str, /, *content: Content, **attributes: object) -> Markup:
    """An element. Attributes: `class_` is class, `aria_label` is aria-label; None and False are left out.

    >>> tag("a", "x < y", href="#x", class_="quiet", hidden=True, title=None)
    '<a href="#x" class="quiet" hidden>x &lt; y</a>'
    """
    opening = name
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        key = key.rstrip("_").replace("_", "-")
        opening += f" {key}" if value is True else f' {key}="{escape(value)}"'
    return Markup(f"<{opening}>" if name in _VOID else f"<{opening}>{join(content)}</{name}>")


def json_script(value: Any, **attributes: object) -> Markup:
    """Data for the page's script. No text in it can end the element, whatever it is; what is no number is null."""
    text = json.dumps(_to_json_value(value), allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return tag("script", Markup(text), type="application/json", **attributes)


def _to_json_value(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _to_json_value(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(entry) for entry in value]
    return value


@dataclass(frozen=True)
class Cell:
    """What a cell shows, and the number or text that it is sorted by where that is not what it shows."""

    content: Content
    sort: float | str | None = None
    style: str | None = None
    title: str | None = None
    class_: str | None = None


def html_table(
    head: Sequence[str],
    rows: Sequence[Sequence[Cell | Content]],
    *,
    caption: str,
    texts: int = 1,
    sortable: bool = False,
    class_: str | None = None,
) -> Markup:
    """A table that scrolls by itself where the page is narrow. The first `texts` columns are texts, others numbers."""

    def kind(column: int) -> str | None:
        return None if column < texts else "number"

    def heading(column: int, text: str) -> Markup:
        shown: Content = text
        sorts = sortable and bool(text)
        if sorts:
            shown = tag("button", text, tag("span", aria_hidden="true", class_="arrow"), type="button")
        return tag("th", shown, scope="col", class_=kind(column), aria_sort="none" if sorts else None)

    def cell(column: int, found: Cell | Content) -> Markup:
        if not isinstance(found, Cell):
            found = Cell(found)
        return tag(
            "td" if column else "th",
            found.content,
            scope=None if column else "row",
            class_=" ".join(filter(None, (kind(column), found.class_))) or None,
            data_sort=found.sort,
            style=found.style,
            title=found.title,
        )

    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption),
            tag("thead", tag("tr", [heading(column, text) for column, text in enumerate(head)])),
            tag("tbody", [tag("tr", [cell(i, found) for i, found in enumerate(row)]) for row in rows]),
            class_=" ".join(filter(None, ("sortable" if sortable else None, class_))) or None,
        ),
        class_="scroll" if len(rows) <= _SCROLL_ABOVE_ROWS else "scroll tall",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


@dataclass(frozen=True)
class Section:
    """A part with a heading that can be linked to."""

    id: str
    title: str
    body: Content

    def html(self) -> Markup:
        """The whole element."""
        heading = f"{self.id}-title"
        return tag("section", tag("h2", self.title, id=heading), join(self.body), id=self.id, aria_labelledby=heading)


def or_unavailable(make: Callable[[], Content]) -> Content:
    """What `make` gives, or the sentence that says why it cannot be shown."""
    try:
        return make()
    except Unavailable as error:
        return tag("p", f"Not shown. {error}", class_="absent")
