"""Run the attacks of an evaluation on each chunk of the examples, stage by stage; a stopped run can resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atas.attacks import PGD, Attack, Clean, StagedAttack
from atas.attacks.projected_gradient_descent import PGDRestart
from atas.attacks.scheduler import Examples, Scheduler, SearchProgress, WarmStart, predicted_classes
from atas.attacks.search import Search
from atas.errors import UsageError
from atas.evaluation.adversarial import KeptPoints, PointStore
from atas.evaluation.corruptions import Corruption
from atas.evaluation.outcomes import FIRST_STAGE, MISCLASSIFIED, ROBUST, AttackOutcome
from atas.evaluation.progress import ProgressMeter, StageKey
from atas.evaluation.resume import ProgressFile, StageProgress
from atas.threat import Threat

_BACKWARD_COST = 1.5  # forward passes that take as long as one backward pass
_TOLERANCE = 1e-3  # a quarter of a grey level

Recorder = Callable[[str, Tensor, Tensor, Tensor, Tensor], None]
"""Called with the attack, positions in the data (on the CPU), images, the points reached, and the verifier's logits."""


class AttackRunner:
    """Runs attacks on a model, chunk by chunk. The results are in `stages` and in the progress file."""

    def __init__(
        self,
        model: nn.Module,
        scheduler: Scheduler,
        attacks: dict[str, Attack],
        threat: Threat,
        seed: int,
        progress_file: ProgressFile,
        meter: ProgressMeter,
        record: Recorder = lambda *_: None,
        store: PointStore | None = None,
    ) -> None:
        self._model, self._scheduler, self._attacks = model, scheduler, attacks
        self._record = record
        self._threat, self._seed = threat, seed
        self._progress_file, self._meter = progress_file, meter
        self._first_restarts = [attack.stages[0] for attack in attacks.values() if isinstance(attack, PGD)]
        self._store = store
        self._points: dict[tuple[int, str], Tensor] = {}
        self.stages: dict[StageKey, StageProgress] = progress_file.read()

    def plan(self, sizes: list[int], num_classes: int) -> None:
        """Tell the meter the maximum work of every stage on chunks of these sizes."""
        self._num_classes = num_classes
        if any(not 0 <= key[0] < len(sizes) or not stage.fits(sizes[key[0]]) for key, stage in self.stages.items()):
            self._progress_file.discard("it is of chunks of another size")
            self.stages.clear()
        for chunk, size in enumerate(sizes):
            for name, attack in self._attacks.items():
                for number, search in enumerate(_searches(attack)):
                    key = chunk, name, number
                    stage = self.stages.get(key, StageProgress())
                    self._meter.resumed(stage.queries * query_cost(search))
                    self._meter.set_remaining(key, 0 if stage.complete else size * self._max_cost(search))

    def is_done(self, chunk: int) -> bool:
        """Return whether all attacks on a chunk are complete, so that it need not be read."""
        if self._store is not None:  # points are not in the progress file
            return False
        keys = [(chunk, name, number) for name, a in self._attacks.items() for number in range(len(_searches(a)))]
        return all(key in self.stages and self.stages[key].complete for key in keys)

    def run_chunk(self, chunk: int, x: Tensor, y: Tensor, index: Tensor, targets: Tensor | None = None) -> None:
        """Run all attacks on one chunk, or what is left of them; with `targets`, push the images to these classes."""
        with self.saved_on_error():
            began = time.perf_counter()
            targeted = targets is not None
            examples = self._scheduler.examples(x, y if targets is None else targets, index, targeted=targeted)
            self._labels = y.to(examples.y.device)
            self._chunk_threat = self._threat.select(index).to(examples.x.device)
            seconds = time.perf_counter() - began
            self._index = index
            self._warm_starts: list[WarmStart] = []
            for name, attack in self._attacks.items():
                if isinstance(attack, Clean):
                    self._classify(chunk, name, examples, seconds)
                elif isinstance(attack, StagedAttack):
                    self._run_staged(chunk, name, attack, examples)
                else:
                    self._run_batch_attack(chunk, name, attack, examples)

    @contextmanager
    def saved_on_error(self) -> Iterator[None]:
        """Save the progress of the attacks if this context ends in an error, or by Ctrl-C."""
        try:
            yield
        except BaseException:  # also KeyboardInterrupt
            if any(stage.queries for stage in self.stages.values()):
                self._progress_file.save(self.stages, now=True)
            raise

    def _classify(self, chunk: int, name: str, examples: Examples, seconds: float) -> None:
        """Enter the verifier's predictions at the images themselves."""
        predicted = predicted_classes(examples.logits).cpu()
        stage = StageProgress(examples.misclassified().cpu(), seconds, queries=0, complete=True, predicted=predicted)
        self.stages[chunk, name, 0] = stage
        self._record(name, self._index, examples.x, examples.x, examples.logits)
        self._end((chunk, name, 0), name, stage)

    def _run_staged(self, chunk: int, name: str, attack: StagedAttack, examples: Examples) -> None:
        """Run the searches of an attack, each on the examples that are not broken yet; skip complete ones."""
        broken = examples.misclassified().cpu() & attack.skips_misclassified
        kept = self._open_points(chunk, name, examples, skips_misclassified=attack.skips_misclassified)
        for number, search in enumerate(attack.stages):
            stage = self.stages.setdefault((chunk, name, number), StageProgress())
            position = _StagePosition(chunk, name, attack.stages, number)
            if not stage.complete:
                self._run_search(search, examples, broken, stage, position, kept)
                self._save_points(chunk, name, number + 1, kept)
            broken = stage.broken
            self._end(position.key, position.description, stage)

    def _run_search(
        self,
        search: Search,
        examples: Examples,
        broken: Tensor,
        stage: StageProgress,
        position: _StagePosition,
        kept: KeptPoints | None,
    ) -> None:
        # A longer search can continue only where every example has a last point of this one.
        record_warm_start = any(other.extends(search) for other in self._first_restarts) and not bool(broken.any())
        progress = stage.search or stage.start_search(
            SearchProgress.start(search, examples, broken, record_warm_start=record_warm_start)
        )
        jobs = len(progress.pending_jobs())
        began = time.perf_counter() - stage.seconds

        def report(queries_left: int) -> None:
            num_correct = int((~progress.broken).sum())
            self._meter.set_remaining(position.key, queries_left * query_cost(search))
            for key, later in position.later():
                self._meter.set_remaining(key, num_correct * self._max_cost(later))
            self._meter.update(position.name, position.description, num_correct, len(progress.broken))

        def on_poll(queries_left: int) -> None:
            stage.seconds, stage.queries = time.perf_counter() - began, progress.queries
            self._meter.completed(self._scheduler.queries_per_poll(search, jobs) * query_cost(search))
            report(queries_left)
            self._progress_file.save(self.stages)

        def on_verified(rows: Tensor, points: Tensor, logits: Tensor) -> None:
            reached = examples.select(rows.to(points.device))
            self._record(position.name, self._index[rows], reached.x, points, logits)
            if kept is not None:
                kept.update(rows, points, reached.margin(logits))

        report(jobs * search.steps * search.queries_per_step)
        self._scheduler.run(
            search,
            examples,
            self._chunk_threat,
            progress,
            seed=self._seed,
            on_poll=on_poll,
            warm_start=self._warm_start(search),
            on_verified=on_verified,
        )
        self._warm_starts += [] if progress.warm_start is None else [progress.warm_start]
        stage.seconds, stage.queries = time.perf_counter() - began, progress.queries
        stage.search, stage.complete = None, True

    def _open_points(
        self, chunk: int, name: str, examples: Examples, *, skips_misclassified: bool
    ) -> KeptPoints | None:
        """Return the points to keep, those of a stopped run if they give its verdicts; else None.

        Stages whose points are lost are forgotten, so they run again.
        """
        if self._store is None:
            return None
        keys = [(chunk, name, number) for number in range(len(_searches(self._attacks[name])))]
        complete = [self.stages[key].complete for key in keys if key in self.stages]
        done = complete.index(False) if False in complete else len(complete)
        stored = self._store.load(chunk, self._number(name), done) if done else None
        if stored is not None and self._gives_verdicts(stored.points, examples, self.stages[keys[done - 1]].broken):
            kept = KeptPoints(stored.points.to(examples.x), stored.margins)
        else:
            done = 0
            margins = examples.margin(examples.logits)
            kept = KeptPoints(examples.x.clone(), margins if skips_misclassified else margins.fill_(torch.inf))
        for key in keys[done:]:
            self.stages.pop(key, None)
        self._points[chunk, name] = kept.points
        return kept

    def _gives_verdicts(self, points: Tensor, examples: Examples, broken: Tensor) -> bool:
        if points.shape != examples.x.shape:
            return False
        with torch.no_grad():
            batches = points.to(examples.x).split(self._scheduler.slots)
            logits = torch.cat([self._scheduler.verifier(batch) for batch in batches])
        return torch.equal(examples.resists(logits).cpu(), ~broken)

    def _save_points(self, chunk: int, name: str, stages: int, kept: KeptPoints | None) -> None:
        if self._store is not None and kept is not None:
            self._store.save(chunk, self._number(name), stages, kept)
            if stages == len(_searches(self._attacks[name])):
                self._points[chunk, name] = kept.points.cpu()

    def _number(self, name: str) -> int:
        return list(self._attacks).index(name)

    def _warm_start(self, search: Search) -> WarmStart | None:
        """Return the last points of the longest search on this chunk that `search` extends: PGD-50 extends PGD-10."""
        extended = [
            start for start in self._warm_starts if isinstance(search, PGDRestart) and search.extends(start.search)
        ]
        return max(extended, key=lambda start: start.search.steps, default=None)

    def _run_batch_attack(self, chunk: int, name: str, attack: Attack, examples: Examples) -> None:
        """Run an attack that maps a batch of images to a batch of points."""
        key, count, size, index = (chunk, name, 0), len(examples.y), self._scheduler.slots, examples.index
        corrupts = isinstance(attack, Corruption)  # a corruption has no threat model, and its images are not kept
        kept = None if corrupts else self._open_points(chunk, name, examples, skips_misclassified=False)
        stage = self.stages.setdefault(key, StageProgress())
        while (start := len(stage.broken)) < count:
            batch = slice(start, start + size)
            threat = self._chunk_threat.select(torch.arange(count)[batch])
            x, y = examples.x[batch], examples.y[batch]
            began = time.perf_counter()
            with _count_queries(self._model) as batch_sizes:
                # Copies: an attack may write to its arguments.
                points = attack(
                    self._model,
                    x.clone(),
                    self._labels[batch].clone(),
                    threat,
                    seed=self._seed,
                    index=index[batch],
                    **({"targets": y.clone()} if examples.targeted else {}),
                )
            points = points if corrupts else check_within_threat(points, x, threat, name)
            if kept is not None:
                kept.points[batch] = points
            with torch.no_grad():
                logits = self._scheduler.verifier(points)
            wrong = ~examples.select(torch.arange(count)[batch]).resists(logits).cpu()
            stage.broken = torch.cat([stage.broken, wrong])
            if stage.predicted is not None:
                stage.predicted = torch.cat([stage.predicted, predicted_classes(logits).cpu()])
            if not corrupts:
                self._record(name, self._index[batch], x, points, logits)
            stage.seconds += time.perf_counter() - began
            stage.queries += sum(batch_sizes)
            self._meter.set_remaining(key, count - len(stage.broken))
            self._meter.completed(len(wrong))
            self._meter.update(name, name, count - int(stage.broken.sum()), count)
            self._progress_file.save(self.stages)
        if not stage.complete:
            self._save_points(chunk, name, 1, kept)
        stage.complete = True
        self._end(key, name, stage)

    def _end(self, key: StageKey, description: str, stage: StageProgress) -> None:
        self._meter.set_remaining(key, 0)
        self._meter.update(key[1], description, int((~stage.broken).sum()), len(stage.broken))
        self._progress_file.save(self.stages)

    def _max_cost(self, search: Search | None) -> float:
        """Return the maximum work of a stage per example."""
        return max_queries(search, self._num_classes) * query_cost(search)

    def outcomes(self, chunks: int) -> dict[str, AttackOutcome]:
        """Return the outcome of each attack on all chunks."""
        return {name: self._outcome(name, attack, chunks) for name, attack in self._attacks.items()}

    def _outcome(self, name: str, attack: Attack, chunks: int) -> AttackOutcome:
        codes, predictions, count = [], [], len(_searches(attack))
        for chunk in range(chunks):
            clean = self.stages[chunk, Clean.name, 0].broken
            predicted = self.stages[chunk, Clean.name, 0].predicted
            skips_misclassified = isinstance(attack, Clean) or (
                isinstance(attack, StagedAttack) and attack.skips_misclassified
            )
            code = (clean & skips_misclassified).long() * MISCLASSIFIED
            for number in range(count):
                stage = self.stages[chunk, name, number]
                newly_broken = stage.broken & (code == ROBUST)
                code = torch.where(newly_broken, FIRST_STAGE + number, code)
                if predicted is not None:
                    predicted = (
                        None if stage.predicted is None else torch.where(newly_broken, stage.predicted, predicted)
                    )
            codes.append(code)
            predictions.append(predicted)
        by_number = [[self.stages[chunk, name, number] for chunk in range(chunks)] for number in range(count)]
        return AttackOutcome(
            torch.cat(codes) if codes else torch.zeros(0, dtype=torch.int64),
            [sum(stage.seconds for stage in stages) for stages in by_number],
            [sum(stage.queries for stage in stages) for stages in by_number],
            _joined(predictions),
            self._kept_points(name, chunks),
        )

    def _kept_points(self, name: str, chunks: int) -> Tensor | None:
        if self._store is None or isinstance(self._attacks[name], Clean | Corruption):
            return None
        points = [self._points[chunk, name].cpu() for chunk in range(chunks)]
        return torch.cat(points) if points else None


