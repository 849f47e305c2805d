"""A run as the page shows it: its summary, and what its evaluation and its training stored for the page."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from atas._utils.formatting import shell_quote
from atas.evaluation import Evaluation, EvaluationDetails
from atas.report.elements import Unavailable
from atas.report.summary import RunSummary
from atas.training.examples import TrainingExamples, read_examples
from atas.training.run import RunFolder


class RunView:
    """One run. Its model and its data are not needed."""

    def __init__(self, summary: RunSummary, folder: Path) -> None:
        self.summary, self.recipe, self.folder = summary, summary.recipe, RunFolder(folder)
        self.environment: dict[str, Any] = self.folder.read_environment()

    @property
    def evaluation(self) -> Evaluation | None:
        """The result to show."""
        return self.summary.evaluation

    @property
    def evaluate_command(self) -> str:
        """The command that evaluates the run, or the Python call if model or data were Python objects."""
        if self.recipe.given_in_python:
            return f'atas.evaluate(model, x_test, y_test, threat).save("{self.folder.evaluation}"), in Python'
        return f"atas evaluate {shell_quote(self.folder.path)} --attacks pgd50,autoattack"

    @property
    def weights_differ(self) -> bool | None:
        """Whether the evaluation used other weights than the run's; None if unknown."""
        return self.summary.weights_differ

    @property
    def details(self) -> tuple[Evaluation, EvaluationDetails] | Unavailable:
        """The evaluation and what it stored for the page, or why there is nothing."""
        if self.evaluation is None:
            return Unavailable(f"The run has not been evaluated: run {self.evaluate_command}")
        if self.evaluation.details is None:
            return Unavailable("The result was written by an earlier version, without images: evaluate again")
        return self.evaluation, self.evaluation.details

    @cached_property
    def training_examples(self) -> TrainingExamples | None:
        """Training examples by gradient norm; None for methods without norms, and for runs of earlier versions."""
        return read_examples(self.folder.training_examples)
