"""Attacks by name, as recipes, the command line and `evaluate` ask for them."""

from __future__ import annotations

import re

from atas.attacks._apgd import APGD
from atas.attacks._attack import Attack, Clean
from atas.attacks._autoattack import VERSIONS, Battery
from atas.attacks._fab import FAB
from atas.attacks._fgsm import FGSM
from atas.attacks._lanes import Search
from atas.attacks._pgd import PGD
from atas.attacks._square import Square
from atas.errors import unknown

_PATTERN = "pgd<steps>[x<restarts>]"
_PGD = re.compile(r"pgd([1-9]\d*)(?:x([1-9]\d*))?", re.ASCII)
_VERSIONS = {"autoattack": "standard", "autoattack-rand": "rand"}
_SINGLE: tuple[Search, ...] = (APGD("ce"), APGD("t"), APGD("dlr"), FAB(), Square(stretched=False))


def names() -> list[str]:
    """The usual names, and last the pattern that every PGD follows.

    >>> names()[:6], names()[-1]
    (['clean', 'fgsm', 'pgd10', 'pgd50', 'autoattack', 'autoattack-rand'], 'pgd<steps>[x<restarts>]')
    """
    return [Clean.name, FGSM.name, "pgd10", "pgd50", *_VERSIONS, *(search.name for search in _SINGLE), _PATTERN]


def create(name: str, step_size: float | None = None) -> Attack:
    """The attack of that name; `step_size` is for PGD, eps/5 if not given.

    >>> create("pgd50x10")
    PGD(steps=50, restarts=10, step_size=None)
    >>> [search.name for search in create("autoattack").stages]
    ['apgd-ce', 'apgd-t', 'fab-t', 'square']
    """
    if name == Clean.name:
        return Clean()
    if name == FGSM.name:
        return FGSM()
    if name in _VERSIONS:
        return Battery(name, VERSIONS[_VERSIONS[name]])
    for search in _SINGLE:
        if search.name == name:
            return Battery(name, (search,))
    if match := _PGD.fullmatch(name):
        return PGD(steps=int(match[1]), restarts=int(match[2] or 1), step_size=step_size)
    raise unknown("attack", name, names())
