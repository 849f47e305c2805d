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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atas import attacks
from atas.noise import Draw
from atas.passes import frozen, full, input_gradient, mode
from atas.processes import ALONE, Processes
from atas.threat import Threat, l2_norm
from atas.training.spread import quantiles

_FALL = 0.5  # of the best PGD accuracy so far
_LEAST_FALL = 0.1
_GONE = 0.1  # of that best: so little is left
_MASKED = 0.8  # no honest model is so much better against one step than against ten
_LEARNT = 0.1  # of what always naming the most frequent class gets wrong
_EPOCHS = 2  # in a row: one may be bad
_SEEN = 5  # figures of each image
_STEPS, _STEPS_ACROSS = 10, 5  # PGD-10 as evaluations run it: ten steps cross the ball once


Ask = Callable[..., Tensor]  # a function of tensors, and its arguments


@dataclass(frozen=True)
class Probe:
    """Accuracy on the slice: clean, under one step of size eps, and under PGD-10; there also the mean cross-entropy.
    And the quantiles of the gradient norm at its images."""

    clean: float
    fgsm: float
    pgd10: float
    pgd10_loss: float | None = None
    gradient_norms: Sequence[float] = field(default=(), compare=False)  # rounding may differ from batch to batch


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
    batch: int = 500
    best: Probe | None = None
    collapsed: bool = False
    fallen: bool = False  # half of the best PGD accuracy is gone, in a bad epoch or in a collapse
    gone: int = 0  # epochs in a row in which robustness is, and clean accuracy is not
    lost: int = 0  # epochs in a row in which what was learnt is gone
    said: bool = False  # a run says it once
    said_broken_down: bool = False
    attacked: bool = True  # the images that the model learns from
    peers: Processes = ALONE

    def probe(self, model: nn.Module, ask: Ask | None = None) -> Probe:
        """Attack the slice in eval mode. `ask` calls a function of tensors: an engine may have a fast way to do so."""
        seen = torch.zeros(_SEEN, len(self.images), dtype=torch.float64, device=self.images.device)
        mine = torch.arange(len(self.images), device=seen.device)[self.peers.rank :: self.peers.count]
        function = functools.partial(self._look, model)
        with torch.inference_mode(False), torch.no_grad(), mode(model, training=False), frozen(model):
            for index in mine.split(self.batch) if len(mine) else ():
                x, y = self.images[index].float() / 255, self.labels[index].long()
                seen[:, index] = (function(x, y, index) if ask is None else ask(function, x, y, index)).double()
        *means, norms = self.peers.add_up(seen)
        clean, fgsm, pgd10, loss = torch.stack(means).mean(1).tolist()
        return Probe(clean, fgsm, pgd10, loss, quantiles(norms.float()))

    def _look(self, model: nn.Module, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """A column an example: whether the model is right on the image, after one step, and after ten from a random
        start; the loss there; and the norm of the gradient at the image."""

        def up(point: Tensor, gradient: Tensor, size: float) -> Tensor:
            return self.threat.ascend(point, gradient.nan_to_num(), size, x)

        start = torch.zeros((), dtype=torch.int64, device=x.device)
        point = self.threat.random_start(x, Draw(0, start, index))
        for _ in range(_STEPS):
            point = up(point, input_gradient(model, point, y)[0], self.threat.eps / _STEPS_ACROSS)
        gradient, _ = input_gradient(model, x, y)
        logits = [model(point) for point in (x, up(x, gradient, self.threat.eps), point)]
        right = [attacks.correct(found, y).float() for found in logits]
        loss = F.cross_entropy(full(logits[-1]), y, reduction="none")
        return torch.stack([*right, loss.float(), l2_norm(gradient).nan_to_num().float()])

    def judge(self, probe: Probe) -> bool:
        """Whether this probe shows a collapse; remembers the best one, and for how long all that was learnt is gone."""
        best = self.best
        learnt = self._tells(probe.clean)
        self.lost = 0 if learnt or best is None or not self._tells(best.pgd10) else self.lost + 1
        if learnt and (best is None or probe.pgd10 > best.pgd10):
            best = self.best = probe
        self.collapsed = probe.fgsm - probe.pgd10 >= _MASKED
        self.fallen = best is not None and best.pgd10 - probe.pgd10 >= max(_FALL * best.pgd10, _LEAST_FALL)
        self.gone = self.gone + 1 if self._robustness_alone_is_gone(probe) else 0
        if best is not None and self.fallen:
            self.collapsed |= probe.fgsm >= best.fgsm or self.gone >= _EPOCHS
        return self.collapsed

    def _robustness_alone_is_gone(self, probe: Probe) -> bool:
        best = self.best
        if best is None or not self.attacked or not self._tells(best.pgd10):
            return False
        return self.fallen and probe.pgd10 <= _GONE * best.pgd10 and probe.clean >= _FALL * best.clean

    def sentence(self, epoch: int, probe: Probe) -> str:
        """What to tell a person of the collapse that this probe shows."""
        best, now = self.best, f"{100 * probe.pgd10:.1f}%"
        fell = "is" if best is None or best.pgd10 <= probe.pgd10 else f"fell from {100 * best.pgd10:.1f}% to"
        if best is None or probe.fgsm >= best.fgsm or probe.fgsm - probe.pgd10 >= _MASKED:
            rest = f"FGSM accuracy is {100 * probe.fgsm:.1f}%"
            what = "The model withstands the attack that it is trained with and no other"
        else:
            rest = f"clean accuracy is {100 * probe.clean:.1f}%"
            what = "The model has lost its robustness and not the rest"
        return (
            f"Catastrophic overfitting in epoch {epoch + 1}: PGD-10 accuracy {fell} {now} while {rest}. {what}; a "
            f"smaller step, or method atas, avoids this."
        )

    @property
    def broken_down(self) -> bool:
        """Whether training has broken down."""
        return self.lost >= _EPOCHS

    def broken_sentence(self, epoch: int, probe: Probe) -> str:
        """What to tell a person of a training that has broken down."""
        assert self.best is not None
        return (
            f"The training broke down in epoch {epoch + 1}: clean accuracy is {100 * probe.clean:.1f}%, hardly "
            f"more than naming one class for all images gives, and was {100 * self.best.clean:.1f}%. Begin anew with a "
            f"smaller schedule.peak or another training.seed."
        )

    def _tells(self, accuracy: float) -> bool:
        """Whether an accuracy is more than always naming the most frequent class gives."""
        return accuracy > self._constant + _LEARNT * (1 - self._constant)

    @functools.cached_property
    def _constant(self) -> float:
        """The accuracy of always naming the most frequent class."""
        return float(self.labels.bincount().max()) / len(self.labels)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        best = None if self.best is None else asdict(self.best)
        said = {"said": self.said, "said_broken_down": self.said_broken_down}
        return {"best": best, "collapsed": self.collapsed, "gone": self.gone, "lost": self.lost, **said}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take up where a checkpoint left off."""
        self.best = None if state["best"] is None else Probe(**state["best"])
        self.collapsed, self.said = state["collapsed"], state["said"]
        self.gone, self.lost = state.get("gone", 0), state.get("lost", 0)  # older versions did not look
        self.said_broken_down = state.get("said_broken_down", False)
