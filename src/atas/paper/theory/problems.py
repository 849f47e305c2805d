"""Min-max problems for the regret study, and SGDBCA and ASGDBCA, which solve them.

The main problem meets every assumption of the paper's analysis, and its constants and solution are known.

    l_i(x_i; theta) = b.theta + s_i [(h + a_i.theta) w_i.x_i - (lambda/2) |x_i|^2],    phi = the mean of l_i over i

theta lies in a Euclidean ball. x_i, the perturbation of example i, lies in a box of d coordinates; w_i is a unit
vector. The loss is affine in theta, so convergence rests on averaging, and concave and smooth in x_i. The scales s_i
set the gradient norm of each example, so their tail is the tail of the norms. b is chosen so that a given theta* is the
minimiser: the gradient in theta is zero at theta* and its best response x*, hence (theta*, x*) is a saddle point.

SGDBCA is stochastic gradient descent in the weights and ascent in one example's perturbation at a time; ASGDBCA adapts
the ascent step. Each step updates one sampled example. The proof also needs x+, the perturbations if every example had
been updated: averaged over the sampled example, the theta gradient equals the gradient at x+.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Constants:
    """The constants of the bounds, in the order of the paper's assumptions."""

    diameter_theta: float
    """D_theta,2: the largest distance between weights, because a comparator may be any weights."""
    gradient_theta: float
    """G_theta,2: the largest root mean square over the examples."""
    diameter_x: float
    """D_x,inf, which is two eps."""
    norms: Array
    """G_xi,2 of each example: the largest norm of its gradient."""
    smoothness: float
    """L_x"""
    d: int

    @property
    def n(self) -> int:
        """The number of examples."""
        return len(self.norms)

    @property
    def gradient_x(self) -> float:
        """G_x,2, as in the paper's ratio: the root of the sum of the squared norms."""
        return float(np.sqrt(np.sum(self.norms**2)))


@dataclass(frozen=True)
class Problem:
    """An instance. Arguments theta (..., p) and x (..., n, d) may have leading axes, for repetitions."""

    scale: Array  # s, (n,)
    coupling: Array  # a, (n, p)
    direction: Array  # w, (n, d)
    slope: Array  # b, (p,)
    push: float  # h
    curvature: float  # lambda
    eps: float
    radius: float  # of the ball of theta
    solution: Array  # theta*, (p,)

    def gradient_x(self, theta: Array, x: Array) -> Array:
        """Return the gradient of each example's loss with respect to its perturbation."""
        margin = self.push + theta @ self.coupling.T
        return self.scale[:, None] * (margin[..., None] * self.direction - self.curvature * x)

    def gradient_theta(self, x_k: Array, k: NDArray[np.int64]) -> Array:
        """Return the gradient of the loss of example k at its perturbation."""
        reach = self.scale[k] * dot(self.direction[k], x_k)
        return self.slope + reach[..., None] * self.coupling[k]

    def line(self, x: Array) -> tuple[Array, Array]:
        """Return phi(., x) as a function of theta: its slope, and its value at zero."""
        reach, weight = dot(self.direction, x), self.scale / len(self.scale)
        height = (self.push * reach - self.curvature / 2 * dot(x, x)) @ weight
        return self.slope + (reach * weight) @ self.coupling, height

    def phi(self, theta: Array, x: Array) -> Array:
        """Return the objective."""
        slope, height = self.line(x)
        return dot(slope, theta) + height

    def best_response(self, theta: Array) -> Array:
        """Return the perturbations that maximise phi(theta, .)."""
        pull = (self.push + theta @ self.coupling.T)[..., None] * self.direction
        return np.clip(pull / self.curvature, -self.eps, self.eps) if self.curvature else self.eps * np.sign(pull)

    def robust_loss(self, theta: Array) -> Array:
        """Return the largest value of phi(theta, .)."""
        return self.phi(theta, self.best_response(theta))

    def min_over_ball(self, slope: Array, height: Array) -> Array:
        """Return the smallest value over the ball of the affine function with this slope and height."""
        return height - self.radius * np.sqrt(dot(slope, slope))

    def project(self, theta: Array) -> Array:
        """Return the nearest point of the ball."""
        norm = np.sqrt(dot(theta, theta))
        return theta * (self.radius / np.maximum(norm, self.radius))[..., None]

    @property
    def value(self) -> float:
        """The smallest robust loss: phi at the saddle point."""
        return float(self.robust_loss(self.solution))

    @property
    def constants(self) -> Constants:
        """The exact constants; each is attained in the domain."""
        margin = abs(self.push) + self.radius * np.linalg.norm(self.coupling, axis=1)
        norms = np.linalg.norm(np.abs(self.direction) * margin[:, None] + self.curvature * self.eps, axis=1)
        reach = (self.scale * self.eps * np.sum(np.abs(self.direction), axis=1))[:, None] * self.coupling
        ends = [np.sum((self.slope + sign * reach) ** 2, axis=1) for sign in (-1, 1)]
        return Constants(
            diameter_theta=2 * self.radius,
            gradient_theta=float(np.sqrt(np.mean(np.maximum(*ends)))),
            diameter_x=2 * self.eps,
            norms=self.scale * norms,
            smoothness=self.curvature * float(np.max(self.scale)),
            d=self.direction.shape[1],
        )


