"""Training examples ranked by their gradient norm, and cut into tenths (the paper's section 3).

GN(x_i) is an example's gradient norm averaged over the epochs, its rank the share of examples with a smaller one, and
D_i^j the examples whose rank lies in [(i-1)/10, j/10); the paper prints 10(i-1)/n, which is a slip.
"""

from __future__ import annotations

import torch
from torch import Tensor

PARTS = 10


def averaged(norms: Tensor) -> Tensor:
    """The mean norm of each example over the epochs (epochs, examples); epochs without a norm yet do not count."""
    counts = norms > 0
    return (norms.double() * counts).sum(0) / counts.sum(0).clamp_min(1)


def ranks(norms: Tensor) -> Tensor:
    """For each example the share of examples with a smaller norm.

    >>> ranks(torch.tensor([3.0, 1.0, 2.0, 3.0])).tolist()
    [0.5, 0.0, 0.25, 0.5]
    """
    return _smaller(norms).double() / len(norms)


def tenths(norms: Tensor) -> Tensor:
    """For each example the number of its tenth, 1 to 10.

    >>> tenths(torch.tensor([5.0, 40.0, 1.0, 12.0, 9.0])).tolist()
    [3, 9, 1, 7, 5]
    """
    return PARTS * _smaller(norms) // len(norms) + 1  # in whole numbers: 0.3 is not 3/10


def _smaller(norms: Tensor) -> Tensor:
    return torch.searchsorted(norms.sort().values, norms, side="left")


def members(tenth: Tensor, first: int, last: int) -> Tensor:
    """The examples of D_first^last, in the order of the data."""
    return ((tenth >= first) & (tenth <= last)).nonzero().flatten()


def class_shares(tenth: Tensor, labels: Tensor, classes: int) -> Tensor:
    """The share of every class in every tenth, (10, classes); rows sum to 1."""
    cells = torch.bincount((tenth - 1) * classes + labels, minlength=PARTS * classes)
    counts = cells.view(PARTS, classes).double()
    return counts / counts.sum(1, keepdim=True).clamp_min(1)


def means_by_tenth(values: Tensor, tenth: Tensor) -> Tensor:
    """The mean of (epochs, examples) over the examples of each tenth: (epochs, 10)."""
    sums = torch.zeros(len(values), PARTS, dtype=torch.float64)
    sums.index_add_(1, tenth - 1, values.double())
    return sums / torch.bincount(tenth - 1, minlength=PARTS).clamp_min(1)


def tail(norms: Tensor) -> float:
    """How long-tailed norms are: mean G^2 / (mean G)^2, 1 where all are equal."""
    norms = norms.double()
    return float(norms.square().mean() / norms.mean().square()) if norms.any() else 1.0


def equal_epochs(examples: int, part: int, batch_size: int, epochs: int) -> int:
    """How many epochs on a part of the examples come nearest to the iterations of `epochs` on all of them.

    >>> equal_epochs(50_000, 10_000, 128, 30)
    148
    """
    return max(1, round(epochs * -(-examples // batch_size) / -(-part // batch_size)))
