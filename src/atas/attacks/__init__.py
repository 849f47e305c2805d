"""Attacks: stateless functions from (model, images, labels, threat) to adversarial inputs, and the same by name.

>>> import torch
>>> from atas import Linf
>>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
>>> x, y = torch.rand(2, 1, 4, 4), torch.tensor([0, 2])
>>> adversarial = pgd(model, x, y, Linf(8/255), steps=20)
>>> bool((adversarial - x).abs().max() <= 8/255 + 1e-6)
True
"""

from __future__ import annotations

from atas.attacks._attack import Attack, Clean, Staged
from atas.attacks._autoattack import Battery, autoattack
from atas.attacks._fgsm import FGSM, fgsm
from atas.attacks._logits import correct
from atas.attacks._names import create, names
from atas.attacks._pgd import PGD, pgd

__all__ = [
    "FGSM",
    "PGD",
    "Attack",
    "Battery",
    "Clean",
    "Staged",
    "autoattack",
    "correct",
    "create",
    "fgsm",
    "names",
    "pgd",
]
