"""Runs of one recipe with several seeds, read as one row with mean and range over the seeds."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from atas.errors import DataError
from atas.evaluation.result import WORST
from atas.evaluation.seed_stats import SeedStats, stats_by_attack, stats_under
from atas.recipes import Recipe, differences
from atas.recipes.fingerprint import RESUME_MAY_CHANGE
from atas.report.summary import RunSummary, summarise
from atas.training.run import find_runs, seed_runs


@dataclass(frozen=True)
class SeedGroup:
    """The runs of one recipe with several seeds."""

    name: str
    runs: tuple[RunSummary, ...]

    @property
    def recipe(self) -> Recipe:
        """The recipe of the first run; the others differ in the seed."""
        return self.runs[0].recipe

    @cached_property
    def stats(self) -> dict[str, SeedStats]:
        """The accuracy by attack, for each run from its first result that has the attack."""
        shown = [run.evaluation for run in self.runs if run.evaluation is not None]
        names = dict.fromkeys(name for run in self.runs for result in run.results for name in result.accuracy)
        first = {name: [run.first_result(name) for run in self.runs] for name in names if name != WORST}
        stats = {name: stats_under(name, [one for one in results if one]) for name, results in first.items()}
        return stats | {name: own for name, own in stats_by_attack(shown).items() if name == WORST}

    @property
    def counts(self) -> list[int]:
        """The numbers of examples of the shown results, without duplicates."""
        return sorted({run.evaluation.n for run in self.runs if run.evaluation is not None})

    @property
    def weights_differ(self) -> bool:
        """Whether the evaluation of a run used other weights than the run's."""
        return any(run.weights_differ for run in self.runs)

    @property
    def seconds(self) -> float:
        """The mean of the seconds spent in training steps."""
        return statistics.fmean(run.seconds for run in self.runs)

    @property
    def collapses(self) -> int:
        """The number of runs in which the monitor saw a collapse."""
        return sum(run.collapse_epoch is not None for run in self.runs)

    @property
    def collapse_status(self) -> str:
        """The number of collapsed runs in words."""
        return f"{self.collapses} of {len(self.runs)}" if self.collapses else "no"

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON: the statistics, and each run."""
        return {
            "run": self.name,
            "recipe": self.recipe.name,
            "method": self.recipe.method.name,
            "threat": repr(self.recipe.threat),
            "seeds": [run.recipe.training.seed for run in self.runs],
            "seconds": self.seconds,
            "collapsed": self.collapses,
            "n": self.counts[0] if len(self.counts) == 1 else None,
            "over_seeds": {name: stats.to_shares() for name, stats in self.stats.items()} or None,
            "runs": [run.to_json() for run in self.runs],
        }


def run_folders(folders: Iterable[str | Path]) -> list[Path]:
    """Return the folder of each run: those given, and those that a given folder holds."""
    return [run for entry in find_runs(map(Path, folders)) for run in seed_runs(entry) or [entry]]


def summarise_groups(folders: Sequence[str | Path]) -> list[RunSummary | SeedGroup]:
    """Read the runs in these folders. A folder of seeds gives one `SeedGroup`, a folder of runs all that it holds."""
    entries = find_runs(map(Path, folders))
    unique = len({path.resolve().name for path in entries}) == len(entries)
    summaries = iter(summarise(run_folders(folders)))
    found: list[RunSummary | SeedGroup] = []
    for path in entries:
        name = path.resolve().name if unique else str(path)
        seeds = seed_runs(path)
        if seeds:
            found.append(_group(path, name, tuple(next(summaries) for _ in seeds)))
        else:
            found.append(dataclasses.replace(next(summaries), name=name))
    return found


def _group(path: Path, name: str, runs: tuple[RunSummary, ...]) -> SeedGroup:
    for run in runs[1:]:
        if changed := differences(runs[0].recipe, run.recipe, ignore=(*RESUME_MAY_CHANGE, "training.seed")):
            raise DataError(
                f"the runs in {path} differ in more than the seed ({'; '.join(changed[:3])}), so they have no mean; "
                f"compare them with --each"
            )
    return SeedGroup(name, runs)
