"""Training images that a training does not see, to choose settings by."""

from __future__ import annotations

import torch

from atas.data import Dataset
from atas.errors import UsageError
from atas.noise import Purpose, seed_for


def hold_out(data: Dataset, count: int) -> Dataset:
    """The data set with so many training images in place of its test images; the same in every trial."""
    if not 0 < count < len(data.train):
        raise UsageError(f"{count} of {len(data.train)} training images cannot be held out; choose fewer")
    generator = torch.Generator().manual_seed(seed_for(0, 0, Purpose.PROBE))
    order = torch.randperm(len(data.train), generator=generator)
    held, rest = order[:count].sort().values, order[count:].sort().values
    return Dataset(data.name, data.train.part(rest), data.train.part(held))
