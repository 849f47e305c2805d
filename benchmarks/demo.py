"""The demo's three recipes over seeds that had no part in choosing their settings.

    OMP_NUM_THREADS=1 python benchmarks/demo.py results/digits

Started once for each core, with the same folder, it is done that much sooner. Prints the mean and the range of every
figure, and in which epochs a collapse was recognised.
"""

from __future__ import annotations

import sys
from pathlib import Path

from atas.sweeps import Plan, PlanProgress, Record, Store, Trial
from atas.sweeps.seed_stats import summarize_seeds

_METHODS = ("fgsm-rs", "atta", "atas")
_SEEDS = range(5, 20)
_ATTACKS = ("fgsm", "pgd50")


def trials() -> list[Trial]:
    """A seed at a time, so that what is there after a stop is of all three."""
    return [
        Trial(f"digits-small-cnn-{method}", {"engine.device": "cpu"}, seed, _ATTACKS)
        for seed in _SEEDS
        for method in _METHODS
    ]


def told(records: list[Record]) -> str:
    """What the seeds of one recipe came to."""
    figures = ", ".join(f"{name} {summarize_seeds(records, name)}" for name in ("clean", *_ATTACKS))
    epochs = sorted(record.collapsed_in for record in records if record.collapsed_in is not None)
    collapses = f"{len(epochs)} collapsed" + (f", epochs {epochs[0]} to {epochs[-1]}" if epochs else "")
    return f"{figures}; {len(records)} seeds, {collapses}"


def main() -> None:
    """Train, evaluate, and tell."""
    store = Store(Path(sys.argv[1]))
    for failure in Plan(trials(), store).run(PlanProgress()):
        sys.exit(f"{failure.trial.label}: {failure.sentence}")
    known = store.by_row()
    for trial in trials()[: len(_METHODS)]:
        print(f"{trial.recipe}: {told(known[trial.row])}")


if __name__ == "__main__":
    main()
