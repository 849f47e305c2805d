"""Attacks: stateless functions from (model, images, labels, threat) to adversarial inputs, also available by name.

>>> import torch
>>> from atas import Linf
>>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
>>> x, y = torch.rand(2, 1, 4, 4), torch.tensor([0, 2])
>>> adversarial = pgd(model, x, y, Linf(8/255), steps=20)
>>> bool((adversarial - x).abs().max() <= 8/255 + 1e-6)
True

The same as an object with fixed settings; a plain number is the eps of Linf:

>>> attack = PGD(Linf(8/255), steps=20)
>>> bool(torch.equal(attack(model, x, y), adversarial))
True
"""

from __future__ import annotations

from atas.attacks.apgd import APGD
from atas.attacks.auto_attack import AttackEnsemble, AutoAttack, autoattack
from atas.attacks.base import Attack, Clean, StagedAttack
from atas.attacks.fab import FAB
from atas.attacks.fast_gradient_sign import FGSM, fgsm
from atas.attacks.losses import correct
from atas.attacks.projected_gradient_descent import PGD, pgd
from atas.attacks.registry import create, display_name, is_pgd, names
from atas.attacks.square import Square

__all__ = [
    "APGD",
    "FAB",
    "FGSM",
    "PGD",
    "Attack",
    "AttackEnsemble",
    "AutoAttack",
    "Clean",
    "Square",
    "StagedAttack",
    "autoattack",
    "correct",
    "create",
    "display_name",
    "fgsm",
    "is_pgd",
    "names",
    "pgd",
]
