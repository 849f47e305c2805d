"""Confidence intervals of measured fractions."""

from __future__ import annotations

import math
from statistics import NormalDist

from atas.errors import UsageError


def wilson(successes: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for a fraction: sound near 0 and 1 too, where the usual plus or minus is not.

    >>> low, high = wilson(50, 100)
    >>> round(low, 4), round(high, 4)
    (0.4038, 0.5962)
    """
    if not 0 <= successes <= n or n < 1:
        raise UsageError(f"an interval needs 0 <= successes <= n and n of at least 1; got {successes} of {n}")
    if not 0 < confidence < 1:
        raise UsageError(f"confidence must lie between 0 and 1, such as 0.95; got {confidence}")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    fraction, weight = successes / n, z * z / n
    centre = (fraction + weight / 2) / (1 + weight)
    half = math.sqrt(fraction * (1 - fraction) * weight + weight * weight / 4) / (1 + weight)
    # The ends are exact where every or no attempt succeeded; rounding would leave them just inside or outside.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return low, high
