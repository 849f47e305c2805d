"""The attacks of the evaluation, run again on a sample of test images to show their perturbations."""

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

_DEFAULT_ATTACKS = ("fgsm", "pgd10")  # if the run was not evaluated
_SECONDS_PER_ATTACK = 40.0


@dataclass(frozen=True)
class Prediction:
    """Predicted class and confidence of each image."""

    label: list[int]
    confidence: list[float]


@dataclass(frozen=True)
class AttackResult:
    """One attack on the sample: adversarial images, predictions, and whether the model is still correct."""

    name: str
    adversarial: Tensor
    prediction: Prediction
    robust: list[bool]


@dataclass(frozen=True)
class AttackedExamples:
    """A sample of test images and every attack on them."""

    index: list[int]
    images: Tensor
    labels: list[int]
    classes: tuple[str, ...]
    broken_by: list[str | None]
    outcomes: list[str | None]
    """Attacks and stages in the order in which they ran; then None (robust) and `clean` (misclassified)."""
    clean: Prediction
    results: list[AttackResult]
    skipped: list[str]
    """Attacks that are too slow on this machine, or unknown to this version."""
    threat: Threat

    def outcome_order(self, row: int) -> int:
        """Return the sort key of an example by its outcome."""
        reason = self.broken_by[row]
        return self.outcomes.index(reason) if reason in self.outcomes else len(self.outcomes)


@dataclass(frozen=True)
class _Task:
    """The attacks to run again, the test images, and the evaluation if there is one."""

    test: Split
    threat: Threat
    names: list[str]
    seed: int = 0
    broken_by: list[str | None] | None = None
    evaluation: Evaluation | None = None


def attack_examples(view: RunView) -> AttackedExamples:
    """Sample test images and attack them as the evaluation did, with the same seed and so the same results."""
    task = _task(view)
    test, device = task.test, view.device
    sample = sample_by_outcome(task.broken_by or [None] * len(test), view.sample_sizes.gallery)
    x, y = test.images[torch.tensor(sample)].to(device).float() / 255, test.labels[sample].to(device).long()
    labels, clean = y.tolist(), predict(view, x)
    results, skipped = [], []
    for name in task.names:
        attack = _attack(name, task.evaluation)
        rows = _rows_to_attack(attack, name, task.evaluation, sample)
        indices = [sample[row] for row in rows]
        if (
            attack is None
            or _queries(attack, task, name, indices) * view.throughput.seconds_per_image > _SECONDS_PER_ATTACK
        ):
            skipped.append(name)
            continue
        adversarial = x.clone()
        if rows:
            index = torch.tensor(indices, device=device)
            adversarial[rows] = attack(view.model, x[rows], y[rows], task.threat, seed=task.seed, index=index)
        prediction = predict(view, adversarial)
        robust = [predicted == label for predicted, label in zip(prediction.label, labels, strict=True)]
        results.append(AttackResult(name, adversarial, prediction, robust))
    broken_by = [
        _first_failure(clean, results, labels, row) if task.broken_by is None else task.broken_by[index]
        for row, index in enumerate(sample)
    ]
    outcomes = _outcomes(task)
    return AttackedExamples(sample, x, labels, test.classes, broken_by, outcomes, clean, results, skipped, task.threat)


def _task(view: RunView) -> _Task:
    if view.evaluation is None:
        return _Task(view.data.test, view.recipe.threat, list(_DEFAULT_ATTACKS))
    evaluation, test = view.test_split
    if view.weights_differ:
        raise Unavailable("The evaluation used other weights than those in the folder: evaluate again")
    seed = int(evaluation.protocol.get("seed", 0))
    return _Task(test, evaluation.threat, attack_names(evaluation), seed, evaluation.broken_by.get("worst"), evaluation)


def sample_by_outcome(outcomes: list[str | None], count: int) -> list[int]:
    """Choose `count` examples with every outcome equally often, evenly spaced over the data.

    >>> sample_by_outcome(["clean", None, None, None, "fgsm"], 4)
    [0, 1, 3, 4]
    """
    by_outcome: dict[str | None, list[int]] = {}
    for index, outcome in enumerate(outcomes):
        by_outcome.setdefault(outcome, []).append(index)
    counts = dict.fromkeys(by_outcome, 0)
    for turn in range(count):
        for outcome, indices in by_outcome.items():
            counts[outcome] += turn < len(indices) and sum(counts.values()) < count
    return sorted(
        indices[row]
        for outcome, indices in by_outcome.items()
        for row in evenly_spaced(len(indices), counts[outcome]).tolist()
    )


def predict(view: RunView, images: Tensor) -> Prediction:
    """Return the model's predictions."""
    with torch.no_grad():
        confidence, label = view.model(images).float().softmax(1).max(1)
    return Prediction(label.tolist(), confidence.tolist())


def _attack(name: str, evaluation: Evaluation | None) -> Attack | None:
    """Create the attack with the step size of the evaluation; None for an unknown name."""
    settings = evaluation.protocol.get("attacks", {}).get(name, {}) if evaluation is not None else {}
    size = settings.get("step_size_value") if name.startswith("pgd") else None
    try:
        return attacks.create(name, size)
    except AtasError:
        return None


def _rows_to_attack(attack: Attack | None, name: str, evaluation: Evaluation | None, sample: list[int]) -> list[int]:
    """Return the rows to attack. An ensemble skips those that it is known not to break: they take longest."""
    if evaluation is None or not isinstance(attack, AttackEnsemble):
        return list(range(len(sample)))
    broken = ~evaluation.correct[name] & evaluation.correct["clean"]
    return [row for row, index in enumerate(sample) if broken[index]]


def _queries(attack: Attack, task: _Task, name: str, indices: list[int]) -> int:
    """Estimate the number of model queries; an example leaves an attack at the stage that broke it."""
    if not isinstance(attack, StagedAttack):
        return len(indices)
    classes, stages = len(task.test.classes), [search.name for search in attack.stages]
    costs = [search.steps * search.queries_per_step * max(search.num_targets(classes), 1) for search in attack.stages]
    broken = task.evaluation.broken_by.get(name) if task.evaluation is not None else None
    queries = 0
    for index in indices:
        stage = broken[index] if broken is not None else None
        queries += sum(costs[: stages.index(stage) + 1] if stage in stages else costs)
    return queries


def _first_failure(clean: Prediction, results: list[AttackResult], labels: list[int], row: int) -> str | None:
    """Return the first attack that broke an example, for a run without an evaluation."""
    if clean.label[row] != labels[row]:
        return "clean"
    return next((result.name for result in results if not result.robust[row]), None)


def _outcomes(task: _Task) -> list[str | None]:
    outcomes: list[str | None] = []
    for name in task.names:
        stages = task.evaluation.stages.get(name, ()) if task.evaluation is not None else ()
        outcomes += [f"{name}: {stage.name}" for stage in stages] or [name]
    return [*outcomes, None, "clean"]
