"""A part of the page, and what stands in its place where something that it needs is not at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from atas.report._html import Content, Markup, join, tag
from atas.report._subject import NotAtHand


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


def or_say_why(make: Callable[[], Content]) -> Content:
    """What `make` gives, or the sentence that says why it cannot be shown."""
    try:
        return make()
    except NotAtHand as error:
        return tag("p", f"Not shown. {error}", class_="absent")
