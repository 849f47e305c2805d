"""Continuous batching for attacks: a search over many examples in a fixed number of slots.

The device runs `poll_interval` steps without host synchronisation. The scheduler then verifies candidate adversarial
inputs in full precision, replaces finished jobs with waiting ones, and reports progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atas.attacks.losses import goal_margin, resists
from atas.attacks.search import AtBudget, LogitsFunction, Search, Slots
from atas.core.validation import check_labels, check_targets
from atas.threat import Threat

_BATCH_SIZES = {"cuda": 1024}
_DEFAULT_BATCH_SIZE = 256
_POLL_INTERVAL = 5

Step = Callable[[], None]
StepRunner = Callable[[Step], Callable[[int], None]]
OnVerified = Callable[[Tensor, Tensor, Tensor], None]
"""Called with rows of the examples (on the CPU), the points that were reached for them, and the verifier's logits."""


def default_batch_size(device: torch.device) -> int:
    """Return a number of images that keeps the device busy with a small network."""
    return _BATCH_SIZES.get(device.type, _DEFAULT_BATCH_SIZE)


def run_eagerly(step: Step) -> Callable[[int], None]:
    """Return a function that calls `step` a given number of times.

    Another `StepRunner` may capture the step and replay it. The scheduler calls it while all slots are idle, so warm-up
    steps change nothing.
    """

    def times(count: int) -> None:
        for _ in range(count):
            step()

    return times


@dataclass(frozen=True)
class WarmStart:
    """The last points of a finished search, from which a longer search with the same first steps continues.

    This works only for a search whose state is the slot's point alone.
    """

    search: Search
    points: Tensor
    """The last point of each example (N, C, H, W), on the device of the images."""


@dataclass(frozen=True)
class Examples:
    """Images to attack, with the verifier's logits; all tensors are on the scheduler's device."""

    x: Tensor
    """Images (N, C, H, W)."""
    y: Tensor
    """Labels (N,), int64."""
    index: Tensor
    """Position of each example in its data set (N,), int64; random numbers are hashed from it."""
    logits: Tensor
    """The verifier's logits at the images (N, classes)."""
    targeted: bool = False
    """Whether `y` holds target classes: an attack succeeds where the prediction is `y`, not where it differs."""

    @property
    def num_classes(self) -> int:
        """The number of classes of the model."""
        return self.logits.shape[1]

    def misclassified(self) -> Tensor:
        """Return the flags (N,) of examples on which an attack succeeds without a perturbation."""
        return ~self.resists(self.logits)

    def resists(self, logits: Tensor) -> Tensor:
        """Return for which examples an attack has failed at the points with these logits."""
        return resists(logits, self.y, targeted=self.targeted)

    def margin(self, logits: Tensor) -> Tensor:
        """Return how far the points with these logits are from success (N,), on the CPU; -inf where they succeed."""
        margin = goal_margin(logits, self.y, targeted=self.targeted).double()
        return margin.where(self.resists(logits), -torch.inf).cpu()

    def jobs(self, search: Search) -> int:
        """Return the number of jobs per example."""
        return 1 if self.targeted else max(search.num_targets(self.num_classes), 1)

    def select(self, rows: Tensor) -> Examples:
        """Return some of the examples."""
        return replace(self, x=self.x[rows], y=self.y[rows], index=self.index[rows], logits=self.logits[rows])

    def target_classes(self, search: Search) -> Tensor:
        """Return each job's target class (N, jobs): the likeliest other classes, or the label without targets.

        >>> from atas.attacks.apgd import APGD
        >>> examples = Examples(torch.rand(1, 1, 2, 2), *torch.tensor([[0], [0]]), torch.tensor([[5.0, 1.0, 3.0, 2.0]]))
        >>> examples.target_classes(APGD(loss="t")).tolist(), examples.target_classes(APGD(loss="ce")).tolist()
        ([[2, 3, 1]], [[0]])
        """
        label = self.y.unsqueeze(1)
        count = search.num_targets(self.num_classes)
        if self.targeted or not count:
            return label
        label_first = self.logits.scatter(1, label, torch.inf).argsort(dim=1, descending=True, stable=True)
        return label_first[:, 1 : count + 1]


