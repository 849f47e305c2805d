"""Where a model lives and in which precision it computes."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from atas.errors import UsageError


def place_of(model: nn.Module, images: torch.device, wanted: torch.device | str | None) -> torch.device:
    """The model's device, which is where batches go; that of the images for a model without weights."""
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    home = images if first is None else first.device
    try:
        place = home if wanted is None else torch.empty(0, device=wanted).device  # "cuda" is then "cuda:0"
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"there is no device '{wanted}' here: leave device out to use the model's") from error
    if first is not None and place != home:
        raise UsageError(f"the model lives on {home} and is never moved: move it with model.to('{place}')")
    return place


def current(place: torch.device) -> AbstractContextManager[object]:
    """Inside, this GPU is the one that streams, graphs and kernels are made on."""
    return torch.cuda.device(place) if place.type == "cuda" else nullcontext()


def dtype_of(model: nn.Module) -> torch.dtype:
    """Float64 where the weights are, else float32; half precision is refused."""
    weights: list[Any] = list(model.parameters()) or list(model.buffers())
    found = {tensor.dtype for tensor in weights if tensor.dtype.is_floating_point}
    if short := sorted(str(dtype) for dtype in found - {torch.float32, torch.float64}):
        raise UsageError(f"the model holds {short[0]} weights, and evaluation is in float32: pass model.float()")
    return torch.float64 if found == {torch.float64} else torch.float32
