"""Attacks as they are written in papers."""

from __future__ import annotations

import re

_PGD = re.compile(r"pgd(\d+)(?:x(\d+))?")
_WRITTEN = {
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


def is_pgd(name: str) -> bool:
    """Whether this is the name of a PGD."""
    return _PGD.fullmatch(name) is not None


def written(name: str) -> str:
    """An attack's name for readers.

    >>> written("pgd50x10"), written("apgd-t"), written("mine")
    ('PGD-50 (10 restarts)', 'APGD-T', 'mine')
    """
    if match := _PGD.fullmatch(name):
        return f"PGD-{match[1]}" + (f" ({match[2]} restarts)" if match[2] else "")
    return _WRITTEN.get(name, name)
