"""The monitor: attacks a fixed set of images after every epoch, and detects collapse and breakdown.

Catastrophic overfitting is not visible in the training loss: the model learns to fool the single-step attack that it
is trained with, so FGSM accuracy rises while PGD accuracy falls to zero. The monitor runs both attacks on a part of the
training images, never on the test set.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atas import attacks
from atas.core.arguments import check_count, describe
from atas.core.autograd import freeze, input_gradient, set_mode, to_float32
from atas.core.rng import CounterRNG, Stream, generator_seed
from atas.core.validation import (
    check_images,
    check_labels,
    check_logits,
    check_module,
    check_shapes,
    explain_model_errors,
)
from atas.distributed.world import SINGLE, World
from atas.errors import DataError, UsageError
from atas.threat import Threat, l2_norm
from atas.training.metrics import quantiles

_DROP = 0.5  # of the best PGD accuracy so far
_MIN_DROP = 0.1
_NOT_ROBUST = 0.1  # of the best PGD accuracy so far
_MASKING_GAP = 0.8  # between FGSM and PGD-10 accuracy; without masked gradients it is smaller
_LEARNT_MARGIN = 0.1  # of the error of a classifier that always predicts the most frequent class
_PATIENCE = 2  # epochs in a row, because a single one may be bad
_VALUES = 5  # measured for each image
_STEPS, _STEPS_ACROSS = 10, 5  # PGD-10 as in evaluations: ten steps cross the ball once
_MODEL_FAILED = "the model fails on the monitor's images: {why}"
_FIRST_EPOCHS = 2  # gradients are small in them, so steps are long in any training
_UNSETTLED_EPOCHS = 8  # the warm-up and a few more, in which gradient norms still grow

Runner = Callable[..., Tensor]  # calls a function of tensors with its arguments


@dataclass(frozen=True)
class ProbeResult:
    """Accuracy on the probe set: clean, under FGSM with step eps, and under PGD-10; the mean cross-entropy under
    PGD-10; and quantiles of the gradient norm at the clean images."""

    clean: float
    fgsm: float
    pgd10: float
    pgd10_loss: float | None = None
    gradient_norms: Sequence[float] = field(default=(), compare=False)  # rounding depends on the batch size


class MonitorEvent(NamedTuple):
    """A verdict, reported once: its name (collapse, breakdown, steps), a sentence for users, and the row for the
    metrics (None for advice)."""

    name: str
    message: str
    row: dict[str, Any] | None = None

    @property
    def style(self) -> str | None:
        """The style in which a console shows the message."""
        return None if self.row is None else "bold red"


@dataclass(frozen=True)
class MonitorStatus:
    """What `Monitor.check` found: accuracies of an epoch (counted from 0), the verdicts, and what is new."""

    epoch: int
    clean: float
    fgsm: float
    pgd10: float
    collapsed: bool
    """Whether robustness is lost while other accuracy is not: catastrophic overfitting."""
    broken_down: bool
    """Whether a model that was robust is at chance level."""
    healthy: bool
    """Whether there is no sign of either, not even in a single epoch."""
    events: tuple[MonitorEvent, ...] = ()
    """The verdicts that no earlier check has reported."""

    def __str__(self) -> str:
        return f"clean {self.clean:.1%}, FGSM {self.fgsm:.1%}, PGD-10 {self.pgd10:.1%}"


class Monitor:
    """Probes a fixed set of images, and detects collapse (catastrophic overfitting) and breakdown.

    Call `check` after every epoch, or every few, of your own loop. Pass some hundred training images, never test images
    if you act on the result: (N, C, H, W), uint8 or float in [0, 1], and their labels, as tensors or arrays.

    A collapse is reported when PGD-10 accuracy has fallen to half its best or less, by at least 10 points, and either
    FGSM accuracy is no lower than at that best or, for methods that attack, PGD-10 accuracy has been at a tenth of its
    best or less in two probes while clean accuracy kept at least half. A gap of 80 points between FGSM and PGD-10 is
    always a collapse. A best is recorded only once clean accuracy beats the majority class: a model that predicts one
    class withstands every attack.

    A breakdown is reported when a model that was robust has been at the accuracy of the majority class, clean, in two
    probes. The loss may stay finite. A model that was never robust may pass through such epochs before it becomes so.

    `adversarial` says whether the method attacks its training images; `every` is the number of epochs between probes,
    for `due`. With several ranks of a `world`, each probes its share of the images, and all get the same result.

    >>> import atas
    >>> images, labels = torch.rand(20, 1, 8, 8), torch.arange(20) % 2
    >>> monitor = atas.Monitor(images, labels, atas.Linf(8 / 255))
    >>> status = monitor.check(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)))
    >>> status.collapsed, status.epoch
    (False, 0)
    """

    def __init__(
        self,
        images: Tensor | np.ndarray,
        labels: Tensor | np.ndarray,
        threat: Threat,
        *,
        batch_size: int = 500,
        adversarial: bool = True,
        every: int = 1,
        world: World = SINGLE,
    ) -> None:
        self.images, self.labels = _checked_images(images, labels)
        if not isinstance(threat, Threat):
            raise UsageError(f"the threat model must be atas.Linf(eps) or atas.L2(eps); got {describe(threat)}")
        self.threat = threat
        self.batch_size, self.every = check_count("batch_size", batch_size), check_count("every", every)
        self.adversarial, self.world = adversarial, world
        self.best: ProbeResult | None = None
        self.collapsed = False
        self.robust_drop = False  # PGD accuracy is at half its best or less, in a bad epoch or in a collapse
        self.epochs_not_robust = 0  # probes in a row without robustness, but with clean accuracy
        self.epochs_at_chance = 0  # probes in a row at the accuracy of the majority class
        self.collapse_reported = False  # once in a run
        self.breakdown_reported = False
        self.step_size_reported = False
        self._checks = 0  # the epoch of the next call of `check`
        self._classes_checked = False

    def check(self, model: nn.Module, epoch: int | None = None) -> MonitorStatus:
        """Attack the images and return accuracies and verdicts. The model keeps its weights, statistics and mode.

        `epoch` counts from 0; by default it is the number of earlier checks.
        """
        check_module(model)
        self._prepare(model)
        epoch = self._checks if epoch is None else check_count("epoch", epoch, minimum=0)
        self._checks = epoch + 1
        probe = self.probe(model)
        self.update(probe)
        events = self.events({"epoch": epoch, "clean": probe.clean, "fgsm": probe.fgsm, "pgd10": probe.pgd10})
        verdicts = self.collapsed, self.broken_down, self.healthy
        return MonitorStatus(epoch, probe.clean, probe.fgsm, probe.pgd10, *verdicts, tuple(events))

    def _prepare(self, model: nn.Module) -> None:
        """Move the images to the model's device, and compare the labels with its classes at the first check."""
        device = next((tensor.device for tensor in model.parameters()), self.images.device)
        if self.images.device != device:
            self.images, self.labels = self.images.to(device), self.labels.to(device)
        if self._classes_checked:
            return
        with torch.no_grad(), set_mode(model, training=False), explain_model_errors(_MODEL_FAILED):
            logits = check_logits(model(_pixels(self.images[:1])), 1)
        check_labels(self.labels, logits.shape[1])
        self._classes_checked = True

    def due(self, epoch: int, epochs: int) -> bool:
        """Return whether to probe after this epoch, counted from 0: after every `every` epochs and after the last."""
        return (epoch + 1) % self.every == 0 or epoch + 1 == epochs

    def probe(self, model: nn.Module, run: Runner | None = None) -> ProbeResult:
        """Attack the probe set in eval mode. `run` calls a function of tensors; an engine may capture and replay it."""
        values = torch.zeros(_VALUES, len(self.images), dtype=torch.float64, device=self.images.device)
        local = torch.arange(len(self.images), device=values.device)[self.world.rank :: self.world.size]
        function = functools.partial(self._probe_batch, model)
        with torch.inference_mode(False), torch.no_grad(), set_mode(model, training=False), freeze(model):
            for index in local.split(self.batch_size) if len(local) else ():
                x, y = _pixels(self.images[index]), self.labels[index].long()
                values[:, index] = (function(x, y, index) if run is None else run(function, x, y, index)).double()
        *means, norms = self.world.all_reduce_sum(values)
        clean, fgsm, pgd10, loss = torch.stack(means).mean(1).tolist()
        return ProbeResult(clean, fgsm, pgd10, loss, quantiles(norms.float()))

    def _probe_batch(self, model: nn.Module, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Return a column per example: whether the model is correct on the image, under FGSM, and under PGD-10 from a
        random start; the loss under PGD-10; the norm of the gradient at the image."""

        def ascend(point: Tensor, gradient: Tensor, size: float) -> Tensor:
            return self.threat.ascend(point, gradient.nan_to_num(), size, x)

        start = torch.zeros((), dtype=torch.int64, device=x.device)
        point = self.threat.random_start(x, CounterRNG(0, start, index))
        for _ in range(_STEPS):
            point = ascend(point, input_gradient(model, point, y)[0], self.threat.eps / _STEPS_ACROSS)
        gradient, _ = input_gradient(model, x, y)
        logits = [model(point) for point in (x, ascend(x, gradient, self.threat.eps), point)]
        correct = [attacks.correct(outputs, y).float() for outputs in logits]
        loss = F.cross_entropy(to_float32(logits[-1]), y, reduction="none")
        return torch.stack([*correct, loss.float(), l2_norm(gradient).nan_to_num().float()])

    def update(self, probe: ProbeResult) -> bool:
        """Update the best probe and the counts of bad epochs; return whether this probe shows a collapse."""
        best = self.best
        learnt = self._above_majority(probe.clean)
        self.epochs_at_chance = (
            0 if learnt or best is None or not self._above_majority(best.pgd10) else self.epochs_at_chance + 1
        )
        if learnt and (best is None or probe.pgd10 > best.pgd10):
            best = self.best = probe
        self.collapsed = probe.fgsm - probe.pgd10 >= _MASKING_GAP
        self.robust_drop = best is not None and best.pgd10 - probe.pgd10 >= max(_DROP * best.pgd10, _MIN_DROP)
        self.epochs_not_robust = self.epochs_not_robust + 1 if self._only_robustness_lost(probe) else 0
        if best is not None and self.robust_drop:
            self.collapsed |= probe.fgsm >= best.fgsm or self.epochs_not_robust >= _PATIENCE
        return self.collapsed

    def _only_robustness_lost(self, probe: ProbeResult) -> bool:
        best = self.best
        if best is None or not self.adversarial or not self._above_majority(best.pgd10):
            return False
        return self.robust_drop and probe.pgd10 <= _NOT_ROBUST * best.pgd10 and probe.clean >= _DROP * best.clean

    def events(self, row: dict[str, Any]) -> list[MonitorEvent]:
        """Return the verdicts on the epoch of this row of metrics that have not been returned before."""
        events = []
        if self.collapsed and not self.collapse_reported:
            self.collapse_reported = True
            values = {"epoch": row["epoch"], "pgd10": row["pgd10"], "fgsm": row["fgsm"]}
            events.append(MonitorEvent("collapse", self._collapse_message(row), {"event": "collapse", **values}))
        if not self.step_size_reported and (message := step_size_warning(row, self.threat.eps)):
            self.step_size_reported = True
            events.append(MonitorEvent("steps", message))
        if self.broken_down and not self.breakdown_reported:
            self.breakdown_reported = True
            values = {"epoch": self._first_at_chance(row["epoch"]), "clean": row["clean"]}
            events.append(
                MonitorEvent("breakdown", self._breakdown_message(**values), {"event": "breakdown", **values})
            )
        return events

    def _collapse_message(self, row: dict[str, Any]) -> str:
        best, pgd10, fgsm = self.best, row["pgd10"], row["fgsm"]
        fell = "is" if best is None or best.pgd10 <= pgd10 else f"fell from {100 * best.pgd10:.1f}% to"
        if best is None or fgsm >= best.fgsm or fgsm - pgd10 >= _MASKING_GAP:
            rest = f"FGSM accuracy is {100 * fgsm:.1f}%"
            what = "The model withstands the attack that it is trained with and no other"
        else:
            rest = f"clean accuracy is {100 * row['clean']:.1f}%"
            what = "The model has lost its robustness and not the rest"
        return (
            f"Catastrophic overfitting in epoch {row['epoch'] + 1}: PGD-10 accuracy {fell} {100 * pgd10:.1f}% while "
            f"{rest}. {what}; a smaller step, or method atas, avoids this."
        )

    @property
    def healthy(self) -> bool:
        """Whether the last probe shows neither a collapse nor the beginning of one, nor of a breakdown."""
        return not (self.collapsed or self.robust_drop or self.epochs_at_chance)

    @property
    def broken_down(self) -> bool:
        """Whether training has broken down."""
        return self.epochs_at_chance >= _PATIENCE

    def _first_at_chance(self, epoch: int) -> int:
        """Return the epoch of the first of the probes at chance level, the last of which was after `epoch`."""
        last = -(-(epoch + 1) // self.every) * self.every - 1  # the last epoch is probed in any case
        return min(epoch, last - (self.epochs_at_chance - 1) * self.every)

    def _breakdown_message(self, epoch: int, clean: float) -> str:
        assert self.best is not None
        return (
            f"The training broke down in epoch {epoch + 1}: clean accuracy is {100 * clean:.1f}%, hardly "
            f"above that of predicting one class for all images, and was {100 * self.best.clean:.1f}%. Start again "
            f"with a smaller schedule.peak or another training.seed."
        )

    def _above_majority(self, accuracy: float) -> bool:
        """Return whether an accuracy is above that of always predicting the most frequent class."""
        return accuracy > self._majority_accuracy + _LEARNT_MARGIN * (1 - self._majority_accuracy)

    @functools.cached_property
    def _majority_accuracy(self) -> float:
        """The accuracy of always predicting the most frequent class."""
        return float(self.labels.bincount().max()) / len(self.labels)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: numbers and texts, without the images."""
        best = None if self.best is None else asdict(self.best)
        reported = {"said": self.collapse_reported, "said_broken_down": self.breakdown_reported}
        checks = {"checks": self._checks} if self._checks else {}  # `atas.train` counts epochs itself
        return {
            "best": best,
            "collapsed": self.collapsed,
            "gone": self.epochs_not_robust,
            "lost": self.epochs_at_chance,
            **reported,
            **checks,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        if not isinstance(state, Mapping) or not {"best", "collapsed", "said"} <= state.keys():
            raise UsageError("this is not the state of a monitor; pass what its state_dict() returned")
        self.best = None if state["best"] is None else ProbeResult(**state["best"])
        self.collapsed, self.collapse_reported = state["collapsed"], state["said"]
        self.epochs_not_robust = state.get("gone", 0)  # older versions did not save the last three
        self.epochs_at_chance = state.get("lost", 0)
        self.breakdown_reported = state.get("said_broken_down", False)
        self._checks = state.get("checks", 0)


def _checked_images(images: Tensor | np.ndarray, labels: Tensor | np.ndarray) -> tuple[Tensor, Tensor]:
    """Return images and labels as tensors; raise DataError if they are wrong."""
    x, y = (torch.from_numpy(np.array(v)) if isinstance(v, np.ndarray) else v for v in (images, labels))
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        raise DataError("images and labels must be tensors or arrays; convert with torch.as_tensor()")
    check_shapes(torch.empty(x.shape, device="meta") if x.dtype == torch.uint8 else x, y, None, None)
    if not len(x):
        raise DataError("the monitor has no images; pass some hundred training images")
    if x.dtype != torch.uint8:
        check_images(x)
    return x.detach(), y.detach().to(x.device)


def _pixels(images: Tensor) -> Tensor:
    """Return images as float32 in [0, 1]."""
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def split_probe(examples: int, probe: int, *, held_out: bool) -> tuple[Tensor, Tensor | None]:
    """Return the training images that the monitor attacks, the same in every run, and those to train on (None: all)."""
    generator = torch.Generator().manual_seed(generator_seed(0, 0, Stream.PROBE))
    order = torch.randperm(examples, generator=generator)
    if not held_out:
        return order[:probe].sort().values, None
    if probe >= examples:
        raise DataError(
            f"training.probe = {probe} images would be held out of {examples} in all; set a smaller training.probe"
        )
    return order[:probe].sort().values, order[probe:].sort().values


def step_size_warning(row: dict[str, Any], eps: float) -> str | None:
    """Return a warning if steps do not adapt: even the shortest are longer than the ball is wide, or nine tenths are
    equal. None otherwise, and in the first epochs."""
    by_tenth = row.get("step_size_by_tenth", [])
    if row["epoch"] < _FIRST_EPOCHS or len(by_tenth) < 3:
        return None
    shortest = by_tenth[-1]
    if shortest < (2 - 1e-6) * eps:
        return _equal_steps_warning(row, eps)
    return (
        f"Steps are too long to adapt: the mean of the shortest tenth is {shortest / eps:.3g} times eps, and a step of "
        f"2 eps ends at the edge of the ball from any start; set method.max_step to about 2 eps, method.clip below it."
    )


def _equal_steps_warning(row: dict[str, Any], eps: float) -> str | None:
    """Return a warning if nine tenths of the adaptive steps are equal, except in a warm-up, without norms."""
    _, longest, *_, shortest = row["step_size_by_tenth"]
    median = row["gradient_norms"][len(row["gradient_norms"]) // 2]
    if row["epoch"] < _UNSETTLED_EPOCHS or longest > (1 + 1e-6) * shortest or not median:
        return None
    return (
        f"Steps do not adapt: {shortest / eps:.3g} times eps for nearly all examples, a bound of method.clip, because "
        f"method.c does not fit the gradient norms, whose median is {median:.3g}; set method.c to about twice that."
    )
