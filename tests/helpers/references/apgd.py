"""APGD once more, slowly: the paper's algorithm 1 in numpy and float64, an example at a time, gradients by hand."""

import math

import numpy as np


def cross_entropy(z, y, t):
    """The loss, and its slope in the logits."""
    share = np.exp(z - z.max())
    share /= share.sum()
    return -math.log(share[y]), share - unit(z, y)


def dlr(z, y, t):
    other = max((i for i in range(len(z)) if i != y), key=lambda i: z[i])
    return ratio(z, other, y, [2] if len(z) > 2 else [])


def targeted_dlr(z, y, t):
    return ratio(z, t, y, {2: [], 3: [1, 2]}.get(len(z), [2, 3]))


def ratio(z, up, down, places):
    """The difference of two logits over that of the greatest and the mean of those at the given places, if any."""
    above, slope_above = z[up] - z[down], unit(z, up) - unit(z, down)
    if not places:
        return above, slope_above
    order = np.argsort(-z)
    below = z[order[0]] - np.mean(z[order[places]]) + 1e-12
    slope_below = unit(z, order[0]) - np.mean([unit(z, order[p]) for p in places], axis=0)
    return above / below, (slope_above * below - above * slope_below) / below**2


def unit(z, i):
    return np.eye(len(z))[i]


LOSSES = {"ce": cross_entropy, "dlr": dlr, "t": targeted_dlr}


def checkpoints(iterations):
    p = [0, 0.22]
    while p[-1] < 1:
        p.append(p[-1] + max(p[-1] - p[-2] - 0.03, 0.06))
    return [math.ceil(round(share * iterations, 9)) for share in p]


def project(norm, point, x, eps):
    change = point - x
    if norm == "linf":
        change = np.clip(change, -eps, eps)
    elif (length := np.linalg.norm(change)) > eps:
        change = change * eps / length
    return np.clip(x + change, 0, 1)


def step(norm, point, gradient, size, x, eps):
    direction = np.sign(gradient) if norm == "linf" else gradient / (np.linalg.norm(gradient) or 1)
    return project(norm, point + size * direction, x, eps)


def apgd(net, x, y, t, start, norm, eps, iterations, loss):
    """The points in the order of their evaluation, and for each halving of the step size the reason."""

    def evaluate(point):
        value, slope = LOSSES[loss](net.logits(point), y, t)
        return value, net.pull_back(point, slope)

    w = checkpoints(iterations)
    size, points, losses, reasons = 2 * eps, [start], [], []
    value, gradient = evaluate(start)
    losses.append(value)
    best, best_value, best_gradient = start, value, gradient
    before, point = start, start
    halved, best_value_then, j = True, value, 1
    for k in range(iterations):
        z = step(norm, point, gradient, size, x, eps)
        if k > 0:
            z = project(norm, point + 0.75 * (z - point) + 0.25 * (point - before), x, eps)
        before, point = point, z
        value, gradient = evaluate(point)
        points.append(point)
        losses.append(value)
        if value > best_value:
            best, best_value, best_gradient = point, value, gradient
        if k + 1 == w[j]:
            rises = sum(losses[i + 1] > losses[i] for i in range(w[j - 1], w[j]))
            few = rises <= 0.75 * (w[j] - w[j - 1])
            same = not halved and best_value == best_value_then
            halved, best_value_then = few or same, best_value
            if halved:
                reasons.append("few rises" if few else "same best")
                size, point, gradient = size / 2, best, best_gradient
            j += 1
    return np.stack(points), reasons
