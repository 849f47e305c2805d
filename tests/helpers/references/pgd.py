"""FGSM and PGD once more, slowly: numpy in float64, an example at a time, gradients by hand."""

import numpy as np
from torch import nn


class Perceptron:
    """A hidden layer of tanh; the same weights as a torch module and as arrays. With more gain it is more curved."""

    def __init__(self, pixels, hidden=7, classes=3, gain=1):
        self.module = nn.Sequential(nn.Flatten(), nn.Linear(pixels, hidden), nn.Tanh(), nn.Linear(hidden, classes))
        self.module.double().requires_grad_(False)
        for weights in self.module.parameters():
            weights.mul_(gain)
        self.w1, self.b1, self.w2, self.b2 = (p.numpy() for p in self.module.parameters())

    def logits(self, x):
        return self.w2 @ np.tanh(self.w1 @ x.ravel() + self.b1) + self.b2

    def gradient(self, x, y):
        """Of the cross-entropy at one image."""
        logits = self.logits(x)
        slope = np.exp(logits - logits.max())
        slope /= slope.sum()
        slope[y] -= 1
        return self.pull_back(x, slope)

    def pull_back(self, x, slope):
        """The gradient in the image of what has this slope in the logits."""
        hidden = np.tanh(self.w1 @ x.ravel() + self.b1)
        return (self.w1.T @ ((self.w2.T @ slope) * (1 - hidden**2))).reshape(x.shape)


def step(norm, point, x, gradient, size, eps):
    """Along the gradient, into the ball, into [0, 1]."""
    if norm == "linf":
        point = np.clip(point + size * np.sign(gradient), x - eps, x + eps)
    else:
        change = point + size * gradient / np.sqrt((gradient**2).sum()) - x
        length = np.sqrt((change**2).sum())
        point = x + change * (eps / length if length > eps else 1)
    return np.clip(point, 0, 1)


def fgsm(net, x, y, norm, eps):
    return np.stack(
        [
            step(norm, image, image, net.gradient(image, label), eps, eps)
            for image, label in zip(x.numpy(), y.numpy(), strict=True)
        ]
    )


def pgd(net, x, y, norm, eps, starts, steps, size):
    """The last iterates from the given starts."""
    found = []
    for image, label, start in zip(x.numpy(), y.numpy(), starts.numpy(), strict=True):
        point = start
        for _ in range(steps):
            point = step(norm, point, image, net.gradient(point, label), size, eps)
        found.append(point)
    return np.stack(found)
