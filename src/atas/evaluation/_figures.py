"""From what each process found to the figures of a result."""

from __future__ import annotations

from typing import Any

import torch

from atas.attacks import Attack, Clean, Staged
from atas.evaluation._result import WORST, Stage
from atas.evaluation._work import FIRST_STAGE, HOLDS, Outcome


def together(parts: list[tuple[range, dict[str, Outcome]]], examples: int) -> dict[str, Outcome]:
    """What all processes found, in the order of the examples. They work side by side: the longest time counts."""
    found = {}
    for name in parts[0][1]:
        code = torch.zeros(examples, dtype=torch.int64)
        for rows, outcomes in parts:
            code[rows.start :: rows.step] = outcomes[name].code
        seconds = zip(*(outcomes[name].seconds for _, outcomes in parts), strict=True)
        queries = zip(*(outcomes[name].queries for _, outcomes in parts), strict=True)
        found[name] = Outcome(code, [max(times) for times in seconds], [sum(counts) for counts in queries])
    return found


def figures(attacks: dict[str, Attack], outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """Verdicts, what they cost and what broke which example, as an `Evaluation` has them."""
    right = {name: outcome.code == HOLDS for name, outcome in outcomes.items()}
    seconds = {name: sum(outcome.seconds) for name, outcome in outcomes.items()}
    queries = {name: sum(outcome.queries) for name, outcome in outcomes.items()}
    stages: dict[str, tuple[Stage, ...]] = {}
    broken_by: dict[str, list[str | None]] = {}
    first: list[str | None] = [None] * len(right[Clean.name])
    for name, attack in attacks.items():
        codes, parts = outcomes[name].code.tolist(), _parts(attack)
        labels = [None, Clean.name, *(parts or [name] * len(outcomes[name].seconds))]
        found = [labels[code] for code in codes]
        if parts:
            stages[name] = _after_each(outcomes[name], parts)
            broken_by[name] = found
            found = [label if label in (None, Clean.name) else f"{name}: {label}" for label in found]
        first = [earlier or label for earlier, label in zip(first, found, strict=True)]
    return {
        "correct": right | {WORST: torch.stack(list(right.values())).all(0)},
        "seconds": seconds | {WORST: sum(seconds.values())},
        "queries": queries | {WORST: sum(queries.values())},
        "stages": stages,
        "broken_by": broken_by | {WORST: first},
    }


def _parts(attack: Attack) -> list[str]:
    """The stages that are worth a figure: PGD's restarts, all of one name, are not."""
    names = [search.name for search in attack.stages] if isinstance(attack, Staged) else []
    return names if len(set(names)) > 1 else []


def _after_each(outcome: Outcome, names: list[str]) -> tuple[Stage, ...]:
    n, found = len(outcome.code), []
    for stage, name in enumerate(names):
        right = int(((outcome.code == HOLDS) | (outcome.code > FIRST_STAGE + stage)).sum())
        found.append(Stage(name, right, n, outcome.seconds[stage], outcome.queries[stage]))
    return tuple(found)
