"""What recipes came to where they were run: figures to hold a run of one's own against.

They are made from records of `results/` by `scripts/expected.py`, and found by a hash of all that decides the weights:
a recipe with anything changed has none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from atas.evaluation._names import written
from atas.reproduce.figures import Figure, figure
from atas.reproduce.record import Record
from atas.reproduce.trial import row_of
from atas.training.recipe import Recipe

if TYPE_CHECKING:
    from atas.evaluation import Evaluation

FILE = "expected.json"
_FAR = 2.0  # points: seeds of CIFAR-10's recipes differ by less than one


@dataclass(frozen=True)
class Expected:
    """The figures of a recipe by attack, in percent, on the test set with this hash; `collapsed` of its seeds did."""

    recipe: str
    data: str
    seeds: tuple[int, ...]
    collapsed: int
    hardware: tuple[str, ...]
    figures: dict[str, Figure]

    @classmethod
    def of(cls, recipe: str, records: Sequence[Record]) -> Expected | None:
        """What records of one recipe have in common; None where nothing but clean images was looked at."""
        names = max((record.attacks for record in records), key=len)
        if len(names) < 2:
            return None
        records = [record for record in records if not record.missing(names)]  # figures of all are of the same seeds
        (data,) = {about["data"] for record in records for about in record.evaluations}
        collapsed = sum(record.collapsed_in is not None for record in records)
        hardware = tuple(sorted({record.hardware for record in records}))
        found = {name: found for name in names if (found := figure(records, name)) is not None}
        return cls(recipe, data, tuple(record.seed for record in records), collapsed, hardware, found)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        figures = {name: found.to_json() for name, found in self.figures.items()}
        return {**vars(self), "seeds": list(self.seeds), "hardware": list(self.hardware), "figures": figures}

    def beside(self, result: Evaluation) -> list[str]:
        """What to tell of a result on the same test images: what the recipe gave, and where this is far from it."""
        names = [name for name in result.correct if name in self.figures]
        if result.data != self.data or len(names) < 2:
            return []
        gave = ", ".join(f"{written(name)} {self._told(name)}" for name in names)
        runs = "one run" if len(self.seeds) == 1 else f"mean and range over {len(self.seeds)} seeds"
        runs += f", {self.collapsed} of which collapsed" if self.collapsed else ""
        said = [f"for comparison: this recipe gave {gave}; {runs}, {' and '.join(self.hardware)}"]
        gaps = {name: 100 * result.accuracy[name] - self.figures[name].value for name in names}
        far = {name: gap for name, gap in gaps.items() if abs(gap) > self._limit(name)}
        if far and not self.collapsed:
            which = ", ".join(f"{written(name)} {gap:+.1f}" for name, gap in far.items())
            said.append(f"note: this run is far from that ({which} points); look for what differs, such as versions")
        return said

    def _told(self, name: str) -> str:
        found = self.figures[name]
        return str(found) if found.runs > 1 else f"{found.value:.2f}"

    def _limit(self, name: str) -> float:
        """Beyond what seeds do: as far as the range over some of them, or what is known of CIFAR-10's."""
        found = self.figures[name]
        return max(_FAR, found.high - found.low if found.runs > 1 else 0.0)


def expected(settings: Recipe) -> Expected | None:
    """What a run by these settings should come to, if such runs have been measured."""
    return _known().get(row_of(settings))


@cache
def _known() -> dict[str, Expected]:
    content = json.loads(resources.files("atas.reproduce").joinpath(FILE).read_text(encoding="utf-8"))
    return {row: _read(entry) for row, entry in content.items()}


def _read(entry: dict[str, Any]) -> Expected:
    figures = {
        name: Figure(found["percent"], found["low"], found["high"], found["runs"], found["n"])
        for name, found in entry["figures"].items()
    }
    seeds, hardware = tuple(entry["seeds"]), tuple(entry["hardware"])
    return Expected(entry["recipe"], entry["data"], seeds, entry["collapsed"], hardware, figures)
