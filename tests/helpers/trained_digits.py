"""A small network trained on the digits, for comparisons with the authors' code, and our side of the comparison."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from atas import data
from atas.attacks.scheduler import Scheduler

NORMS = {"linf": "Linf", "l2": "L2"}  # what the authors' code calls them


@functools.cache
def trained():
    """A network, and images and labels on which it is right."""
    digits = data.load("digits")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(256, 10),
        )
        optimizer = torch.optim.Adam(net.parameters(), 5e-3)
        x, y = digits.train.images / 255, digits.train.labels
        for _ in range(8):
            for batch in torch.randperm(len(x)).split(64):
                optimizer.zero_grad()
                F.cross_entropy(net(x[batch]), y[batch]).backward()
                optimizer.step()
    net.requires_grad_(False).eval()
    x, y = digits.test.images / 255, digits.test.labels
    right = net(x).argmax(1) == y
    return net, x[right][:240], y[right][:240]


def robust(search, model, x, y, ball, seed=0):
    """Which examples the search does not break, run as an evaluation runs it."""
    scheduler = Scheduler(model, model, x.device, slots=120)
    examples = scheduler.examples(x, y, torch.arange(len(x)))
    broken, _ = scheduler.run_stages([search], examples, ball, examples.misclassified(), seed=seed)
    return ~broken
