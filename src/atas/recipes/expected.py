"""The table `[expected]` of a recipe: the accuracy that the recipe gave where it was measured.

    [expected]
    examples = 10000
    seeds = [0, 1, 2]
    hardware = "NVIDIA H200"
    clean = { mean = 81.57, min = 81.30, max = 81.75 }  # over the seeds; of one seed: clean = 72.97
    autoattack = { mean = 44.12, seeds = [0] }          # measured with other seeds than the rest

Accuracies are in percent. `collapsed = true` marks a training that collapsed, and `note` adds a sentence. The table is
no part of a `Recipe`, and a recipe that extends another does not inherit it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atas._utils.documents import parse_toml
from atas.attacks.registry import display_name
from atas.recipes.fingerprint import RESUME_MAY_CHANGE, differences
from atas.recipes.loading import load, names, packaged_content
from atas.recipes.schema import Recipe

_FAR_POINTS = 2.0  # points; seeds of CIFAR-10's recipes differ by less than one
_MAY_DIFFER = (*RESUME_MAY_CHANGE, "training.seed", "training.on_collapse")
_NOT_ACCURACY = ("examples", "seeds", "hardware", "collapsed", "note")
_TWO_DECIMALS_FROM = 1000  # images; with fewer, one image is more than 0.1 points


@dataclass(frozen=True)
class ExpectedAccuracy:
    """An accuracy in percent: the mean over seeds and its range, or the value of one seed. `seeds` is empty if they are
    those of the table."""

    mean: float
    min: float | None = None
    max: float | None = None
    seeds: tuple[int, ...] = ()

    @property
    def range(self) -> tuple[float, float] | None:
        """The smallest and the largest accuracy over seeds; None for one seed."""
        return None if self.min is None or self.max is None else (self.min, self.max)


@dataclass(frozen=True)
class Expected:
    """The expected accuracies of a recipe, and the keys in which a run differs from it."""

    recipe: str
    examples: int
    seeds: tuple[int, ...]
    accuracy: Mapping[str, ExpectedAccuracy]
    hardware: str | None = None
    collapsed: bool = False
    note: str | None = None
    differences: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The whole table in words.

        >>> Expected("r", 500, (0,), {"clean": ExpectedAccuracy(94.2), "pgd50": ExpectedAccuracy(60.0)}).sentence
        'Expect, on the 500 test images, with seed 0 in percent: clean 94.2, PGD-50 60.0.'
        """
        several = len(self.seeds) > 1
        seeds = f"mean and range over {_format_seeds(self.seeds)}" if several else f"with {_format_seeds(self.seeds)}"
        common = [f"{display_name(name)} {self.figure(name)}" for name, own in self.accuracy.items() if not own.seeds]
        hardware = f" ({self.hardware})" if self.hardware else ""
        sentences = [
            f"Expect, on the {self.examples:,} test images, {seeds} in percent: {', '.join(common)}{hardware}."
        ]
        for name, accuracy in self.accuracy.items():
            if accuracy.seeds:
                sentences.append(f"{display_name(name)}, {_format_seeds(accuracy.seeds)}: {self.figure(name)}.")
        if self.collapsed:
            sentences.append("It collapsed.")
        if self.note:
            sentences.append(self.note)
        return " ".join(sentences)

    def figure(self, attack: str) -> str | None:
        """Return the accuracy under an attack and its range over seeds as text; None for an attack not in the table.

        >>> Expected("r", 500, (0, 1), {"pgd50": ExpectedAccuracy(62.5, 44.0, 75.0)}).figure("pgd50")
        '62.5 (44.0 to 75.0)'
        """
        accuracy = self.accuracy.get(attack)
        if accuracy is None:
            return None
        decimals = 2 if self.examples >= _TWO_DECIMALS_FROM else 1
        over = "" if accuracy.range is None else " ({:.{d}f} to {:.{d}f})".format(*accuracy.range, d=decimals)
        return f"{accuracy.mean:.{decimals}f}{over}"

    def compare(self, examples: int, accuracy: Mapping[str, float]) -> list[str]:
        """Return the lines to print after an evaluation of a run: the sentence, and a note that names the attacks under
        which the run is far from it.

        Nothing is returned for a run that differs from the recipe or was evaluated on another number of examples.
        `accuracy` holds shares, not percent. Attacks without a range over seeds are not compared.
        """
        if self.differences or examples != self.examples:
            return []
        gaps = []
        for name, share in accuracy.items():
            expected = self.accuracy.get(name)
            if expected is None or expected.range is None or name == "clean":
                continue
            gap, (low, high) = 100 * share - expected.mean, expected.range
            if abs(gap) > max(_FAR_POINTS, high - low):
                gaps.append(f"{display_name(name)} {gap:+.1f}")
        lines = [f"the recipe says: {self.sentence}"]
        if gaps:
            lines.append(f"note: this run is far from that ({', '.join(gaps)} points); look for what differs")
        return lines


def find_expected(recipe: Recipe, *, on_subset: bool = False) -> Expected | None:
    """Return the expected accuracies of the packaged recipe with this name, if it has any.

    `on_subset` tells that the run was trained on a part of the training images: nothing is expected of it.
    """
    if recipe.name not in names() or on_subset:
        return None
    table = parse_toml(packaged_content(recipe.name)).get("expected")
    if table is None:
        return None
    changed = tuple(differences(load(recipe.name), recipe, ignore=_MAY_DIFFER))
    return Expected(
        recipe.name,
        table["examples"],
        tuple(table["seeds"]),
        {name: _parse_accuracy(entry) for name, entry in table.items() if name not in _NOT_ACCURACY},
        table.get("hardware"),
        table.get("collapsed", False),
        table.get("note"),
        changed,
    )


def _parse_accuracy(entry: float | dict[str, Any]) -> ExpectedAccuracy:
    if not isinstance(entry, dict):
        return ExpectedAccuracy(entry)
    return ExpectedAccuracy(**{**entry, "seeds": tuple(entry.get("seeds", ()))})


def _format_seeds(seeds: tuple[int, ...]) -> str:
    return f"seeds {seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"seed {seeds[0]}"
