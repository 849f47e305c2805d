"""Training images that are held out as test images, for data that has none of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from atas.core.rng import Stream, generator_seed
from atas.data.dataset import Split
from atas.errors import DataError


def hold_out(train: Split, count: int, seed: int = 0) -> tuple[Split, Split]:
    """Split training images into those to train on and `count` test images, stratified by class.

    >>> train = Split(torch.zeros(20, 1, 4, 4, dtype=torch.uint8), torch.arange(20) % 2, ("cat", "dog"))
    >>> rest, test = hold_out(train, 4)
    >>> len(rest), test.labels.bincount().tolist()
    (16, [2, 2])
    """
    check_held_out(count, len(train))
    held = stratified_rows(train.labels, count, seed)
    rest = torch.ones(len(train), dtype=torch.bool)
    rest[held] = False
    return train.subset(rest.nonzero().flatten()), train.subset(held)


def check_held_out(count: int, images: int) -> None:
    """Raise DataError unless some of the images, and not all, would be held out."""
    if not 0 < count < images:
        raise DataError(f"cannot hold out {count:,} of {images:,} training images as test images; choose fewer")


def stratified_rows(labels: Tensor, count: int, seed: int = 0) -> Tensor:
    """Return the positions of `count` examples in ascending order, drawn by the seed and stratified by class.

    >>> labels = torch.tensor([0] * 30 + [1] * 10)
    >>> labels[stratified_rows(labels, 8)].bincount().tolist()
    [6, 2]
    """
    generator = torch.Generator().manual_seed(generator_seed(seed, 0, Stream.HELD_OUT))
    shuffled = torch.randperm(len(labels), generator=generator)
    by_class = shuffled[labels[shuffled].argsort(stable=True)]  # shuffled within each class
    counts = labels.bincount()
    first = counts.cumsum(0) - counts
    of_class = labels[by_class]
    rank = torch.arange(len(labels)) - first[of_class]
    position = (rank + torch.rand(len(counts), generator=generator)[of_class]) / counts[of_class]
    return by_class[position.argsort(stable=True)[:count]].sort().values
