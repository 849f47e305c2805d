"""Searches: what an attack implements to run under the scheduler.

A job is one example and, for a targeted attack, one target class. A slot holds one job. Each step advances every
running slot by one iteration; slots may be at different iterations. The scheduler replaces finished jobs with waiting
ones, so the device stays full until the last jobs and a broken example costs nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from atas.core.dispatch import fast_op
from atas.core.rng import CounterRNG
from atas.threat import Threat

LogitsFunction = Callable[[Tensor], Tensor]  # points (B, C, H, W) to logits (B, classes), differentiable


@dataclass(frozen=True)
class Slots:
    """The tensors of B slots. They are allocated once and written in place, so a recorded step can be replayed on them.

    An idle slot keeps what it held last: finite, and of no effect on the others.
    """

    x: Tensor
    """Clean images (B, C, H, W)."""
    y: Tensor
    """Labels (B,), int64, as are the other numbers."""
    target: Tensor
    """The class to be taken for; the label itself where an attack has no target."""
    index: Tensor
    """Number of the example in its data set: with `target_rank`, all that random numbers are hashed from."""
    target_rank: Tensor
    """Place of the target among the example's targets, from 0; 0 without targets."""
    iteration: Tensor
    """Iterations that the slot has made: 0 in a slot that was just filled."""
    occupied: Tensor
    """Whether the slot holds a job."""
    point: Tensor
    """The point to verify (B, C, H, W): the adversarial input if `broken`, else the best so far."""
    broken: Tensor
    """Whether `point` is a candidate adversarial input. The scheduler clears the flag if the verifier rejects the
    point; the search then continues and must not propose the same point again."""
    done: Tensor
    """All iterations are made."""

    @staticmethod
    def empty(count: int, like: Tensor) -> Slots:
        """Idle slots for images of the shape (without the batch), type and device of `like`."""

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
        )

    def __len__(self) -> int:
        return len(self.y)

    def running(self) -> Tensor:
        """The slots (B,) that a step moves; all that belongs to another slot stays as it is.

        A slot that is broken waits for the host: where it goes from there, if its point is not confirmed, does not
        depend on when the host looks.
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
        """Give new jobs to the slots of these numbers; with a point and an iteration, jobs that have come so far."""
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
    """One value or flag an example, shaped so that it goes with a batch of images (or of anything)."""
    return values.view(-1, *(1,) * (images.dim() - 1))


def where_write(old: Tensor, new: Tensor, slots: Tensor) -> None:
    """Overwrite in place what belongs to the slots that are flagged."""
    old.copy_(torch.where(expand_like(slots, old), new, old))


@fast_op
def random_start(threat: Threat, slots: Slots, seed: int, epoch: Tensor, current: Tensor) -> Tensor:
    """Where each slot is at: a random point of its ball if it was just filled, else `current`.

    `epoch` is one number or one a slot; like the seed, another one gives other starts.
    """
    start = threat.random_start(slots.x, CounterRNG(seed, epoch, slots.index))
    return torch.where(expand_like(slots.iteration == 0, start), start, current)


class SearchState(Protocol):
    """A search under way: what it keeps for each of its slots."""

    def step(self, model: LogitsFunction) -> None:
        """One iteration of every slot that moves; a slot at iteration 0 is set up first.

        No host synchronisation, and no shape or branch that depends on data. What becomes of a slot depends on its own
        tensors, the seed and the model alone.
        """


class Search(Protocol):
    """An attack that works in slots; its settings are fixed."""

    @property
    def name(self) -> str:
        """What results are filed under."""

    @property
    def steps(self) -> int:
        """Iterations that a job makes at most: `done` is set when the slot's iteration reaches them."""

    @property
    def queries_per_step(self) -> int:
        """Forward passes of the model in an iteration."""

    @property
    def backward_passes(self) -> int:
        """After how many of them the gradient is computed."""

    def num_targets(self, num_classes: int) -> int:
        """Jobs an example: one a target, or 0 for a single job without a target."""

    def settings(self, threat: Threat) -> dict[str, Any]:
        """What a result file has to say for someone to repeat the attack; plain JSON values."""

    def init_state(self, slots: Slots, threat: Threat, num_classes: int, seed: int) -> SearchState:
        """Allocate what the search keeps for these slots."""
