"""Figures, attacks and threat models as the page writes them."""

from __future__ import annotations

from atas.attacks.registry import display_name
from atas.evaluation import Evaluation
from atas.threat import Threat


def percent(share: float, digits: int = 1) -> str:
    """A share in percent, without the sign.

    >>> percent(0.6025)
    '60.2'
    """
    return f"{100 * share:.{digits}f}"


def format_interval(ends: tuple[float, float]) -> str:
    """An interval in percent.

    >>> format_interval((0.559, 0.644))
    '55.9 to 64.4'
    """
    return f"{percent(ends[0])} to {percent(ends[1])}"


def describe_threat(threat: Threat) -> str:
    """What attacks may do, for readers."""
    norm = {"linf": "every pixel by at most", "l2": "the image by at most (L2)"}.get(threat.name, threat.name)
    return f"{norm} {str(threat).partition('(')[2].rstrip(')')}"


def attack_names(evaluation: Evaluation) -> list[str]:
    """The attacks that were run, in their order."""
    return [name for name in evaluation.correct if name not in ("clean", "worst")]


def join_names(names: list[str]) -> str:
    """Attacks by the names that papers have for them, in a row.

    >>> join_names(["fgsm", "pgd50", "autoattack"])
    'FGSM, PGD-50 and AutoAttack'
    """
    shown = [display_name(name) for name in names]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)


def describe_outcome(label: str | None) -> str:
    """What broke an example.

    >>> describe_outcome("autoattack: apgd-t"), describe_outcome("clean"), describe_outcome(None)
    ('AutoAttack: APGD-T', 'wrong without an attack', 'holds')
    """
    if label is None:
        return "holds"
    if label == "clean":
        return "wrong without an attack"
    return ": ".join(display_name(part) for part in label.split(": "))
