"""The queue: a search over many examples in few lanes, which are kept full.

Between two looks of the host at the lanes there are only steps. At a look, points that the search holds to be
misclassified are put before the judge, lanes whose job is over are emptied and filled again from the queue, and whoever
called is told how far it has come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from atas.attacks._lanes import Lanes, Logits, Search
from atas.attacks._logits import correct
from atas.checks import check_labels
from atas.threat import Threat

Step = Callable[[], None]
Repeat = Callable[[Step], Callable[[int], None]]


def one_by_one(step: Step) -> Callable[[int], None]:
    """A number of steps, the plain way.

    Another `Repeat` may record the step and replay it. It is called while all lanes are idle, so steps that it makes to
    warm up change nothing.
    """

    def times(count: int) -> None:
        for _ in range(count):
            step()

    return times


@dataclass(frozen=True)
class Trail:
    """Where the jobs of a search were when all of them were over: one that begins in the same way goes on from there.

    Only a search whose jobs keep all they know in their lane's point can.
    """

    search: Search
    points: Tensor
    """One an example (N, C, H, W), beside the images."""


@dataclass(frozen=True)
class Examples:
    """Images to attack and what the model makes of them; the tensors live together, the lanes may live elsewhere."""

    x: Tensor
    """Images (N, C, H, W)."""
    y: Tensor
    """Labels (N,), int64."""
    index: Tensor
    """Number of each in its data set (N,), int64: random numbers are hashed from it."""
    logits: Tensor
    """What the judge says of the images (N, classes)."""

    @staticmethod
    def of(judge: Logits, x: Tensor, y: Tensor, index: Tensor, *, batch: int, device: torch.device) -> Examples:
        """Ask the judge, so many images at a time, on that device."""
        with torch.no_grad():
            logits = torch.cat([judge(part.to(device)).to(x.device) for part in x.split(batch)])
        check_labels(y, logits.shape[1])
        return Examples(x, y, index, logits)

    @property
    def classes(self) -> int:
        """How many the model has."""
        return self.logits.shape[1]

    def misclassified(self) -> Tensor:
        """Which of them (N,) need no attack."""
        return ~correct(self.logits, self.y)

    def targets(self, search: Search) -> Tensor:
        """The class that each job aims at (N, jobs): other classes, likeliest first, or the label without targets.

        >>> from atas.attacks._apgd import APGD
        >>> examples = Examples(torch.rand(1, 1, 2, 2), *torch.tensor([[0], [0]]), torch.tensor([[5.0, 1.0, 3.0, 2.0]]))
        >>> examples.targets(APGD("t")).tolist(), examples.targets(APGD("ce")).tolist()
        ([[2, 3, 1]], [[0]])
        """
        label = self.y.unsqueeze(1)
        if not (count := search.targets(self.classes)):
            return label
        label_first = self.logits.scatter(1, label, torch.inf).argsort(dim=1, descending=True, stable=True)
        return label_first[:, 1 : count + 1]


@dataclass(frozen=True)
class Ledger:
    """What a search has found so far: all that it needs to go on after a stop.

    A job that was in a lane at the stop begins again and takes the same course.
    """

    broken: Tensor
    """Whether there is an adversarial input (N,), on the CPU. Examples that begin as broken are left alone."""
    finished: Tensor
    """Which jobs came to their end (N, jobs), on the CPU."""
    evaluations: Tensor
    """How often the model was evaluated (N,), on the CPU; by jobs that are over, with what a trail saved them."""
    point: Tensor
    """The adversarial input where this search found one, else the image (N, C, H, W), beside the images."""
    trail: Trail | None = None
    """If wanted, where the jobs ended, whatever was found there."""

    @staticmethod
    def open(search: Search, examples: Examples, broken: Tensor, *, trail: bool = False) -> Ledger:
        """An empty one, but for the examples that are broken already."""
        jobs = max(search.targets(examples.classes), 1)
        return Ledger(
            broken=broken.to("cpu", copy=True),
            finished=torch.zeros(len(examples.x), jobs, dtype=torch.bool),
            evaluations=torch.zeros(len(examples.x), dtype=torch.int64),
            point=examples.x.clone(),
            trail=Trail(search, examples.x.clone()) if trail else None,
        )

    def jobs(self) -> Tensor:
        """What is left to do: rows of (rank of the target, example), likeliest targets first."""
        return (~(self.finished | self.broken.unsqueeze(1))).T.nonzero()


def run(
    search: Search,
    logits: Logits,
    judge: Logits,
    examples: Examples,
    threat: Threat,
    ledger: Ledger,
    *,
    seed: int = 0,
    lanes: int = 256,
    every: int = 5,
    device: torch.device | None = None,
    repeat: Repeat = one_by_one,
    on_look: Callable[[int], None] | None = None,
    after: Trail | None = None,
) -> None:
    """Do every job that the ledger leaves to do, and enter there what comes of it.

    Which examples are broken depends neither on `lanes` nor on `every`. Which adversarial input is found first where
    there are several, and how many evaluations it takes, may.

    Args:
        search: the attack.
        logits: the model to search with, differentiable and of whatever precision.
        judge: the model that decides. What the search holds to be misclassified counts only if it is so here; if not,
            the search goes on. The last point of a job is judged in any case.
        examples: images, labels, and the judge's logits at the images.
        threat: the ball.
        ledger: what is known; it is up to date at each look.
        seed: another seed gives other random numbers.
        lanes: how many at most.
        every: steps from one look to the next.
        device: where the lanes live; beside the images if not given.
        repeat: how steps are made, see `one_by_one`.
        on_look: called after each look with the number of evaluations that are left at most: to save the ledger, to
            show progress, or to stop by raising.
        after: what a shorter search has done of the same jobs; they go on from there.
    """
    with torch.inference_mode(False), torch.no_grad():
        jobs = ledger.jobs()
        if not len(jobs):
            return
        home = examples.x.device if device is None else device
        places = Lanes.empty(lanes_for(len(jobs), lanes), examples.x[:1].to(home))
        state = search.begin(places, threat, examples.classes, seed)
        steps = repeat(lambda: state.step(logits))
        desk = _Desk(search, judge, examples, threat, ledger, places, after)
        while desk.fill():
            steps(min(every, desk.longest()))
            desk.look()
            if on_look is not None:
                on_look(desk.left())


def lanes_for(jobs: int, most: int) -> int:
    """How many lanes to use: as many as leave none idle in the last round.

    >>> lanes_for(4500, 1024), lanes_for(7, 1024)
    (900, 7)
    """
    return -(-jobs // -(-jobs // most))


class _Desk:
    """The host's side: which job is in which lane."""

    def __init__(
        self,
        search: Search,
        judge: Logits,
        examples: Examples,
        threat: Threat,
        ledger: Ledger,
        lanes: Lanes,
        after: Trail | None,
    ) -> None:
        self._search, self._judge, self._examples = search, judge, examples
        self._threat, self._ledger, self._lanes = threat, ledger, lanes
        self._after, self._begins_at = after, 0 if after is None else after.search.steps
        self._targets = examples.targets(search)
        self._waiting = ledger.jobs()
        self._busy = torch.zeros(len(lanes), dtype=torch.bool)
        self._rank, self._row, self._clock = torch.zeros(3, len(lanes), dtype=torch.int64)

    def fill(self) -> bool:
        """Give jobs to idle lanes while there are any; returns whether there is something to do."""
        idle = (~self._busy).nonzero().squeeze(1)
        taken, self._waiting = self._waiting[: len(idle)], self._waiting[len(idle) :]
        if len(taken):
            lanes, (ranks, rows) = idle[: len(taken)], taken.T
            self._rank[lanes], self._row[lanes] = ranks, rows
            self._clock[lanes], self._busy[lanes] = self._begins_at, True
            self._hand_over(lanes, ranks, rows)
        return bool(self._busy.any())

    def _hand_over(self, lanes: Tensor, ranks: Tensor, rows: Tensor) -> None:
        home, examples = self._lanes.x.device, self._examples
        there = rows.to(examples.x.device)
        self._lanes.fill(
            lanes.to(home),
            x=examples.x[there].to(home),
            y=examples.y[there].to(home),
            target=self._targets[there, ranks.to(examples.x.device)].to(home),
            example=examples.index[there].to(home),
            rank=ranks.to(home),
            point=None if self._after is None else self._after.points[there].to(home),
            clock=self._begins_at,
        )

    def longest(self) -> int:
        """Steps until the last of the jobs in the lanes is done."""
        return self._search.steps - int(self._clock[self._busy].min())

    def left(self) -> int:
        """Evaluations that are left at most."""
        under_way = int((self._search.steps - self._clock[self._busy]).sum())
        to_come = len(self._waiting) * (self._search.steps - self._begins_at)
        return (to_come + under_way) * self._search.evaluations

    def look(self) -> None:
        """Judge what is due, enter it, and empty the lanes whose job is over."""
        lanes, ledger = self._lanes, self._ledger
        broken, done, self._clock = torch.stack((lanes.broken, lanes.done, lanes.clock)).cpu().unbind()
        ended = self._busy & done.bool()
        due = (ended | (self._busy & broken.bool())).nonzero().squeeze(1)
        if not len(due):
            return
        fooled = self._judge_and_enter(due)
        ledger.finished[self._row[ended], self._rank[ended]] = True
        lanes.broken[due[~fooled].to(lanes.x.device)] = False
        over = self._busy & (ended | ledger.broken[self._row])
        ledger.evaluations.index_add_(0, self._row[over], self._clock[over] * self._search.evaluations)
        self._busy &= ~over
        lanes.active.copy_(self._busy)
        self._waiting = self._waiting[~ledger.broken[self._waiting[:, 1]]]

    def _judge_and_enter(self, due: Tensor) -> Tensor:
        """Whether the points of these lanes fool the judge; those that do are entered."""
        lanes, ledger = self._lanes, self._ledger
        here = due.to(lanes.x.device)
        points = self._threat.project(lanes.point[here], lanes.x[here])
        fooled = ~correct(self._judge(points), lanes.y[here]).cpu()
        rows = self._row[due]
        if ledger.trail is not None:
            ends = ledger.trail.points
            ends[rows.to(ends.device)] = lanes.point[here].to(ends.device)
        # Two lanes may hold two targets of one example: one of them is enough.
        if winners := {int(rows[place]): place for place in fooled.nonzero().flatten().tolist()}:
            found, places = torch.tensor(list(winners.items())).T
            ledger.broken[found] = True
            ledger.point[found.to(ledger.point.device)] = points[places.to(points.device)].to(ledger.point.device)
        return fooled
