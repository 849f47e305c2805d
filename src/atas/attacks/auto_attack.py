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
from atas.core.validation import check_images, check_logits
from atas.errors import unknown
from atas.threat import Threat

_EOT_ITERATIONS = 20  # over which `rand` averages

VERSIONS: dict[str, tuple[Search, ...]] = {
    "standard": (APGD("ce"), APGD("t"), FAB(), Square()),
    "rand": (APGD("ce", eot_iterations=_EOT_ITERATIONS), APGD("dlr", eot_iterations=_EOT_ITERATIONS)),
}


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
    """The usual measure of robustness (Croce and Hein, 2020): strong attacks without a parameter to tune.

    `standard` is APGD on the cross-entropy, APGD on the targeted DLR loss, targeted FAB, and Square, which uses no
    gradient. `rand`, for models with random parts, is APGD on the cross-entropy and on the DLR loss, each evaluation
    being a mean of 20; whether a point counts as adversarial is then up to one pass, and to chance.

    The model runs in eval mode. What is found for an example depends on the seed and on its index, not on the batch.

    Args:
        model: maps images (N, C, H, W) to logits (N, classes).
        x: images in [0, 1], float.
        y: labels (N,), integers.
        threat: the ball to stay in, such as `atas.Linf(8/255)`.
        version: `standard` or `rand`.
        seed: another seed gives other random numbers.
        index: number of each example (N,) in its data set; 0 to N-1 if not given.

    Returns:
        Adversarial inputs like x; the image itself where it is misclassified already or where nothing was found. So the
        model is right on the result exactly where it is robust.

    >>> from atas import Linf
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    >>> x = torch.rand(4, 1, 4, 4)
    >>> y = model(x).argmax(1)
    >>> found = autoattack(model, x, y, Linf(0.5))
    >>> bool((model(found).argmax(1) == y).any())
    False
    """
    if version not in VERSIONS:
        raise unknown("version of AutoAttack", version, list(VERSIONS))
    return _run_stages(VERSIONS[version], model, x, y, threat, seed, index)


@dataclass(frozen=True)
class AttackEnsemble:
    """Searches one after the other, each on the examples that are still right, as an attack of an evaluation.

    >>> AttackEnsemble("quick", (APGD("ce", 20), Square(500))).name
    'quick'
    """

    name: str
    stages: tuple[Search, ...]
    skips_misclassified: ClassVar[bool] = True

    def settings(self, threat: Threat) -> dict[str, Any]:
        """Those of the searches, by their names where there are several."""
        found = {search.name: search.settings(threat) for search in self.stages}
        return found if len(self.stages) > 1 else found[self.stages[0].name]

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, seed: int = 0, index: Tensor | None = None
    ) -> Tensor:
        """Adversarial inputs; the image itself where it is misclassified already or where nothing was found."""
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
    if index is None:
        index = torch.arange(len(x), device=x.device)
    with attack_context(model, x, y, threat, index) as target:
        if not len(x):
            return target.x
        check_images(target.x)  # at once on a GPU too: the attack is long
        layout = torch.contiguous_format if x.is_contiguous() else torch.channels_last

        def verifier(point: Tensor) -> Tensor:
            return check_logits(model(point.contiguous(memory_format=layout)), len(point))

        scheduler = Scheduler(verifier, verifier, x.device, default_batch_size(x.device))
        examples = scheduler.examples(target.x, target.y, index.long())
        _, points = scheduler.run_stages(stages, examples, threat, examples.misclassified(), seed=seed)
        return points
