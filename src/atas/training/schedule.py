"""Learning rates and momenta, by update."""

from __future__ import annotations

import torch
from torch import Tensor

from atas.training import recipe


def learning_rate(schedule: recipe.Schedule, update: Tensor, updates: int) -> Tensor:
    """The rates of some updates, counted from 0, in a training of so many updates.

    >>> cyclic = recipe.Schedule(name="cyclic", peak=0.2)
    >>> learning_rate(cyclic, torch.arange(4), 4).tolist()
    [0.0, 0.1, 0.2, 0.1]
    """
    if schedule.name == "piecewise":
        starts = sorted(round(milestone * updates) for milestone in schedule.milestones)
        rates = [schedule.peak * schedule.factor**drops for drops in range(len(starts) + 1)]
        drops = torch.bucketize(update, torch.tensor(starts, dtype=torch.int64), right=True)
        return torch.tensor(rates, dtype=torch.float64)[drops]
    return schedule.peak * _height(schedule, update, updates)


def momentum_at(schedule: recipe.Schedule, usual: float, update: Tensor, updates: int) -> Tensor:
    """The momenta of some updates: the usual one, unless it goes against the rate as PyTorch's `CyclicLR` lets it.

    >>> cyclic = recipe.Schedule(name="cyclic", peak_momentum=0.8)
    >>> momentum_at(cyclic, 0.9, torch.arange(4), 4).round(decimals=3).tolist()
    [0.9, 0.85, 0.8, 0.85]
    """
    if schedule.name != "cyclic" or schedule.peak_momentum is None:
        return torch.full(update.shape, usual, dtype=torch.float64)
    return usual + (schedule.peak_momentum - usual) * _height(schedule, update, updates)


def _height(schedule: recipe.Schedule, update: Tensor, updates: int) -> Tensor:
    """Where a cycle is between its foot, 0, and its peak, 1."""
    summit, place = schedule.peak_at * updates, update.double()
    return torch.where(place < summit, place / summit, (updates - place) / (updates - summit))
