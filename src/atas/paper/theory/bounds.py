"""The paper's regret bounds, as printed and as the proof gives them once it is mended; docs/theory.md has the algebra.

`beta` is the momentum of ASGDBCA's average of squared norms; None stands for SGDBCA, which has no such average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from atas.paper.theory.problems import Constants, StepSizes


@dataclass(frozen=True)
class Bound:
    """A bound of the regret by its three terms."""

    theta: float
    x: float
    smooth: float
    hindsight: float = 0.0
    """What it costs that the maximiser of the gap is chosen after the run, when chance has had its say."""

    @property
    def regret(self) -> float:
        """Against comparators that are fixed before the run, in expectation."""
        return self.theta + self.x + self.smooth

    @property
    def gap(self) -> float:
        """T times the gap of the averaged weights, in expectation."""
        return self.regret + self.hindsight


def step_sizes(of: Constants, steps: int, beta: float | None) -> StepSizes:
    """The step sizes that make the mended bounds smallest: the printed ones, eta_x times sqrt(n)."""
    printed = printed_step_sizes(of, steps, beta)
    return StepSizes(printed.theta, math.sqrt(of.n) * printed.x)


def printed_step_sizes(of: Constants, steps: int, beta: float | None) -> StepSizes:
    """The step sizes of Theorem 4.1 and, without beta, of Theorem 4.2."""
    theta = of.diameter_theta / (of.gradient_theta * math.sqrt(steps)) if of.gradient_theta else 0.0
    if beta is None:
        return StepSizes(theta, math.sqrt(of.n * of.d / steps) * of.diameter_x / of.gradient_x)
    return StepSizes(theta, math.sqrt(of.d / steps) * of.diameter_x * (1 - beta) ** 0.25)


def sharp_step_sizes(of: Constants, steps: int) -> StepSizes:
    """The step sizes that suit ASGDBCA's sharper bound, whatever beta is."""
    return StepSizes(printed_step_sizes(of, steps, None).theta, math.sqrt(of.n * of.d / steps) * of.diameter_x)


def smooth_step_sizes(of: Constants, steps: int) -> StepSizes:
    """SGDBCA with eta_x = 1/(2 L_x), whatever the number of steps."""
    return StepSizes(printed_step_sizes(of, steps, None).theta, 1 / (2 * of.smoothness))


def bound(of: Constants, steps: int, at: StepSizes, beta: float | None) -> Bound:
    """What the mended proof gives at any step sizes."""
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
    """ASGDBCA's bound with beta out of the leading term.

    Over the visits to an example, |g|^2/sqrt(v-hat) adds up to at most G times their number plus 2 beta/(1 - beta): a
    gradient that is large for its average raises the average.
    """
    loose = bound(of, steps, at, beta)
    visits = steps / of.n + 2 * beta / (1 - beta)
    x = float(np.sum(of.norms)) * (of.d * of.diameter_x**2 / at.x + at.x * visits) / 2
    return Bound(loose.theta, x, loose.smooth, loose.hindsight)


def smooth_bound(of: Constants, steps: int, at: StepSizes) -> Bound:
    """SGDBCA with eta_x of at most 1/(2 L_x): smoothness pays for the squared gradients, and only the start is left."""
    x = of.n * of.d * of.diameter_x**2 / (2 * at.x)
    return Bound(_theta(of, steps, at), x, 0.0, 2 * x)


def printed_bound(of: Constants, steps: int, beta: float | None) -> Bound:
    """Theorem 4.1 and, without beta, Theorem 4.2, to the letter."""
    theta = of.gradient_theta * of.diameter_theta * math.sqrt(steps)
    third = of.d * of.smoothness * of.diameter_x**2 / (2 * of.n)
    if beta is None:
        return Bound(theta, of.gradient_x * of.diameter_x * math.sqrt(of.d * steps / of.n), third)
    x = of.diameter_x * float(np.sum(of.norms)) * math.sqrt(of.d * steps) / (of.n * (1 - beta) ** 0.25)
    return Bound(theta, x, third / (of.n * math.sqrt(1 - beta)))


def ratio(tail: float, beta: float) -> float:
    """SGDBCA's second term over ASGDBCA's, where the mean square of the norms is `tail` times their squared mean.

    >>> round(ratio(1.5, 0.5), 2)
    1.03
    """
    return float((1 - beta) ** 0.25 * math.sqrt(tail))


def sharp_ratio(tail: float) -> float:
    """The same with ASGDBCA's sharper bound, for many steps: never less than one."""
    return math.sqrt(tail)


def printed_ratio(tail: float, beta: float) -> float:
    """The ratio as the paper prints it: the factor of beta is upside down."""
    return float((1 - beta) ** -0.25 * math.sqrt(tail))


def both_ratios(tail: float, beta: float) -> tuple[float, float]:
    """Return the ratio as printed and as it follows from the bounds."""
    return printed_ratio(tail, beta), ratio(tail, beta)


def break_even_tail(beta: float) -> float:
    """The tail at which the two second terms are equal; only beyond it is the adaptive bound the smaller one."""
    return 1 / math.sqrt(1 - beta)


def weighted_limit(n: int, beta: float) -> float:
    """The most that the squared gradients, each over its v-hat, can add up to: 1/(1 - beta) for each of n examples."""
    return n / (1 - beta)


def printed_weighted_limit(beta: float) -> float:
    """The same as the appendix prints it, for all examples together."""
    return 1 / (1 - beta)


def _theta(of: Constants, steps: int, at: StepSizes) -> float:
    if not at.theta:
        return 0.0
    return of.diameter_theta**2 / (2 * at.theta) + steps * at.theta * of.gradient_theta**2 / 2
