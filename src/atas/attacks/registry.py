"""Attacks by name: list them, create them, and format their names as in papers."""

from __future__ import annotations

import re

from atas.attacks.apgd import APGD
from atas.attacks.auto_attack import VERSIONS, AttackEnsemble
from atas.attacks.base import Attack, Clean
from atas.attacks.fab import FAB
from atas.attacks.fast_gradient_sign import FGSM
from atas.attacks.projected_gradient_descent import PGD
from atas.attacks.search import Search
from atas.attacks.square import Square
from atas.core.arguments import check_arguments
from atas.errors import unknown

_PATTERN = "pgd<steps>[x<restarts>]"
_PGD = re.compile(r"pgd([1-9]\d*)(?:x([1-9]\d*))?", re.ASCII)
_VERSIONS = {"autoattack": "standard", "autoattack-rand": "rand"}
_SINGLE: tuple[Search, ...] = (APGD(loss="ce"), APGD(loss="t"), APGD(loss="dlr"), FAB(), Square())
_DISPLAY_NAMES = {
    "fgsm": "FGSM",
    "autoattack": "AutoAttack",
    "autoattack-rand": "AutoAttack (rand)",
    "apgd-ce": "APGD-CE",
    "apgd-t": "APGD-T",
    "apgd-dlr": "APGD-DLR",
    "fab-t": "FAB-T",
    "square": "Square",
    "worst": "worst case",
}


def names() -> list[str]:
    """Return the names of attacks, and last the pattern of PGD's names.

    >>> names()[:6], names()[-1]
    (['clean', 'fgsm', 'pgd10', 'pgd50', 'autoattack', 'autoattack-rand'], 'pgd<steps>[x<restarts>]')
    """
    return [Clean.name, FGSM.name, "pgd10", "pgd50", *_VERSIONS, *(search.name for search in _SINGLE), _PATTERN]


@check_arguments
def create(name: str, step_size: float | None = None) -> Attack:
    """Return the attack of a name; `step_size` is for PGD, by default eps/5.

    >>> create("pgd50x10")
    PGD(threat=None, steps=50, restarts=10, step_size=None)
    >>> [search.name for search in create("autoattack").stages]
    ['apgd-ce', 'apgd-t', 'fab-t', 'square']
    """
    if name == Clean.name:
        return Clean()
    if name == FGSM.name:
        return FGSM()
    if name in _VERSIONS:
        return AttackEnsemble(name, VERSIONS[_VERSIONS[name]])
    for search in _SINGLE:
        if search.name == name:
            return AttackEnsemble(name, (search,))
    if match := _PGD.fullmatch(name):
        return PGD(steps=int(match[1]), restarts=int(match[2] or 1), step_size=step_size)
    raise unknown("attack", name, names())


def is_pgd(name: str) -> bool:
    """Return whether a name is a PGD attack."""
    return _PGD.fullmatch(name) is not None


def is_autoattack(name: str) -> bool:
    """Return whether a name is a version of AutoAttack."""
    return name in _VERSIONS


def display_name(name: str) -> str:
    """Return an attack's name as in papers.

    >>> display_name("pgd50x10"), display_name("apgd-t"), display_name("mine")
    ('PGD-50 (10 restarts)', 'APGD-T', 'mine')
    """
    if match := _PGD.fullmatch(name):
        return f"PGD-{match[1]}" + (f" ({match[2]} restarts)" if match[2] else "")
    return _DISPLAY_NAMES.get(name, name)
