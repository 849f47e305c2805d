"""The paper's regret bounds, as printed and by the corrected proof; docs/theory.md has the algebra.

`beta` is the momentum of ASGDBCA's average of squared norms. None stands for SGDBCA, which has no average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from atas.paper.theory.problems import Constants, StepSizes


@dataclass(frozen=True)
class Bound:
    """The three terms of a regret bound."""

    theta: float
    x: float
    smooth: float
    hindsight: float = 0.0
    """The price of choosing the maximiser of the gap after the run."""

    @property
    def regret(self) -> float:
        """Expected regret against comparators fixed before the run."""
        return self.theta + self.x + self.smooth

    @property
    def gap(self) -> float:
        """T times the expected gap of the averaged weights."""
        return self.regret + self.hindsight


def step_sizes(of: Constants, steps: int, beta: float | None) -> StepSizes:
    """Return the step sizes that minimise the corrected bounds: the printed ones, with eta_x times sqrt(n)."""
    printed = printed_step_sizes(of, steps, beta)
    return StepSizes(printed.theta, math.sqrt(of.n) * printed.x)


def printed_step_sizes(of: Constants, steps: int, beta: float | None) -> StepSizes:
    """Return the step sizes of Theorem 4.1 or, without beta, of Theorem 4.2."""
    theta = of.diameter_theta / (of.gradient_theta * math.sqrt(steps)) if of.gradient_theta else 0.0
    if beta is None:
        return StepSizes(theta, math.sqrt(of.n * of.d / steps) * of.diameter_x / of.gradient_x)
    return StepSizes(theta, math.sqrt(of.d / steps) * of.diameter_x * (1 - beta) ** 0.25)


def sharp_step_sizes(of: Constants, steps: int) -> StepSizes:
    """Return the step sizes for ASGDBCA's sharper bound, which do not depend on beta."""
    return StepSizes(printed_step_sizes(of, steps, None).theta, math.sqrt(of.n * of.d / steps) * of.diameter_x)


def smooth_step_sizes(of: Constants, steps: int) -> StepSizes:
    """Return the step sizes of SGDBCA with eta_x = 1/(2 L_x) for any number of steps."""
    return StepSizes(printed_step_sizes(of, steps, None).theta, 1 / (2 * of.smoothness))


def bound(of: Constants, steps: int, at: StepSizes, beta: float | None) -> Bound:
    """Return the bound of the corrected proof at any step sizes."""
    start = of.d * of.diameter_x**2 / (2 * at.x)
    total, square = float(np.sum(of.norms)), of.gradient_x**2
    if beta is None:
        x = of.n * start + steps * at.x * square / (2 * of.n)
        smooth = steps * of.smoothness * at.x**2 * square / (2 * of.n)
        hindsight = of.gradient_x * of.diameter_x * math.sqrt(of.d * steps)
    else:
        x = total * (start + steps * at.x / (2 * of.n * math.sqrt(1 - beta)))
        smooth = steps * of.smoothness * at.x**2 / (2 * (1 - beta))
        hindsight = total * of.diameter_x * math.sqrt(of.d * steps / of.n)
    return Bound(_theta(of, steps, at), x, smooth, hindsight)


def sharp_bound(of: Constants, steps: int, at: StepSizes, beta: float) -> Bound:
    """Return ASGDBCA's bound without beta in the leading term.

    Over the visits to an example, |g|^2/sqrt(v-hat) sums to at most G times (their number plus 2 beta/(1 - beta)),
    because a gradient larger than the average raises the average.
    """
    loose = bound(of, steps, at, beta)
    visits = steps / of.n + 2 * beta / (1 - beta)
    x = float(np.sum(of.norms)) * (of.d * of.diameter_x**2 / at.x + at.x * visits) / 2
    return Bound(loose.theta, x, loose.smooth, loose.hindsight)


def smooth_bound(of: Constants, steps: int, at: StepSizes) -> Bound:
    """Return SGDBCA's bound for eta_x of at most 1/(2 L_x): smoothness cancels the squared gradients."""
    x = of.n * of.d * of.diameter_x**2 / (2 * at.x)
    return Bound(_theta(of, steps, at), x, 0.0, 2 * x)


def printed_bound(of: Constants, steps: int, beta: float | None) -> Bound:
    """Return the bound of Theorem 4.1 or, without beta, of Theorem 4.2 as printed."""
    theta = of.gradient_theta * of.diameter_theta * math.sqrt(steps)
    third = of.d * of.smoothness * of.diameter_x**2 / (2 * of.n)
    if beta is None:
        return Bound(theta, of.gradient_x * of.diameter_x * math.sqrt(of.d * steps / of.n), third)
    x = of.diameter_x * float(np.sum(of.norms)) * math.sqrt(of.d * steps) / (of.n * (1 - beta) ** 0.25)
    return Bound(theta, x, third / (of.n * math.sqrt(1 - beta)))


def ratio(tail: float, beta: float) -> float:
    """Return SGDBCA's second term over ASGDBCA's, where the mean square of the norms is `tail` times the squared mean.

    >>> round(ratio(1.5, 0.5), 2)
    1.03
    """
    return float((1 - beta) ** 0.25 * math.sqrt(tail))


def sharp_ratio(tail: float) -> float:
    """Return the ratio for ASGDBCA's sharper bound and many steps; it is at least one."""
    return math.sqrt(tail)


def printed_ratio(tail: float, beta: float) -> float:
    """Return the ratio as the paper prints it, with the inverse factor of beta."""
    return float((1 - beta) ** -0.25 * math.sqrt(tail))


def both_ratios(tail: float, beta: float) -> tuple[float, float]:
    """Return the ratio as printed and as it follows from the bounds."""
    return printed_ratio(tail, beta), ratio(tail, beta)


def break_even_tail(beta: float) -> float:
    """Return the tail at which the second terms are equal; for longer tails the adaptive bound is smaller."""
    return 1 / math.sqrt(1 - beta)


def weighted_limit(n: int, beta: float) -> float:
    """Return the limit of the sum of squared gradients over v-hat: 1/(1 - beta) for each of n examples."""
    return n / (1 - beta)


def printed_weighted_limit(beta: float) -> float:
    """Return the limit that the appendix prints for all examples together."""
    return 1 / (1 - beta)


def _theta(of: Constants, steps: int, at: StepSizes) -> float:
    if not at.theta:
        return 0.0
    return of.diameter_theta**2 / (2 * at.theta) + steps * at.theta * of.gradient_theta**2 / 2
