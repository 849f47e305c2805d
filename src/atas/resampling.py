"""Resampling along one axis as a matrix, so that a batch of windows is shown by two products of matrices.

The other ways, indexing with four neighbours each or `grid_sample`, cannot widen their filter where an image shrinks,
and their inverse scatters, in an order that no GPU promises. Places are shares of the axis: 0 is where the first sample
begins, 1 where the last one ends. They are in float64, weights in the precision of what is resampled.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TIE = 1e-9  # a place on the border of two cells is in the second, however its last digit was rounded


def triangles(places: Tensor, count: int, step: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What each of `count` samples contributes at each place: (batch, places, count); a row adds up to one.

    Bilinear: a sample reaches as far as its neighbours. `step` is how many samples lie between two places; where it is
    above one, the filter is widened by it (antialiasing, as Pillow and torchvision do). Beyond the outermost samples
    their value goes on.
    """
    at = (places * count - 0.5).clamp(-0.5, count - 0.5)
    whole = at.floor()  # apart from its fraction, so that float32 keeps all digits of the distance
    sample = torch.arange(count, device=places.device, dtype=dtype)
    distance = (sample - whole[..., None].to(dtype)) - (at - whole)[..., None].to(dtype)
    if step is not None:
        distance = distance / step.clamp_min(1).to(dtype)[:, None, None]
    weight = (1 - distance.abs()).clamp_min(0)
    return weight / weight.sum(-1, keepdim=True)


def means(places: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The mean over the places in each of `count` cells: (batch, count, places); zeros for a cell without any."""
    cell = torch.arange(count, device=places.device)[:, None]
    inside = ((places * count + _TIE).floor()[:, None, :] == cell).to(dtype)
    return inside / inside.sum(-1, keepdim=True).clamp_min(1)


def both_ways(rows: Tensor, x: Tensor, columns: Tensor) -> Tensor:
    """One matrix an example for the rows of its images, one for their columns; in full precision, autocast or not."""
    with torch.autocast(x.device.type, enabled=False):
        x = (x.flatten(1, 2) @ columns.transpose(1, 2)).unflatten(1, x.shape[1:3])  # all channels at once
        return rows[:, None] @ x
