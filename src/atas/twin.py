"""A working copy of a model for mixed precision."""

from __future__ import annotations

import copy

import torch
from torch import nn

_MIXED = (nn.modules.conv._ConvNd, nn.Linear)


def working_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with the weights of its convolutions and linear layers in `dtype`; all other tensors are shared.

    Casting every weight in every forward pass, as autocast does, costs a kernel a layer and pass; a copy that the
    optimiser keeps up to date costs none.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, dict(shared))
    cast: dict[int, nn.Parameter] = {}
    for module in twin.modules():
        if isinstance(module, _MIXED):
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.dtype == torch.float32:
                    low = cast.setdefault(id(parameter), nn.Parameter(parameter.detach().to(dtype)))
                    low.requires_grad_(parameter.requires_grad)
                    module._parameters[name] = low
    return twin
