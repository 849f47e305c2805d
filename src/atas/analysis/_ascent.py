"""ASGDBCA and SGDBCA: stochastic gradient descent in the weights, ascent in one example's perturbation at a time.

Every step moves all examples in thought and one, the picked one, in deed. The step in thought costs nothing in words
and is what the proof speaks of: the gradient by theta is, on average over the pick, the gradient at the perturbations
that have all been moved. They are written x+ here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atas.analysis._bounds import Rates
from atas.analysis._saddle import Array, Problem, dot


@dataclass(frozen=True)
class Outcome:
    """Where several repetitions arrived, and what they regret on the way; arrays hold one entry a repetition."""

    theta: Array
    x: Array
    peak: Array
    """v-hat: the largest average of squared gradient norms so far, of each example; zero for SGDBCA."""
    regret: float
    """The mean regret at x+ against the weights and perturbations that are best for all repetitions together."""
    regret_x: float
    """The maximiser's part of it."""
    regret_after: Array
    """The regret at x+ against the best weights and perturbations of each repetition, known only after it."""
    regret_defined: Array
    """R(T) as the paper defines it: another comparator for every step."""
    gap: Array
    """The robust loss of the averaged weights less the least there is."""
    weighted: float | None
    """The mean over the steps of the sum over the examples of squared gradient norm over v-hat."""


def ascend(
    problem: Problem, order: NDArray[np.int64], rates: Rates, beta: float | None, theta: Array, x: Array
) -> Outcome:
    """Run SGDBCA, or ASGDBCA if there is a `beta`, from (theta, x); `order` (T, repetitions) is who is picked when.

    The weights are kept inside their ball, which the paper assumes but its updates do not see to. An example whose
    gradient has been zero so far stays where it is.
    """
    steps, rows = len(order), np.arange(order.shape[1])
    theta, x = theta.copy(), x.copy()
    average, peak = np.zeros(x.shape[:2]), np.zeros(x.shape[:2])
    thetas, slopes, heights = np.zeros_like(theta), np.zeros_like(theta), np.zeros(len(rows))
    values, defined, weighted = np.zeros(len(rows)), np.zeros(len(rows)), 0.0

    for k in order:
        gradient = problem.gradient_x(theta, x)
        if beta is None:
            moved = np.clip(x + rates.x * gradient, -problem.eps, problem.eps)
        else:
            square = dot(gradient, gradient)
            new_average = beta * average + (1 - beta) * square
            new_peak = np.maximum(peak, new_average)
            safe = np.where(new_peak > 0, new_peak, 1.0)
            moved = np.clip(x + (rates.x / np.sqrt(safe))[..., None] * gradient, -problem.eps, problem.eps)
            weighted += float(np.sum(square / safe)) / len(rows)
            average[rows, k], peak[rows, k] = new_average[rows, k], new_peak[rows, k]

        slope, height = problem.line(moved)
        thetas += theta
        slopes += slope
        heights += height
        values += dot(slope, theta) + height
        defined += problem.highest(theta) - problem.lowest(*problem.line(x))

        x[rows, k] = moved[rows, k]
        theta = problem.inside(theta - rates.theta * problem.gradient_theta(x[rows, k], k))

    # The objective is affine in theta, so a sum over the steps is its value at the mean, as many times.
    best = steps * problem.highest(thetas / steps)
    best_of_all = steps * float(problem.highest(np.mean(thetas, axis=0) / steps))
    least_of_all = float(problem.lowest(np.mean(slopes, axis=0), np.mean(heights, keepdims=True))[0])
    return Outcome(
        theta=theta,
        x=x,
        peak=peak,
        regret=best_of_all - least_of_all,
        regret_x=best_of_all - float(np.mean(values)),
        regret_after=best - problem.lowest(slopes, heights),
        regret_defined=defined,
        gap=best / steps - problem.value,
        weighted=None if beta is None else weighted / steps,
    )
