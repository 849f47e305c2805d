"""The monitor: after every epoch, how the model stands under a real attack, and whether training has collapsed or
broken down.

Catastrophic overfitting is not visible in the training loss: the model learns to fool the single-step attack that it
is trained with, so FGSM accuracy rises while PGD accuracy falls to zero. The monitor attacks a fixed slice of images,
never of the test set, with both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atas import attacks
from atas.core.autograd import freeze, input_gradient, set_mode, to_float32
from atas.core.rng import CounterRNG, Stream, generator_seed
from atas.distributed.world import SINGLE, World
from atas.errors import DataError
from atas.threat import Threat, l2_norm
from atas.training.metrics import quantiles

_DROP = 0.5  # of the best PGD accuracy so far
_MIN_DROP = 0.1
_NOT_ROBUST = 0.1  # of that best: so little is left
_MASKING_GAP = 0.8  # no honest model is so much better against one step than against ten
_LEARNT_MARGIN = 0.1  # of what always naming the most frequent class gets wrong
_PATIENCE = 2  # epochs in a row: one may be bad
_VALUES = 5  # figures of each image
_STEPS, _STEPS_ACROSS = 10, 5  # PGD-10 as evaluations run it: ten steps cross the ball once
_FIRST_EPOCHS = 2  # in which steps are long in any training

Runner = Callable[..., Tensor]  # calls a function of tensors with its arguments


@dataclass(frozen=True)
class ProbeResult:
    """Accuracy on the slice: clean, under one step of size eps, and under PGD-10; there also the mean cross-entropy.
    And the quantiles of the gradient norm at its images."""

    clean: float
    fgsm: float
    pgd10: float
    pgd10_loss: float | None = None
    gradient_norms: Sequence[float] = field(default=(), compare=False)  # rounding may differ from batch to batch


class MonitorEvent(NamedTuple):
    """A verdict to report once: the row for the metrics (None for advice that is only printed), and the message."""

    row: dict[str, Any] | None
    message: str
    style: str | None = None


@dataclass
class Monitor:
    """Probes a fixed slice of images and recognises catastrophic overfitting.

    A collapse is a PGD accuracy of at most half of the best so far, by 10 points at least, while FGSM accuracy is no
    lower than it was at that best. A bad epoch lowers both; so may the first epochs of a collapse, which is told apart
    when FGSM accuracy rises again, or, where the training attacks at all, when two epochs in a row have not a tenth of
    that best and half of its clean accuracy at least. A model that has learnt nothing yet has no best, though one that
    always names the same class withstands every attack. Training that was never robust has nothing to fall from: there
    a gap of 80 points between the two tells. Several processes share the images and come to one judgement.

    Training that has broken down is something else: the model has been robust, and now, two epochs in a row, is hardly
    better than one that always names the same class, clean or attacked. The loss may stay finite, so nothing else
    tells. One that was never robust may forget all on its way to become so, and is given the time.
    """

    images: Tensor
    labels: Tensor
    threat: Threat
    batch_size: int = 500
    best: ProbeResult | None = None
    collapsed: bool = False
    robust_drop: bool = False  # half of the best PGD accuracy is gone, in a bad epoch or in a collapse
    epochs_not_robust: int = 0  # epochs in a row in which robustness is, and clean accuracy is not
    epochs_at_chance: int = 0  # epochs in a row in which what was learnt is gone
    collapse_reported: bool = False  # a run says it once
    breakdown_reported: bool = False
    step_size_reported: bool = False
    adversarial: bool = True  # the images that the model learns from
    world: World = SINGLE

    def probe(self, model: nn.Module, run: Runner | None = None) -> ProbeResult:
        """Attack the slice in eval mode. `run` calls a function of tensors: an engine may have a fast way to do so."""
        seen = torch.zeros(_VALUES, len(self.images), dtype=torch.float64, device=self.images.device)
        mine = torch.arange(len(self.images), device=seen.device)[self.world.rank :: self.world.size]
        function = functools.partial(self._probe_batch, model)
        with torch.inference_mode(False), torch.no_grad(), set_mode(model, training=False), freeze(model):
            for index in mine.split(self.batch_size) if len(mine) else ():
                x, y = self.images[index].float() / 255, self.labels[index].long()
                seen[:, index] = (function(x, y, index) if run is None else run(function, x, y, index)).double()
        *means, norms = self.world.all_reduce_sum(seen)
        clean, fgsm, pgd10, loss = torch.stack(means).mean(1).tolist()
        return ProbeResult(clean, fgsm, pgd10, loss, quantiles(norms.float()))

    def _probe_batch(self, model: nn.Module, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """A column an example: whether the model is right on the image, after one step, and after ten from a random
        start; the loss there; and the norm of the gradient at the image."""

        def up(point: Tensor, gradient: Tensor, size: float) -> Tensor:
            return self.threat.ascend(point, gradient.nan_to_num(), size, x)

        start = torch.zeros((), dtype=torch.int64, device=x.device)
        point = self.threat.random_start(x, CounterRNG(0, start, index))
        for _ in range(_STEPS):
            point = up(point, input_gradient(model, point, y)[0], self.threat.eps / _STEPS_ACROSS)
        gradient, _ = input_gradient(model, x, y)
        logits = [model(point) for point in (x, up(x, gradient, self.threat.eps), point)]
        right = [attacks.correct(outputs, y).float() for outputs in logits]
        loss = F.cross_entropy(to_float32(logits[-1]), y, reduction="none")
        return torch.stack([*right, loss.float(), l2_norm(gradient).nan_to_num().float()])

    def update(self, probe: ProbeResult) -> bool:
        """Whether this probe shows a collapse; remembers the best one, and for how long all that was learnt is gone."""
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
            events.append(MonitorEvent({"event": "collapse", **values}, self._collapse_message(row), "bold red"))
        if not self.step_size_reported and (message := step_size_warning(row, self.threat.eps)):
            self.step_size_reported = True
            events.append(MonitorEvent(None, message))
        if self.broken_down and not self.breakdown_reported:
            self.breakdown_reported = True
            values = {"epoch": row["epoch"] + 1 - self.epochs_at_chance, "clean": row["clean"]}
            events.append(MonitorEvent({"event": "breakdown", **values}, self._breakdown_message(**values), "bold red"))
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

    def _breakdown_message(self, epoch: int, clean: float) -> str:
        assert self.best is not None
        return (
            f"The training broke down in epoch {epoch + 1}: clean accuracy is {100 * clean:.1f}%, hardly "
            f"more than naming one class for all images gives, and was {100 * self.best.clean:.1f}%. Begin anew with a "
            f"smaller schedule.peak or another training.seed."
        )

    def _above_majority(self, accuracy: float) -> bool:
        """Whether an accuracy is more than always naming the most frequent class gives."""
        return accuracy > self._majority_accuracy + _LEARNT_MARGIN * (1 - self._majority_accuracy)

    @functools.cached_property
    def _majority_accuracy(self) -> float:
        """The accuracy of always naming the most frequent class."""
        return float(self.labels.bincount().max()) / len(self.labels)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        best = None if self.best is None else asdict(self.best)
        reported = {"said": self.collapse_reported, "said_broken_down": self.breakdown_reported}
        return {
            "best": best,
            "collapsed": self.collapsed,
            "gone": self.epochs_not_robust,
            "lost": self.epochs_at_chance,
            **reported,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up where a checkpoint left off."""
        self.best = None if state["best"] is None else ProbeResult(**state["best"])
        self.collapsed, self.collapse_reported = state["collapsed"], state["said"]
        self.epochs_not_robust, self.epochs_at_chance = (
            state.get("gone", 0),
            state.get("lost", 0),
        )  # older versions did not look
        self.breakdown_reported = state.get("said_broken_down", False)


def split_probe(examples: int, probe: int, *, held_out: bool) -> tuple[Tensor, Tensor | None]:
    """Which training images the monitor attacks, the same in every run, and which are left to train on (None: all)."""
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
    """What to tell a person where even the shortest adaptive steps are longer than the ball is wide. In the first
    epochs they are in any training, as gradients are small."""
    shortest = row.get("step_size_by_tenth", [0.0])[-1]
    if row["epoch"] < _FIRST_EPOCHS or shortest < (2 - 1e-6) * eps:
        return None
    return (
        f"Steps are too long to adapt: even the shortest tenth of them has {shortest / eps:.3g} times eps, where 2 eps "
        f"end at the edge of the ball wherever they begin; set method.max_step to about 2 eps, method.clip below it."
    )