@dataclass(frozen=True)
class SearchProgress:
    """The results of a search so far, sufficient to resume it.

    A job that was in a slot when the search stopped starts again and makes the same steps.
    """

    broken: Tensor
    """Whether each example has an adversarial input (N,), on the CPU. Examples that start as broken are skipped."""
    finished: Tensor
    """Which jobs made all their iterations (N, jobs), on the CPU."""
    queries_per_example: Tensor
    """Queries of the model (N,) by jobs that are over, on the CPU; includes the steps that a warm start saved."""
    points: Tensor | None = None
    """If given, adversarial inputs are written here (N, C, H, W); on the device of the images."""
    warm_start: WarmStart | None = None
    """If given, the last point of every job is written here."""
    predicted: Tensor | None = None
    """If given, the class that the verifier predicts at each adversarial input is written here (N,), on the CPU."""

    @staticmethod
    def start(
        search: Search,
        examples: Examples,
        broken: Tensor,
        *,
        points: Tensor | None = None,
        record_warm_start: bool = False,
    ) -> SearchProgress:
        """Return the progress of a search that has not begun, with the examples that are broken already."""
        jobs = examples.jobs(search)
        return SearchProgress(
            broken=broken.to("cpu", copy=True),
            finished=torch.zeros(len(examples.x), jobs, dtype=torch.bool),
            queries_per_example=torch.zeros(len(examples.x), dtype=torch.int64),
            points=points,
            warm_start=WarmStart(search, examples.x.clone()) if record_warm_start else None,
            predicted=torch.full((len(examples.x),), -1),
        )

    @property
    def queries(self) -> int:
        """Queries of all examples."""
        return int(self.queries_per_example.sum())

    def pending_jobs(self) -> Tensor:
        """Return the jobs that are left, as rows of (rank of the target, example), likeliest targets first."""
        return (~(self.finished | self.broken.unsqueeze(1))).T.nonzero()


def predicted_classes(logits: Tensor) -> Tensor:
    """Return the predicted classes; -1 for logits with a NaN, which are never correct.

    >>> predicted_classes(torch.tensor([[2.0, 1.0], [float("nan"), 1.0]])).tolist()
    [0, -1]
    """
    return logits.argmax(1).masked_fill(logits.isnan().any(1), -1)


