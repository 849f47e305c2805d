"""What the shell completes besides commands and options: names that can be told without torch."""

from __future__ import annotations

from atas import _catalogue


def recipes(incomplete: str) -> list[str]:
    """Recipes that come with the package."""
    return [name for name in _catalogue.recipes() if name.startswith(incomplete)]


def studies(incomplete: str) -> list[str]:
    """Studies of `atas reproduce`."""
    return [name for name in _catalogue.studies() if name.startswith(incomplete)]
