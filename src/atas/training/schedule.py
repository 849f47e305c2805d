"""Schedules: the learning rate of every update, and what else an optimiser changes with it."""

from __future__ import annotations

import torch
from torch import Tensor

from atas.recipes import OptimizerConfig, ScheduleConfig

BETAS = (0.9, 0.999)


def update_table(optimizer: OptimizerConfig, schedule: ScheduleConfig, updates: int) -> Tensor:
    """Return a row for each of `updates` updates and the end: the learning rate, and what the optimiser needs beside.

    That is the momentum for SGD; for AdamW the corrections for the start of its two averages at zero.
    """
    update = torch.arange(updates + 1)
    columns = [learning_rate(schedule, update, updates)]
    if optimizer.name == "adamw":
        columns += [1 - beta ** (update + 1).double() for beta in optimizer.betas or BETAS]
    else:
        columns.append(momentum_at(schedule, optimizer.momentum, update, updates))
    return torch.stack(columns, dim=1)


def learning_rate(schedule: ScheduleConfig, update: Tensor, updates: int) -> Tensor:
    """Return the learning rate at each `update`, counted from 0, in a training of `updates` updates.

    >>> cyclic = ScheduleConfig(name="cyclic", peak=0.2)
    >>> learning_rate(cyclic, torch.arange(4), 4).tolist()
    [0.0, 0.1, 0.2, 0.1]
    >>> cosine = ScheduleConfig(name="cosine", peak=0.2, warmup=0.5)
    >>> learning_rate(cosine, torch.arange(5), 4).tolist()
    [0.1, 0.2, 0.2, 0.1, 0.0]
    """
    if schedule.name == "cyclic":
        height, falling = _cycle_height(schedule, update, updates), update.double() >= schedule.peak_at * updates
        return schedule.peak * torch.where(falling, _above_final(schedule, height), height)
    rates = (
        _piecewise(schedule, update, updates) if schedule.name == "piecewise" else _cosine(schedule, update, updates)
    )
    if not schedule.warmup:
        return rates
    rise = (update + 1).double() / (schedule.warmup * updates)
    return rates * rise.clamp_max(1)


def _piecewise(schedule: ScheduleConfig, update: Tensor, updates: int) -> Tensor:
    starts = sorted(round(milestone * updates) for milestone in schedule.milestones)
    rates = [schedule.peak * schedule.factor**drops for drops in range(len(starts) + 1)]
    drops = torch.bucketize(update, torch.tensor(starts, dtype=torch.int64), right=True)
    return torch.tensor(rates, dtype=torch.float64)[drops]


def _cosine(schedule: ScheduleConfig, update: Tensor, updates: int) -> Tensor:
    """Return the peak during the warm-up, then half a cosine."""
    warmup = (schedule.warmup or 0.0) * updates
    position = ((update.double() - warmup) / (updates - warmup)).clamp_min(0)
    return schedule.peak * _above_final(schedule, (1 + torch.cos(torch.pi * position)) / 2)


def _above_final(schedule: ScheduleConfig, height: Tensor) -> Tensor:
    """Return heights between 0 and 1 as shares of the peak, of which the lowest is `final`."""
    floor = schedule.final or 0.0
    return floor + (1 - floor) * height


def momentum_at(schedule: ScheduleConfig, default: float, update: Tensor, updates: int) -> Tensor:
    """Return the momentum at each `update`: the default, or in a cycle opposite to the learning rate, as in PyTorch's
    `CyclicLR`.

    >>> cyclic = ScheduleConfig(name="cyclic", peak_momentum=0.8)
    >>> momentum_at(cyclic, 0.9, torch.arange(4), 4).round(decimals=3).tolist()
    [0.9, 0.85, 0.8, 0.85]
    """
    if schedule.name != "cyclic" or schedule.peak_momentum is None:
        return torch.full(update.shape, default, dtype=torch.float64)
    return default + (schedule.peak_momentum - default) * _cycle_height(schedule, update, updates)


def _cycle_height(schedule: ScheduleConfig, update: Tensor, updates: int) -> Tensor:
    """Return the position in a cycle: 0 at its ends, 1 at its peak."""
    peak, position = schedule.peak_at * updates, update.double()
    return torch.where(position < peak, position / peak, (updates - position) / (updates - peak))
