"""Run the attacks of an evaluation on each chunk of the examples, stage by stage; a stopped run can resume."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from atas.attacks import PGD, Attack, Clean, StagedAttack
from atas.attacks.projected_gradient_descent import PGDRestart
from atas.attacks.scheduler import Examples, Scheduler, SearchProgress, WarmStart, predicted_classes
from atas.attacks.search import Search
from atas.errors import UsageError
from atas.evaluation.adversarial import KeptPoints, PointStore
from atas.evaluation.corruptions import Corruption
from atas.evaluation.inputs import ChunkReader
from atas.evaluation.outcomes import FIRST_STAGE, MISCLASSIFIED, ROBUST, AttackOutcome
from atas.evaluation.progress import ProgressMeter, StageKey
from atas.evaluation.resume import ProgressFile, StageProgress
from atas.threat import Threat

_BACKWARD_COST = 1.5  # forward passes that take as long as one backward pass
_TOLERANCE = 1e-3  # a quarter of a grey level

Recorder = Callable[[str, Tensor, Tensor, Tensor, Tensor], None]
"""Called with the attack, positions in the data (on the CPU), images, the points reached, and the verifier's logits."""


@dataclass(frozen=True)
class EvaluationSetup:
    """What an evaluation measures: the model, the attacks on it, and the images."""

    model: nn.Module
    scheduler: Scheduler
    attacks: dict[str, Attack]
    """By the names under which they were requested, `clean` first."""
    corruptions: dict[str, Corruption]
    threat: Threat
    seed: int
    reader: ChunkReader
    labels: Tensor
    """The labels of all examples."""
    targets: Tensor | None = None
    """The class to push each example towards."""

    def examples(self, rows: Sequence[int], x: Tensor, y: Tensor) -> Examples:
        """Return the images and labels of these rows as examples to attack, with their targets if there are any."""
        goals = y if self.targets is None else self.targets[list(rows)]
        return self.scheduler.examples(x, goals, torch.tensor(rows), targeted=self.targets is not None)


@dataclass(frozen=True)
class _Chunk:
    """The examples that are in memory."""

    number: int
    examples: Examples
    """On the device."""
    labels: Tensor
    """On the device; `examples.y` holds the target classes if there are any."""
    index: Tensor
    """Positions in the data, on the CPU."""
    threat: Threat
    seconds: float
    """The time to classify the images."""
    warm_starts: list[WarmStart] = field(default_factory=list)


