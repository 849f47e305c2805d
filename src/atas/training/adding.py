"""Sums over processes of what a step computes in each of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atas.processes import Processes


@torch.no_grad()
def add_up(tensors: Sequence[Tensor], peers: Processes) -> list[Tensor]:
    """The sum over all processes of each tensor, in float32 at least; all of them travel as one flat tensor."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    flat = peers.add_up(torch.cat([tensor.to(dtype).flatten() for tensor in tensors]))
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
