"""What is measured besides the attacks, for the warnings: a few passes of the model on a few examples."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from atas.attacks import PGD, Attack, Battery, Staged, correct, create
from atas.attacks._apgd import APGD
from atas.attacks._queue import Examples, Ledger
from atas.evaluation._cautions import (
    Caution,
    different_answers,
    fgsm_is_stronger,
    gradient_trouble,
    holds_at_any_budget,
    more_steps_help,
    not_finite,
    not_logits,
    square_goes_further,
)
from atas.evaluation._search import Runner
from atas.evaluation._work import FIRST_STAGE, HOLDS
from atas.passes import input_gradient
from atas.threat import L2, Linf, Threat

SAMPLE = 256  # examples at most
_HANDFUL = 16  # for the large budget, and to ask again
_REPEATS = 10
_MANY_STEPS = 10
# From the surface of an L2 ball, where random points lie, ten steps of eps/5 go 95% of the way if the gradient is the
# same everywhere, and twenty go 99.9%: only what twenty steps confirm says something about the model.
_ENOUGH_FOR_L2 = 20
_LARGE = Linf(0.5)
_STRONG = Battery("strong", (APGD("ce", 20), APGD("t", 20)))  # a sound model falls within a few steps
# Square may find what cross-entropy alone does not, and that means nothing: it has to go beyond this one.
_MARGIN, _SQUARE = "apgd-t", "square"


class Checks:
    """A model on a sample of the examples, whatever the number of processes; `rows` says which ones they are."""

    def __init__(
        self, model: nn.Module, runner: Runner, threat: Threat, seed: int, rows: range, x: Tensor, y: Tensor
    ) -> None:
        self._model, self._runner, self._threat, self._seed, self._rows = model, runner, threat, seed, rows
        self._sample = runner.examples(x, y, torch.tensor(rows))
        self._handful = min(_HANDFUL, runner.lanes)

    @property
    def classes(self) -> int:
        """How many the model has."""
        return self._sample.classes

    def before(self) -> list[Caution]:
        """What can be said of the model itself, before anything takes long."""
        x, y, judge = self._sample.x, self._sample.y, self._runner.judge
        size = min(self._runner.lanes, len(x))
        with torch.no_grad():
            first, again, elsewhere = (_in_parts(judge, parts, x) for parts in (size, size, (size + 1) // 2))
            # A model that tosses one coin for a whole batch may well give the same answer twice.
            handful = [judge(x[: self._handful]) for _ in range(_REPEATS)]
            once, again = torch.cat([first, *handful[1:]]), torch.cat([again, *handful[:-1]])
            elsewhere = torch.cat([elsewhere, *handful[1:]])
            largest, rise = _in_parts(self._gradient, size, x, y).unbind(1)
        answers = different_answers(once, again, elsewhere)
        return _those(not_finite(first), answers, not_logits(first), *gradient_trouble(largest, rise))

    def _gradient(self, x: Tensor, y: Tensor) -> Tensor:
        """The largest entry of each gradient, and by how much the loss would rise within the ball if it were right."""
        gradient, _ = input_gradient(self._runner.judge, x, y)
        promised = gradient * (self._threat.step(x, gradient, self._threat.eps) - x)
        return torch.stack([gradient.flatten(1).abs().amax(1), promised.flatten(1).sum(1)], 1)

    def after(self, attacks: dict[str, Attack], codes: dict[str, Tensor]) -> list[Caution]:
        """What the attacks say of each other.

        Where the search of AutoAttack, or a part of it, was asked for, PGD on the sample costs little beside it; else
        only what was asked for is compared.
        """
        if len(attacks) == 1:  # clean
            return []
        known = {name: code == HOLDS for name, code in codes.items()}
        searched = any(isinstance(attack, Battery) for attack in attacks.values())
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

        def fgsm_against(name: str) -> Caution | None:
            return fgsm_is_stronger(*both("fgsm", name), name)

        def pgd50_against(name: str) -> Caution | None:
            return more_steps_help(*both(name, "pgd50"), (name, "pgd50"))

        def confirmed(compare: Callable[[str], Caution | None], name: str) -> Caution | None:
            found, few = compare(name), steps.get(name, _MANY_STEPS) < _ENOUGH_FOR_L2
            return compare(f"pgd{_ENOUGH_FOR_L2}") if found and few and isinstance(self._threat, L2) else found

        found: list[Caution | None] = []
        if searched or max(steps.values(), default=0) >= _MANY_STEPS:
            name = next((name for name, count in steps.items() if count >= _MANY_STEPS), "pgd10")
            found.append(confirmed(fgsm_against, name))
        if searched or {"pgd10", "pgd50"} <= set(known):
            found.append(confirmed(pgd50_against, "pgd10"))
        found.append(square_goes_further(_by_square(attacks, codes), len(codes["clean"])))
        found.append(self._large_budget())
        return _those(*found)

    def _verdicts(self, name: str, step_size: float | None) -> Tensor:
        """Under an attack by name, on the sample."""
        attack, sample = create(name, step_size), self._sample
        if isinstance(attack, Staged):
            return ~self._broken(attack, sample, self._threat)

        def judged(x: Tensor, y: Tensor) -> Tensor:
            point = attack(self._model, x, y, self._threat, seed=self._seed)
            with torch.no_grad():
                return correct(self._runner.judge(point), y)

        return _in_parts(judged, self._runner.lanes, sample.x, sample.y).cpu()

    def _large_budget(self) -> Caution | None:
        """On examples that grey, which is inside of every ball, is known to break."""
        sample, judge = self._sample, self._runner.judge
        with torch.no_grad():
            grey = judge(torch.full_like(sample.x[: self._handful], 0.5))[:1].expand(len(sample.y), -1)
        rows = (~sample.misclassified() & ~correct(grey, sample.y)).nonzero().squeeze(1)[:_HANDFUL]
        few = Examples(sample.x[rows], sample.y[rows], sample.index[rows], sample.logits[rows])
        right = int((~self._broken(_STRONG, few, _LARGE)).sum())
        return holds_at_any_budget(right, len(rows), _LARGE.eps)

    def _broken(self, attack: Staged, examples: Examples, threat: Threat) -> Tensor:
        broken = examples.misclassified().cpu() & attack.counts_clean
        for search in attack.stages:
            ledger = Ledger.open(search, examples, broken)
            self._runner.run(search, examples, threat, ledger, seed=self._seed)
            broken = ledger.broken
        return broken


def _by_square(attacks: dict[str, Attack], codes: dict[str, Tensor]) -> int:
    """How many examples Square broke that held under attacks by gradients, within an attack or beside others."""
    found, beside = 0, []
    for name, attack in attacks.items():
        stages = [search.name for search in attack.stages] if isinstance(attack, Staged) else []
        if _SQUARE not in stages:
            beside.append(codes[name] == HOLDS)
        elif _MARGIN in stages[: stages.index(_SQUARE)]:
            found = max(found, int((codes[name] == FIRST_STAGE + stages.index(_SQUARE)).sum()))
    if {_SQUARE, _MARGIN} <= set(codes):
        found = max(found, int((torch.stack(beside).all(0) & (codes[_SQUARE] != HOLDS)).sum()))
    return found


def _in_parts(function: Callable[..., Tensor], size: int, *tensors: Tensor) -> Tensor:
    """A function of tensors, so many examples at a time."""
    return torch.cat([function(*parts) for parts in zip(*(tensor.split(size) for tensor in tensors), strict=True)])


def _those(*found: Caution | None) -> list[Caution]:
    return [caution for caution in found if caution is not None]
