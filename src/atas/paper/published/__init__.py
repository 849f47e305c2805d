"""The published results of "Fast Adversarial Training with Adaptive Step Size".

Networks and methods have their names in this package: the paper's ResNet-18 is `preact-resnet18` on CIFAR and
`resnet18` on ImageNet, its PGD10 is `pgd`, its FreeAT is `free`.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from importlib import resources
from typing import Any

ATTACKS = ("clean", "pgd10", "pgd50", "autoattack")
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class PublishedRow:
    """One row of the paper's tables: accuracies in percent, training time in hours, and hardware."""

    clean: float
    pgd10: float
    pgd50: float
    autoattack: float
    hours: float
    hardware: str
    doubt: str | None = None
    """Why a value may be a misprint."""

    def accuracy(self, attack: str) -> float | None:
        """Return the accuracy in percent, or None for an attack that the paper did not run."""
        return float(getattr(self, attack)) if attack in ATTACKS else None


def lookup(data: str, network: str, eps: float, method: str) -> PublishedRow | None:
    """Return a row of the paper's accuracy tables, or None if it has no such row.

    >>> row = lookup("cifar10", "preact-resnet18", 8/255, "atas")
    >>> row.autoattack, row.hours, row.hardware
    (45.38, 0.3, '1 NVIDIA Tesla V100')
    >>> lookup("digits", "small-cnn", 0.39, "atas") is None
    True
    """
    tables = _read("accuracy")
    budgets = tables["rows"].get(data, {})
    budget = _same(eps, budgets)
    row = budgets.get(budget, {}).get(network, {}).get(method)
    if row is None:
        return None
    doubt = tables["doubts"].get(f"{data} {budget} {network} {method}")
    named = dict(zip(tables["columns"], row, strict=True))
    return PublishedRow(**named, hardware=tables["hardware"][data], doubt=doubt)


def budgets(data: str) -> list[float]:
    """Return the budgets of the tables of a data set.

    >>> [round(255 * eps) for eps in budgets("cifar100")]
    [4, 8, 12]
    """
    return [_value(text) for text in _read("accuracy")["rows"].get(data, {})]


def ablation(setting: str, value: float, eps: float) -> float | None:
    """Return the accuracy in percent under AutoAttack for a `max_step` or a `c`.

    `max_step` is gamma/c in pixel units. `c` is the paper's, for the mean loss over 128 examples; here it is 128 times
    as large.

    >>> ablation("max_step", 20/255, 8/255), ablation("c", 0.005, 16/255)
    (45.6, 20.36)
    """
    values = _read("ablation")[setting]
    by_budget = values.get(_same(value, values), {})
    accuracy = by_budget.get(_same(eps, by_budget))
    return None if accuracy is None else float(accuracy)


def ablation_values(setting: str) -> list[float]:
    """Return the values that the paper tried.

    >>> ablation_values("c")
    [0.005, 0.007, 0.01, 0.02, 0.04]
    """
    return [_value(text) for text in _read("ablation")[setting]]


def convergence_gap(eps: float) -> dict[str, float] | None:
    """Return the `ratio` of the bounds and the `gap` and `loss_ratio` of the last training losses.

    They are of ATTA and ATAS on CIFAR-10.

    >>> convergence_gap(16/255)["gap"]
    0.12
    """
    gaps = _read("statements")["convergence_gap"]
    row: dict[str, float] | None = gaps.get(_same(eps, gaps))
    return row


def mean_step(method: str) -> float | None:
    """Return the mean step size that the text names, in pixel units, or None.

    >>> round(255 * mean_step("atas"), 1)
    9.3
    """
    steps = _read("statements")["mean_step"]
    return _value(steps[method]) if method in steps else None


def class_share_of_subsets() -> tuple[float, float]:
    """Return the smallest and the largest share of a class in a subset by gradient norm, in percent.

    >>> class_share_of_subsets()
    (8.98, 10.86)
    """
    share = _read("statements")["class_share_of_subsets"]
    return share["least"], share["most"]


def _same(value: float, known: dict[str, Any]) -> str:
    """Return the key of a value, or an empty text, which is no key."""
    return next((text for text in known if abs(_value(text) - value) < _TOLERANCE), "")


def _value(text: str) -> float:
    number, _, divisor = text.partition("/")
    return float(number) / float(divisor or 1)


@functools.cache
def _read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(resources.files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8"))
    return content
