"""The attacks of the evaluation, repeated on a few test images to show what they do."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atas import attacks
from atas.attacks import Attack, AttackEnsemble, StagedAttack
from atas.data import Split
from atas.errors import AtasError
from atas.evaluation import Evaluation
from atas.report.formatting import attack_names
from atas.report.run_view import RunView, Unavailable, evenly_spaced
from atas.threat import Threat

EXAMPLES = 24
_DEFAULT_ATTACKS = ("fgsm", "pgd10")  # of a run that was not evaluated
_SECONDS_PER_ATTACK = 40.0  # for an attack


@dataclass(frozen=True)
class Prediction:
    """What the model says of each image: the class, and how sure it is."""

    label: list[int]
    confidence: list[float]


@dataclass(frozen=True)
class AttackResult:
    """An attack on the chosen examples: where it ended, what the model says there, and whether it is still right."""

    name: str
    adversarial: Tensor
    prediction: Prediction
    robust: list[bool]


@dataclass(frozen=True)
class AttackedExamples:
    """The chosen test images and every attack on them."""

    index: list[int]
    images: Tensor
    labels: list[int]
    classes: tuple[str, ...]
    broken_by: list[str | None]
    outcomes: list[str | None]
    """What can break an example, in the order in which it was tried; then None, which nothing does, and `clean`."""
    clean: Prediction
    results: list[AttackResult]
    skipped: list[str]
    """Attacks that would take too long here, or that are not known here."""
    threat: Threat

    def outcome_order(self, row: int) -> int:
        """The place of an example by what broke it."""
        reason = self.broken_by[row]
        return self.outcomes.index(reason) if reason in self.outcomes else len(self.outcomes)


@dataclass(frozen=True)
class _Task:
    """What there is to repeat: attacks by name on the test images, with the evaluation where there is one."""

    test: Split
    threat: Threat
    names: list[str]
    seed: int = 0
    broken_by: list[str | None] | None = None
    evaluation: Evaluation | None = None


def attack_examples(view: RunView) -> AttackedExamples:
    """Choose examples and run the attacks of the evaluation on them again, with its seed, so that they end alike."""
    task = _task(view)
    test, device = task.test, view.device
    chosen = sample_by_outcome(task.broken_by or [None] * len(test), EXAMPLES)
    x, y = test.images[torch.tensor(chosen)].to(device).float() / 255, test.labels[chosen].to(device).long()
    labels, clean = y.tolist(), predict(view, x)
    results, skipped = [], []
    for name in task.names:
        attack = _attack(name, task.evaluation)
        rows = _rows(attack, name, task.evaluation, chosen)
        if (
            attack is None
            or _passes(attack, task, name, [chosen[row] for row in rows]) * view.throughput.seconds_per_image
            > _SECONDS_PER_ATTACK
        ):
            skipped.append(name)
            continue
        adversarial = x.clone()
        if rows:
            index = torch.tensor([chosen[row] for row in rows], device=device)
            adversarial[rows] = attack(view.model, x[rows], y[rows], task.threat, seed=task.seed, index=index)
        prediction = predict(view, adversarial)
        robust = [predicted == label for predicted, label in zip(prediction.label, labels, strict=True)]
        results.append(AttackResult(name, adversarial, prediction, robust))
    broken_by = [
        _first(clean, results, labels, row) if task.broken_by is None else task.broken_by[place]
        for row, place in enumerate(chosen)
    ]
    outcomes = _outcomes(task)
    return AttackedExamples(chosen, x, labels, test.classes, broken_by, outcomes, clean, results, skipped, task.threat)


def _task(view: RunView) -> _Task:
    if view.evaluation is None:
        return _Task(view.data.test, view.recipe.threat, list(_DEFAULT_ATTACKS))
    evaluation, test = view.test_split
    if view.weights_differ:
        raise Unavailable("The evaluation is of other weights than those in the folder: evaluate again")
    seed = int(evaluation.protocol.get("seed", 0))
    return _Task(test, evaluation.threat, attack_names(evaluation), seed, evaluation.broken_by.get("worst"), evaluation)


def sample_by_outcome(reasons: list[str | None], count: int) -> list[int]:
    """Examples of every kind, by what broke them, as many of each as there are places, and evenly over the data.

    >>> sample_by_outcome(["clean", None, None, None, "fgsm"], 4)
    [0, 1, 3, 4]
    """
    kinds: dict[str | None, list[int]] = {}
    for place, reason in enumerate(reasons):
        kinds.setdefault(reason, []).append(place)
    wanted = dict.fromkeys(kinds, 0)
    for turn in range(count):
        for kind, places in kinds.items():
            wanted[kind] += turn < len(places) and sum(wanted.values()) < count
    return sorted(
        places[row] for kind, places in kinds.items() for row in evenly_spaced(len(places), wanted[kind]).tolist()
    )


def predict(view: RunView, points: Tensor) -> Prediction:
    """What the model says."""
    with torch.no_grad():
        confidence, label = view.model(points).float().softmax(1).max(1)
    return Prediction(label.tolist(), confidence.tolist())


def _attack(name: str, evaluation: Evaluation | None) -> Attack | None:
    """The attack of that name with the step size of the evaluation; None for one that is not known here."""
    settings = evaluation.protocol.get("attacks", {}).get(name, {}) if evaluation is not None else {}
    size = settings.get("step_size_value") if name.startswith("pgd") else None
    try:
        return attacks.create(name, size)
    except AtasError:
        return None


def _rows(attack: Attack | None, name: str, evaluation: Evaluation | None, chosen: list[int]) -> list[int]:
    """Which examples to attack: a search that is known to find nothing would only take its time."""
    if evaluation is None or not isinstance(attack, AttackEnsemble):
        return list(range(len(chosen)))
    broken = ~evaluation.correct[name] & evaluation.correct["clean"]
    return [row for row, place in enumerate(chosen) if broken[place]]


def _passes(attack: Attack, task: _Task, name: str, places: list[int]) -> int:
    """About how often images go through the model: an example that a stage is known to break goes no further."""
    if not isinstance(attack, StagedAttack):
        return len(places)
    classes, stages = len(task.test.classes), [search.name for search in attack.stages]
    costs = [search.steps * search.queries_per_step * max(search.num_targets(classes), 1) for search in attack.stages]
    broken = task.evaluation.broken_by.get(name) if task.evaluation is not None else None
    passes = 0
    for place in places:
        reason = broken[place] if broken is not None else None
        passes += sum(costs[: stages.index(reason) + 1] if reason in stages else costs)
    return passes


def _first(clean: Prediction, results: list[AttackResult], labels: list[int], row: int) -> str | None:
    """What broke an example first, where no evaluation tells."""
    if clean.label[row] != labels[row]:
        return "clean"
    return next((result.name for result in results if not result.robust[row]), None)


def _outcomes(task: _Task) -> list[str | None]:
    outcomes: list[str | None] = []
    for name in task.names:
        stages = task.evaluation.stages.get(name, ()) if task.evaluation is not None else ()
        outcomes += [f"{name}: {stage.name}" for stage in stages] or [name]
    return [*outcomes, None, "clean"]
