"""Numbers, attacks and threat models as text."""

from __future__ import annotations

from atas.attacks.registry import display_name
from atas.evaluation import Evaluation
from atas.threat import Threat


def percent(share: float) -> str:
    """Format a share in percent, without the sign.

    >>> percent(0.6025)
    '60.2'
    """
    return f"{100 * share:.1f}"


def format_interval(ends: tuple[float, float]) -> str:
    """Format an interval in percent.

    >>> format_interval((0.559, 0.644))
    '55.9 to 64.4'
    """
    return f"{percent(ends[0])} to {percent(ends[1])}"


def describe_threat(threat: Threat) -> str:
    """Describe what an attack may change, for readers."""
    norm = {"linf": "every pixel by at most", "l2": "the image by at most (L2)"}.get(threat.name, threat.name)
    return f"{norm} {str(threat).partition('(')[2].rstrip(')')}"


def attack_names(evaluation: Evaluation) -> list[str]:
    """Return the attacks that were run, in their order."""
    return [name for name in evaluation.correct if name not in ("clean", "worst")]


def join_names(names: list[str]) -> str:
    """Join the names of attacks, as papers write them.

    >>> join_names(["fgsm", "pgd50", "autoattack"])
    'FGSM, PGD-50 and AutoAttack'
    """
    titles = [display_name(name) for name in names]
    return " and ".join([", ".join(titles[:-1]), titles[-1]] if len(titles) > 1 else titles)


def describe_outcome(label: str | None) -> str:
    """Describe the outcome of an example.

    >>> describe_outcome("autoattack: apgd-t"), describe_outcome("clean"), describe_outcome(None)
    ('first broken by AutoAttack: APGD-T', 'wrong without an attack', 'holds')
    """
    if label is None:
        return "holds"
    if label == "clean":
        return "wrong without an attack"
    return f"first broken by {': '.join(display_name(part) for part in label.split(': '))}"
