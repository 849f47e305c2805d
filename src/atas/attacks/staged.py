"""Searches as attacks: run in order on a batch, each on the examples that earlier ones did not break."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from atas.attacks.base import attack_context, choose_threat
from atas.attacks.scheduler import Scheduler, default_batch_size
from atas.attacks.search import Search
from atas.core.autograd import contiguous
from atas.core.validation import check_images, check_logits
from atas.threat import Threat


class StagedCall:
    """The call of an attack with `stages`: it skips misclassified images and stops at the first success."""

    skips_misclassified: ClassVar[bool] = True

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        threat: Threat | None = None,
        *,
        seed: int = 0,
        index: Tensor | None = None,
        targets: Tensor | int | None = None,
    ) -> Tensor:
        """Return adversarial inputs, or the image itself if it is misclassified already or no search succeeds."""
        attack: Any = self
        return run_stages(attack.stages, model, x, y, choose_threat(attack, threat), seed, index, targets)


class SearchAttack(StagedCall):
    """Makes a search an attack of one stage."""

    @property
    def stages(self) -> tuple[Search, ...]:
        """The search itself."""
        search: Any = self
        return (search,)


def run_stages(
    stages: tuple[Search, ...],
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    seed: int,
    index: Tensor | None,
    targets: Tensor | int | None = None,
) -> Tensor:
    """Run searches in order, each on the examples that earlier ones did not break; return points like x.

    A point is an adversarial input, or the image itself if it is misclassified already or no search succeeds.
    """
    with attack_context(model, x, y, threat, index, targets) as target:
        if not len(x):
            return target.x
        check_images(target.x)  # before the attack on a GPU too: it takes long
        is_contiguous = x.is_contiguous()

        def verifier(point: Tensor) -> Tensor:
            laid_out = contiguous(point) if is_contiguous else point.contiguous(memory_format=torch.channels_last)
            return check_logits(model(laid_out), len(point))

        scheduler = Scheduler(verifier, verifier, x.device, default_batch_size(x.device))
        examples = scheduler.examples(target.x, target.y, target.index, targeted=target.targeted)
        _, points = scheduler.run_stages(stages, examples, threat, examples.misclassified(), seed=seed)
        return points
