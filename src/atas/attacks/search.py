"""Searches: the interface of attacks that run under the scheduler.

A job is one example and, for a targeted attack, one target class. A slot holds one job. Each step advances every
running slot by one iteration; slots may be at different iterations. The scheduler replaces finished jobs with waiting
ones, so the device stays busy until the last jobs, and a broken example takes no more time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from atas.core.dispatch import fast_op
from atas.core.rng import CounterRNG
from atas.threat import Threat, format_pixels

LogitsFunction = Callable[[Tensor], Tensor]  # images (B, C, H, W) to logits (B, classes), differentiable


@dataclass(frozen=True)
class Slots:
    """The tensors of B slots, allocated once and written in place, so that a captured step can be replayed.

    An idle slot keeps its last values, which are finite and do not affect other slots.
    """

    x: Tensor
    """Clean images (B, C, H, W)."""
    y: Tensor
    """Labels (B,), int64 like the other integers."""
    target: Tensor
    """The target class; the label itself for an attack without targets."""
    index: Tensor
    """Position of the example in its data set; random numbers are hashed from it and `target_rank`."""
    target_rank: Tensor
    """Rank of the target among the example's targets, from 0; 0 without targets."""
    iteration: Tensor
    """Iterations that the slot has made; 0 for a new job."""
    occupied: Tensor
    """Whether the slot holds a job."""
    point: Tensor
    """The point to verify (B, C, H, W): the adversarial input if `broken`, else the best so far."""
    broken: Tensor
    """Whether `point` is a candidate adversarial input. The scheduler clears the flag if the verifier rejects the
    point; the search then continues and must not propose the same point again."""
    done: Tensor
    """Whether the slot has made all iterations."""
    targeted: bool = False
    """Whether `y` holds target classes: the search succeeds where the prediction is `y`, not where it differs. It then
    has one job per example, whatever `num_targets` says."""

    @staticmethod
    def empty(count: int, like: Tensor, *, targeted: bool = False) -> Slots:
        """Return idle slots for images with the shape (without the batch), dtype and device of `like`."""

        def numbers() -> Tensor:
            return torch.zeros(count, dtype=torch.int64, device=like.device)

        def flags() -> Tensor:
            return torch.zeros(count, dtype=torch.bool, device=like.device)

        images = torch.zeros(count, *like.shape[1:], dtype=like.dtype, device=like.device)
        return Slots(
            x=images,
            y=numbers(),
            target=numbers(),
            index=numbers(),
            target_rank=numbers(),
            iteration=numbers(),
            occupied=flags(),
            point=images.clone(),
            broken=flags(),
            done=flags(),
            targeted=targeted,
        )

    def __len__(self) -> int:
        return len(self.y)

    def running(self) -> Tensor:
        """Return the flags (B,) of the slots that a step advances; the values of other slots must not change.

        A broken slot waits for the verifier. So if its point is rejected, the next steps do not depend on the time of
        the poll.
        """
        return self.occupied & ~self.broken & ~self.done

    def assign(
        self,
        slots: Tensor,
        *,
        x: Tensor,
        y: Tensor,
        target: Tensor,
        index: Tensor,
        target_rank: Tensor | int = 0,
        point: Tensor | None = None,
        iteration: int = 0,
    ) -> None:
        """Write new jobs to the slots with these numbers; `point` and `iteration` continue an earlier search."""
        self.x[slots] = x
        self.y[slots] = y
        self.target[slots] = target
        self.index[slots] = index
        self.target_rank[slots] = target_rank
        self.iteration[slots] = iteration
        self.occupied[slots] = True
        self.point[slots] = x if point is None else point
        self.broken[slots] = False
        self.done[slots] = False


def expand_like(values: Tensor, images: Tensor) -> Tensor:
    """Reshape one value per example so that it broadcasts over a batch of images."""
    return values.view(-1, *(1,) * (images.dim() - 1))


def where_write(old: Tensor, new: Tensor, slots: Tensor) -> None:
    """Overwrite `old` in place for the flagged slots."""
    old.copy_(torch.where(expand_like(slots, old), new, old))


@fast_op
def random_start(threat: Threat, slots: Slots, seed: int, epoch: Tensor, current: Tensor) -> Tensor:
    """Return a random point of the threat model for each slot at iteration 0, else `current`.

    `epoch` is one number, or one per slot. Like the seed, it selects the random numbers.
    """
    start = threat.random_start(slots.x, CounterRNG(seed, epoch, slots.index))
    return torch.where(expand_like(slots.iteration == 0, start), start, current)


class SearchState(Protocol):
    """A running search: its values for each slot."""

    def step(self, model: LogitsFunction) -> None:
        """Make one iteration in every running slot; initialise slots at iteration 0 first.

        There must be no host synchronisation, and no shape or branch that depends on data. The result of a slot may
        depend only on its own tensors, the seed and the model.
        """


class Search(Protocol):
    """An attack that runs in slots, with fixed settings."""

    @property
    def name(self) -> str:
        """The name in results."""

    @property
    def steps(self) -> int:
        """The maximum number of iterations of a job; the search sets `done` at this iteration."""

    @property
    def queries_per_step(self) -> int:
        """Forward passes per iteration."""

    @property
    def backward_passes(self) -> int:
        """Backward passes per iteration."""

    def num_targets(self, num_classes: int) -> int:
        """Return the number of targets per example, each of which is a job; 0 for one job without a target."""

    def settings(self, threat: Threat) -> dict[str, Any]:
        """Return the settings that reproduce the attack, as plain JSON values."""

    def init_state(self, slots: Slots, threat: Threat, num_classes: int, seed: int) -> SearchState:
        """Allocate the state of the search for these slots."""


@dataclass(frozen=True)
class AtBudget:
    """A search at a smaller budget than the threat model of the evaluation.

    The scheduler gives it the threat model with this budget, and verifies its points there.
    """

    search: Search
    budget: float

    @property
    def name(self) -> str:
        """The search and the budget."""
        return f"{self.search.name} at {format_pixels(self.budget)}"

    @property
    def steps(self) -> int:
        """As in the search."""
        return self.search.steps

    @property
    def queries_per_step(self) -> int:
        """As in the search."""
        return self.search.queries_per_step

    @property
    def backward_passes(self) -> int:
        """As in the search."""
        return self.search.backward_passes

    def num_targets(self, num_classes: int) -> int:
        """Return the number of the search."""
        return self.search.num_targets(num_classes)

    def settings(self, threat: Threat) -> dict[str, Any]:
        """Return the settings of the search at this budget."""
        return {"search": self.search.name, "eps": self.budget} | self.search.settings(threat.with_eps(self.budget))

    def init_state(self, slots: Slots, threat: Threat, num_classes: int, seed: int) -> SearchState:
        """Allocate the state of the search; the threat model has this budget already."""
        return self.search.init_state(slots, threat, num_classes, seed)
