"""AutoAttack, and ensembles of searches in general: each search attacks the examples that are still robust."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from atas.attacks.apgd import APGD
from atas.attacks.base import attack_context
from atas.attacks.fab import FAB
from atas.attacks.scheduler import Scheduler, default_batch_size
from atas.attacks.search import Search
from atas.attacks.square import Square
from atas.core.autograd import contiguous
from atas.core.validation import check_arguments, check_images, check_logits
from atas.errors import unknown
from atas.threat import Threat

_EOT_ITERATIONS = 20  # passes over which `rand` averages

VERSIONS: dict[str, tuple[Search, ...]] = {
    "standard": (APGD("ce"), APGD("t"), FAB(), Square()),
    "rand": (APGD("ce", eot_iterations=_EOT_ITERATIONS), APGD("dlr", eot_iterations=_EOT_ITERATIONS)),
}


@check_arguments
def autoattack(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    version: str = "standard",
    seed: int = 0,
    index: Tensor | None = None,
) -> Tensor:
    """Run AutoAttack, the standard measure of robustness (Croce and Hein, 2020): strong attacks without parameters.

    `standard` is APGD on the cross-entropy, APGD on the targeted DLR loss, targeted FAB, and Square, which uses no
    gradient. `rand`, for stochastic models, is APGD on the cross-entropy and on the DLR loss, with the mean over 20
    passes for each evaluation. One pass then decides whether a point is adversarial, so verdicts depend on chance.

    The model runs in eval mode. The result for an example depends on the seed and its index, not on the batch.

    Args:
        model: maps images (N, C, H, W) to logits (N, classes).
        x: images in [0, 1], float.
        y: labels (N,), integers.
        threat: the threat model, such as `atas.Linf(8/255)`.
        version: `standard` or `rand`.
        seed: another seed gives other random numbers.
        index: position of each example (N,) in its data set; 0 to N-1 by default.

    Returns:
        Points like x: an adversarial input, or the image itself if it is misclassified without an attack or no attack
        succeeds. So the model is correct on the result exactly where it is robust.

    >>> from atas import Linf
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    >>> x = torch.rand(4, 1, 4, 4)
    >>> y = model(x).argmax(1)
    >>> points = autoattack(model, x, y, Linf(0.5))
    >>> bool((model(points).argmax(1) == y).any())
    False
    """
    if version not in VERSIONS:
        raise unknown("version of AutoAttack", version, list(VERSIONS))
    return _run_stages(VERSIONS[version], model, x, y, threat, seed, index)


@dataclass(frozen=True)
class AttackEnsemble:
    """An attack of several searches, each on the examples that earlier ones did not break.

    >>> AttackEnsemble("quick", (APGD("ce", 20), Square(500))).name
    'quick'
    """

    name: str
    stages: tuple[Search, ...]
    skips_misclassified: ClassVar[bool] = True

    def settings(self, threat: Threat) -> dict[str, Any]:
        """Return the settings of the search, or of several searches by name."""
        settings = {search.name: search.settings(threat) for search in self.stages}
        return settings if len(self.stages) > 1 else settings[self.stages[0].name]

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, seed: int = 0, index: Tensor | None = None
    ) -> Tensor:
        """Return adversarial inputs, or the image itself if it is misclassified already or no search succeeds."""
        return _run_stages(self.stages, model, x, y, threat, seed, index)


def _run_stages(
    stages: tuple[Search, ...],
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    seed: int,
    index: Tensor | None,
) -> Tensor:
    with attack_context(model, x, y, threat, index) as target:
        if not len(x):
            return target.x
        check_images(target.x)  # before the attack on a GPU too: it takes long
        is_contiguous = x.is_contiguous()

        def verifier(point: Tensor) -> Tensor:
            laid_out = contiguous(point) if is_contiguous else point.contiguous(memory_format=torch.channels_last)
            return check_logits(model(laid_out), len(point))

        scheduler = Scheduler(verifier, verifier, x.device, default_batch_size(x.device))
        examples = scheduler.examples(target.x, target.y, target.index)
        _, points = scheduler.run_stages(stages, examples, threat, examples.misclassified(), seed=seed)
        return points
