"""Tables, with headings that sort them where that helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atas.report._html import Content, Markup, tag

_TALL = 30  # rows; a table of more scrolls by itself


@dataclass(frozen=True)
class Cell:
    """What a cell shows, and the number or text that it is sorted by where that is not what it shows."""

    content: Content
    sort: float | str | None = None
    style: str | None = None
    title: str | None = None
    class_: str | None = None


def table(
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
        class_="scroll" if len(rows) <= _TALL else "scroll tall",
        tabindex="0",
        role="region",
        aria_label=caption,
    )
