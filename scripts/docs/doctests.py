"""Show the `>>>` examples of docstrings as code in the API reference."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Put every example of a docstring into a fence."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring in place."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(fenced, obj.docstring.value)


def fenced(match: re.Match[str]) -> str:
    """Return the example as a fenced console block, without doctest directives."""
    example = re.sub(r"\s+# doctest: .*", "", match[0])
    return f"```pycon\n{example}\n```"
