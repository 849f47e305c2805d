"""How step sizes and gradient norms spread over the examples: what is logged of them after every epoch.

Everything is computed where the values live and read once.
"""

from __future__ import annotations

import torch
from torch import Tensor

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_PARTS = 10


def quantiles(values: Tensor) -> list[float]:
    """The values at the shares `QUANTILES` of the examples, by nearest rank.

    >>> quantiles(torch.arange(101.0))
    [5.0, 25.0, 50.0, 75.0, 95.0]
    """
    ordered = values.sort().values
    places = [round(share * (len(ordered) - 1)) for share in QUANTILES]
    return ordered[torch.tensor(places, device=values.device)].tolist()


def by_tenth(norms: Tensor, values: Tensor) -> list[float]:
    """The mean of `values` over each tenth of the examples, those with the smallest norms first.

    >>> by_tenth(torch.tensor([3.0, 1.0, 2.0] * 10), torch.tensor([30.0, 10.0, 20.0] * 10))[::9]
    [10.0, 30.0]
    """
    ordered = values[norms.argsort(stable=True)]
    parts = ordered.tensor_split(min(_PARTS, len(ordered)))
    return torch.stack([part.mean() for part in parts]).tolist()
