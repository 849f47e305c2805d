"""BatchNorm over several processes: averaged running statistics, or statistics of the global batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase


class _AllReduceSum(torch.autograd.Function):
    """Differentiable all-reduce. The losses of all ranks count, so gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _AllReduceSum.apply(gradients[0].contiguous())


class SyncBatchNorm(_BatchNorm):
    """BatchNorm whose mean and variance in train mode are those of the global batch, also if a rank has no rows.

    It is written in differentiable operations and runs on any device. Gradient alignment needs second derivatives,
    which torch's SyncBatchNorm does not have.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by the statistics of the global batch."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        wide = input if input.dtype == torch.float64 else input.float()
        axes = [axis for axis in range(input.dim()) if axis != 1]
        shape = [-1 if axis == 1 else 1 for axis in range(input.dim())]
        count = torch.full((1,), input.numel() // input.shape[1], dtype=wide.dtype, device=wide.device)
        totals = _AllReduceSum.apply(torch.cat([wide.sum(axes), count]))
        count = totals[-1].detach()
        mean = totals[:-1] / count
        centred = wide - mean.view(shape)
        variance = _AllReduceSum.apply(centred.square().sum(axes)) / count
        self._update_running_stats(mean.detach(), variance.detach() * (count / (count - 1)))
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)

    @torch.no_grad()
    def _update_running_stats(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running statistics as BatchNorm does."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        for running, found in ((self.running_mean, mean), (self.running_var, variance)):
            step = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
            running.copy_(running * (1 - step) + found.to(running.dtype) * step)


class _SyncBatchNorm1d(SyncBatchNorm, nn.BatchNorm1d):
    pass


class _SyncBatchNorm2d(SyncBatchNorm, nn.BatchNorm2d):
    pass


class _SyncBatchNorm3d(SyncBatchNorm, nn.BatchNorm3d):
    pass


_SYNC_VERSION: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: _SyncBatchNorm1d,
    nn.BatchNorm2d: _SyncBatchNorm2d,
    nn.BatchNorm3d: _SyncBatchNorm3d,
}
_LOCAL_VERSION = {together: alone for alone, together in _SYNC_VERSION.items()}


def convert_sync_batchnorm(model: nn.Module) -> nn.Module:
    """Make BatchNorm layers use the global batch, in place; weights, state keys and hooks stay."""
    return _convert(model, _SYNC_VERSION)


def revert_sync_batchnorm(model: nn.Module) -> nn.Module:
    """Undo `convert_sync_batchnorm`, in place."""
    return _convert(model, _LOCAL_VERSION)


def _convert(model: nn.Module, kinds: dict[type[nn.Module], Any]) -> nn.Module:
    for module in model.modules():
        module.__class__ = kinds.get(type(module), type(module))
    return model


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Return the running statistics that train-mode passes have updated with this rank's rows only."""
    statistics: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, _NormBase) and module.training and not isinstance(module, SyncBatchNorm):
            statistics += [tensor for tensor in (module.running_mean, module.running_var) if isinstance(tensor, Tensor)]
    return statistics
