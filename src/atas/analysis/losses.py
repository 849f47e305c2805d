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
Attack = Callable[[Runner, Tensor, Tensor, Tensor], Sequence[Tensor]]
"""Of a model, images, labels and the numbers of the examples: points to take the loss at, one or more of each."""
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
    """Cross-entropy and right answers (points, examples) at the points of the attacks in turn; images are uint8."""
    images, labels = images.to(runner.device), labels.to(runner.device)
    size, count = runner.lanes, len(images)
    found = []
    with torch.no_grad():
        for first in range(0, count, size):
            index = torch.arange(first, first + size, device=runner.device) % count  # all batches are of one shape
            x, y = images[index].float() / 255, labels[index]
            points = [point for attack in attacks for point in attack(runner, x, y, index)]
            logits = [runner.judge(point) for point in points]
            loss = torch.stack([F.cross_entropy(one, y, reduction="none") for one in logits])
            right = torch.stack([one.argmax(1) == y for one in logits])
            found.append(torch.stack([loss, right.to(loss.dtype)]))
    all_loss, all_right = torch.cat(found, 2)[..., :count].cpu()
    return all_loss, all_right.bool()


def pgd10(threat: Threat) -> Attack:
    """Ten steps of eps/5 from a random start."""

    def attack(runner: Runner, x: Tensor, y: Tensor, index: Tensor) -> list[Tensor]:
        point = random_start(threat, x, index)
        for _ in range(STEPS):
            point = threat.ascend(point, _gradient(runner, point, y), threat.eps / STEPS_ACROSS, x)
        return [point]

    return attack


def single_steps(threat: Threat, sizes: Sequence[float], start: Start) -> Attack:
    """One step of each size from somewhere, along one gradient: FGSM-RS from noise, ATTA from what it remembers."""

    def attack(runner: Runner, x: Tensor, y: Tensor, index: Tensor) -> list[Tensor]:
        point = start(x, index)
        gradient = _gradient(runner, point, y)
        return [threat.ascend(point, gradient, size, x) for size in sizes]

    return attack


def random_start(threat: Threat, x: Tensor, index: Tensor) -> Tensor:
    """Uniform in the ball; the same for PGD-10 and for FGSM-RS."""
    return threat.random_start(x, Draw(0, torch.zeros((), dtype=torch.int64, device=x.device), index))


def gaps(losses_of_steps: Tensor, loss_of_pgd: Tensor) -> list[float]:
    """The mean of what PGD-10 finds more than each single step does."""
    return [float(gap) for gap in (loss_of_pgd.double() - losses_of_steps.double()).mean(1)]


def _gradient(runner: Runner, point: Tensor, y: Tensor) -> Tensor:
    gradient, _ = input_gradient(runner.logits, point, y)
    return gradient.nan_to_num()
