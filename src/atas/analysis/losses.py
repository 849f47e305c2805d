"""Losses of a trained model on many images: under PGD-10, and how much less a single step finds.

Points are searched for by the fast model that evaluations search with, half precision on a GPU; every loss is that of
the model itself in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atas.evaluation._search import Runner, ready, usual_lanes
from atas.noise import Draw
from atas.passes import input_gradient
from atas.threat import Threat

STEPS, STEPS_ACROSS = 10, 5  # PGD-10 as evaluations run it
Attack = Callable[[Runner, Tensor, Tensor, Tensor], Tensor]
"""Of a model, images, labels and the numbers of the examples: the points to take the loss at."""
Start = Callable[[Tensor, Tensor], Tensor]
"""Of images and the numbers of the examples: where an attack begins."""


@contextmanager
def prepared(model: nn.Module, images: Tensor, precision: str = "auto") -> Iterator[Runner]:
    """A model ready to be attacked, in eval mode; `images` are some that it will see."""
    device = next(model.parameters()).device
    lanes = min(usual_lanes(device), len(images))
    with ready(model, device, precision=precision, lanes=lanes, images=images[:64].float() / 255) as runner:
        yield runner


def losses(runner: Runner, images: Tensor, labels: Tensor, attacks: Sequence[Attack]) -> tuple[Tensor, Tensor]:
    """Cross-entropy and right answers (attacks, examples) at the points of each attack; images are uint8."""
    images, labels = images.to(runner.device), labels.to(runner.device)
    size, count = runner.lanes, len(images)
    found = []
    with torch.no_grad():
        for first in range(0, count, size):
            index = torch.arange(first, first + size, device=runner.device) % count  # all batches are of one shape
            x, y = images[index].float() / 255, labels[index]
            logits = torch.stack([runner.judge(attack(runner, x, y, index)) for attack in attacks])
            loss = F.cross_entropy(logits.flatten(0, 1), y.repeat(len(attacks)), reduction="none").view(
                len(attacks), -1
            )
            found.append(torch.stack([loss, (logits.argmax(2) == y).to(loss.dtype)]))
    loss, right = torch.cat(found, 2)[..., :count].cpu()
    return loss, right.bool()


def pgd10(threat: Threat) -> Attack:
    """Ten steps of eps/5 from a random start."""

    def attack(runner: Runner, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        point = random_start(threat, x, index)
        for _ in range(STEPS):
            point = _up(runner, threat, point, threat.eps / STEPS_ACROSS, x, y)
        return point

    return attack


def single_step(threat: Threat, size: float, start: Start) -> Attack:
    """One step of a size from somewhere: FGSM-RS from noise, ATTA from what it remembers."""

    def attack(runner: Runner, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        return _up(runner, threat, start(x, index), size, x, y)

    return attack


def random_start(threat: Threat, x: Tensor, index: Tensor) -> Tensor:
    """Uniform in the ball; the same for PGD-10 and for FGSM-RS."""
    return threat.random_start(x, Draw(0, torch.zeros((), dtype=torch.int64, device=x.device), index))


def gaps(losses_of_steps: Tensor, loss_of_pgd: Tensor) -> list[float]:
    """The mean of what PGD-10 finds more than each single step does."""
    return [float(gap) for gap in (loss_of_pgd.double() - losses_of_steps.double()).mean(1)]


def _up(runner: Runner, threat: Threat, point: Tensor, size: float, x: Tensor, y: Tensor) -> Tensor:
    gradient, _ = input_gradient(runner.logits, point, y)
    return threat.ascend(point, gradient.nan_to_num(), size, x)
