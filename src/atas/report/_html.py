"""HTML that cannot be broken by what it shows: everything is escaped unless it was made here."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable
from typing import Any

_VOID = {"br", "col", "hr", "img", "input", "link", "meta"}
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


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


def embedded(value: Any, **attributes: object) -> Markup:
    """Data for the page's script. No text in it can end the element, whatever it is; what is no number is null."""
    text = json.dumps(_plain(value), allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return tag("script", Markup(text), type="application/json", **attributes)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
