"""The loss around images, in the plane of the adversarial direction and a random one (the paper's first figure)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atas.analysis.losses import prepared
from atas.noise import Draw, Purpose
from atas.passes import input_gradient
from atas.threat import Threat


def loss_surface(model: nn.Module, images: Tensor, labels: Tensor, threat: Threat, points: int = 11) -> Tensor:
    """The mean loss at x + eps (a v1 + b v2) for a and b from 0 to 1, (points, points): rows are a, columns b.

    v1 is the sign of each image's gradient, as FGSM steps; v2 has random signs. Pixels stay in [0, 1].
    """
    scale = torch.linspace(0, 1, points, dtype=torch.float64).tolist()
    sums = torch.zeros(points, points, dtype=torch.float64)
    with prepared(model, images, precision="float32") as runner, torch.no_grad():
        images, labels = images.to(runner.device), labels.to(runner.device)
        for first in range(0, len(images), runner.lanes):
            index = torch.arange(first, min(first + runner.lanes, len(images)), device=runner.device)
            x, y = images[index].float() / 255, labels[index]
            gradient, _ = input_gradient(runner.judge, x, y)
            v1 = gradient.nan_to_num().sign()
            draw = Draw(0, torch.zeros((), dtype=torch.int64, device=x.device), index)
            v2 = (draw.uniform(Purpose.START, x.shape[1:]) - 0.5).sign()
            cells = [
                F.cross_entropy(runner.judge((x + threat.eps * (a * v1 + b * v2)).clamp(0, 1)), y, reduction="sum")
                for a in scale
                for b in scale
            ]
            sums += torch.stack(cells).view(points, points).double().cpu()
    return sums / len(images)


def peak(surface: Tensor) -> float:
    """How far along the adversarial direction the loss is largest, as a share of eps: 1 for a smooth surface, less
    where it is distorted."""
    along = surface[:, 0]
    return int(along.argmax()) / (len(along) - 1)
