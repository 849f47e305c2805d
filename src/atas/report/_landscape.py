"""The loss around an image: on a grid of two directions, the adversarial one and a random one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atas.noise import Draw
from atas.passes import frozen, full, input_gradient, mode
from atas.threat import Threat

POINTS = 21  # along each direction
_BATCH = 256


@dataclass(frozen=True)
class Landscape:
    """Losses (random, adversarial) at steps from -1 to 1 of the whole budget along each direction."""

    steps: list[float]
    loss: Tensor

    @property
    def bends(self) -> bool:
        """Whether along the adversarial direction the loss is highest well inside of the ball, not at its edge."""
        along = self.loss[len(self.steps) // 2, len(self.steps) // 2 :]
        return bool(along[:-2].max() > along[-1] + 0.1 * (along.max() - along[0]))


def landscape(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, index: int) -> Landscape:
    """The loss around one image (1, C, H, W), in eval mode. The directions are those of a whole step of FGSM and of a
    step as long along random signs, hashed from the image's index; pixels stay in [0, 1]."""
    steps = torch.linspace(-1, 1, POINTS, device=x.device)
    with mode(model, training=False), frozen(model):
        gradient, _ = input_gradient(model, x, y)
        number = torch.zeros((), dtype=torch.int64, device=x.device)
        draw = Draw(0, number, torch.tensor([index], device=x.device))
        noise = threat.noise(draw, x.shape[1:], reset=False)
        nowhere = torch.zeros_like(x)
        along, aside = (threat.step(nowhere, way.to(x.dtype), threat.eps) for way in (gradient.nan_to_num(), noise))
        grid = x + steps.view(-1, 1, 1, 1, 1) * aside + steps.view(1, -1, 1, 1, 1) * along
        points = grid.reshape(-1, *x.shape[1:]).clamp(0, 1)
        with torch.no_grad():
            losses = [
                F.cross_entropy(full(model(part)), y.expand(len(part)), reduction="none")
                for part in points.split(_BATCH)
            ]
    return Landscape(
        [round(step, 6) for step in steps.tolist()],
        torch.cat(losses).nan_to_num(0.0, 0.0, 0.0).view(POINTS, POINTS).double().cpu(),
    )
