"""Rules that turn a measurement into an `EvaluationWarning`: reasons not to trust a figure.

Each function looks at something that was measured and returns a warning, or None. Where examples are counted, a
difference has to be larger than chance explains, so that a few examples more or less make no warning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

# Of the largest logit. Rounding is far below both; another batch may be computed by another algorithm.
_SAME_BATCH, _OTHER_BATCH = 1e-4, 1e-2
_SUMS_TO_ONE = 1e-3
_SHARE = 0.01  # of the examples: with fewer, gradients that vanish or explode are no concern
_EXPLODES = 1e4  # by how much the loss would rise within the ball, if the gradient were right
_STRONGER = 0.01  # FGSM than PGD
_ALONE = 0.05  # broken by FGSM and not by PGD: 1% in the tutorial's model, 7% and more in the demo's
_MORE_STEPS = 0.05
_SQUARE = 0.01
_DEVIATIONS = 2  # how far beyond chance
_FEW = 2  # so many examples say nothing


@dataclass(frozen=True)
class EvaluationWarning:
    """A warning: its kind, to look for, and a sentence, to read."""

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


def check_deterministic(first: Tensor, again: Tensor, elsewhere: Tensor) -> EvaluationWarning | None:
    """By the logits of the same images: once, once more, and in other batches."""
    scale = max(float(first.nan_to_num(0, 0, 0).abs().max()), 1e-30)

    def change(other: Tensor) -> float:
        return float((first - other).nan_to_num(0, 0, 0).abs().max()) / scale

    if (by := change(again)) > _SAME_BATCH:
        return EvaluationWarning(
            "random",
            f"the model gives different answers to the same images (logits change by up to {_percent(by)} of the "
            "largest): its verdicts are in part chance, and gradients mislead; use autoattack-rand, and report "
            "several seeds",
        )
    if (by := change(elsewhere)) > _OTHER_BATCH:
        return EvaluationWarning(
            "batch",
            f"the model's answer to an image depends on the other images of its batch (logits change by up to "
            f"{_percent(by)} of the largest): its verdicts are not a property of the examples; look for a layer that "
            "computes over the batch in eval mode",
        )
    return None


def check_finite(output: Tensor) -> EvaluationWarning | None:
    """By the model's output.

    >>> import torch
    >>> str(check_finite(torch.tensor([[0.9, float("nan")], [0.2, 0.8], [float("inf"), 0.0]])))[:56]
    "the model's output is NaN or infinite on 2 of 3 images: "
    """
    if not (number := int((~output.isfinite()).any(1).sum())):
        return None
    return EvaluationWarning(
        "not-finite",
        f"the model's output is NaN or infinite on {number} of {len(output)} images: NaN counts as wrong, and attacks "
        "cannot weigh infinities; look for an overflow or a division by zero in the model, or for damaged weights",
    )


def check_logits(output: Tensor) -> EvaluationWarning | None:
    """By the model's output.

    >>> import torch
    >>> check_logits(torch.tensor([[0.9, 0.1], [0.2, 0.8]])).kind
    'softmax'
    """
    output = output[~output.isnan().any(1)].double()
    if not len(output):
        return None
    # Some add a little before they take the logarithm, or do not and get minus infinity.
    if bool((output >= -_SUMS_TO_ONE).all()) and bool(((output.sum(1) - 1).abs() < _SUMS_TO_ONE).all()):
        what, remedy = "probabilities", "return what goes into the softmax"
    elif bool((output <= _SUMS_TO_ONE).all()) and bool((output.logsumexp(1).abs() < _SUMS_TO_ONE).all()):
        what, remedy = "logarithms of probabilities", "return what goes into the log-softmax"
    else:
        return None
    return EvaluationWarning(
        "softmax",
        f"the model returns {what} where logits are expected, which weakens attacks by gradients: {remedy}",
    )


def check_gradients(largest: Tensor, rise: Tensor) -> list[EvaluationWarning]:
    """By the gradient of the loss at each image: its largest entry, and how much it promises within the ball."""
    found, count = [], len(largest)
    explodes = ~largest.isfinite() | ~rise.isfinite() | (rise > _EXPLODES)
    vanishes = ~explodes & (largest == 0)
    for flagged, kind, what in (
        (vanishes, "zero-gradients", "zero"),
        (explodes, "exploding-gradients", "not a number, or so large that it cannot be right,"),
    ):
        if (number := int(flagged.sum())) > max(_SHARE * count, _FEW):
            found.append(
                EvaluationWarning(
                    kind,
                    f"the gradient of the cross-entropy is {what} on {number} of {count} images: FGSM and PGD cannot "
                    "work there; look for rounding, saturation or a detached part in the model, and rely on autoattack",
                )
            )
    return found


def check_single_step(fgsm: Tensor, iterated: Tensor, name: str) -> EvaluationWarning | None:
    """By the verdicts on the same examples under one step, and under the attack of that name, which makes many."""
    only_fgsm, only_iterated = int((iterated & ~fgsm).sum()), int((fgsm & ~iterated).sum())
    lead = only_fgsm - only_iterated
    if lead > _beyond_chance(only_fgsm + only_iterated, _STRONGER * len(fgsm)):
        found = f"one step breaks more examples than {name} does ({lead} more of {len(fgsm)})"
    elif only_fgsm > max(_ALONE * len(fgsm), _FEW):
        found = f"one step breaks {only_fgsm} of {len(fgsm)} examples that hold under {name}"
    else:
        return None
    return EvaluationWarning(
        "fgsm-stronger",
        f"{found}, the sign of masked gradients: the true accuracy is likely lower than what attacks by gradients show",
    )


def check_convergence(fewer: Tensor, more: Tensor, names: tuple[str, str]) -> EvaluationWarning | None:
    """By the verdicts on the same examples under PGD with fewer and with more steps."""
    only_fewer, only_more = int((more & ~fewer).sum()), int((fewer & ~more).sum())
    lead = only_more - only_fewer
    if lead <= _beyond_chance(only_fewer + only_more, _MORE_STEPS * len(fewer)):
        return None
    return EvaluationWarning(
        "more-steps",
        f"{names[1]} is {100 * lead / len(fewer):.1f} points below {names[0]}: the attack has not converged, a sign of "
        "masked gradients; report AutoAttack, not PGD",
    )


def check_black_box(by_square: int, count: int) -> EvaluationWarning | None:
    """By how many examples Square broke that held under attacks by gradients."""
    if by_square <= max(_SQUARE * count, _FEW):
        return None
    return EvaluationWarning(
        "square",
        f"Square, which uses no gradient, breaks {by_square} of {count} examples that held under all attacks by "
        f"gradients ({100 * by_square / count:.1f} points), the sign of masked gradients: the true accuracy is likely "
        "lower still",
    )


def check_large_budget(right: int, count: int, budget: float) -> EvaluationWarning | None:
    """By how many examples were still right when an attack by gradients could have made them grey, which is wrong."""
    if not right:
        return None
    return EvaluationWarning(
        "large-budget",
        f"{right} of {count} examples hold under an attack by gradients at a budget of {budget:g}, though all can be "
        "made grey there, and grey is another class to the model: the gradients are masked, and the true accuracy is "
        "likely lower",
    )


def _beyond_chance(differing: int, least: float) -> float:
    """What a lead has to exceed, where so many examples differ either way."""
    return max(least, _DEVIATIONS * math.sqrt(differing))


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"
