"""Any dataset of pairs, with the position of each example added."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Protocol

import torch.utils.data

from atas.errors import DataError


class MapDataset(Sized, Protocol):
    """What is asked of a dataset: a length, and items by position."""

    def __getitem__(self, index: int, /) -> Any: ...


class Indexed(torch.utils.data.Dataset[tuple[Any, Any, int]]):
    """A dataset whose items are (x, y, index); made by `indexed`."""

    def __init__(self, dataset: MapDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any, int]:
        # The index addresses the memory of perturbations, so an example must always come with the same one.
        index = index + len(self) if index < 0 else int(index)
        item = self.dataset[index]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            found = f"{len(item)} entries" if isinstance(item, (tuple, list)) else type(item).__name__
            raise DataError(
                f"item {index} of the dataset is {found}, expected a pair (x, y); "
                "make the dataset return image and label."
            )
        x, y = item
        return x, y, index


def indexed(dataset: MapDataset) -> Indexed:
    """Wrap a map-style dataset of (x, y) so that its items are (x, y, index), for methods that remember each example.

    The images must come unaugmented; `atas.random_view` augments a batch so that stored perturbations can follow.
    Take a subset before wrapping it: the indices then run from 0 to its length.

    >>> pairs = [("a", 0), ("b", 1)]
    >>> indexed(pairs)[1]
    ('b', 1, 1)
    """
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise DataError(
            f"{type(dataset).__name__} has no length or no items by position; give a map-style dataset, not a stream."
        )
    return Indexed(dataset)