class AttackRunner:
    """Runs attacks and corruptions on the `chunks` of the examples. The results are also in the progress file."""

    def __init__(
        self,
        setup: EvaluationSetup,
        chunks: list[range],
        num_classes: int,
        progress_file: ProgressFile,
        meter: ProgressMeter,
        record: Recorder,
        store: PointStore | None,
    ) -> None:
        self._setup, self._chunks, self._num_classes = setup, chunks, num_classes
        self._progress_file, self._meter, self._record, self._store = progress_file, meter, record, store
        self._attacks: dict[str, Attack] = setup.attacks | setup.corruptions
        self._scheduler = setup.scheduler
        self._first_restarts = [attack.stages[0] for attack in self._attacks.values() if isinstance(attack, PGD)]
        self._points: dict[tuple[int, str], Tensor] = {}
        self._stages = self._resume()

    def _resume(self) -> dict[StageKey, StageProgress]:
        """Return the progress of a stopped run, and tell the meter the maximum work that is left."""
        stages = self._progress_file.read()
        sizes = list(map(len, self._chunks))
        if any(not 0 <= chunk < len(sizes) or not stage.fits(sizes[chunk]) for (chunk, *_), stage in stages.items()):
            self._progress_file.discard("it is of chunks of another size")
            stages.clear()
        for chunk, size in enumerate(sizes):
            for key, search in self._stages_of(chunk):
                stage = stages.get(key, StageProgress())
                self._meter.resumed(stage.queries * query_cost(search))
                self._meter.set_remaining(key, 0 if stage.complete else size * self._max_cost(search))
        return stages

    def _stages_of(self, chunk: int) -> Iterator[tuple[StageKey, Search | None]]:
        """Yield the keys and searches of all stages on a chunk."""
        for name, attack in self._attacks.items():
            for number, search in enumerate(_searches(attack)):
                yield (chunk, name, number), search

    def run(self) -> dict[str, AttackOutcome]:
        """Run all attacks, or what a stopped run left of them, and return their outcomes on all chunks."""
        for chunk in range(len(self._chunks)):
            if not self._is_done(chunk):
                self.run_chunk(chunk)
        return {name: self._outcome(name, attack) for name, attack in self._attacks.items()}

    def _is_done(self, chunk: int) -> bool:
        """Return whether all attacks on a chunk are complete, so that it need not be read."""
        if self._store is not None:  # points are not in the progress file
            return False
        return all(key in self._stages and self._stages[key].complete for key, _ in self._stages_of(chunk))

    def run_chunk(self, number: int) -> None:
        """Run all attacks on one chunk, or what is left of them."""
        rows = self._chunks[number]
        x, y = self._setup.reader.read(rows)
        with self.saved_on_error():
            began, index = time.perf_counter(), torch.tensor(rows)
            examples = self._setup.examples(rows, x, y)
            threat = self._setup.threat.select(index).to(examples.x.device)
            labels = y.to(examples.y.device)
            chunk = _Chunk(number, examples, labels, index, threat, time.perf_counter() - began)
            for name, attack in self._attacks.items():
                if isinstance(attack, Clean):
                    self._classify(chunk, name)
                elif isinstance(attack, StagedAttack):
                    self._run_staged(chunk, name, attack)
                else:
                    self._run_batch_attack(chunk, name, attack)

    @contextmanager
    def saved_on_error(self) -> Iterator[None]:
        """Save the progress of the attacks if this context ends in an error, or by Ctrl-C."""
        try:
            yield
        except BaseException:  # also KeyboardInterrupt
            if any(stage.queries for stage in self._stages.values()):
                self._progress_file.save(self._stages, now=True)
            raise

    def _classify(self, chunk: _Chunk, name: str) -> None:
        """Enter the verifier's predictions at the images themselves."""
        key, examples = (chunk.number, name, 0), chunk.examples
        broken, predicted = examples.misclassified().cpu(), predicted_classes(examples.logits).cpu()
        self._stages[key] = StageProgress(broken, chunk.seconds, complete=True, predicted=predicted)
        self._record(name, chunk.index, examples.x, examples.x, examples.logits)
        self._end(key, name)

    def _run_staged(self, chunk: _Chunk, name: str, attack: StagedAttack) -> None:
        """Run the searches of an attack, each on the examples that are not broken yet; skip complete ones."""
        broken = chunk.examples.misclassified().cpu() & attack.skips_misclassified
        kept = self._open_points(chunk, name, skips_misclassified=attack.skips_misclassified)
        for number in range(len(attack.stages)):
            key, title = (chunk.number, name, number), _stage_title(attack, number)
            stage = self._stages.setdefault(key, StageProgress())
            if not stage.complete:
                self._run_search(chunk, attack, key, title, broken, kept)
                self._save_points(chunk, name, number + 1, kept)
            broken = stage.broken
            self._end(key, title)

    def _run_search(
        self,
        chunk: _Chunk,
        attack: StagedAttack,
        key: StageKey,
        title: str,
        broken: Tensor,
        kept: KeptPoints | None,
    ) -> None:
        examples, stage, (_, name, number) = chunk.examples, self._stages[key], key
        search, *later = attack.stages[number:]
        # A longer search can continue only where every example has a last point of this one.
        record_warm_start = any(other.extends(search) for other in self._first_restarts) and not bool(broken.any())
        progress = stage.search or stage.start_search(
            SearchProgress.start(search, examples, broken, record_warm_start=record_warm_start)
        )
        jobs = len(progress.pending_jobs())
        began = time.perf_counter() - stage.seconds

        def report(queries_left: int) -> None:
            num_correct = int((~progress.broken).sum())
            self._meter.set_remaining(key, queries_left * query_cost(search))
            for other, following in enumerate(later, number + 1):
                self._meter.set_remaining((chunk.number, name, other), num_correct * self._max_cost(following))
            self._meter.update(name, title, num_correct, len(progress.broken))

        def on_poll(queries_left: int) -> None:
            stage.seconds, stage.queries = time.perf_counter() - began, progress.queries
            self._meter.completed(self._scheduler.queries_per_poll(search, jobs) * query_cost(search))
            report(queries_left)
            self._progress_file.save(self._stages)

        def on_verified(rows: Tensor, points: Tensor, logits: Tensor) -> None:
            reached = examples.select(rows.to(points.device))
            self._record(name, chunk.index[rows], reached.x, points, logits)
            if kept is not None:
                kept.update(rows, points, reached.margin(logits))

        report(jobs * search.steps * search.queries_per_step)
        self._scheduler.run(
            search,
            examples,
            chunk.threat,
            progress,
            seed=self._setup.seed,
            on_poll=on_poll,
            warm_start=_longest_extended(search, chunk.warm_starts),
            on_verified=on_verified,
        )
        chunk.warm_starts.extend([] if progress.warm_start is None else [progress.warm_start])
        stage.seconds, stage.queries = time.perf_counter() - began, progress.queries
        stage.search, stage.complete = None, True

    def _open_points(self, chunk: _Chunk, name: str, *, skips_misclassified: bool) -> KeptPoints | None:
        """Return the points to keep, those of a stopped run if they give its verdicts; else None.

        Stages whose points are lost are forgotten, so they run again.
        """
        if self._store is None:
            return None
        examples = chunk.examples
        keys = [(chunk.number, name, number) for number in range(len(_searches(self._attacks[name])))]
        complete = [self._stages[key].complete for key in keys if key in self._stages]
        done = complete.index(False) if False in complete else len(complete)
        stored = self._store.load(chunk.number, self._number(name), done) if done else None
        if stored is not None and self._gives_verdicts(stored.points, examples, self._stages[keys[done - 1]].broken):
            kept = KeptPoints(stored.points.to(examples.x), stored.margins)
        else:
            done = 0
            margins = examples.margin(examples.logits)
            kept = KeptPoints(examples.x.clone(), margins if skips_misclassified else margins.fill_(torch.inf))
        for key in keys[done:]:
            self._stages.pop(key, None)
        self._points[chunk.number, name] = kept.points
        return kept

    def _gives_verdicts(self, points: Tensor, examples: Examples, broken: Tensor) -> bool:
        if points.shape != examples.x.shape:
            return False
        with torch.no_grad():
            batches = points.to(examples.x).split(self._scheduler.slots)
            logits = torch.cat([self._scheduler.verifier(batch) for batch in batches])
        return torch.equal(examples.resists(logits).cpu(), ~broken)

    def _save_points(self, chunk: _Chunk, name: str, stages: int, kept: KeptPoints | None) -> None:
        if self._store is not None and kept is not None:
            self._store.save(chunk.number, self._number(name), stages, kept)
            if stages == len(_searches(self._attacks[name])):
                self._points[chunk.number, name] = kept.points.cpu()

    def _number(self, name: str) -> int:
        return list(self._attacks).index(name)

    def _run_batch_attack(self, chunk: _Chunk, name: str, attack: Attack) -> None:
        """Run an attack that maps a batch of images to a batch of points."""
        examples, key = chunk.examples, (chunk.number, name, 0)
        corrupts = isinstance(attack, Corruption)  # a corruption has no threat model, and its images are not kept
        kept = None if corrupts else self._open_points(chunk, name, skips_misclassified=False)
        stage = self._stages.setdefault(key, StageProgress())
        count, size = len(examples.y), self._scheduler.slots
        for start in range(len(stage.broken), count, size):
            rows = torch.arange(start, min(start + size, count))
            batch, threat = examples.select(rows), chunk.threat.select(rows)
            targets = {"targets": batch.y.clone()} if batch.targeted else {}
            began = time.perf_counter()
            with _count_queries(self._setup.model) as batch_sizes:
                # Copies: an attack may write to its arguments.
                points = attack(
                    self._setup.model,
                    batch.x.clone(),
                    chunk.labels[rows].clone(),
                    threat,
                    seed=self._setup.seed,
                    index=batch.index,
                    **targets,
                )
            points = points if corrupts else check_within_threat(points, batch.x, threat, name)
            if kept is not None:
                kept.points[rows] = points
            with torch.no_grad():
                logits = self._scheduler.verifier(points)
            stage.broken = torch.cat([stage.broken, ~batch.resists(logits).cpu()])
            if stage.predicted is not None:
                stage.predicted = torch.cat([stage.predicted, predicted_classes(logits).cpu()])
            if not corrupts:
                self._record(name, chunk.index[rows], batch.x, points, logits)
            stage.seconds += time.perf_counter() - began
            stage.queries += sum(batch_sizes)
            self._meter.set_remaining(key, count - len(stage.broken))
            self._meter.completed(len(rows))
            self._meter.update(name, name, count - int(stage.broken.sum()), count)
            self._progress_file.save(self._stages)
        if not stage.complete:
            self._save_points(chunk, name, 1, kept)
        stage.complete = True
        self._end(key, name)

    def _end(self, key: StageKey, title: str) -> None:
        stage = self._stages[key]
        self._meter.set_remaining(key, 0)
        self._meter.update(key[1], title, int((~stage.broken).sum()), len(stage.broken))
        self._progress_file.save(self._stages)

    def _max_cost(self, search: Search | None) -> float:
        """Return the maximum work of a stage per example."""
        return max_queries(search, self._num_classes) * query_cost(search)

    def _outcome(self, name: str, attack: Attack) -> AttackOutcome:
        """Return the outcome of an attack on all chunks."""
        skips_misclassified = isinstance(attack, Clean) or (
            isinstance(attack, StagedAttack) and attack.skips_misclassified
        )
        codes, predictions, count = [], [], len(_searches(attack))
        for chunk in range(len(self._chunks)):
            clean = self._stages[chunk, Clean.name, 0]
            code, predicted = (clean.broken & skips_misclassified).long() * MISCLASSIFIED, clean.predicted
            for number in range(count):
                stage = self._stages[chunk, name, number]
                newly_broken = stage.broken & (code == ROBUST)
                code = torch.where(newly_broken, FIRST_STAGE + number, code)
                if predicted is not None:
                    predicted = (
                        None if stage.predicted is None else torch.where(newly_broken, stage.predicted, predicted)
                    )
            codes.append(code)
            predictions.append(predicted)
        by_number = [
            [self._stages[chunk, name, number] for chunk in range(len(self._chunks))] for number in range(count)
        ]
        return AttackOutcome(
            torch.cat(codes) if codes else torch.zeros(0, dtype=torch.int64),
            [sum(stage.seconds for stage in stages) for stages in by_number],
            [sum(stage.queries for stage in stages) for stages in by_number],
            _joined(predictions),
            self._kept_points(name),
        )

    def _kept_points(self, name: str) -> Tensor | None:
        if self._store is None or isinstance(self._attacks[name], Clean | Corruption):
            return None
        points = [self._points[chunk, name].cpu() for chunk in range(len(self._chunks))]
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


def _stage_title(attack: StagedAttack, number: int) -> str:
    """Return the name of a stage, or its number if all stages have one name, as PGD's restarts do."""
    count = len(attack.stages)
    if count > 1 and len({search.name for search in attack.stages}) == 1:
        return f"restart {number + 1} of {count}"
    return attack.stages[number].name


def _longest_extended(search: Search, warm_starts: list[WarmStart]) -> WarmStart | None:
    """Return the last points of the longest search that `search` extends: PGD-50 extends PGD-10."""
    extended = [start for start in warm_starts if isinstance(search, PGDRestart) and search.extends(start.search)]
    return max(extended, key=lambda start: start.search.steps, default=None)


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
