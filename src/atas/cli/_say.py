"""Sentences on the screen."""

from __future__ import annotations

from rich.console import Console


def say(text: str) -> None:
    """One line as it stands: paths are neither broken nor read as markup."""
    Console().print(text, highlight=False, soft_wrap=True, markup=False)
