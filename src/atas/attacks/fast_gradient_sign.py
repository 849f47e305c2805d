"""The fast gradient sign method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from atas.attacks.base import as_threat, attack_context, choose_threat, step_settings
from atas.threat import Threat


def fgsm(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, targets: Tensor | int | None = None) -> Tensor:
    """Make one step of size eps from the image (Goodfellow et al., 2015): P[x + eps sgn grad l(x)].

    For L2 the step is eps along the normalised gradient. The model runs in eval mode.

    Args:
        model: maps images (N, C, H, W) to logits (N, classes).
        x: images in [0, 1], float.
        y: labels (N,), integers.
        threat: the threat model, such as `atas.Linf(8/255)`.
        targets: the class to push the images towards, or one class per image (N,). The attack then succeeds where the
            model predicts it.

    Returns:
        Adversarial inputs like x.

    >>> import torch
    >>> from atas import Linf
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    >>> x = torch.full((1, 1, 2, 2), 0.5)
    >>> (fgsm(model, x, torch.tensor([1]), Linf(0.25)) - x).abs().flatten().tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    with attack_context(model, x, y, threat, targets=targets) as target:
        return target.step(target.x, threat.eps)


@dataclass(frozen=True)
class FGSM:
    """The fast gradient sign method: one step of size eps from the image.

    Paper: "Explaining and Harnessing Adversarial Examples" (Goodfellow et al., 2015), https://arxiv.org/abs/1412.6572.
    Distance: Linf, L2.

    Args:
        threat: the threat model, such as `atas.Linf(8/255)`; a plain number is the eps of Linf. An attack without one
            gets it at the call, or from `atas.evaluate`.

    Shape:
        - model: maps images (N, C, H, W) in [0, 1] to logits (N, classes)
        - x: (N, C, H, W), float in [0, 1]
        - y: (N,), integers from 0 to classes - 1
        - output: like x

    >>> from torch import nn
    >>> import torch
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    >>> x, y = torch.rand(2, 1, 4, 4), torch.tensor([0, 2])
    >>> attack = FGSM(8 / 255)
    >>> x_adv = attack(model, x, y)
    """

    threat: Threat | float | None = None
    name: ClassVar[str] = "fgsm"

    def __post_init__(self) -> None:
        object.__setattr__(self, "threat", as_threat(self.threat))

    def settings(self, threat: Threat) -> dict[str, Any]:
        """Return the step size and the start."""
        return {"steps": 1, **step_settings(threat.eps), "start": "image"}

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
        """Return adversarial inputs; seed and index have no effect."""
        return fgsm(model, x, y, choose_threat(self, threat), targets=targets)
