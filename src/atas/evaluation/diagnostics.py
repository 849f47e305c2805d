"""Measurements behind the warnings: a few passes of the model on a sample of the examples."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from atas.attacks import PGD, Attack, AttackEnsemble, StagedAttack, correct, create
from atas.attacks.apgd import APGD
from atas.attacks.scheduler import Examples, Scheduler
from atas.core.autograd import input_gradient
from atas.evaluation.runner import FIRST_STAGE, ROBUST
from atas.evaluation.warnings import (
    EvaluationWarning,
    check_black_box,
    check_convergence,
    check_deterministic,
    check_finite,
    check_gradients,
    check_large_budget,
    check_logits,
    check_single_step,
)
from atas.threat import L2, Linf, Threat

SAMPLE_SIZE = 256  # examples at most
_SMALL_SAMPLE = 16  # for the large budget, and to ask again
_REPEATS = 10
_MANY_STEPS = 10
# From the surface of an L2 ball, where random points lie, ten steps of eps/5 go 95% of the way if the gradient is the
# same everywhere, and twenty go 99.9%: only what twenty steps confirm says something about the model.
_ENOUGH_FOR_L2 = 20
_LARGE_BUDGET = Linf(0.5)
_STRONG_ATTACK = AttackEnsemble("strong", (APGD("ce", 20), APGD("t", 20)))  # a sound model falls within a few steps
# Square may find what cross-entropy alone does not, and that means nothing: it has to go beyond this one.
_MARGIN, _SQUARE = "apgd-t", "square"


class Diagnostics:
    """A model on a sample of the examples, whatever the number of processes; `rows` says which ones they are."""

    def __init__(
        self, model: nn.Module, scheduler: Scheduler, threat: Threat, seed: int, rows: range, x: Tensor, y: Tensor
    ) -> None:
        self._model, self._scheduler, self._threat, self._seed, self._rows = model, scheduler, threat, seed, rows
        self._sample = scheduler.examples(x, y, torch.tensor(rows))
        self._small_sample = min(_SMALL_SAMPLE, scheduler.slots)

    @property
    def num_classes(self) -> int:
        """How many the model has."""
        return self._sample.num_classes

    def check_model(self) -> list[EvaluationWarning]:
        """What can be said of the model itself, before anything takes long."""
        x, y, verifier = self._sample.x, self._sample.y, self._scheduler.verifier
        size = min(self._scheduler.slots, len(x))
        with torch.no_grad():
            first, again, elsewhere = (_in_batches(verifier, parts, x) for parts in (size, size, (size + 1) // 2))
            # A model that tosses one coin for a whole batch may well give the same answer twice.
            handful = [verifier(x[: self._small_sample]) for _ in range(_REPEATS)]
            once, again = torch.cat([first, *handful[1:]]), torch.cat([again, *handful[:-1]])
            elsewhere = torch.cat([elsewhere, *handful[1:]])
            largest, rise = _in_batches(self._gradient, size, x, y).unbind(1)
        answers = check_deterministic(once, again, elsewhere)
        return _not_none(check_finite(first), answers, check_logits(first), *check_gradients(largest, rise))

    def _gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """The largest entry of each gradient, and by how much the loss would rise within the ball if it were right."""
        gradient, _ = input_gradient(self._scheduler.verifier, x, y)
        promised = gradient * (self._threat.step(x, gradient, self._threat.eps) - x)
        return torch.stack([gradient.flatten(1).abs().amax(1), promised.flatten(1).sum(1)], 1)

    def check_attacks(self, attacks: dict[str, Attack], codes: dict[str, Tensor]) -> list[EvaluationWarning]:
        """What the attacks say of each other.

        Where the search of AutoAttack, or a part of it, was asked for, PGD on the sample costs little beside it; else
        only what was asked for is compared.
        """
        if len(attacks) == 1:  # clean
            return []
        known = {name: code == ROBUST for name, code in codes.items()}
        searched = any(isinstance(attack, AttackEnsemble) for attack in attacks.values())
        steps = {name: attack.steps for name, attack in attacks.items() if isinstance(attack, PGD)}
        size = next((attack.step_size for attack in attacks.values() if isinstance(attack, PGD)), None)

        @functools.cache
        def on_sample(name: str) -> Tensor:
            return known[name][list(self._rows)] if name in known else self._verdicts(name, size)

        def both(one: str, other: str) -> tuple[Tensor, Tensor]:
            """Verdicts on the same examples: on all of them where they are known, else on the sample."""
            if one in known and other in known:
                return known[one], known[other]
            return on_sample(one), on_sample(other)

        def fgsm_against(name: str) -> EvaluationWarning | None:
            return check_single_step(*both("fgsm", name), name)

        def pgd50_against(name: str) -> EvaluationWarning | None:
            return check_convergence(*both(name, "pgd50"), (name, "pgd50"))

        def confirmed(compare: Callable[[str], EvaluationWarning | None], name: str) -> EvaluationWarning | None:
            found, few = compare(name), steps.get(name, _MANY_STEPS) < _ENOUGH_FOR_L2
            return compare(f"pgd{_ENOUGH_FOR_L2}") if found and few and isinstance(self._threat, L2) else found

        found: list[EvaluationWarning | None] = []
        if searched or max(steps.values(), default=0) >= _MANY_STEPS:
            name = next((name for name, count in steps.items() if count >= _MANY_STEPS), "pgd10")
            found.append(confirmed(fgsm_against, name))
        if searched or {"pgd10", "pgd50"} <= set(known):
            found.append(confirmed(pgd50_against, "pgd10"))
        found.append(check_black_box(_broken_by_square(attacks, codes), len(codes["clean"])))
        found.append(self._large_budget())
        return _not_none(*found)

    def _verdicts(self, name: str, step_size: float | None) -> Tensor:
        """Under an attack by name, on the sample."""
        attack, sample = create(name, step_size), self._sample
        if isinstance(attack, StagedAttack):
            return ~self._broken(attack, sample, self._threat)

        def judged(x: Tensor, y: Tensor) -> Tensor:
            point = attack(self._model, x, y, self._threat, seed=self._seed)
            with torch.no_grad():
                return correct(self._scheduler.verifier(point), y)

        return _in_batches(judged, self._scheduler.slots, sample.x, sample.y).cpu()

    def _large_budget(self) -> EvaluationWarning | None:
        """On examples that grey, which is inside of every ball, is known to break."""
        sample, verifier = self._sample, self._scheduler.verifier
        with torch.no_grad():
            grey = verifier(torch.full_like(sample.x[: self._small_sample], 0.5))[:1].expand(len(sample.y), -1)
        rows = (~sample.misclassified() & ~correct(grey, sample.y)).nonzero().squeeze(1)[:_SMALL_SAMPLE]
        few = Examples(sample.x[rows], sample.y[rows], sample.index[rows], sample.logits[rows])
        right = int((~self._broken(_STRONG_ATTACK, few, _LARGE_BUDGET)).sum())
        return check_large_budget(right, len(rows), _LARGE_BUDGET.eps)

    def _broken(self, attack: StagedAttack, examples: Examples, threat: Threat) -> Tensor:
        broken = examples.misclassified().cpu() & attack.skips_misclassified
        return self._scheduler.run_stages(attack.stages, examples, threat, broken, seed=self._seed)[0]


def _broken_by_square(attacks: dict[str, Attack], codes: dict[str, Tensor]) -> int:
    """How many examples Square broke that held under attacks by gradients, within an attack or beside others."""
    found, beside = 0, []
    for name, attack in attacks.items():
        stages = [search.name for search in attack.stages] if isinstance(attack, StagedAttack) else []
        if _SQUARE not in stages:
            beside.append(codes[name] == ROBUST)
        elif _MARGIN in stages[: stages.index(_SQUARE)]:
            found = max(found, int((codes[name] == FIRST_STAGE + stages.index(_SQUARE)).sum()))
    if {_SQUARE, _MARGIN} <= set(codes):
        found = max(found, int((torch.stack(beside).all(0) & (codes[_SQUARE] != ROBUST)).sum()))
    return found


def _in_batches(function: Callable[..., Tensor], size: int, *tensors: Tensor) -> Tensor:
    """A function of tensors, so many examples at a time."""
    return torch.cat([function(*parts) for parts in zip(*(tensor.split(size) for tensor in tensors), strict=True)])


def _not_none(*found: EvaluationWarning | None) -> list[EvaluationWarning]:
    return [warning for warning in found if warning is not None]