def slot_count(jobs: int, limit: int) -> int:
    """Return the number of slots to use: at most `limit`, and so that the last round leaves few slots idle.

    >>> slot_count(4500, 1024), slot_count(7, 1024)
    (900, 7)
    """
    return -(-jobs // -(-jobs // limit))


@dataclass(frozen=True)
class Scheduler:
    """Runs searches on a model: continuous batching in slots, with a search model and a verifier."""

    search_model: LogitsFunction
    """The model to search with: differentiable, in any precision."""
    verifier: LogitsFunction
    """The model in full precision, which gives the verdicts. A candidate adversarial input counts only if the verifier
    misclassifies it; otherwise the search continues. The last point of every job is verified too."""
    device: torch.device
    """The device of the slots and the examples."""
    slots: int
    """The maximum number of jobs at a time; also the number of images that `examples` classifies at a time."""
    poll_interval: int = _POLL_INTERVAL
    """Steps from one poll of the slots to the next."""
    run_steps: StepRunner = run_eagerly
    precision: str = "float32"
    """The precision of the search model, for the result."""
    notes: tuple[str, ...] = ()
    """Why the search does not run in a lower precision, for the result."""

    def examples(self, x: Tensor, y: Tensor, index: Tensor, *, targeted: bool = False) -> Examples:
        """Move images, labels (or targets) and indices to the device, and classify the images with the verifier."""
        x, y, index = x.to(self.device), y.to(self.device), index.to(self.device)
        with torch.no_grad():
            logits = torch.cat([self.verifier(batch) for batch in x.split(self.slots)])
        (check_targets if targeted else check_labels)(y, logits.shape[1])
        return Examples(x, y, index, logits, targeted)

    def run(
        self,
        search: Search,
        examples: Examples,
        threat: Threat,
        progress: SearchProgress,
        *,
        seed: int = 0,
        on_poll: Callable[[int], None] | None = None,
        warm_start: WarmStart | None = None,
        on_verified: OnVerified | None = None,
    ) -> None:
        """Run every pending job of the progress, and write the results there.

        Which examples are broken depends neither on `slots` nor on `poll_interval`. The adversarial input and the
        number of queries may depend on them where an example has several adversarial inputs.

        Args:
            search: the attack.
            examples: images, labels, and the verifier's logits at the images.
            threat: the threat model.
            progress: the results so far; up to date at each poll.
            seed: another seed gives other random numbers.
            on_poll: called after each poll with the maximum number of queries that are left. It may save the progress,
                show it, or stop the search by raising.
            warm_start: the last points of a shorter search with the same first steps; the jobs continue from there.
            on_verified: called with adversarial inputs, and with the last points of jobs that ended without one.
        """
        with torch.inference_mode(False), torch.no_grad():
            if not len(progress.pending_jobs()):
                return
            threat = threat.with_eps(search.budget) if isinstance(search, AtBudget) else threat
            table = _SlotTable(self, search, examples, threat, progress, warm_start, on_verified)
            state = search.init_state(table.slots, table.threat, examples.num_classes, seed)
            advance = self.run_steps(lambda: state.step(self.search_model))
            while table.admit():
                advance(min(self.poll_interval, table.steps_to_end()))
                table.poll()
                if on_poll is not None:
                    on_poll(table.queries_left())

    def run_stages(
        self, stages: Iterable[Search], examples: Examples, threat: Threat, broken: Tensor, *, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Run searches in order, each on the examples that are not broken yet.

        Returns:
            Which examples are broken in the end (N,), on the CPU; and points (N, C, H, W): the adversarial input where
            a search found one, else the image.
        """
        points = examples.x.clone()
        for search in stages:
            progress = SearchProgress.start(search, examples, broken, points=points)
            self.run(search, examples, threat, progress, seed=seed)
            broken = progress.broken
        return broken, points

    def queries_per_poll(self, search: Search, jobs: int) -> int:
        """Return the queries from one poll to the next."""
        return (slot_count(jobs, self.slots) if jobs else 0) * self.poll_interval * search.queries_per_step


class _SlotTable:
    """The slots of a running search, with their threat model, and the host's record of which job is in which slot."""

    def __init__(
        self,
        scheduler: Scheduler,
        search: Search,
        examples: Examples,
        threat: Threat,
        progress: SearchProgress,
        warm_start: WarmStart | None,
        on_verified: OnVerified | None,
    ) -> None:
        self._verifier, self._search, self._examples, self._progress = scheduler.verifier, search, examples, progress
        self._warm_start, self._start_iteration = warm_start, 0 if warm_start is None else warm_start.search.steps
        self._on_verified = on_verified
        self._targets = examples.target_classes(search)
        self._waiting = progress.pending_jobs()
        count = slot_count(len(self._waiting), scheduler.slots)
        self.slots = Slots.empty(count, examples.x[:1], targeted=examples.targeted)
        self._examples_threat = threat
        self.threat = threat.select(torch.zeros(count, dtype=torch.int64))  # masks of its own, to write into
        self._busy = torch.zeros(count, dtype=torch.bool)
        self._target_rank, self._row, self._iteration = torch.zeros(3, count, dtype=torch.int64)

    def admit(self) -> bool:
        """Assign waiting jobs to idle slots; return whether any slot is busy."""
        idle = (~self._busy).nonzero().squeeze(1)
        taken, self._waiting = self._waiting[: len(idle)], self._waiting[len(idle) :]
        if len(taken):
            slots, (ranks, rows) = idle[: len(taken)], taken.T
            self._target_rank[slots], self._row[slots] = ranks, rows
            self._iteration[slots], self._busy[slots] = self._start_iteration, True
            self._load(*(numbers.to(self.slots.x.device) for numbers in (slots, ranks, rows)))
        return bool(self._busy.any())

    def _load(self, slots: Tensor, ranks: Tensor, rows: Tensor) -> None:
        examples = self._examples
        self.threat.assign(slots, self._examples_threat, rows)
        self.slots.assign(
            slots,
            x=examples.x[rows],
            y=examples.y[rows],
            target=self._targets[rows, ranks],
            index=examples.index[rows],
            target_rank=ranks,
            point=None if self._warm_start is None else self._warm_start.points[rows],
            iteration=self._start_iteration,
        )

    def steps_to_end(self) -> int:
        """Return the steps until every job that is now in a slot is done."""
        return self._search.steps - int(self._iteration[self._busy].min())

    def queries_left(self) -> int:
        """Return the maximum number of queries that are left."""
        running = int((self._search.steps - self._iteration[self._busy]).sum())
        waiting = len(self._waiting) * (self._search.steps - self._start_iteration)
        return (waiting + running) * self._search.queries_per_step

    def poll(self) -> None:
        """Verify candidates and last points, write the results, and free the slots whose job is over."""
        slots, progress = self.slots, self._progress
        broken, done, self._iteration = torch.stack((slots.broken, slots.done, slots.iteration)).cpu().unbind()
        ended = self._busy & done.bool()
        due = (ended | (self._busy & broken.bool())).nonzero().squeeze(1)
        if not len(due):
            return
        fooled = self._verify(due, ended[due])
        progress.finished[self._row[ended], self._target_rank[ended]] = True
        slots.broken[due[~fooled].to(slots.x.device)] = False
        over = self._busy & (ended | progress.broken[self._row])
        progress.queries_per_example.index_add_(
            0, self._row[over], self._iteration[over] * self._search.queries_per_step
        )
        self._busy &= ~over
        slots.occupied.copy_(self._busy)
        self._waiting = self._waiting[~progress.broken[self._waiting[:, 1]]]

    def _verify(self, due: Tensor, ended: Tensor) -> Tensor:
        """Return whether the points of the slots `due` fool the verifier, and write those that do to the progress.

        `ended` flags the slots among them that have made all iterations.
        """
        slots, progress, rows = self.slots, self._progress, self._row[due]
        device = slots.x.device
        on_device = due.to(device)
        points = self.threat.select(on_device).project(slots.point[on_device], slots.x[on_device])
        logits = self._verifier(points)
        fooled = ~resists(logits, slots.y[on_device], targeted=slots.targeted).cpu()
        if progress.warm_start is not None:
            progress.warm_start.points[rows.to(device)] = slots.point[on_device]
        # Two slots may hold two targets of one example: one adversarial input is enough.
        if winners := {int(rows[position]): position for position in fooled.nonzero().flatten().tolist()}:
            newly_broken, positions = torch.tensor(list(winners.items())).T
            progress.broken[newly_broken] = True
            if progress.points is not None:
                progress.points[newly_broken.to(device)] = points[positions.to(device)]
            if progress.predicted is not None:
                progress.predicted[newly_broken] = predicted_classes(logits)[positions.to(device)].cpu()
        if self._on_verified is not None:
            missed = (ended & ~progress.broken[rows]).nonzero().squeeze(1)
            reached = torch.cat([torch.tensor([*winners.values()], dtype=torch.int64), missed])
            self._on_verified(rows[reached], points[reached.to(device)], logits[reached.to(device)])
        return fooled
