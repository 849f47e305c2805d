"""The paper, reproduced by command: studies, each a plan of runs that can be stopped and gone on with."""

from __future__ import annotations

from atas.reproduce.plan import Failure, Plan
from atas.reproduce.progress import PlanProgress
from atas.reproduce.record import Record
from atas.reproduce.store import Store
from atas.reproduce.studies import get, names
from atas.reproduce.study import Alone, Page, Report, Request, Study, Sweep
from atas.reproduce.together import joint_plan, run
from atas.reproduce.trial import Trial

__all__ = [
    "Alone",
    "Failure",
    "Page",
    "Plan",
    "PlanProgress",
    "Record",
    "Report",
    "Request",
    "Store",
    "Study",
    "Sweep",
    "Trial",
    "get",
    "joint_plan",
    "names",
    "run",
]
