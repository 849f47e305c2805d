"""Averaged weights: exponential moving averages of a model's state, which a captured step can update too."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atas.core.autograd import eval_mode
from atas.core.model_state import state_tensors

_WARMUP = 10.0  # of the decay, as in TensorFlow


class EMA(nn.Module):
    """Exponential moving average of a model's weights and running statistics.

    At update t, counted from 0, the decay is at most (1 + t) / (warmup + t), so that the random start is forgotten
    soon. The decay is reached after about (warmup - 1) / (1 - decay) updates; before that, the mean age of what is
    averaged is t / warmup updates. `warmup` is 10 by default; with 0 there is none.
    """

    updates: Tensor

    def __init__(self, model: nn.Module, decay: float, warmup: float | None = None) -> None:
        super().__init__()
        with torch.no_grad():  # or the copied weights of a scripted model depend on its own
            self.model = eval_mode(copy.deepcopy(model))
        for parameter in self.model.parameters():
            parameter.requires_grad_(False)
        self.decay, self.warmup = decay, _WARMUP if warmup is None else warmup
        first = next(iter(state_tensors(model).values()))
        self.register_buffer("updates", torch.zeros((), device=first.device))
        both = zip(state_tensors(self.model).values(), state_tensors(model).values(), strict=True)
        pairs = {average.data_ptr(): (average, value) for average, value in both}.values()  # tied weights once
        self._averaged = [pair for pair in pairs if _is_continuous(pair[0])]
        self._copied = [pair for pair in pairs if not _is_continuous(pair[0])]

    @torch.no_grad()
    def update(self, decay: float | Tensor | None = None) -> None:
        """Average with the current weights; called after every update of them. `decay` replaces the usual one."""
        self._average(self._averaged, self.current_decay(decay))
        self.copy_integers()
        self.updates += 1

    def current_decay(self, decay: float | Tensor | None = None) -> Tensor:
        """Return the decay of the next update, during the warm-up a smaller one than `decay`."""
        return ((1 + self.updates) / (self.warmup + self.updates)).clamp_max(self.decay if decay is None else decay)

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

    def __init__(self, model: nn.Module, decay: float, warmup: float | None = None) -> None:
        super().__init__(model, decay, warmup)
        from atas.ops.triton.average import AverageUpdate, is_supported  # needs Triton

        fused = [pair for pair in self._averaged if is_supported(*pair)]
        self._others = [pair for pair in self._averaged if not is_supported(*pair)]
        self._update = AverageUpdate(*zip(*fused, strict=True)) if fused else None

    @torch.no_grad()
    def update(self, decay: float | Tensor | None = None) -> None:
        """Average with the current weights; called after every update of them. `decay` replaces the usual one."""
        current = self.current_decay(decay)
        if self._update is not None:
            self._update(current)
        self._average(self._others, current)
        self.updates += 1


def _is_continuous(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
