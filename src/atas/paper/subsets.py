"""Training on subsets of the images by gradient norm.

A run ranks the training images: FGSM-RS or ATTA with the paper's step, run as the adaptive version of the method with a
fixed step, which stores gradient norms. `NormSubset` selects deciles of that ranking for another training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from atas.paper import gradient_norms
from atas.paper.gradient_norms import FIXED_STEP
from atas.paper.grid import QUICK_EPS, Grid, cifar, digits
from atas.paper.measurements import Deciles, load_deciles
from atas.paper.study import StudyOptions
from atas.sweeps.trial import Trial

if TYPE_CHECKING:
    from atas.paper.figure_study import MeasuredStudy
    from atas.sweeps.store import Store


@dataclass(frozen=True)
class NormSubset:
    """D_first^last of the ranking."""

    ranking: Trial
    first: int
    last: int

    def __str__(self) -> str:
        return f"D_{self.first}^{self.last}"

    def to_json(self) -> list[Any]:
        """Return what decides the selection."""
        return [self.ranking.training_key, self.first, self.last]

    @property
    def share(self) -> float:
        """The fraction of all training images."""
        return (self.last - self.first + 1) / gradient_norms.NUM_DECILES

    def rows(self, store: Store) -> Tensor:
        """Return the indices of the images; the ranking must be done."""
        return gradient_norms.decile_members(load_deciles(self.ranking, store), self.first, self.last)


EPS = 8 / 255
_ADAPTIVE_VERSION = {"fgsm-rs": "fgsm-rs-adaptive", "atta": "atas-literal"}
_STEPS = {"fgsm-rs": 10 / 255, "atta": 4 / 255}
_QUICK_STEPS = {"fgsm-rs": QUICK_EPS, "atta": 0.5 * QUICK_EPS}
QUICK_EPOCHS = 8


def subset_grid(options: StudyOptions) -> Grid:
    """Return the grid of the studies of subsets."""
    return digits() if options.quick else cifar("cifar10", (EPS,))


def quick_values(options: StudyOptions) -> dict[str, int]:
    """Return values that shorten the quick runs, because these studies have many."""
    return {"training.epochs": QUICK_EPOCHS} if options.quick else {}


def ranking_trial(study: MeasuredStudy, options: StudyOptions, method: str) -> Trial:
    """Return the trial that ranks images for a method: its adaptive version with a fixed step, which stores norms."""
    grid, eps = subset_grid(options), QUICK_EPS if options.quick else EPS
    step = (_QUICK_STEPS if options.quick else _STEPS)[method]
    values = {f"method.{key}": value for key, value in FIXED_STEP.items()} | {"method.max_step": step}
    cell = (grid.networks[0], _ADAPTIVE_VERSION[method], eps)
    return study.trial(options, grid, cell, (Deciles(),), values=values | quick_values(options))


def equal_epochs(examples: int, subset: int, batch_size: int, epochs: int) -> int:
    """Return how many epochs on a subset come nearest to the iterations of `epochs` on all examples.

    >>> equal_epochs(50_000, 10_000, 128, 30)
    148
    """
    return max(1, round(epochs * -(-examples // batch_size) / -(-subset // batch_size)))
