"""Three recipes on the digits at eps 0.39 over seeds that were not used to choose their settings.

    OMP_NUM_THREADS=1 python benchmarks/digits.py results/digits

Start it once per core with the same folder to run in parallel. It prints the mean and the range of every accuracy, and
the epochs of collapses.
"""

from __future__ import annotations

import sys
from pathlib import Path

from atas.sweeps import Plan, PlanProgress, Record, Store, Trial
from atas.sweeps.record import summarize_seeds

_METHODS = ("fgsm-rs", "atta", "atas")
_SEEDS = range(5, 20)
_ATTACKS = ("fgsm", "pgd50")


def trials() -> list[Trial]:
    """Return the trials ordered by seed, so that results of all methods grow evenly."""
    return [
        Trial(f"digits-small-cnn-{method}", {"engine.device": "cpu"}, seed, _ATTACKS)
        for seed in _SEEDS
        for method in _METHODS
    ]


def summary(records: list[Record]) -> str:
    """Return the results of one recipe over its seeds."""
    accuracies = ", ".join(f"{name} {summarize_seeds(records, name)}" for name in ("clean", *_ATTACKS))
    epochs = sorted(record.collapsed_in for record in records if record.collapsed_in is not None)
    collapses = f"{len(epochs)} collapsed" + (f", epochs {epochs[0]} to {epochs[-1]}" if epochs else "")
    return f"{accuracies}; {len(records)} seeds, {collapses}"


def main() -> None:
    """Train, evaluate, and print the results."""
    store = Store(Path(sys.argv[1]))
    for failure in Plan(trials(), store).run(PlanProgress()):
        sys.exit(f"{failure.trial.label}: {failure.sentence}")
    rows = store.by_row()
    for trial in trials()[: len(_METHODS)]:
        print(f"{trial.recipe}: {summary(rows[trial.row])}")


if __name__ == "__main__":
    main()
