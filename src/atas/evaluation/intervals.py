"""Confidence intervals of measured fractions."""

from __future__ import annotations

import math
from statistics import NormalDist

from torch import Tensor

from atas.errors import UsageError


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Return Wilson's score interval of a fraction. Unlike the normal approximation it is valid near 0 and 1.

    >>> low, high = wilson(50, 100)
    >>> round(low, 4), round(high, 4)
    (0.4038, 0.5962)
    """
    if not 0 <= successes <= n or n < 1:
        raise UsageError(f"an interval needs 0 <= successes <= n and n of at least 1; got {successes} of {n}")
    if not 0 < confidence < 1:
        raise UsageError(f"confidence must lie between 0 and 1, such as 0.95; got {confidence}")
    z = _quantile(confidence)
    fraction, weight = successes / n, z * z / n
    centre = (fraction + weight / 2) / (1 + weight)
    half = math.sqrt(fraction * (1 - fraction) * weight + weight * weight / 4) / (1 + weight)
    # The ends are exact if all or none succeeded; rounding would move them.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return low, high


def paired_difference(correct: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the 95% interval of the difference of two accuracies on the same examples (Agresti and Min, 2005).

    >>> import torch
    >>> low, high = paired_difference(torch.arange(100) < 60, torch.arange(100) < 50)
    >>> round(low, 3), round(high, 3)
    (0.037, 0.159)
    """
    gained, lost, n = int((correct & ~other).sum()) + 0.5, int((other & ~correct).sum()) + 0.5, len(correct) + 2
    difference = (gained - lost) / n
    half = _quantile(0.95) * math.sqrt(gained + lost - (gained - lost) ** 2 / n) / n
    return difference - half, difference + half


def _quantile(confidence: float) -> float:
    """Return the normal quantile of a two-sided interval."""
    return NormalDist().inv_cdf((1 + confidence) / 2)
