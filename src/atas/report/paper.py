"""The row of the paper's tables that belongs to a run. The tables lie above this package, so they are passed in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from atas.recipes import Recipe


class PaperRow(Protocol):
    """A row of the paper's tables, in percent."""

    def accuracy(self, attack: str) -> float | None:
        """Return the printed accuracy; None for an attack that the paper did not run."""


Paper = Callable[[str, str, float, str], PaperRow | None]
"""Returns the row of a data set, network, budget and method."""


def paper_row(recipe: Recipe, paper: Paper | None) -> PaperRow | None:
    """Return the paper's row of this recipe, if there is one."""
    if paper is None or recipe.method.norm != "linf":
        return None
    return paper(recipe.data.name, recipe.model.name, recipe.method.eps, recipe.method.name)
