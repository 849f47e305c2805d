"""The outcomes of attacks: what broke each example, joined over processes, and summed up for the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atas.attacks import Attack, Clean, StagedAttack
from atas.evaluation.corruptions import Corruption
from atas.evaluation.result import WORST, Stage

ROBUST, MISCLASSIFIED, FIRST_STAGE = 0, 1, 2


@dataclass(frozen=True)
class AttackOutcome:
    """The result of an attack on the examples of this process."""

    code: Tensor
    """For each example (N,): ROBUST; MISCLASSIFIED if it is wrong without an attack and therefore skipped; or the stage
    that broke it, counted from FIRST_STAGE."""
    seconds: list[float]
    """The time of each stage."""
    queries: list[int]
    """Forward passes of the model in each stage, in images."""
    predicted: Tensor | None = None
    """The class predicted at what broke each example (N,), -1 for NaN; None if it was not recorded."""
    points: Tensor | None = None
    """The point of each example, adversarial or the strongest that failed (N, C, H, W), if points are kept."""


def merge_shards(shards: list[tuple[range, dict[str, AttackOutcome]]], examples: int) -> dict[str, AttackOutcome]:
    """Join the outcomes of all processes in the order of the examples. The slowest process gives the time."""
    merged = {}
    for name in shards[0][1]:
        code = _merge([(rows, outcomes[name].code) for rows, outcomes in shards], examples)
        assert code is not None
        seconds = zip(*(outcomes[name].seconds for _, outcomes in shards), strict=True)
        queries = zip(*(outcomes[name].queries for _, outcomes in shards), strict=True)
        merged[name] = AttackOutcome(
            code,
            [max(times) for times in seconds],
            [sum(counts) for counts in queries],
            _merge([(rows, outcomes[name].predicted) for rows, outcomes in shards], examples),
            _merge([(rows, outcomes[name].points) for rows, outcomes in shards], examples),
        )
    return merged


def _merge(shares: list[tuple[range, Tensor | None]], examples: int) -> Tensor | None:
    """Join tensors of all processes in the order of the examples; None if one is missing."""
    shares = [(rows, share) for rows, share in shares if len(rows)]  # there may be fewer examples than processes
    known = [(rows, share) for rows, share in shares if share is not None]
    if len(known) < len(shares):
        return None
    merged = known[0][1].new_zeros(examples, *known[0][1].shape[1:])
    for rows, share in known:
        merged[rows.start :: rows.step] = share
    return merged


def summarize(
    attacks: dict[str, Attack], corruptions: dict[str, Corruption], outcomes: dict[str, AttackOutcome]
) -> dict[str, Any]:
    """Return the fields of an `Evaluation` that hold verdicts, their cost, what broke each example, and points."""
    counts: dict[str, tuple[int, ...]] = {}
    for name, corruption in corruptions.items():  # at severities from 1 on
        robust = int((outcomes[name].code == ROBUST).sum())
        counts[corruption.kind] = (*counts.get(corruption.kind, ()), robust)
    outcomes = {name: outcomes[name] for name in attacks}
    correct = {name: outcome.code == ROBUST for name, outcome in outcomes.items()}
    seconds = {name: sum(outcome.seconds) for name, outcome in outcomes.items()}
    queries = {name: sum(outcome.queries) for name, outcome in outcomes.items()}
    stages: dict[str, tuple[Stage, ...]] = {}
    broken_by: dict[str, list[str | None]] = {}
    first: list[str | None] = [None] * len(correct[Clean.name])
    for name, attack in attacks.items():
        stage_names = reported_stages(attack)
        names = [None, Clean.name, *(stage_names or [name] * len(outcomes[name].seconds))]
        labels = [names[code] for code in outcomes[name].code.tolist()]
        if stage_names:
            stages[name] = _stage_results(outcomes[name], stage_names)
            broken_by[name] = labels
            labels = [label if label in (None, Clean.name) else f"{name}: {label}" for label in labels]
        first = [earlier or label for earlier, label in zip(first, labels, strict=True)]
    return {
        "correct": correct | {WORST: torch.stack(list(correct.values())).all(0)},
        "seconds": seconds | {WORST: sum(seconds.values())},
        "queries": queries | {WORST: sum(queries.values())},
        "stages": stages,
        "broken_by": broken_by | {WORST: first},
        "corruptions": counts,
        "adversarial": {name: outcome.points for name, outcome in outcomes.items() if outcome.points is not None},
    }


def reported_stages(attack: Attack) -> list[str]:
    """Return the names of the stages to report; PGD's restarts, which share one name, are not reported."""
    names = [search.name for search in attack.stages] if isinstance(attack, StagedAttack) else []
    return names if len(set(names)) > 1 else []


def _stage_results(outcome: AttackOutcome, names: list[str]) -> tuple[Stage, ...]:
    n, stages = len(outcome.code), []
    for number, name in enumerate(names):
        num_correct = int(((outcome.code == ROBUST) | (outcome.code > FIRST_STAGE + number)).sum())
        stages.append(Stage(name, num_correct, n, outcome.seconds[number], outcome.queries[number]))
    return tuple(stages)
