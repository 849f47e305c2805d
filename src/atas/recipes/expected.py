"""What a run was expected to give: by the recipe's first comment, and by the paper."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from dataclasses import dataclass
from importlib import resources
from typing import Protocol

from atas.attacks.registry import display_name
from atas.evaluation import Evaluation
from atas.recipes import Recipe, differences, load, names
from atas.recipes.fingerprint import RESUME_MAY_CHANGE
from atas.training.run import ROWS_KEY

_NUMBER = r"\d+(?:\.\d+)?"
_FAR_POINTS = 2.0  # points; seeds of CIFAR-10's recipes differ by less than one
_MAY_DIFFER = (*RESUME_MAY_CHANGE, "training.seed", "training.on_collapse")


class PaperRow(Protocol):
    """A row of the paper's tables, in percent."""

    def accuracy(self, attack: str) -> float | None:
        """None for an attack that the paper did not run."""


Paper = Callable[[str, str, float, str], PaperRow | None]
"""By data, network, budget and method."""


@dataclass(frozen=True)
class Expected:
    """The sentence of a recipe, and what this run did otherwise."""

    recipe: str
    sentence: str
    differences: tuple[str, ...] = ()

    def figure(self, attack: str) -> str | None:
        """What the sentence says of an attack, if it does.

        >>> Expected("r", "Expect: clean 94.0 (92.4 to 94.8). AutoAttack, seed 0: 3.2.").figure("autoattack")
        '3.2'
        """
        name = re.escape(display_name(attack))
        found = re.search(
            rf"(?<![\w-]){name}(?:, seed \d+:)? ({_NUMBER}(?: \({_NUMBER} to {_NUMBER}\))?)", self.sentence
        )
        return found[1] if found else None

    def compare(self, result: Evaluation) -> list[str]:
        """What to tell of a result of a run that did nothing otherwise, on as many images: the sentence, and attacks
        that left far more or less than its seeds say; of a single one nothing is known of their range."""
        if self.differences or f"on the {result.n:,} test images" not in self.sentence:
            return []
        gaps = {}
        for name in result.correct:
            mean, *ends = map(float, re.findall(_NUMBER, self.figure(name) or "0"))
            gap = 100 * result.accuracy[name] - mean
            if ends and name != "clean" and abs(gap) > max(_FAR_POINTS, ends[1] - ends[0]):
                gaps[name] = f"{display_name(name)} {gap:+.1f}"
        messages = [f"the recipe says: {self.sentence}"]
        if gaps:
            messages.append(
                f"note: this run is far from that ({', '.join(gaps.values())} points); look for what differs"
            )
        return messages


def find_expected(recipe: Recipe, environment: Container[str] = ()) -> Expected | None:
    """What the recipe of that name says to expect, if it comes with the package and says so; nothing of a run whose
    environment has it that only a part of the images was learnt from."""
    if recipe.name not in names() or ROWS_KEY in environment:
        return None
    sentence = _comment(recipe.name)
    if not sentence:
        return None
    return Expected(
        recipe.name,
        sentence,
        tuple(differences(load(recipe.name), recipe, ignore=_MAY_DIFFER)),
    )


def paper_row(recipe: Recipe, paper: Paper | None) -> PaperRow | None:
    """The paper's row of this recipe, where it has one."""
    if paper is None or recipe.method.norm != "linf":
        return None
    return paper(recipe.data.name, recipe.model.name, recipe.method.eps, recipe.method.name)


def _comment(name: str) -> str:
    """The comment that a recipe begins with, but for its first line, which is the command."""
    lines = resources.files("atas.recipes").joinpath(f"{name}.toml").read_text(encoding="utf-8").splitlines()
    first = next((row for row, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return " ".join(line.removeprefix("#").strip() for line in lines[1:first])
