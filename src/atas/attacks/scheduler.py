"""Continuous batching for attacks: a search over many examples in a fixed number of slots.

The device runs `poll_interval` steps without host synchronisation. The scheduler then verifies candidate adversarial
inputs in full precision, replaces finished jobs with waiting ones, and reports progress.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from atas.attacks.losses import correct
from atas.attacks.search import LogitsFunction, Search, Slots
from atas.core.validation import check_labels
from atas.threat import Threat

_POLL_INTERVAL = 5

Step = Callable[[], None]
StepRunner = Callable[[Step], Callable[[int], None]]


def run_eagerly(step: Step) -> Callable[[int], None]:
    """A number of steps, the plain way.

    Another `StepRunner` may record the step and replay it. It is called while all slots are idle, so steps that it
    makes to warm up change nothing.
    """

    def times(count: int) -> None:
        for _ in range(count):
            step()

    return times


@dataclass(frozen=True)
class WarmStart:
    """Where the jobs of a search were when all of them were over: one that begins in the same way goes on from there.

    Only a search whose jobs keep all they know in their slot's point can.
    """

    search: Search
    points: Tensor
    """One an example (N, C, H, W), beside the images."""


@dataclass(frozen=True)
class Examples:
    """Images to attack and what the model makes of them; the tensors live together, the slots may live elsewhere."""

    x: Tensor
    """Images (N, C, H, W)."""
    y: Tensor
    """Labels (N,), int64."""
    index: Tensor
    """Number of each in its data set (N,), int64: random numbers are hashed from it."""
    logits: Tensor
    """What the verifier says of the images (N, classes)."""

    @staticmethod
    def from_model(
        verifier: LogitsFunction, x: Tensor, y: Tensor, index: Tensor, *, batch: int, device: torch.device
    ) -> Examples:
        """Ask the verifier, so many images at a time, on that device."""
        with torch.no_grad():
            logits = torch.cat([verifier(part.to(device)).to(x.device) for part in x.split(batch)])
        check_labels(y, logits.shape[1])
        return Examples(x, y, index, logits)

    @property
    def num_classes(self) -> int:
        """How many the model has."""
        return self.logits.shape[1]

    def misclassified(self) -> Tensor:
        """Which of them (N,) need no attack."""
        return ~correct(self.logits, self.y)

    def target_classes(self, search: Search) -> Tensor:
        """The class that each job aims at (N, jobs): other classes, likeliest first, or the label without targets.

        >>> from atas.attacks.apgd import APGD
        >>> examples = Examples(torch.rand(1, 1, 2, 2), *torch.tensor([[0], [0]]), torch.tensor([[5.0, 1.0, 3.0, 2.0]]))
        >>> examples.target_classes(APGD("t")).tolist(), examples.target_classes(APGD("ce")).tolist()
        ([[2, 3, 1]], [[0]])
        """
        label = self.y.unsqueeze(1)
        if not (count := search.num_targets(self.num_classes)):
            return label
        label_first = self.logits.scatter(1, label, torch.inf).argsort(dim=1, descending=True, stable=True)
        return label_first[:, 1 : count + 1]


@dataclass(frozen=True)
class SearchProgress:
    """What a search has found so far: all that it needs to go on after a stop.

    A job that was in a slot at the stop begins again and takes the same course.
    """

    broken: Tensor
    """Whether there is an adversarial input (N,), on the CPU. Examples that begin as broken are left alone."""
    finished: Tensor
    """Which jobs came to their end (N, jobs), on the CPU."""
    queries_per_example: Tensor
    """Queries of the model (N,), on the CPU; by jobs that are over, including those that a warm start saved."""
    point: Tensor
    """The adversarial input where this search found one, else the image (N, C, H, W), beside the images."""
    warm_start: WarmStart | None = None
    """If wanted, where the jobs ended, whatever was found there."""

    @staticmethod
    def start(search: Search, examples: Examples, broken: Tensor, *, record_warm_start: bool = False) -> SearchProgress:
        """An empty one, but for the examples that are broken already."""
        jobs = max(search.num_targets(examples.num_classes), 1)
        return SearchProgress(
            broken=broken.to("cpu", copy=True),
            finished=torch.zeros(len(examples.x), jobs, dtype=torch.bool),
            queries_per_example=torch.zeros(len(examples.x), dtype=torch.int64),
            point=examples.x.clone(),
            warm_start=WarmStart(search, examples.x.clone()) if record_warm_start else None,
        )

    def pending_jobs(self) -> Tensor:
        """What is left to do: rows of (rank of the target, example), likeliest targets first."""
        return (~(self.finished | self.broken.unsqueeze(1))).T.nonzero()


def run(
    search: Search,
    search_model: LogitsFunction,
    verifier: LogitsFunction,
    examples: Examples,
    threat: Threat,
    progress: SearchProgress,
    *,
    seed: int = 0,
    slots: int = 256,
    poll_interval: int = 5,
    device: torch.device | None = None,
    run_steps: StepRunner = run_eagerly,
    on_poll: Callable[[int], None] | None = None,
    warm_start: WarmStart | None = None,
) -> None:
    """Run every pending job of the progress, and enter its result there.

    Which examples are broken depends neither on `slots` nor on `poll_interval`. Which adversarial input is found first
    where there are several, and how many queries it takes, may.

    Args:
        search: the attack.
        search_model: the model to search with, differentiable and of whatever precision.
        verifier: the model that decides. What the search holds to be misclassified counts only if it is so here; if
            not, the search goes on. The last point of a job is judged in any case.
        examples: images, labels, and the verifier's logits at the images.
        threat: the ball.
        progress: what is known; it is up to date at each poll.
        seed: another seed gives other random numbers.
        slots: how many at most.
        poll_interval: steps from one poll to the next.
        device: where the slots live; beside the images if not given.
        run_steps: how steps are made, see `run_eagerly`.
        on_poll: called after each poll with the number of queries that are left at most: to save the progress, to
            show progress, or to stop by raising.
        warm_start: what a shorter search has done of the same jobs; they go on from there.
    """
    with torch.inference_mode(False), torch.no_grad():
        jobs = progress.pending_jobs()
        if not len(jobs):
            return
        place = examples.x.device if device is None else device
        tensors = Slots.empty(slot_count(len(jobs), slots), examples.x[:1].to(place))
        state = search.init_state(tensors, threat, examples.num_classes, seed)
        advance = run_steps(lambda: state.step(search_model))
        table = _SlotTable(search, verifier, examples, threat, progress, tensors, warm_start)
        while table.admit():
            advance(min(poll_interval, table.steps_to_end()))
            table.poll()
            if on_poll is not None:
                on_poll(table.queries_left())


def slot_count(jobs: int, limit: int) -> int:
    """How many slots to use: as many as leave none idle in the last round.

    >>> slot_count(4500, 1024), slot_count(7, 1024)
    (900, 7)
    """
    return -(-jobs // -(-jobs // limit))


@dataclass(frozen=True)
class Scheduler:
    """A model, made ready for searches."""

    verifier: LogitsFunction
    """Decides: the model in full precision. It is differentiable too."""
    search_model: LogitsFunction
    """Searches: the model in whatever precision, differentiable."""
    precision: str
    """That of the search, for the result."""
    device: torch.device
    slots: int
    """How many jobs at a time at most; also how many images are judged at a time."""
    poll_interval: int = _POLL_INTERVAL
    """Steps from one poll of the slots to the next."""
    run_steps: StepRunner = run_eagerly

    def examples(self, x: Tensor, y: Tensor, index: Tensor) -> Examples:
        """Images, labels and their numbers, with what the verifier says of the images."""
        x, y, index = x.to(self.device), y.to(self.device), index.to(self.device)
        return Examples.from_model(self.verifier, x, y, index, batch=self.slots, device=self.device)

    def run(
        self,
        search: Search,
        examples: Examples,
        threat: Threat,
        progress: SearchProgress,
        *,
        seed: int,
        on_poll: Callable[[int], None] | None = None,
        warm_start: WarmStart | None = None,
    ) -> None:
        """Run the pending jobs of the progress."""
        run(
            search,
            self.search_model,
            self.verifier,
            examples,
            threat,
            progress,
            seed=seed,
            slots=self.slots,
            poll_interval=self.poll_interval,
            device=self.device,
            run_steps=self.run_steps,
            on_poll=on_poll,
            warm_start=warm_start,
        )

    def queries_per_poll(self, search: Search, jobs: int) -> int:
        """Queries from one poll to the next, to tell how long the rest will take."""
        return (slot_count(jobs, self.slots) if jobs else 0) * self.poll_interval * search.queries_per_step


class _SlotTable:
    """The host's side: which job is in which slot."""

    def __init__(
        self,
        search: Search,
        verifier: LogitsFunction,
        examples: Examples,
        threat: Threat,
        progress: SearchProgress,
        slots: Slots,
        warm_start: WarmStart | None,
    ) -> None:
        self._search, self._verifier, self._examples = search, verifier, examples
        self._threat, self._progress, self._slots = threat, progress, slots
        self._warm_start, self._start_iteration = warm_start, 0 if warm_start is None else warm_start.search.steps
        self._targets = examples.target_classes(search)
        self._waiting = progress.pending_jobs()
        self._busy = torch.zeros(len(slots), dtype=torch.bool)
        self._target_rank, self._row, self._iteration = torch.zeros(3, len(slots), dtype=torch.int64)

    def admit(self) -> bool:
        """Give jobs to idle slots while there are any; returns whether there is something to do."""
        idle = (~self._busy).nonzero().squeeze(1)
        taken, self._waiting = self._waiting[: len(idle)], self._waiting[len(idle) :]
        if len(taken):
            slots, (ranks, rows) = idle[: len(taken)], taken.T
            self._target_rank[slots], self._row[slots] = ranks, rows
            self._iteration[slots], self._busy[slots] = self._start_iteration, True
            self._load(slots, ranks, rows)
        return bool(self._busy.any())

    def _load(self, slots: Tensor, ranks: Tensor, rows: Tensor) -> None:
        device, examples = self._slots.x.device, self._examples
        there = rows.to(examples.x.device)
        self._slots.assign(
            slots.to(device),
            x=examples.x[there].to(device),
            y=examples.y[there].to(device),
            target=self._targets[there, ranks.to(examples.x.device)].to(device),
            index=examples.index[there].to(device),
            target_rank=ranks.to(device),
            point=None if self._warm_start is None else self._warm_start.points[there].to(device),
            iteration=self._start_iteration,
        )

    def steps_to_end(self) -> int:
        """Steps until the last of the jobs in the slots is done."""
        return self._search.steps - int(self._iteration[self._busy].min())

    def queries_left(self) -> int:
        """Queries that are left at most."""
        under_way = int((self._search.steps - self._iteration[self._busy]).sum())
        to_come = len(self._waiting) * (self._search.steps - self._start_iteration)
        return (to_come + under_way) * self._search.queries_per_step

    def poll(self) -> None:
        """Verify what is due, enter it, and empty the slots whose job is over."""
        slots, progress = self._slots, self._progress
        broken, done, self._iteration = torch.stack((slots.broken, slots.done, slots.iteration)).cpu().unbind()
        ended = self._busy & done.bool()
        due = (ended | (self._busy & broken.bool())).nonzero().squeeze(1)
        if not len(due):
            return
        fooled = self._verify(due)
        progress.finished[self._row[ended], self._target_rank[ended]] = True
        slots.broken[due[~fooled].to(slots.x.device)] = False
        over = self._busy & (ended | progress.broken[self._row])
        progress.queries_per_example.index_add_(
            0, self._row[over], self._iteration[over] * self._search.queries_per_step
        )
        self._busy &= ~over
        slots.occupied.copy_(self._busy)
        self._waiting = self._waiting[~progress.broken[self._waiting[:, 1]]]

    def _verify(self, due: Tensor) -> Tensor:
        """Whether the points of these slots fool the verifier; those that do are entered."""
        slots, progress = self._slots, self._progress
        here = due.to(slots.x.device)
        points = self._threat.project(slots.point[here], slots.x[here])
        fooled = ~correct(self._verifier(points), slots.y[here]).cpu()
        rows = self._row[due]
        if progress.warm_start is not None:
            ends = progress.warm_start.points
            ends[rows.to(ends.device)] = slots.point[here].to(ends.device)
        # Two slots may hold two targets of one example: one of them is enough.
        if winners := {int(rows[place]): place for place in fooled.nonzero().flatten().tolist()}:
            found, places = torch.tensor(list(winners.items())).T
            progress.broken[found] = True
            progress.point[found.to(progress.point.device)] = points[places.to(points.device)].to(progress.point.device)
        return fooled
