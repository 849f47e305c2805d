"""Learning rates, by update."""

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
    summit = schedule.peak_at * updates
    share = update / summit if update < summit else (updates - update) / (updates - summit)
    return schedule.peak * share
