"""Losses of a trained model: under PGD-10, after single steps, and on a plane around images (the paper's first figure).

Attacks use the fast model of evaluations, in half precision on a GPU. Every loss is computed by the model in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atas.attacks.scheduler import Scheduler, default_batch_size
from atas.core.autograd import input_gradient
from atas.core.rng import CounterRNG, Stream
from atas.evaluation.backend import prepare
from atas.threat import Threat

STEPS, STEPS_PER_EPS = 10, 5  # PGD-10 as evaluations run it
Attack = Callable[[Scheduler, Tensor, Tensor, Tensor], Sequence[Tensor]]
"""Called with a runner, images, labels and indices; returns one or more batches of points."""
Start = Callable[[Tensor, Tensor], Tensor]
"""Called with images and indices; returns the start of an attack."""


@contextmanager
def prepare_runner(
    model: nn.Module, images: Tensor, precision: str = "auto", batch_size: int | None = None
) -> Iterator[Scheduler]:
    """Prepare a model for attacks, in eval mode; `images` are examples of its input."""
    device = next(model.parameters()).device
    slots = min(batch_size or default_batch_size(device), len(images))
    with prepare(model, device, precision=precision, slots=slots, images=images[:64].float() / 255) as runner:
        yield runner


def attack_losses(
    runner: Scheduler, images: Tensor, labels: Tensor, attacks: Sequence[Attack]
) -> tuple[Tensor, Tensor]:
    """Return cross-entropy and correctness, each (points, examples), at the points of the attacks; images are uint8."""
    images, labels = images.to(runner.device), labels.to(runner.device)
    size, count = runner.slots, len(images)
    batches = []
    with torch.no_grad():
        for first in range(0, count, size):
            index = torch.arange(first, first + size, device=runner.device) % count  # all batches are of one shape
            x, y = images[index].float() / 255, labels[index]
            points = [point for attack in attacks for point in attack(runner, x, y, index)]
            logits = [runner.verifier(point) for point in points]
            loss = torch.stack([F.cross_entropy(one, y, reduction="none") for one in logits])
            right = torch.stack([one.argmax(1) == y for one in logits])
            batches.append(torch.stack([loss, right.to(loss.dtype)]))
    all_loss, all_right = torch.cat(batches, 2)[..., :count].cpu()
    return all_loss, all_right.bool()


def pgd10(threat: Threat) -> Attack:
    """Return an attack of ten steps of eps/5 from a random start."""

    def attack(runner: Scheduler, x: Tensor, y: Tensor, index: Tensor) -> list[Tensor]:
        point = random_start(threat, x, index)
        for _ in range(STEPS):
            point = threat.ascend(point, _gradient(runner, point, y), threat.eps / STEPS_PER_EPS, x)
        return [point]

    return attack


def single_steps(threat: Threat, sizes: Sequence[float], start: Start) -> Attack:
    """Return an attack of one step of each size along one gradient: from noise (FGSM-RS) or stored points (ATTA)."""

    def attack(runner: Scheduler, x: Tensor, y: Tensor, index: Tensor) -> list[Tensor]:
        point = start(x, index)
        gradient = _gradient(runner, point, y)
        return [threat.ascend(point, gradient, size, x) for size in sizes]

    return attack


def random_start(threat: Threat, x: Tensor, index: Tensor) -> Tensor:
    """Return a uniform point of the ball, the same for PGD-10 and FGSM-RS."""
    return threat.random_start(x, CounterRNG(0, torch.zeros((), dtype=torch.int64, device=x.device), index))


def loss_gaps(losses_of_steps: Tensor, loss_of_pgd: Tensor) -> list[float]:
    """Return the mean loss of PGD-10 minus that of each single step."""
    return [float(gap) for gap in (loss_of_pgd.double() - losses_of_steps.double()).mean(1)]


def _gradient(runner: Scheduler, point: Tensor, y: Tensor) -> Tensor:
    gradient, _ = input_gradient(runner.search_model, point, y)
    return gradient.nan_to_num()


def loss_surface(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    threat: Threat,
    points: int = 11,
    batch_size: int | None = None,
) -> Tensor:
    """Return the mean loss at x + eps (a v1 + b v2) for a (rows) and b (columns) from 0 to 1.

    v1 is the sign of each image's gradient, as FGSM steps; v2 has random signs. Pixels stay in [0, 1].
    """
    scale = torch.linspace(0, 1, points, dtype=torch.float64).tolist()
    sums = torch.zeros(points, points, dtype=torch.float64)
    with prepare_runner(model, images, precision="float32", batch_size=batch_size) as runner, torch.no_grad():
        images, labels = images.to(runner.device), labels.to(runner.device)
        for first in range(0, len(images), runner.slots):
            index = torch.arange(first, min(first + runner.slots, len(images)), device=runner.device)
            x, y = images[index].float() / 255, labels[index]
            gradient, _ = input_gradient(runner.verifier, x, y)
            v1 = gradient.nan_to_num().sign()
            draw = CounterRNG(0, torch.zeros((), dtype=torch.int64, device=x.device), index)
            v2 = (draw.uniform(Stream.START, x.shape[1:]) - 0.5).sign()
            cells = [
                F.cross_entropy(runner.verifier((x + threat.eps * (a * v1 + b * v2)).clamp(0, 1)), y, reduction="sum")
                for a in scale
                for b in scale
            ]
            sums += torch.stack(cells).view(points, points).double().cpu()
    return sums / len(images)


def peak_position(surface: Tensor) -> float:
    """Return where along the adversarial direction the loss is largest, as a share of eps.

    It is 1 for a smooth surface and less for a distorted one.
    """
    along = surface[:, 0]
    return int(along.argmax()) / (len(along) - 1)
