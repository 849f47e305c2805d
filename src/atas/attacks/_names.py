"""Attacks by name, as recipes, the command line and `evaluate` ask for them."""

from __future__ import annotations

import re

from atas.attacks._attack import Attack, Clean
from atas.attacks._fgsm import FGSM
from atas.attacks._pgd import PGD
from atas.errors import unknown

_PATTERN = "pgd<steps>[x<restarts>]"
_PGD = re.compile(r"pgd([1-9]\d*)(?:x([1-9]\d*))?", re.ASCII)


def names() -> list[str]:
    """The usual names, and last the pattern that every PGD follows.

    >>> names()
    ['clean', 'fgsm', 'pgd10', 'pgd50', 'pgd<steps>[x<restarts>]']
    """
    return [Clean.name, FGSM.name, "pgd10", "pgd50", _PATTERN]


def create(name: str, step_size: float | None = None) -> Attack:
    """The attack of that name; `step_size` is for PGD, eps/5 if not given.

    >>> create("pgd50x10")
    PGD(steps=50, restarts=10, step_size=None)
    """
    if name == Clean.name:
        return Clean()
    if name == FGSM.name:
        return FGSM()
    if match := _PGD.fullmatch(name):
        return PGD(steps=int(match[1]), restarts=int(match[2] or 1), step_size=step_size)
    raise unknown("attack", name, names())
