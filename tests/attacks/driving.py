"""A search driven by hand, without a queue."""

import torch

from atas.attacks._lanes import Lanes


def filled(x, y, target=None, rank=0):
    """A lane an image, numbered from 0."""
    lanes = Lanes.empty(len(x), x)
    numbers = torch.arange(len(x))
    lanes.fill(numbers, x=x, y=y, target=y if target is None else target, example=numbers, rank=rank)
    return lanes


def recorded(model, seen):
    """The model, noting the points that it is asked about."""

    def logits(point):
        seen.append(point.detach().clone())
        return model(point)

    return logits


def course(search, lanes, model, ball, *, seed=0, classes=10):
    """All points that a search evaluates (steps, B, C, H, W) if no judge ever agrees with it, and what it broke."""
    seen, broken = [], torch.zeros(len(lanes), dtype=torch.bool)
    state = search.begin(lanes, ball, classes, seed)
    for _ in range(search.steps):
        state.step(recorded(model, seen))
        broken |= lanes.broken
        lanes.broken.fill_(False)
    return torch.stack(seen), broken
