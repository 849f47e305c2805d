"""A part of the training images by gradient norm, as another trial ranked them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from atas.analysis import subsets
from atas.errors import DataError

if TYPE_CHECKING:
    from atas.reproduce.store import Store
    from atas.reproduce.trial import Trial

TENTHS = "tenths"


@dataclass(frozen=True)
class Part:
    """D_first^last of the ranking."""

    ranking: Trial
    first: int
    last: int

    def __str__(self) -> str:
        return f"D_{self.first}^{self.last}"

    def to_json(self) -> list[Any]:
        """What decides which images these are."""
        return [self.ranking.training_key, self.first, self.last]

    @property
    def share(self) -> float:
        """Of all images."""
        return (self.last - self.first + 1) / subsets.PARTS

    def rows(self, store: Store) -> Tensor:
        """The images' numbers; the ranking has to be done."""
        return subsets.members(tenths_of(self.ranking, store), self.first, self.last)


def tenths_of(ranking: Trial, store: Store) -> Tensor:
    """The tenth of every training image, 1 to 10, that a trial was asked to observe."""
    record = store.record(ranking)
    if record is None or TENTHS not in record.observed:
        raise DataError(f"the run that ranks the images is missing ({ranking.label}); the same command tries it again")
    return torch.tensor([int(digit) + 1 for digit in record.observed[TENTHS]["of_each"]])
