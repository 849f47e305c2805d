"""The result of `robustify`: the model, its run and evaluation, and a verdict in plain sentences.

The verdict follows the same rules as reports and model cards (`atas.report.verdict`): without AutoAttack a figure is an
upper bound, and with signs of masked gradients it is not known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from atas._utils.formatting import shell_quote
from atas.autotrain.plan import TrainingPlan
from atas.evaluation import Evaluation
from atas.recipes import Recipe
from atas.report.formatting import attack_names, describe_threat, join_names, percent
from atas.report.verdict import judge
from atas.threat import format_pixels
from atas.training import Run
from atas.training.metrics import first_collapse

_ENOUGH_EPOCHS = 30  # of the shortest recipe that is trained to its end
_PROBES = 10  # with fewer, a trend cannot be told from noise
_NOTICEABLE = 0.02  # change of the monitor's accuracy between the last two fifths of a training
_GREY = 0.5  # eps with which every image can become uniformly grey
_TRAINING_SHARE = 0.6  # of the time, as a careful estimate


@dataclass(frozen=True)
class AutoTrainResult:
    """The result of `robustify`. `str()` gives the verdict.

    Attributes:
        run: the run, in an ordinary folder of `atas train`.
        evaluation: the evaluation of its model on test images.
        verdict: sentences about what the model withstands, how sure that is, and what to do next.
        choices: lines that say what was chosen and why.
    """

    run: Run
    evaluation: Evaluation
    verdict: tuple[str, ...]
    choices: tuple[str, ...] = field(repr=False)

    @property
    def model(self) -> nn.Module:
        """The trained model, in eval mode."""
        return self.run.model

    def __str__(self) -> str:
        return "\n".join(self.verdict)


@dataclass(frozen=True)
class Findings:
    """The measurements that a verdict is based on.

    `most_frequent` is the share of the most frequent class among the evaluated images. `events` are rows of
    metrics.jsonl. `before` and `after` are results of one attack on a given model and on the trained one, on the same
    images.
    """

    recipe: Recipe
    folder: Path
    metrics: Sequence[dict[str, Any]]
    events: Sequence[dict[str, Any]]
    evaluation: Evaluation
    most_frequent: float
    test_images: int
    held_out: int | None
    plan: TrainingPlan
    before: Evaluation | None = None
    after: Evaluation | None = None

    @property
    def at_chance(self) -> bool:
        """Whether the model is no better than always predicting one class."""
        return any(warning.kind == "chance" for warning in self.evaluation.warnings)

    @property
    def collapsed(self) -> bool:
        """Whether the weights that the training ended with have collapsed."""
        stopped = bool(self.events) and self.events[-1].get("event") == "stop"
        return not stopped and bool(self.metrics[-1].get("collapsed"))

    def verdict(self) -> tuple[str, ...]:
        """Return all sentences."""
        return tuple(
            sentence
            for sentences in (
                self._robustness(),
                self._training(),
                self._doubts(),
                self._gain(),
                self._more_time(),
                self._next(),
            )
            for sentence in sentences
        )

    def _robustness(self) -> Iterator[str]:
        evaluation, worst = self.evaluation, judge([self.evaluation])
        clean, images = percent(evaluation.accuracy["clean"]), f"{evaluation.n:,} test images"
        if self.at_chance:
            yield (
                f"The model has learnt nothing that helps: of {images}, it classifies {clean}% correctly, and always "
                f"answering the most frequent class would give {percent(self.most_frequent)}%. It is not robust."
            )
            return
        if worst.is_low:
            yield f"The model is not robust: its worst case is {worst.figure}."
        names = join_names(attack_names(evaluation))
        yield f"Of {images}, the model classifies {clean}% correctly without an attack. {worst.sentence()}"
        yield (
            f"The worst case counts images that withstand {names}, each of which may change "
            f"{describe_threat(evaluation.threat)}."
        )
        if not worst.is_low and worst.interval[0] <= self.most_frequent:
            yield (
                f"Robustness is not shown: always answering the most frequent class would withstand every attack on "
                f"{percent(self.most_frequent)}% of these images."
            )

    def _training(self) -> Iterator[str]:
        epoch = first_collapse(self.metrics)
        rollbacks = sum(event.get("event") == "rollback" for event in self.events)
        if self.collapsed:
            yield (
                f"The training collapsed in epoch {epoch}: the model withstands the attack that it was trained with, "
                "and hardly any other. Do not use it."
            )
        elif epoch is not None:
            how = f"{rollbacks} times" if rollbacks > 1 else "once"
            ended = (
                f"returned to the last healthy weights {how} and continued with smaller steps"
                if self.events[-1].get("event") != "stop"
                else "ended with the last healthy weights"
            )
            yield f"The training collapsed in epoch {epoch}; it {ended}."
        if any(event.get("event") == "breakdown" for event in self.events):
            yield "The training broke down to the accuracy of one class; start again with another seed."
        threat = self.recipe.threat
        if threat.name == "linf" and threat.eps >= _GREY:
            yield (
                f"With eps = {threat.eps:g} every image can become uniformly grey, which no model withstands: choose a "
                "smaller one."
            )
        elif self.at_chance or judge([self.evaluation]).is_low:
            yield (
                f"eps = {format_pixels(threat.eps)} may be too large for these images, or the training too short: try "
                f"eps = {format_pixels(threat.eps / 2)}, or more minutes."
            )

    def _doubts(self) -> Iterator[str]:
        if self.held_out is not None:
            yield (
                f"The data had no test images: {self.held_out:,} of its training images were held out and not trained "
                "on. They may be more alike to the others than new images are."
            )
            if self.before is not None:
                yield "If your model was trained on these images before, all figures are higher than on new ones."
        yield from (f"Warning: {warning}." for warning in self.evaluation.warnings if warning.kind != "chance")
        yield f"These are figures of one training with seed {self.recipe.training.seed}; other seeds give others."

    def _gain(self) -> Iterator[str]:
        if self.before is None or self.after is None:
            return
        (robust, clean), (robust_now, clean_now) = (
            (percent(result.accuracy["worst"]), percent(result.accuracy["clean"]))
            for result in (self.before, self.after)
        )
        yield (
            f"Your model had {robust}% under PGD-10 and {clean}% clean; the trained one has {robust_now}% and "
            f"{clean_now}%, on the same {self.before.n:,} images."
        )

    def _more_time(self) -> Iterator[str]:
        epochs, plan = self.recipe.training.epochs, self.plan
        if plan.too_short or epochs < _ENOUGH_EPOCHS:
            minutes = plan.seconds_for(_ENOUGH_EPOCHS) / _TRAINING_SHARE / 60
            short = "the time was too short for this data" if plan.too_short else f"{epochs} epochs are few"
            yield (
                f"More minutes are likely to help: {short}. {_ENOUGH_EPOCHS} epochs and an evaluation take about "
                f"{_minutes(minutes)} here."
            )
            return
        if self.at_chance or self.collapsed:
            return
        change = trend(self.metrics)
        if change is not None and change > _NOTICEABLE:
            yield (
                f"More minutes are likely to help: PGD-10 accuracy on held-back training images still rose by "
                f"{percent(change)} points in the last fifth of the training."
            )
        elif change is not None and change < -_NOTICEABLE:
            yield (
                f"More minutes are unlikely to help: PGD-10 accuracy on held-back training images fell by "
                f"{percent(-change)} points in the last fifth of the training. More images would help."
            )
        elif plan.longest:
            yield f"More minutes are unlikely to help: {epochs} epochs are the most that are of use."
        else:
            yield "More minutes would change little: the last epochs hardly changed the accuracy under attack."

    def _next(self) -> Iterator[str]:
        folder = shell_quote(self.folder)
        in_python = self.recipe.given_in_python
        if not self.evaluation.has_autoattack or self.evaluation.n < self.test_images:
            command = "atas.evaluate with all test images" if in_python else f"atas evaluate {folder}"
            what = "AutoAttack" if not self.evaluation.has_autoattack else "all test images"
            yield f"For {what}, which takes longer: {command}{'' if in_python else ' --attacks pgd50,autoattack'}"
        yield f"To see what happened: atas report {folder}"


def trend(metrics: Sequence[dict[str, Any]]) -> float | None:
    """Return the change of the monitor's PGD-10 accuracy from the last but one fifth of a training to the last; None
    after too few probes.

    >>> trend([{"pgd10": number / 20} for number in range(20)])
    0.2
    """
    probes = [row["pgd10"] for row in metrics if row.get("pgd10") is not None]
    if len(probes) < _PROBES:
        return None
    fifth = len(probes) // 5
    earlier, last = probes[-2 * fifth : -fifth], probes[-fifth:]
    return round(sum(last) / fifth - sum(earlier) / fifth, 6)


def _minutes(minutes: float) -> str:
    return "a minute" if minutes < 1.5 else f"{minutes:,.0f} minutes"
