"""Measurements behind the warnings: passes of the model on a sample of the examples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from atas.attacks import PGD, Attack, AttackEnsemble, StagedAttack, create
from atas.attacks.apgd import APGD
from atas.attacks.losses import resists
from atas.attacks.scheduler import Examples
from atas.core.autograd import input_gradient
from atas.evaluation.inputs import Sample
from atas.evaluation.outcomes import FIRST_STAGE, ROBUST
from atas.evaluation.runner import EvaluationSetup
from atas.evaluation.warnings import (
    EvaluationWarning,
    check_black_box,
    check_chance,
    check_convergence,
    check_deterministic,
    check_finite,
    check_gradients,
    check_large_budget,
    check_logits,
    check_single_step,
)
from atas.threat import L2, Linf, Threat

SAMPLE_SIZE = 256  # maximum number of examples
_SMALL_SAMPLE = 16  # for the large budget, and for repeated passes
_REPEATS = 10
_MANY_STEPS = 10
_COMPARED = "fgsm", "pgd10", "pgd50"  # a user's attack of such a name is another one
# Random starts in high dimensions lie near the surface of the L2 ball. From there, ten steps of eps/5 go 95% of the way
# if the gradient is constant, and twenty go 99.9%: so a warning from fewer steps needs confirmation by twenty.
_ENOUGH_FOR_L2 = 20
_LARGE_BUDGET = Linf(0.5)
_STRONG_ATTACK = AttackEnsemble(
    "strong", (APGD(loss="ce", iterations=20), APGD(loss="t", iterations=20))
)  # enough steps without masked gradients
# Square may break examples that attacks on the cross-entropy do not; only examples that apgd-t does not break count.
_MARGIN, _SQUARE = "apgd-t", "square"


class Diagnostics:
    """Checks of a model on a sample of the examples."""

    def __init__(self, setup: EvaluationSetup, sample: Sample) -> None:
        self._setup, self._scheduler, self._rows = setup, setup.scheduler, sample.rows
        self._sample = setup.examples(sample.rows, sample.x, sample.y)
        self._threat = setup.threat.select(self._sample.index).to(self._sample.x.device)
        self._small_sample = min(_SMALL_SAMPLE, self._scheduler.slots)

    @property
    def num_classes(self) -> int:
        """The number of classes of the model."""
        return self._sample.num_classes

    def check_model(self) -> list[EvaluationWarning]:
        """Return warnings about the model itself, before the long attacks."""
        x, y, verifier = self._sample.x, self._sample.y, self._scheduler.verifier
        size = min(self._scheduler.slots, len(x))
        with torch.no_grad():
            output, repeated, other_batches = (_in_batches(verifier, n, x) for n in (size, size, (size + 1) // 2))
            # A model with one random decision per batch may well give the same output twice: repeat a small batch.
            small = [verifier(x[: self._small_sample]) for _ in range(_REPEATS)]
            first, repeated = torch.cat([output, *small[1:]]), torch.cat([repeated, *small[:-1]])
            other_batches = torch.cat([other_batches, *small[1:]])
            largest, rise = _in_batches(self._gradient, size, x, y, torch.arange(len(x))).unbind(1)
        deterministic = check_deterministic(first, repeated, other_batches)
        return _not_none(check_finite(output), deterministic, check_logits(output), *check_gradients(largest, rise))

    def _gradient(self, x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        """Return the largest entry of each gradient, and the increase of a linear loss within the threat model."""
        gradient, _ = input_gradient(self._scheduler.verifier, x, y)
        threat = self._threat.select(rows)
        increase = gradient * (threat.step(x, gradient, threat.eps) - x)
        return torch.stack([gradient.flatten(1).abs().amax(1), increase.flatten(1).sum(1)], 1)

    def check_clean(self) -> list[EvaluationWarning]:
        """Return a warning if the model answers at chance on the sample."""
        num_correct = int((~self._sample.misclassified()).sum())
        return _not_none(check_chance(num_correct, self._sample.y.bincount().tolist()))

    def check_attacks(self, codes: dict[str, Tensor]) -> list[EvaluationWarning]:
        """Return warnings from comparisons of attacks with each other.

        If AutoAttack or one of its searches was requested, PGD on the sample costs little in comparison, so it is run
        too; otherwise only requested attacks are compared.
        """
        attacks = self._setup.attacks
        if len(attacks) == 1:  # clean
            return []
        searched = any(isinstance(attack, StagedAttack) and not isinstance(attack, PGD) for attack in attacks.values())
        steps = {name: attack.steps for name, attack in attacks.items() if isinstance(attack, PGD)}
        size = next((attack.step_size for attack in attacks.values() if isinstance(attack, PGD)), None)
        taken = {name for name in _COMPARED if name in attacks and attacks[name] != create(name, size)}
        known = {name: code == ROBUST for name, code in codes.items() if name not in taken}

        @functools.cache
        def on_sample(name: str) -> Tensor:
            return known[name][list(self._rows)] if name in known else self._verdicts(name, size)

        def both(a: str, b: str) -> tuple[Tensor, Tensor]:
            """Return the verdicts of two attacks on the same examples: on all if both are known, else on the sample."""
            if a in known and b in known:
                return known[a], known[b]
            return on_sample(a), on_sample(b)

        def fgsm_against(name: str) -> EvaluationWarning | None:
            return check_single_step(*both("fgsm", name), name)

        def pgd50_against(name: str) -> EvaluationWarning | None:
            return check_convergence(*both(name, "pgd50"), (name, "pgd50"))

        def confirmed(compare: Callable[[str], EvaluationWarning | None], name: str) -> EvaluationWarning | None:
            warning, needs_more = compare(name), steps.get(name, _MANY_STEPS) < _ENOUGH_FOR_L2
            if warning and needs_more and isinstance(self._threat.unmasked, L2):
                return compare(f"pgd{_ENOUGH_FOR_L2}")
            return warning

        warnings: list[EvaluationWarning | None] = []
        if searched or max(steps.values(), default=0) >= _MANY_STEPS:
            name = next((name for name, count in steps.items() if count >= _MANY_STEPS), "pgd10")
            warnings.append(confirmed(fgsm_against, name))
        if searched or {"pgd10", "pgd50"} <= set(known):
            warnings.append(confirmed(pgd50_against, "pgd10"))
        warnings.append(check_black_box(_broken_by_square(attacks, codes), len(codes["clean"])))
        warnings.append(self._large_budget())
        return _not_none(*warnings)

    def _verdicts(self, name: str, step_size: float | None) -> Tensor:
        """Return the verdicts on the sample under an attack by name."""
        attack, sample = create(name, step_size), self._sample
        if isinstance(attack, StagedAttack):
            return ~self._broken(attack, sample, self._threat)

        def verdicts(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
            targets: dict[str, Any] = {"targets": y} if sample.targeted else {}
            point = attack(self._setup.model, x, y, self._threat.select(rows), seed=self._setup.seed, **targets)
            with torch.no_grad():
                return resists(self._scheduler.verifier(point), y, targeted=sample.targeted)

        rows = torch.arange(len(sample.x))
        return _in_batches(verdicts, self._scheduler.slots, sample.x, sample.y, rows).cpu()

    def _large_budget(self) -> EvaluationWarning | None:
        """Attack examples at a budget that allows grey, which the model misclassifies."""
        sample, verifier = self._sample, self._scheduler.verifier
        with torch.no_grad():
            grey = verifier(torch.full_like(sample.x[: self._small_sample], 0.5))[:1].expand(len(sample.y), -1)
        rows = (~sample.misclassified() & ~sample.resists(grey)).nonzero().squeeze(1)[:_SMALL_SAMPLE]
        examples = sample.select(rows)
        num_correct = int((~self._broken(_STRONG_ATTACK, examples, _LARGE_BUDGET)).sum())
        return check_large_budget(num_correct, len(rows), _LARGE_BUDGET.eps)

    def _broken(self, attack: StagedAttack, examples: Examples, threat: Threat) -> Tensor:
        broken = examples.misclassified().cpu() & attack.skips_misclassified
        return self._scheduler.run_stages(attack.stages, examples, threat, broken, seed=self._setup.seed)[0]


def _broken_by_square(attacks: dict[str, Attack], codes: dict[str, Tensor]) -> int:
    """Count the examples that Square broke and gradient attacks did not, in one attack or in several."""
    count, gradient_attacks = 0, []
    for name, attack in attacks.items():
        stages = [search.name for search in attack.stages] if isinstance(attack, StagedAttack) else []
        if _SQUARE not in stages:
            gradient_attacks.append(codes[name] == ROBUST)
        elif _MARGIN in stages[: stages.index(_SQUARE)]:
            count = max(count, int((codes[name] == FIRST_STAGE + stages.index(_SQUARE)).sum()))
    if {_SQUARE, _MARGIN} <= set(codes):
        count = max(count, int((torch.stack(gradient_attacks).all(0) & (codes[_SQUARE] != ROBUST)).sum()))
    return count


def _in_batches(function: Callable[..., Tensor], size: int, *tensors: Tensor) -> Tensor:
    """Call a function on batches of `size` examples, and join the results."""
    return torch.cat([function(*batches) for batches in zip(*(tensor.split(size) for tensor in tensors), strict=True)])


def _not_none(*warnings: EvaluationWarning | None) -> list[EvaluationWarning]:
    return [warning for warning in warnings if warning is not None]