def _joined(predictions: list[Tensor | None]) -> Tensor | None:
    """Join the predictions of all chunks; None if some are missing."""
    known = [predicted for predicted in predictions if predicted is not None]
    if len(known) < len(predictions):
        return None
    return torch.cat(known) if known else torch.zeros(0, dtype=torch.int64)


def max_queries(search: Search | None, num_classes: int) -> int:
    """Return the maximum number of queries per example; None stands for an attack that is no search."""
    return 1 if search is None else max(search.num_targets(num_classes), 1) * search.steps * search.queries_per_step


def query_cost(search: Search | None) -> float:
    """Return the work of one query of this search in forward passes, backward passes included."""
    return 1.0 if search is None else 1 + _BACKWARD_COST * search.backward_passes / search.queries_per_step


def total_max_queries(attacks: Iterable[Attack], num_classes: int) -> int:
    """Return the maximum number of queries per example of several attacks with all their stages."""
    return sum(max_queries(search, num_classes) for attack in attacks for search in _searches(attack))


def _searches(attack: Attack) -> tuple[Search | None, ...]:
    return attack.stages if isinstance(attack, StagedAttack) else (None,)


@dataclass(frozen=True)
class _StagePosition:
    """The position of a stage in its attack."""

    chunk: int
    name: str
    stages: tuple[Search, ...]
    number: int

    @property
    def key(self) -> StageKey:
        return self.chunk, self.name, self.number

    @property
    def description(self) -> str:
        """The name of the stage, or its number if all stages have one name, as PGD's restarts do."""
        count = len(self.stages)
        if count > 1 and len({search.name for search in self.stages}) == 1:
            return f"restart {self.number + 1} of {count}"
        return self.stages[self.number].name

    def later(self) -> Iterator[tuple[StageKey, Search]]:
        """Yield the keys and searches of the stages after this one."""
        for number in range(self.number + 1, len(self.stages)):
            yield (self.chunk, self.name, number), self.stages[number]


@contextmanager
def _count_queries(model: nn.Module) -> Iterator[list[int]]:
    """Collect the sizes of all batches that pass through the model in this context."""
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, arguments: sizes.append(len(arguments[0])))
    try:
        yield sizes
    finally:
        hook.remove()


def check_within_threat(points: object, x: Tensor, threat: Threat, name: str) -> Tensor:
    """Return the points of the attack `name`, projected to remove rounding; raise UsageError if they lie outside."""
    if not isinstance(points, Tensor) or points.shape != x.shape:
        got = tuple(points.shape) if isinstance(points, Tensor) else type(points).__name__
        raise UsageError(
            f"the attack '{name}' must return images of the shape of its input, {tuple(x.shape)}; got {got}"
        )
    points = points.detach().to(x)
    allowed = threat.project(points, x)
    if not bool((points - allowed).abs().max() <= _TOLERANCE):
        raise UsageError(f"the attack '{name}' leaves {threat} or [0, 1]: let it return threat.project(point, x)")
    return allowed
