"""How robust a model is: accuracy under attack, with intervals, verdicts per example and a file that says how."""

from __future__ import annotations

from atas.evaluation._cautions import Caution
from atas.evaluation._evaluate import evaluate
from atas.evaluation._interval import wilson
from atas.evaluation._result import Evaluation, Stage
from atas.evaluation._status import Status

__all__ = ["Caution", "Evaluation", "Stage", "Status", "evaluate", "wilson"]
