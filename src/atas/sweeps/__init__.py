"""Sweeps: many trainings with their evaluations, run as one plan that can be stopped and resumed.

A `Trial` is one training with its evaluation. A `Plan` runs trials and saves a `Record` of each in a `Store`. Processes
that share the folder of a store share the work.
"""

from __future__ import annotations

from atas.sweeps.plan import Failure, Plan
from atas.sweeps.progress import PlanProgress
from atas.sweeps.record import Record
from atas.sweeps.store import Store
from atas.sweeps.trial import Measurement, Subset, Trial

__all__ = [
    "Failure",
    "Measurement",
    "Plan",
    "PlanProgress",
    "Record",
    "Store",
    "Subset",
    "Trial",
]
