"""The attacks of an evaluation, one after the other on each portion of the examples."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atas.attacks import PGD, Attack, Clean, Staged, correct
from atas.attacks._lanes import Search
from atas.attacks._pgd import Start
from atas.attacks._queue import Examples, Ledger, Trail
from atas.evaluation._inside import inside
from atas.evaluation._journal import Journal
from atas.evaluation._records import Record
from atas.evaluation._search import Runner
from atas.evaluation._status import Key, Meter
from atas.threat import Threat

HOLDS, CLEAN, FIRST_STAGE = 0, 1, 2
_BACK = 1.5  # forward passes that a gradient takes


@dataclass(frozen=True)
class Outcome:
    """What an attack came to on the examples of this process."""

    code: Tensor
    """For each example (N,): HOLDS, CLEAN where it is wrong without an attack and so left alone, or the stage that
    broke it, counted from FIRST_STAGE."""
    seconds: list[float]
    """Time of each stage."""
    queries: list[int]
    """Passes of the model in each stage."""


class Work:
    """Which attacks, on what model; what they found is in `records`, and in the journal."""

    def __init__(
        self,
        model: nn.Module,
        runner: Runner,
        attacks: dict[str, Attack],
        threat: Threat,
        seed: int,
        journal: Journal,
        meter: Meter,
    ) -> None:
        self._model, self._runner, self._attacks = model, runner, attacks
        self._threat, self._seed = threat, seed
        self._journal, self._meter = journal, meter
        self._firsts = [attack.stages[0] for attack in attacks.values() if isinstance(attack, PGD)]
        self.records: dict[Key, Record] = journal.read()

    def plan(self, sizes: list[int], classes: int) -> None:
        """Tell the meter what lies ahead, for portions of these sizes."""
        self._classes = classes
        for portion, size in enumerate(sizes):
            for name, attack in self._attacks.items():
                for stage, search in enumerate(_stages(attack)):
                    key = portion, name, stage
                    record = self.records.get(key, Record())
                    self._meter.took_over(record.queries * weight(search))
                    self._meter.expect(key, 0 if record.complete else size * self._most(search))

    def is_done(self, portion: int) -> bool:
        """Whether nothing is left to do on a portion, so that it need not be read."""
        keys = [(portion, name, stage) for name, a in self._attacks.items() for stage in range(len(_stages(a)))]
        return all(key in self.records and self.records[key].complete for key in keys)

    def do(self, portion: int, x: Tensor, y: Tensor, index: Tensor) -> None:
        """All attacks on one portion, from where they were left."""
        try:
            began = time.perf_counter()
            examples = self._runner.examples(x, y, index)
            seconds = time.perf_counter() - began
            self._trails: list[Trail] = []
            for name, attack in self._attacks.items():
                if isinstance(attack, Clean):
                    wrong = examples.misclassified().cpu()
                    self.records[portion, name, 0] = Record(wrong, seconds, queries=0, complete=True)
                    self._end((portion, name, 0), name, self.records[portion, name, 0])
                elif isinstance(attack, Staged):
                    self._in_stages(portion, name, attack, examples)
                else:
                    self._whole(portion, name, attack, examples)
        except BaseException:  # also when a person has had enough
            if any(record.queries for record in self.records.values()):
                self._journal.save(self.records, now=True)
            raise

    def _in_stages(self, portion: int, name: str, attack: Staged, examples: Examples) -> None:
        """Searches one after the other, each on what holds."""
        broken = examples.misclassified().cpu() & attack.counts_clean
        for stage, search in enumerate(attack.stages):
            record = self.records.setdefault((portion, name, stage), Record())
            ahead = _Ahead(portion, name, attack.stages, stage)
            if not record.complete:
                self._search(search, examples, broken, record, ahead)
            broken = record.broken
            self._end(ahead.key, ahead.doing, record)

    def _search(self, search: Search, examples: Examples, broken: Tensor, record: Record, ahead: _Ahead) -> None:
        wanted = any(other.goes_on_from(search) for other in self._firsts)
        whole = record.finished is None and not broken.any()
        ledger = Ledger.open(search, examples, broken, trail=wanted and whole)
        if record.finished is not None and record.evaluations is not None:
            ledger.broken.copy_(record.broken)
            ledger.finished.copy_(record.finished)
            ledger.evaluations.copy_(record.evaluations)
        # The search writes into these tensors, so the record is up to date at each look.
        record.broken, record.finished, record.evaluations = ledger.broken, ledger.finished, ledger.evaluations
        jobs = len(ledger.jobs())
        began = time.perf_counter() - record.seconds

        def tell(left: int) -> None:
            holds = int((~ledger.broken).sum())
            self._meter.expect(ahead.key, left * weight(search))
            for key, later in ahead.later():
                self._meter.expect(key, holds * self._most(later))
            self._meter.tell(ahead.name, ahead.doing, holds, len(ledger.broken))

        def look(left: int) -> None:
            record.seconds, record.queries = time.perf_counter() - began, int(ledger.evaluations.sum())
            self._meter.made(self._runner.passes_a_look(search, jobs) * weight(search))
            tell(left)
            self._journal.save(self.records)

        tell(jobs * search.steps * search.evaluations)
        after = self._furthest(search)
        self._runner.run(search, examples, self._threat, ledger, seed=self._seed, on_look=look, after=after)
        self._trails += [] if ledger.trail is None else [ledger.trail]
        record.seconds, record.queries = time.perf_counter() - began, int(ledger.evaluations.sum())
        record.finished = record.evaluations = None
        record.complete = True

    def _furthest(self, search: Search) -> Trail | None:
        """What an earlier attack did of this search on this portion: PGD-50 begins with the steps of PGD-10."""
        fitting = [trail for trail in self._trails if isinstance(search, Start) and search.goes_on_from(trail.search)]
        return max(fitting, key=lambda trail: trail.search.steps, default=None)

    def _whole(self, portion: int, name: str, attack: Attack, examples: Examples) -> None:
        """An attack that takes a batch and gives it back."""
        key, count, size, index = (portion, name, 0), len(examples.y), self._runner.lanes, examples.index
        record = self.records.setdefault(key, Record())
        while (start := len(record.broken)) < count:
            part = slice(start, start + size)
            x, y = examples.x[part], examples.y[part]
            began = time.perf_counter()
            with _counted(self._model) as passes:
                # Copies: an attack may write into what it is given.
                found = attack(self._model, x.clone(), y.clone(), self._threat, seed=self._seed, index=index[part])
            with torch.no_grad():
                wrong = ~correct(self._runner.judge(inside(found, x, self._threat, name)), y).cpu()
            record.broken = torch.cat([record.broken, wrong])
            record.seconds += time.perf_counter() - began
            record.queries += sum(passes)
            self._meter.expect(key, count - len(record.broken))
            self._meter.made(len(wrong))
            self._meter.tell(name, name, count - int(record.broken.sum()), count)
            self._journal.save(self.records)
        record.complete = True
        self._end(key, name, record)

    def _end(self, key: Key, doing: str, record: Record) -> None:
        self._meter.expect(key, 0)
        self._meter.tell(key[1], doing, int((~record.broken).sum()), len(record.broken))
        self._journal.save(self.records)

    def _most(self, search: Search | None) -> float:
        """The work that a stage is for an example at most."""
        return passes_of(search, self._classes) * weight(search)

    def outcomes(self, portions: int) -> dict[str, Outcome]:
        """What each attack came to, all portions together."""
        return {name: self._outcome(name, attack, portions) for name, attack in self._attacks.items()}

    def _outcome(self, name: str, attack: Attack, portions: int) -> Outcome:
        codes, count = [], len(_stages(attack))
        for portion in range(portions):
            clean = self.records[portion, Clean.name, 0].broken
            counts_clean = isinstance(attack, Clean) or (isinstance(attack, Staged) and attack.counts_clean)
            code = (clean & counts_clean).long() * CLEAN
            for stage in range(count):
                broken = self.records[portion, name, stage].broken
                code = torch.where(broken & (code == HOLDS), FIRST_STAGE + stage, code)
            codes.append(code)
        records = [[self.records[portion, name, stage] for portion in range(portions)] for stage in range(count)]
        return Outcome(
            torch.cat(codes) if codes else torch.zeros(0, dtype=torch.int64),
            [sum(record.seconds for record in stage) for stage in records],
            [sum(record.queries for record in stage) for stage in records],
        )


def passes_of(search: Search | None, classes: int) -> int:
    """How often a model of so many classes is asked about an example at most; None is an attack that is no search."""
    return 1 if search is None else max(search.targets(classes), 1) * search.steps * search.evaluations


def weight(search: Search | None) -> float:
    """The work of a pass of this search, in forward passes: some come with a gradient."""
    return 1.0 if search is None else 1 + _BACK * search.gradients / search.evaluations


def passes_at_most(attacks: Iterable[Attack], classes: int) -> int:
    """The same of several attacks with all their stages."""
    return sum(passes_of(search, classes) for attack in attacks for search in _stages(attack))


def _stages(attack: Attack) -> tuple[Search | None, ...]:
    return attack.stages if isinstance(attack, Staged) else (None,)


@dataclass(frozen=True)
class _Ahead:
    """Where an attack is among its stages."""

    portion: int
    name: str
    stages: tuple[Search, ...]
    stage: int

    @property
    def key(self) -> Key:
        return self.portion, self.name, self.stage

    @property
    def doing(self) -> str:
        """The name of the stage, or its number where all have the same: PGD's restarts."""
        count = len(self.stages)
        if count > 1 and len({search.name for search in self.stages}) == 1:
            return f"restart {self.stage + 1} of {count}"
        return self.stages[self.stage].name

    def later(self) -> Iterator[tuple[Key, Search]]:
        """The stages that are still to come."""
        for stage in range(self.stage + 1, len(self.stages)):
            yield (self.portion, self.name, stage), self.stages[stage]


@contextmanager
def _counted(model: nn.Module) -> Iterator[list[int]]:
    """The sizes of all batches that a model is asked about inside."""
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, arguments: sizes.append(len(arguments[0])))
    try:
        yield sizes
    finally:
        hook.remove()