def saddle(
    scale: Array, *, d: int = 8, p: int = 4, curvature: float = 0.5, push: float = 0.5, even: bool = True, seed: int = 0
) -> Problem:
    """Return a random problem in which weights and perturbations interact; theta* lies half-way to the border.

    With `even`, the loss depends equally on all coordinates of an example, the case of the factor sqrt(d) in the
    bounds. The size of the box makes sqrt(d) D_x,inf equal to one.
    """
    draw = np.random.default_rng(seed)
    n, eps, radius = len(scale), 0.5 / np.sqrt(d), 1.0
    direction = draw.normal(size=(n, d))
    direction = _unit(np.sign(direction) if even else direction)
    coupling, solution = _unit(draw.normal(size=(n, p))), radius / 2 * _unit(draw.normal(size=p))
    problem = Problem(scale, coupling, direction, np.zeros(p), push, curvature, eps, radius, solution)
    slope, _ = problem.line(problem.best_response(solution))
    return Problem(scale, coupling, direction, -slope, push, curvature, eps, radius, solution)


def linear(scale: Array) -> Problem:
    """Return a problem with only the maximiser's part and constant gradients, which nearly attains the bounds."""
    n, d = len(scale), 8
    zero, direction = np.zeros(1), np.full((n, d), 1 / np.sqrt(d))
    return Problem(scale, np.zeros((n, 1)), direction, zero, 1.0, 0.0, 0.5 / np.sqrt(d), 1.0, zero)


def cycle() -> Problem:
    """Return theta times x, both scalars: gradient methods circle the saddle point."""
    one, zero = np.ones((1, 1)), np.zeros(1)
    return Problem(np.ones(1), one, one, zero, 0.0, 0.0, 0.5, 1.0, zero)


def long_tail(n: int, ratio: float) -> Array:
    """Return n positive scales, quantiles of a Pareto distribution, with mean 1 and mean square `ratio`.

    >>> [round(float(value), 3) for value in long_tail(3, 1.5)]
    [0.375, 0.637, 1.989]
    """
    rank = 1 - (np.arange(n) + 0.5) / n
    low, high = 0.0, 64.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(rank**-middle) < ratio else (low, middle)
    scale = rank**-low
    return scale / np.mean(scale)


def tail(norms: Array) -> float:
    """Return the mean of the squares over the square of the mean, which is 1 if all norms are equal."""
    return float(np.mean(norms**2) / np.mean(norms) ** 2)


def dot(one: Array, other: Array) -> Array:
    """Return inner products along the last axis."""
    products: Array = np.einsum("...d,...d->...", one, other)
    return products


def _unit(vectors: Array) -> Array:
    return vectors / np.sqrt(dot(vectors, vectors))[..., None]


@dataclass(frozen=True)
class StepSizes:
    """The step sizes eta_theta and eta_x."""

    theta: float
    x: float


@dataclass(frozen=True)
class Trajectory:
    """Final points and regrets of several repetitions; arrays have one entry per repetition."""

    theta: Array
    x: Array
    peak: Array
    """v-hat of each example: the largest average of squared gradient norms; zero for SGDBCA."""
    regret: float
    """The mean regret at x+ against the weights and perturbations that are best over all repetitions."""
    regret_x: float
    """The maximiser's part of the regret."""
    regret_after: Array
    """The regret at x+ against the best weights and perturbations of each repetition, in hindsight."""
    regret_defined: Array
    """R(T) as the paper defines it, with a comparator for every step."""
    gap: Array
    """The robust loss of the averaged weights minus the smallest robust loss."""
    weighted: float | None
    """The mean over the steps of the sum over the examples of squared gradient norm over v-hat."""


def run_sgdbca(
    problem: Problem, order: NDArray[np.int64], rates: StepSizes, beta: float | None, theta: Array, x: Array
) -> Trajectory:
    """Run SGDBCA, or ASGDBCA with `beta`, from (theta, x); `order` (T, repetitions) has the sampled examples.

    The weights are projected onto their ball; the paper assumes the ball, but its updates do not project. An example
    whose gradients were all zero does not move.
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
        defined += problem.robust_loss(theta) - problem.min_over_ball(*problem.line(x))

        x[rows, k] = moved[rows, k]
        theta = problem.project(theta - rates.theta * problem.gradient_theta(x[rows, k], k))

    # The objective is affine in theta, so its sum over the steps is T times its value at the mean.
    best = steps * problem.robust_loss(thetas / steps)
    best_of_all = steps * float(problem.robust_loss(np.mean(thetas, axis=0) / steps))
    least_of_all = float(problem.min_over_ball(np.mean(slopes, axis=0), np.mean(heights, keepdims=True))[0])
    return Trajectory(
        theta=theta,
        x=x,
        peak=peak,
        regret=best_of_all - least_of_all,
        regret_x=best_of_all - float(np.mean(values)),
        regret_after=best - problem.min_over_ball(slopes, heights),
        regret_defined=defined,
        gap=best / steps - problem.value,
        weighted=None if beta is None else weighted / steps,
    )
