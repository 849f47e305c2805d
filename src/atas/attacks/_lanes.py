"""Lanes: the places in which an attack works on many jobs at once, each with a clock of its own.

A job is an example and, for a targeted attack, the class that it is to be taken for. A lane holds one job. One step of
a search moves every lane by one iteration, whatever iteration that is for the lane; now and then a lane whose job is
over is given the next one. So the device is full until the last jobs, and a broken example costs nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from atas.fusing import fusable
from atas.noise import Draw
from atas.threat import Threat

Logits = Callable[[Tensor], Tensor]  # points (B, C, H, W) to logits (B, classes), differentiable


@dataclass(frozen=True)
class Lanes:
    """The tensors of B lanes. They are allocated once and written in place, so a recorded step can be replayed on them.

    An idle lane keeps what it held last: finite, and of no effect on the others.
    """

    x: Tensor
    """Clean images (B, C, H, W)."""
    y: Tensor
    """Labels (B,), int64, as are the other numbers."""
    target: Tensor
    """The class to be taken for; the label itself where an attack has no target."""
    example: Tensor
    """Number of the example in its data set: with `rank`, all that random numbers are hashed from."""
    rank: Tensor
    """Place of the target among the example's targets, from 0; 0 without targets."""
    clock: Tensor
    """Iterations that the lane has made: 0 in a lane that was just filled."""
    active: Tensor
    """Whether the lane holds a job."""
    point: Tensor
    """The point to judge (B, C, H, W): the adversarial input if `broken`, else the best so far."""
    broken: Tensor
    """The search holds `point` to be misclassified and inside the ball. The host may clear the flag; then the search
    goes on, and sets it again for another point only."""
    done: Tensor
    """All iterations are made."""

    @staticmethod
    def empty(count: int, like: Tensor) -> Lanes:
        """Idle lanes for images of the shape (without the batch), type and place of `like`."""

        def numbers() -> Tensor:
            return torch.zeros(count, dtype=torch.int64, device=like.device)

        def flags() -> Tensor:
            return torch.zeros(count, dtype=torch.bool, device=like.device)

        images = torch.zeros(count, *like.shape[1:], dtype=like.dtype, device=like.device)
        return Lanes(
            x=images,
            y=numbers(),
            target=numbers(),
            example=numbers(),
            rank=numbers(),
            clock=numbers(),
            active=flags(),
            point=images.clone(),
            broken=flags(),
            done=flags(),
        )

    def __len__(self) -> int:
        return len(self.y)

    def moving(self) -> Tensor:
        """The lanes (B,) that a step moves; all that belongs to another lane stays as it is.

        A lane that is broken waits for the host: where it goes from there, if its point is not confirmed, does not
        depend on when the host looks.
        """
        return self.active & ~self.broken & ~self.done

    def fill(
        self,
        lanes: Tensor,
        *,
        x: Tensor,
        y: Tensor,
        target: Tensor,
        example: Tensor,
        rank: Tensor | int = 0,
        point: Tensor | None = None,
        clock: int = 0,
    ) -> None:
        """Give new jobs to the lanes of these numbers; with a point and a clock, jobs that have come so far."""
        self.x[lanes] = x
        self.y[lanes] = y
        self.target[lanes] = target
        self.example[lanes] = example
        self.rank[lanes] = rank
        self.clock[lanes] = clock
        self.active[lanes] = True
        self.point[lanes] = x if point is None else point
        self.broken[lanes] = False
        self.done[lanes] = False


def wide(values: Tensor, images: Tensor) -> Tensor:
    """One value or flag an example, shaped so that it goes with a batch of images (or of anything)."""
    return values.view(-1, *(1,) * (images.dim() - 1))


def write(old: Tensor, new: Tensor, lanes: Tensor) -> None:
    """Overwrite in place what belongs to the lanes that are flagged."""
    old.copy_(torch.where(wide(lanes, old), new, old))


@fusable
def started(threat: Threat, lanes: Lanes, seed: int, epoch: Tensor, current: Tensor) -> Tensor:
    """Where each lane is at: a random point of its ball if it was just filled, else `current`.

    `epoch` is one number or one a lane; like the seed, another one gives other starts.
    """
    start = threat.random_start(lanes.x, Draw(seed, epoch, lanes.example))
    return torch.where(wide(lanes.clock == 0, start), start, current)


class State(Protocol):
    """A search under way: what it keeps for each of its lanes."""

    def step(self, logits: Logits) -> None:
        """One iteration of every lane that moves; a lane whose clock is 0 is set up first.

        No host synchronisation, and no shape or branch that depends on data. What becomes of a lane depends on its own
        tensors, the seed and the model alone.
        """


class Search(Protocol):
    """An attack that works in lanes; its settings are fixed."""

    @property
    def name(self) -> str:
        """What results are filed under."""

    @property
    def steps(self) -> int:
        """Iterations that a job makes at most: `done` is set when the clock reaches them."""

    @property
    def evaluations(self) -> int:
        """Forward passes of the model in an iteration."""

    @property
    def gradients(self) -> int:
        """After how many of them the gradient is computed."""

    def targets(self, classes: int) -> int:
        """Jobs an example: one a target, or 0 for a single job without a target."""

    def settings(self, threat: Threat) -> dict[str, Any]:
        """What a result file has to say for someone to repeat the attack; plain JSON values."""

    def begin(self, lanes: Lanes, threat: Threat, classes: int, seed: int) -> State:
        """Allocate what the search keeps for these lanes."""
