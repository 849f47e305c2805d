"""Run the attacks of an evaluation on each chunk of the examples, stage by stage; a stopped run can resume."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atas.attacks import PGD, Attack, Clean, StagedAttack, correct
from atas.attacks.projected_gradient_descent import PGDRestart
from atas.attacks.scheduler import Examples, Scheduler, SearchProgress, WarmStart
from atas.attacks.search import Search
from atas.errors import UsageError
from atas.evaluation.progress import ProgressFile, ProgressMeter, StageKey, StageProgress
from atas.threat import Threat

ROBUST, MISCLASSIFIED, FIRST_STAGE = 0, 1, 2
_BACKWARD_COST = 1.5  # forward passes that a gradient takes
_TOLERANCE = 1e-3  # a quarter of a grey level


@dataclass(frozen=True)
class AttackOutcome:
    """What an attack came to on the examples of this process."""

    code: Tensor
    """For each example (N,): ROBUST, MISCLASSIFIED where it is wrong without an attack and so left alone, or the stage
    that broke it, counted from FIRST_STAGE."""
    seconds: list[float]
    """Time of each stage."""
    queries: list[int]
    """Passes of the model in each stage."""


class AttackRunner:
    """Which attacks, on what model; what they found is in `records`, and in the progress file."""

    def __init__(
        self,
        model: nn.Module,
        scheduler: Scheduler,
        attacks: dict[str, Attack],
        threat: Threat,
        seed: int,
        progress_file: ProgressFile,
        meter: ProgressMeter,
    ) -> None:
        self._model, self._scheduler, self._attacks = model, scheduler, attacks
        self._threat, self._seed = threat, seed
        self._progress_file, self._meter = progress_file, meter
        self._firsts = [attack.stages[0] for attack in attacks.values() if isinstance(attack, PGD)]
        self.records: dict[StageKey, StageProgress] = progress_file.read()

    def plan(self, sizes: list[int], num_classes: int) -> None:
        """Tell the meter what is ahead, for chunks of these sizes."""
        self._num_classes = num_classes
        for chunk, size in enumerate(sizes):
            for name, attack in self._attacks.items():
                for stage, search in enumerate(_stages(attack)):
                    key = chunk, name, stage
                    record = self.records.get(key, StageProgress())
                    self._meter.resumed(record.queries * query_cost(search))
                    self._meter.set_remaining(key, 0 if record.complete else size * self._max_cost(search))

    def is_done(self, chunk: int) -> bool:
        """Whether nothing is left to do on a chunk, so that it need not be read."""
        keys = [(chunk, name, stage) for name, a in self._attacks.items() for stage in range(len(_stages(a)))]
        return all(key in self.records and self.records[key].complete for key in keys)

    def run_chunk(self, chunk: int, x: Tensor, y: Tensor, index: Tensor) -> None:
        """All attacks on one chunk, from where they were left."""
        try:
            began = time.perf_counter()
            examples = self._scheduler.examples(x, y, index)
            seconds = time.perf_counter() - began
            self._warm_starts: list[WarmStart] = []
            for name, attack in self._attacks.items():
                if isinstance(attack, Clean):
                    wrong = examples.misclassified().cpu()
                    self.records[chunk, name, 0] = StageProgress(wrong, seconds, queries=0, complete=True)
                    self._end((chunk, name, 0), name, self.records[chunk, name, 0])
                elif isinstance(attack, StagedAttack):
                    self._run_staged(chunk, name, attack, examples)
                else:
                    self._run_batch_attack(chunk, name, attack, examples)
        except BaseException:  # also when a person has had enough
            if any(record.queries for record in self.records.values()):
                self._progress_file.save(self.records, now=True)
            raise

    def _run_staged(self, chunk: int, name: str, attack: StagedAttack, examples: Examples) -> None:
        """Searches one after the other, each on what holds."""
        broken = examples.misclassified().cpu() & attack.skips_misclassified
        for stage, search in enumerate(attack.stages):
            record = self.records.setdefault((chunk, name, stage), StageProgress())
            position = _StagePosition(chunk, name, attack.stages, stage)
            if not record.complete:
                self._run_search(search, examples, broken, record, position)
            broken = record.broken
            self._end(position.key, position.description, record)

    def _run_search(
        self, search: Search, examples: Examples, broken: Tensor, record: StageProgress, position: _StagePosition
    ) -> None:
        is_extended = any(other.extends(search) for other in self._firsts) and not bool(broken.any())
        progress = record.search or record.start_search(
            SearchProgress.start(search, examples, broken, record_warm_start=is_extended)
        )
        jobs = len(progress.pending_jobs())
        began = time.perf_counter() - record.seconds

        def report(left: int) -> None:
            holds = int((~progress.broken).sum())
            self._meter.set_remaining(position.key, left * query_cost(search))
            for key, later in position.later():
                self._meter.set_remaining(key, holds * self._max_cost(later))
            self._meter.update(position.name, position.description, holds, len(progress.broken))

        def on_poll(left: int) -> None:
            record.seconds, record.queries = time.perf_counter() - began, progress.queries
            self._meter.completed(self._scheduler.queries_per_poll(search, jobs) * query_cost(search))
            report(left)
            self._progress_file.save(self.records)

        report(jobs * search.steps * search.queries_per_step)
        warm_start = self._warm_start(search)
        self._scheduler.run(
            search, examples, self._threat, progress, seed=self._seed, on_poll=on_poll, warm_start=warm_start
        )
        self._warm_starts += [] if progress.warm_start is None else [progress.warm_start]
        record.seconds, record.queries = time.perf_counter() - began, progress.queries
        record.search, record.complete = None, True

    def _warm_start(self, search: Search) -> WarmStart | None:
        """What an earlier attack did of this search on this chunk: PGD-50 begins with the steps of PGD-10."""
        fitting = [
            start for start in self._warm_starts if isinstance(search, PGDRestart) and search.extends(start.search)
        ]
        return max(fitting, key=lambda start: start.search.steps, default=None)

    def _run_batch_attack(self, chunk: int, name: str, attack: Attack, examples: Examples) -> None:
        """An attack that takes a batch and gives it back."""
        key, count, size, index = (chunk, name, 0), len(examples.y), self._scheduler.slots, examples.index
        record = self.records.setdefault(key, StageProgress())
        while (start := len(record.broken)) < count:
            part = slice(start, start + size)
            x, y = examples.x[part], examples.y[part]
            began = time.perf_counter()
            with _count_queries(self._model) as batch_sizes:
                # Copies: an attack may write into what it is given.
                found = attack(self._model, x.clone(), y.clone(), self._threat, seed=self._seed, index=index[part])
            with torch.no_grad():
                wrong = ~correct(self._scheduler.verifier(check_within_threat(found, x, self._threat, name)), y).cpu()
            record.broken = torch.cat([record.broken, wrong])
            record.seconds += time.perf_counter() - began
            record.queries += sum(batch_sizes)
            self._meter.set_remaining(key, count - len(record.broken))
            self._meter.completed(len(wrong))
            self._meter.update(name, name, count - int(record.broken.sum()), count)
            self._progress_file.save(self.records)
        record.complete = True
        self._end(key, name, record)

    def _end(self, key: StageKey, description: str, record: StageProgress) -> None:
        self._meter.set_remaining(key, 0)
        self._meter.update(key[1], description, int((~record.broken).sum()), len(record.broken))
        self._progress_file.save(self.records)

    def _max_cost(self, search: Search | None) -> float:
        """The work that a stage is for an example at most."""
        return max_queries(search, self._num_classes) * query_cost(search)

    def outcomes(self, chunks: int) -> dict[str, AttackOutcome]:
        """What each attack came to, all chunks together."""
        return {name: self._outcome(name, attack, chunks) for name, attack in self._attacks.items()}

    def _outcome(self, name: str, attack: Attack, chunks: int) -> AttackOutcome:
        codes, count = [], len(_stages(attack))
        for chunk in range(chunks):
            clean = self.records[chunk, Clean.name, 0].broken
            skips_misclassified = isinstance(attack, Clean) or (
                isinstance(attack, StagedAttack) and attack.skips_misclassified
            )
            code = (clean & skips_misclassified).long() * MISCLASSIFIED
            for stage in range(count):
                broken = self.records[chunk, name, stage].broken
                code = torch.where(broken & (code == ROBUST), FIRST_STAGE + stage, code)
            codes.append(code)
        records = [[self.records[chunk, name, stage] for chunk in range(chunks)] for stage in range(count)]
        return AttackOutcome(
            torch.cat(codes) if codes else torch.zeros(0, dtype=torch.int64),
            [sum(record.seconds for record in stage) for stage in records],
            [sum(record.queries for record in stage) for stage in records],
        )


def max_queries(search: Search | None, num_classes: int) -> int:
    """Queries of an example at most, for a model with that many classes; None is an attack that is no search."""
    return 1 if search is None else max(search.num_targets(num_classes), 1) * search.steps * search.queries_per_step


def query_cost(search: Search | None) -> float:
    """The work of a pass of this search, in forward passes: some come with a gradient."""
    return 1.0 if search is None else 1 + _BACKWARD_COST * search.backward_passes / search.queries_per_step


def total_max_queries(attacks: Iterable[Attack], num_classes: int) -> int:
    """The same of several attacks with all their stages."""
    return sum(max_queries(search, num_classes) for attack in attacks for search in _stages(attack))


def _stages(attack: Attack) -> tuple[Search | None, ...]:
    return attack.stages if isinstance(attack, StagedAttack) else (None,)


@dataclass(frozen=True)
class _StagePosition:
    """Where an attack is among its stages."""

    chunk: int
    name: str
    stages: tuple[Search, ...]
    stage: int

    @property
    def key(self) -> StageKey:
        return self.chunk, self.name, self.stage

    @property
    def description(self) -> str:
        """The name of the stage, or its number where all have the same: PGD's restarts."""
        count = len(self.stages)
        if count > 1 and len({search.name for search in self.stages}) == 1:
            return f"restart {self.stage + 1} of {count}"
        return self.stages[self.stage].name

    def later(self) -> Iterator[tuple[StageKey, Search]]:
        """The stages that are still to come."""
        for stage in range(self.stage + 1, len(self.stages)):
            yield (self.chunk, self.name, stage), self.stages[stage]


@contextmanager
def _count_queries(model: nn.Module) -> Iterator[list[int]]:
    """The sizes of all batches that a model is asked about inside."""
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, arguments: sizes.append(len(arguments[0])))
    try:
        yield sizes
    finally:
        hook.remove()


def check_within_threat(found: object, x: Tensor, threat: Threat, name: str) -> Tensor:
    """The points that the attack of that name returned for these images, rid of rounding; others are refused."""
    if not isinstance(found, Tensor) or found.shape != x.shape:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise UsageError(f"the attack '{name}' must return images of shape {tuple(x.shape)}, as it got them; got {got}")
    point = found.detach().to(x)
    allowed = threat.project(point, x)
    if not bool((point - allowed).abs().max() <= _TOLERANCE):
        raise UsageError(f"the attack '{name}' leaves {threat} or [0, 1]: let it return threat.project(point, x)")
    return allowed
