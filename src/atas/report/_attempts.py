"""Attacks run again on a few examples, to show what they do: the points they find and what the model says there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atas import attacks
from atas.attacks import Attack, Battery, Staged
from atas.data import Split
from atas.errors import AtasError
from atas.evaluation import Evaluation
from atas.report._subject import NotAtHand, Subject, evenly
from atas.report._words import attacks_of
from atas.threat import Threat

EXAMPLES = 24
_USUAL = ("fgsm", "pgd10")  # of a run that was not evaluated
_SECONDS = 40.0  # for an attack


@dataclass(frozen=True)
class Answer:
    """What the model says of each image: the class, and how sure it is."""

    label: list[int]
    confidence: list[float]


@dataclass(frozen=True)
class Attempt:
    """An attack on the chosen examples: where it ended, what the model says there, and whether it is still right."""

    name: str
    points: Tensor
    answer: Answer
    holds: list[bool]


@dataclass(frozen=True)
class Attempts:
    """The chosen test images and every attack on them."""

    index: list[int]
    images: Tensor
    labels: list[int]
    classes: tuple[str, ...]
    broken_by: list[str | None]
    kinds: list[str | None]
    """What can break an example, in the order in which it was tried; then None, which nothing does, and `clean`."""
    clean: Answer
    attempts: list[Attempt]
    left_out: list[str]
    """Attacks that would take too long here, or that are not known here."""
    threat: Threat

    def order(self, row: int) -> int:
        """The place of an example by what broke it."""
        reason = self.broken_by[row]
        return self.kinds.index(reason) if reason in self.kinds else len(self.kinds)


@dataclass(frozen=True)
class _Task:
    """What there is to repeat: attacks by name on the test images, with the evaluation where there is one."""

    test: Split
    threat: Threat
    names: list[str]
    seed: int = 0
    reasons: list[str | None] | None = None
    found: Evaluation | None = None


def attempt(subject: Subject) -> Attempts:
    """Choose examples and run the attacks of the evaluation on them again, with its seed, so that they end alike."""
    task = _task(subject)
    test, device = task.test, subject.device
    chosen = choose(task.reasons or [None] * len(test), EXAMPLES)
    x, y = test.images[torch.tensor(chosen)].to(device).float() / 255, test.labels[chosen].to(device).long()
    labels, clean = y.tolist(), ask(subject, x)
    attempts, left_out = [], []
    for name in task.names:
        attack = _attack(name, task.found)
        rows = _rows(attack, name, task.found, chosen)
        if (
            attack is None
            or _passes(attack, task, name, [chosen[row] for row in rows]) * subject.pace.seconds > _SECONDS
        ):
            left_out.append(name)
            continue
        points = x.clone()
        if rows:
            index = torch.tensor([chosen[row] for row in rows], device=device)
            points[rows] = attack(subject.model, x[rows], y[rows], task.threat, seed=task.seed, index=index)
        answer = ask(subject, points)
        holds = [said == label for said, label in zip(answer.label, labels, strict=True)]
        attempts.append(Attempt(name, points, answer, holds))
    broken_by = [
        _first(clean, attempts, labels, row) if task.reasons is None else task.reasons[place]
        for row, place in enumerate(chosen)
    ]
    kinds = _kinds(task)
    return Attempts(chosen, x, labels, test.classes, broken_by, kinds, clean, attempts, left_out, task.threat)


def _task(subject: Subject) -> _Task:
    if subject.evaluation is None:
        return _Task(subject.data.test, subject.recipe.threat, list(_USUAL))
    found, test = subject.tested
    if subject.weights_differ:
        raise NotAtHand("The evaluation is of other weights than those in the folder: evaluate again")
    seed = int(found.protocol.get("seed", 0))
    return _Task(test, found.threat, attacks_of(found), seed, found.broken_by.get("worst"), found)


def choose(reasons: list[str | None], count: int) -> list[int]:
    """Examples of every kind, by what broke them, as many of each as there are places, and evenly over the data.

    >>> choose(["clean", None, None, None, "fgsm"], 4)
    [0, 1, 3, 4]
    """
    kinds: dict[str | None, list[int]] = {}
    for place, reason in enumerate(reasons):
        kinds.setdefault(reason, []).append(place)
    wanted = dict.fromkeys(kinds, 0)
    for turn in range(count):
        for kind, places in kinds.items():
            wanted[kind] += turn < len(places) and sum(wanted.values()) < count
    return sorted(places[row] for kind, places in kinds.items() for row in evenly(len(places), wanted[kind]).tolist())


def ask(subject: Subject, points: Tensor) -> Answer:
    """What the model says."""
    with torch.no_grad():
        confidence, label = subject.model(points).float().softmax(1).max(1)
    return Answer(label.tolist(), confidence.tolist())


def _attack(name: str, found: Evaluation | None) -> Attack | None:
    """The attack of that name with the step size of the evaluation; None for one that is not known here."""
    settings = found.protocol.get("attacks", {}).get(name, {}) if found is not None else {}
    size = settings.get("step_size_value") if name.startswith("pgd") else None
    try:
        return attacks.create(name, size)
    except AtasError:
        return None


def _rows(attack: Attack | None, name: str, found: Evaluation | None, chosen: list[int]) -> list[int]:
    """Which examples to attack: a search that is known to find nothing would only take its time."""
    if found is None or not isinstance(attack, Battery):
        return list(range(len(chosen)))
    broken = ~found.correct[name] & found.correct["clean"]
    return [row for row, place in enumerate(chosen) if broken[place]]


def _passes(attack: Attack, task: _Task, name: str, places: list[int]) -> int:
    """About how often images go through the model: an example that a stage is known to break goes no further."""
    if not isinstance(attack, Staged):
        return len(places)
    classes, stages = len(task.test.classes), [search.name for search in attack.stages]
    costs = [search.steps * search.evaluations * max(search.targets(classes), 1) for search in attack.stages]
    broken = task.found.broken_by.get(name) if task.found is not None else None
    passes = 0
    for place in places:
        reason = broken[place] if broken is not None else None
        passes += sum(costs[: stages.index(reason) + 1] if reason in stages else costs)
    return passes


def _first(clean: Answer, attempts: list[Attempt], labels: list[int], row: int) -> str | None:
    """What broke an example first, where no evaluation tells."""
    if clean.label[row] != labels[row]:
        return "clean"
    return next((attempt.name for attempt in attempts if not attempt.holds[row]), None)


def _kinds(task: _Task) -> list[str | None]:
    kinds: list[str | None] = []
    for name in task.names:
        stages = task.found.stages.get(name, ()) if task.found is not None else ()
        kinds += [f"{name}: {stage.name}" for stage in stages] or [name]
    return [*kinds, None, "clean"]
