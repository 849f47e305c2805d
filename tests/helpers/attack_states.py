"""A search driven by hand, without a queue."""

import torch

from atas.attacks.search import Slots


def filled(x, y, target=None, rank=0):
    """A slot an image, numbered from 0."""
    slots = Slots.empty(len(x), x)
    numbers = torch.arange(len(x))
    slots.assign(numbers, x=x, y=y, target=y if target is None else target, index=numbers, target_rank=rank)
    return slots


def recorded(model, seen):
    """The model, noting the points that it is asked about."""

    def logits(point):
        seen.append(point.detach().clone())
        return model(point)

    return logits


def course(search, slots, model, ball, *, seed=0, classes=10):
    """All points that a search evaluates (steps, B, C, H, W) if no verifier ever agrees with it, and what it broke."""
    seen, broken = [], torch.zeros(len(slots), dtype=torch.bool)
    state = search.init_state(slots, ball, classes, seed)
    for _ in range(search.steps):
        state.step(recorded(model, seen))
        broken |= slots.broken
        slots.broken.fill_(False)
    return torch.stack(seen), broken
