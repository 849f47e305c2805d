"""A search driven step by step, without a scheduler."""

import torch

from atas.attacks.search import Slots


def filled(x, y, target=None, rank=0):
    """Return slots with one image each, numbered from 0."""
    slots = Slots.empty(len(x), x)
    numbers = torch.arange(len(x))
    slots.assign(numbers, x=x, y=y, target=y if target is None else target, index=numbers, target_rank=rank)
    return slots


def recorded(model, seen):
    """Return the model as a function that records its inputs in `seen`."""

    def logits(point):
        seen.append(point.detach().clone())
        return model(point)

    return logits


def course(search, slots, model, ball, *, seed=0, classes=10):
    """Return all points that a search evaluates (steps, B, C, H, W) if every candidate is rejected, and the flags of
    examples with a candidate."""
    seen, broken = [], torch.zeros(len(slots), dtype=torch.bool)
    state = search.init_state(slots, ball, classes, seed)
    for _ in range(search.steps):
        state.step(recorded(model, seen))
        broken |= slots.broken
        slots.broken.fill_(False)
    return torch.stack(seen), broken
