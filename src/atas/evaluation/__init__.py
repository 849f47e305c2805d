"""Accuracy under attack: intervals, verdicts per example, warnings, and result files."""

from __future__ import annotations

from atas.evaluation.curve import AccuracyCurve, accuracy_curve
from atas.evaluation.details import AttackedImages, EvaluationDetails, ExampleImages, LossLandscapes
from atas.evaluation.evaluator import evaluate
from atas.evaluation.intervals import wilson
from atas.evaluation.progress import EvaluationProgress, Status
from atas.evaluation.result import Evaluation, Stage
from atas.evaluation.warnings import EvaluationWarning

__all__ = [
    "AccuracyCurve",
    "AttackedImages",
    "Evaluation",
    "EvaluationDetails",
    "EvaluationProgress",
    "EvaluationWarning",
    "ExampleImages",
    "LossLandscapes",
    "Stage",
    "Status",
    "accuracy_curve",
    "evaluate",
    "wilson",
]
