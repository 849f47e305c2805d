"""What the shell completes besides commands and options: names that the library knows."""

from __future__ import annotations


def recipes(incomplete: str) -> list[str]:
    """Recipes that come with the package."""
    from atas.training import recipe

    return [name for name in recipe.names() if name.startswith(incomplete)]


def studies(incomplete: str) -> list[str]:
    """Studies of `atas reproduce`."""
    from atas import reproduce

    return [name for name in reproduce.names() if name.startswith(incomplete)]
