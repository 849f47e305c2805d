"""ATAS with its default settings at a budget far from the paper's, beside FGSM-RS and the fixed steps of 8/255.

    OMP_NUM_THREADS=1 python benchmarks/budget.py results/budget

Start it once per core with the same folder to run in parallel. It trains on the digits at eps = 0.1 and prints accuracy
under AutoAttack on the 500 test images: mean and range over seeds.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from atas.sweeps import Plan, PlanProgress, Store, Trial
from atas.sweeps.record import summarize_seeds

_SEEDS = range(3)
_BUDGET = {"method.eps": 0.1, "engine.device": "cpu"}
_DEFAULTS = {"method.c": 1.28, "method.warmup_epochs": 5, "method.reset_every": 10}
_ATAS = _BUDGET | _DEFAULTS | {"method.max_step": "auto", "method.clip": "auto"}
_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "fgsm-rs": ("digits-small-cnn-fgsm-rs", _BUDGET | {"method.step_size": "none"}),
    "atas, steps up to 14/255": (
        "digits-small-cnn-atas",
        _ATAS | {"method.max_step": "16/255", "method.clip": ["4/255", "14/255"]},
    ),
    "atas": ("digits-small-cnn-atas", _ATAS),
    "atas, c = auto": ("digits-small-cnn-atas", _ATAS | {"method.c": "auto"}),
}


def trials(row: str) -> list[Trial]:
    """Return the trials of a row of the table, one for each seed."""
    recipe, values = _ROWS[row]
    return [Trial(recipe, values, seed, ("autoattack",)) for seed in _SEEDS]


def main() -> None:
    """Train, evaluate, and print the results."""
    store = Store(Path(sys.argv[1]))
    for failure in Plan([trial for row in _ROWS for trial in trials(row)], store).run(PlanProgress()):
        sys.exit(f"{failure.trial.label}: {failure.sentence}")
    records = store.by_row()
    for row in _ROWS:
        found = records[trials(row)[0].row]
        accuracies = ", ".join(f"{name} {summarize_seeds(found, name)}" for name in ("clean", "autoattack"))
        print(f"{row}: {accuracies}; {len(found)} seeds")


if __name__ == "__main__":
    main()
