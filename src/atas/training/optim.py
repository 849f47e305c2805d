"""The optimiser, its schedules and the average of weights: `SGD`, learning rate and momentum by update, `EMA`.

Rate and momentum are tensors, so a step can be captured and replayed. The weights may have a copy in bf16 that the
forward pass uses.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atas.recipes import OptimizerConfig, ScheduleConfig


class SGD:
    """g <- g + decay w, m <- momentum m + g, w <- w - rate m (with Nesterov: g + momentum m in place of m).

    As `torch.optim.SGD`, but nothing in a step is read by the host, so that a step can be captured and replayed.
    `compute_weights` are the tensors that the forward pass uses: the weights themselves, or copies of them in lower
    precision, which follow.
    """

    def __init__(self, config: OptimizerConfig, weights: Sequence[Tensor], compute_weights: Sequence[Tensor]) -> None:
        self.config = config
        self.weights, self.compute_weights = list(weights), list(compute_weights)
        self.momentum = [torch.zeros_like(weight) for weight in self.weights]

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], rate: Tensor, momentum: Tensor) -> None:
        """Change the weights; those without a gradient stay."""
        rows = [row for row, gradient in enumerate(gradients) if gradient is not None]
        weights = [self.weights[row] for row in rows]
        speeds = [self.momentum[row] for row in rows]
        steps = [gradients[row].to(self.weights[row].dtype) for row in rows]  # type: ignore[union-attr]
        steps = list(torch._foreach_add(steps, weights, alpha=self.config.weight_decay))
        torch._foreach_mul_(speeds, momentum)
        torch._foreach_add_(speeds, steps)
        if self.config.nesterov:
            torch._foreach_add_(steps, torch._foreach_mul(speeds, momentum))
        else:
            steps = speeds
        torch._foreach_sub_(weights, torch._foreach_mul(steps, rate))
        self.refresh()

    def begin_capture(self, steps: int) -> None:
        """Called before so many steps are captured."""

    def finish_capture(self) -> None:
        """Called when they are."""

    @torch.no_grad()
    def refresh(self) -> None:
        """Bring the copies up to date."""
        for weight, compute_weight in zip(self.weights, self.compute_weights, strict=True):
            if compute_weight is not weight:
                compute_weight.copy_(weight)


class FusedSGD(SGD):
    """`SGD` in one Triton kernel that reads and writes every weight once."""

    def __init__(self, config: OptimizerConfig, weights: Sequence[Tensor], compute_weights: Sequence[Tensor]) -> None:
        super().__init__(config, weights, compute_weights)
        from atas.ops.triton.sgd import SGDUpdate  # needs Triton

        self._update = SGDUpdate(self.weights, self.compute_weights, self.momentum)

    def step(self, gradients: Sequence[Tensor | None], rate: Tensor, momentum: Tensor) -> None:
        """Update the weights; those without a gradient stay as they are."""
        decay, nesterov = self.config.weight_decay, self.config.nesterov
        self._update.step(gradients, rate, momentum, weight_decay=decay, nesterov=nesterov)

    def begin_capture(self, steps: int) -> None:
        """Allocate the address tables of `steps` steps, outside of the memory pool of the capture."""
        self._update.begin_capture(steps)

    def finish_capture(self) -> None:
        """Fill the address tables of the captured steps."""
        self._update.finish_capture()


def learning_rate(schedule: ScheduleConfig, update: Tensor, updates: int) -> Tensor:
    """The rates of some updates, counted from 0, in a training of so many updates.

    >>> cyclic = ScheduleConfig(name="cyclic", peak=0.2)
    >>> learning_rate(cyclic, torch.arange(4), 4).tolist()
    [0.0, 0.1, 0.2, 0.1]
    """
    if schedule.name == "piecewise":
        starts = sorted(round(milestone * updates) for milestone in schedule.milestones)
        rates = [schedule.peak * schedule.factor**drops for drops in range(len(starts) + 1)]
        drops = torch.bucketize(update, torch.tensor(starts, dtype=torch.int64), right=True)
        return torch.tensor(rates, dtype=torch.float64)[drops]
    return schedule.peak * _cycle_height(schedule, update, updates)


def momentum_at(schedule: ScheduleConfig, default: float, update: Tensor, updates: int) -> Tensor:
    """The momenta of some updates: the default one, unless it goes against the rate as PyTorch's `CyclicLR` lets it.

    >>> cyclic = ScheduleConfig(name="cyclic", peak_momentum=0.8)
    >>> momentum_at(cyclic, 0.9, torch.arange(4), 4).round(decimals=3).tolist()
    [0.9, 0.85, 0.8, 0.85]
    """
    if schedule.name != "cyclic" or schedule.peak_momentum is None:
        return torch.full(update.shape, default, dtype=torch.float64)
    return default + (schedule.peak_momentum - default) * _cycle_height(schedule, update, updates)


def _cycle_height(schedule: ScheduleConfig, update: Tensor, updates: int) -> Tensor:
    """Where a cycle is between its foot, 0, and its peak, 1."""
    peak, position = schedule.peak_at * updates, update.double()
    return torch.where(position < peak, position / peak, (updates - position) / (updates - peak))


class EMA(nn.Module):
    """A copy of a model that follows it slowly. Running statistics are averaged with the weights.

    In the first updates the decay is smaller, (1 + t) / (10 + t), so that the random start is forgotten.
    """

    updates: Tensor

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay
        first = next(iter(model.state_dict().values()))
        self.register_buffer("updates", torch.zeros((), device=first.device))
        both = zip(self.model.state_dict().values(), model.state_dict().values(), strict=True)
        pairs = {average.data_ptr(): (average, value) for average, value in both}.values()  # tied weights once
        self._averaged = [pair for pair in pairs if pair[0].dtype.is_floating_point]
        self._copied = [pair for pair in pairs if not pair[0].dtype.is_floating_point]

    @torch.no_grad()
    def update(self) -> None:
        """Move a little towards the model; called after every update of its weights."""
        decay = ((1 + self.updates) / (10 + self.updates)).clamp_max(self.decay)
        averages, values = [list(side) for side in zip(*self._averaged, strict=True)]
        torch._foreach_mul_(averages, decay)
        torch._foreach_add_(averages, torch._foreach_mul(values, 1 - decay))
        self.copy_integers()
        self.updates += 1

    def copy_integers(self) -> None:
        """Whole numbers, such as BatchNorm's count of batches, are the model's own."""
        for copied, value in self._copied:
            copied.copy_(value)
