"""SGD, the schedules of learning rate and momentum, and averaged weights (`EMA`).

Learning rate and momentum are tensors, so a step can be captured and replayed. The forward pass may use a copy of the
weights in bf16.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atas.core.autograd import eval_mode
from atas.core.model_state import state_tensors
from atas.recipes import OptimizerConfig, ScheduleConfig

_ALIGNMENT = 16  # bytes that the kernel reads at once


class SGD:
    """g <- g + decay w, m <- momentum m + g, w <- w - rate m (with Nesterov: g + momentum m instead of m).

    Computes the same as `torch.optim.SGD`, without reading anything on the host. `compute_weights` are the tensors that
    the forward pass uses: the weights themselves, or copies in lower precision, which each step updates.
    """

    def __init__(self, config: OptimizerConfig, weights: Sequence[Tensor], compute_weights: Sequence[Tensor]) -> None:
        self.config = config
        self.weights, self.compute_weights = list(weights), list(compute_weights)
        self.momentum = [torch.zeros_like(weight) for weight in self.weights]

    @staticmethod
    def supports(weights: Sequence[Tensor], compute_weights: Sequence[Tensor]) -> bool:
        """Return whether these weights can be updated: all can."""
        return True

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], rate: Tensor, momentum: Tensor) -> None:
        """Update the weights; those without a gradient stay."""
        rows = [row for row, gradient in enumerate(gradients) if gradient is not None]
        weights = [self.weights[row] for row in rows]
        momenta = [self.momentum[row] for row in rows]
        steps = [gradients[row].to(self.weights[row].dtype) for row in rows]  # type: ignore[union-attr]
        steps = list(torch._foreach_add(steps, weights, alpha=self.config.weight_decay))
        torch._foreach_mul_(momenta, momentum)
        torch._foreach_add_(momenta, steps)
        if self.config.nesterov:
            torch._foreach_add_(steps, torch._foreach_mul(momenta, momentum))
        else:
            steps = momenta
        torch._foreach_sub_(weights, torch._foreach_mul(steps, rate))
        self.refresh()

    def begin_capture(self, steps: int) -> None:
        """Prepare for the capture of `steps` steps; nothing to do here."""

    def finish_capture(self) -> None:
        """Finish the capture; nothing to do here."""

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the weights to `compute_weights`."""
        for weight, compute_weight in zip(self.weights, self.compute_weights, strict=True):
            if compute_weight is not weight:
                compute_weight.copy_(weight)


class FusedSGD(SGD):
    """`SGD` in one Triton kernel that reads and writes every weight once; `supports` says for which weights."""

    @staticmethod
    def supports(weights: Sequence[Tensor], compute_weights: Sequence[Tensor]) -> bool:
        """Return whether the kernel can update these weights: it goes over their memory from the first address on."""
        copied = [
            (weight, copied) for weight, copied in zip(weights, compute_weights, strict=True) if copied is not weight
        ]
        return all(weight.dtype == torch.float32 and _is_aligned(weight) for weight in weights) and all(
            copied.dtype == torch.bfloat16 and _is_aligned(copied) and copied.stride() == weight.stride()
            for weight, copied in copied
        )

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


def _is_aligned(tensor: Tensor) -> bool:
    """Return whether the elements fill one range of memory, in any order of axes, that starts at sixteen bytes."""
    filled = 1 if tensor.numel() else 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and filled and stride != filled:
            return False
        filled *= size
    return tensor.data_ptr() % _ALIGNMENT == 0


def learning_rate(schedule: ScheduleConfig, update: Tensor, updates: int) -> Tensor:
    """Return the learning rate at each `update`, counted from 0, in a training of `updates` updates.

    >>> cyclic = ScheduleConfig(name="cyclic", peak=0.2)
    >>> learning_rate(cyclic, torch.arange(4), 4).tolist()
    [0.0, 0.1, 0.2, 0.1]
    """
    if schedule.name == "piecewise":
        starts = sorted(round(milestone * updates) for milestone in schedule.milestones)
        rates = [schedule.peak * schedule.factor**drops for drops in range(len(starts) + 1)]
        drops = torch.bucketize(update, torch.tensor(starts, dtype=torch.int64), right=True)
        return torch.tensor(rates, dtype=torch.float64)[drops]
    height, falling = _cycle_height(schedule, update, updates), update.double() >= schedule.peak_at * updates
    floor = schedule.final or 0.0
    return schedule.peak * torch.where(falling, floor + (1 - floor) * height, height)


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


class EMA(nn.Module):
    """Exponential moving average of a model's weights and running statistics.

    At update t the decay is at most (1 + t) / (10 + t), so that the random start is forgotten soon.
    """

    updates: Tensor

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        with torch.no_grad():  # or the copied weights of a scripted model depend on its own
            self.model = eval_mode(copy.deepcopy(model))
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        self.decay = decay
        first = next(iter(state_tensors(model).values()))
        self.register_buffer("updates", torch.zeros((), device=first.device))
        both = zip(state_tensors(self.model).values(), state_tensors(model).values(), strict=True)
        pairs = {average.data_ptr(): (average, value) for average, value in both}.values()  # tied weights once
        self._averaged = [pair for pair in pairs if _is_continuous(pair[0])]
        self._copied = [pair for pair in pairs if not _is_continuous(pair[0])]

    @torch.no_grad()
    def update(self) -> None:
        """Average with the current weights; called after every update of them."""
        self._average(self._averaged, ((1 + self.updates) / (10 + self.updates)).clamp_max(self.decay))
        self.copy_integers()
        self.updates += 1

    def _average(self, pairs: Sequence[tuple[Tensor, Tensor]], decay: Tensor) -> None:
        """Average pairs of an average and its current value."""
        if not pairs:
            return
        averages, values = [list(side) for side in zip(*pairs, strict=True)]
        torch._foreach_mul_(averages, decay)
        torch._foreach_add_(averages, torch._foreach_mul(values, 1 - decay))

    def copy_integers(self) -> None:
        """Copy whole numbers, such as BatchNorm's count of batches, from the model."""
        for copied, value in self._copied:
            copied.copy_(value)


class FusedEMA(EMA):
    """`EMA` in one Triton kernel that reads and writes every weight once.

    Whole numbers, of which the kernels of a captured step keep no count, are copied only by `copy_integers`.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, decay)
        from atas.ops.triton.average import AverageUpdate, is_supported  # needs Triton

        fused = [pair for pair in self._averaged if is_supported(*pair)]
        self._others = [pair for pair in self._averaged if not is_supported(*pair)]
        self._update = AverageUpdate(*zip(*fused, strict=True)) if fused else None

    @torch.no_grad()
    def update(self) -> None:
        """Average with the current weights; called after every update of them."""
        decay = ((1 + self.updates) / (10 + self.updates)).clamp_max(self.decay)
        if self._update is not None:
            self._update(decay)
        self._average(self._others, decay)
        self.updates += 1


def _is_continuous(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
