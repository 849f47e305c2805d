"""AutoAttack, and ensembles of searches in general: each search attacks the examples that are still robust."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor, nn

from atas.attacks.apgd import APGD
from atas.attacks.base import StagedCall, as_threat, run_stages
from atas.attacks.fab import FAB
from atas.attacks.search import Search
from atas.attacks.square import Square
from atas.core.arguments import check_arguments, check_fields
from atas.errors import unknown
from atas.threat import Threat

_EOT_ITERATIONS = 20  # passes over which `rand` averages

VERSIONS: dict[str, tuple[Search, ...]] = {
    "standard": (APGD(loss="ce"), APGD(loss="t"), FAB(), Square()),
    "rand": (APGD(loss="ce", eot_iterations=_EOT_ITERATIONS), APGD(loss="dlr", eot_iterations=_EOT_ITERATIONS)),
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
    targets: Tensor | int | None = None,
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
        targets: the class to push the images towards, or one class per image (N,). The attack then succeeds where the
            model predicts it.

    Returns:
        Points like x: an adversarial input, or the image itself if it is misclassified without an attack or no attack
        succeeds. So the model is correct on the result exactly where it is robust.

    >>> import torch
    >>> from atas import Linf
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    >>> x = torch.rand(4, 1, 4, 4)
    >>> y = model(x).argmax(1)
    >>> points = autoattack(model, x, y, Linf(0.5))
    >>> bool((model(points).argmax(1) == y).any())
    False
    """
    _check_version(version)
    return run_stages(VERSIONS[version], model, x, y, threat, seed, index, targets)


@dataclass(frozen=True)
class AttackEnsemble(StagedCall):
    """An attack of several searches, each on the examples that earlier ones did not break.

    >>> AttackEnsemble("quick", (APGD(loss="ce", iterations=20), Square(queries=500))).name
    'quick'
    """

    name: str
    stages: tuple[Search, ...]
    threat: Threat | float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "threat", as_threat(self.threat))

    def settings(self, threat: Threat) -> dict[str, Any]:
        """Return the settings of the search, or of several searches by name."""
        settings = {search.name: search.settings(threat) for search in self.stages}
        return settings if len(self.stages) > 1 else settings[self.stages[0].name]


@dataclass(frozen=True)
class AutoAttack(StagedCall):
    """AutoAttack, the standard measure of robustness; see `autoattack`.

    Paper: "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free attacks" (Croce and
    Hein, 2020), https://arxiv.org/abs/2003.01690.
    Distance: Linf, L2.

    Args:
        threat: the threat model, such as `atas.Linf(8/255)`; a plain number is the eps of Linf. An attack without one
            gets it at the call, or from `atas.evaluate`.
        version: `standard` (the default) or `rand` for stochastic models.

    Shape:
        - model: maps images (N, C, H, W) in [0, 1] to logits (N, classes)
        - x: (N, C, H, W), float in [0, 1]
        - y: (N,), integers from 0 to classes - 1
        - output: like x; the image itself if it is misclassified already or no search succeeds

    >>> import torch
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    >>> x = torch.rand(2, 1, 4, 4)
    >>> attack = AutoAttack(0.5)
    >>> x_adv = attack(model, x, model(x).argmax(1))
    """

    threat: Threat | float | None = None
    _: KW_ONLY
    version: str = "standard"

    def __post_init__(self) -> None:
        object.__setattr__(self, "threat", as_threat(self.threat))
        check_fields(self)
        _check_version(self.version)

    @property
    def name(self) -> str:
        """`autoattack` or `autoattack-rand`."""
        return "autoattack" if self.version == "standard" else f"autoattack-{self.version}"

    @property
    def stages(self) -> tuple[Search, ...]:
        """The searches of the version."""
        return VERSIONS[self.version]

    def settings(self, threat: Threat) -> dict[str, Any]:
        """Return the settings of the searches by name."""
        return {search.name: search.settings(threat) for search in self.stages}


def _check_version(version: str) -> None:
    if version not in VERSIONS:
        raise unknown("version of AutoAttack", version, list(VERSIONS))
