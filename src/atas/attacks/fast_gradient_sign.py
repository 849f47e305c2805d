"""The fast gradient sign method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from atas.attacks.base import attack_context, step_settings
from atas.threat import Threat


def fgsm(model: nn.Module, x: Tensor, y: Tensor, threat: Threat) -> Tensor:
    """Make one step of size eps from the image (Goodfellow et al., 2015): P[x + eps sgn grad l(x)].

    For L2 the step is eps along the normalised gradient. The model runs in eval mode.

    Args:
        model: maps images (N, C, H, W) to logits (N, classes).
        x: images in [0, 1], float.
        y: labels (N,), integers.
        threat: the threat model, such as `atas.Linf(8/255)`.

    Returns:
        Adversarial inputs like x.

    >>> import torch
    >>> from atas import Linf
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 2))
    >>> x = torch.full((1, 1, 2, 2), 0.5)
    >>> (fgsm(model, x, torch.tensor([1]), Linf(0.25)) - x).abs().flatten().tolist()
    [0.25, 0.25, 0.25, 0.25]
    """
    with attack_context(model, x, y, threat) as target:
        return target.step(target.x, threat.eps)


@dataclass(frozen=True)
class FGSM:
    """FGSM as an attack of an evaluation; see `fgsm`."""

    name: ClassVar[str] = "fgsm"

    def settings(self, threat: Threat) -> dict[str, Any]:
        """Return the step size and the start."""
        return {"steps": 1, **step_settings(threat.eps), "start": "image"}

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, seed: int = 0, index: Tensor | None = None
    ) -> Tensor:
        """Return adversarial inputs; seed and index have no effect."""
        return fgsm(model, x, y, threat)
