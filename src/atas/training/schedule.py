"""Learning rates and momenta, by update."""

from __future__ import annotations

from atas.training import recipe


def learning_rate(schedule: recipe.Schedule, update: int, updates: int) -> float:
    """The rate of an update, counted from 0, in a training of so many updates.

    >>> cyclic = recipe.Schedule(name="cyclic", peak=0.2)
    >>> [round(learning_rate(cyclic, update, 4), 3) for update in range(4)]
    [0.0, 0.1, 0.2, 0.1]
    """
    if schedule.name == "piecewise":
        drops = sum(update >= round(milestone * updates) for milestone in schedule.milestones)
        return schedule.peak * schedule.factor**drops
    return schedule.peak * _height(schedule, update, updates)


def momentum_at(schedule: recipe.Schedule, usual: float, update: int, updates: int) -> float:
    """The momentum of an update: the usual one, unless it goes against the rate as PyTorch's `CyclicLR` lets it.

    >>> cyclic = recipe.Schedule(name="cyclic", peak_momentum=0.8)
    >>> [round(momentum_at(cyclic, 0.9, update, 4), 3) for update in range(4)]
    [0.9, 0.85, 0.8, 0.85]
    """
    if schedule.name != "cyclic" or schedule.peak_momentum is None:
        return usual
    return usual + (schedule.peak_momentum - usual) * _height(schedule, update, updates)


def _height(schedule: recipe.Schedule, update: int, updates: int) -> float:
    """Where a cycle is between its foot, 0, and its peak, 1."""
    summit = schedule.peak_at * updates
    return update / summit if update < summit else (updates - update) / (updates - summit)
