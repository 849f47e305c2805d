"""Rules that turn a measurement into an `EvaluationWarning`: a reason not to trust an accuracy.

Each function takes a measurement and returns a warning or None. Where examples are counted, a difference must be larger
than chance explains, so that two or three examples give no warning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from atas.evaluation.intervals import wilson

# Changes as a fraction of the largest logit. Rounding is far below; another batch may use another algorithm.
_SAME_BATCH, _OTHER_BATCH = 1e-4, 1e-2
_SUMS_TO_ONE = 1e-3
# Fractions of the examples above which there is a warning:
_BAD_GRADIENTS = 0.01
_FGSM_LEAD = 0.01
_FGSM_ALONE = 0.05  # broken by FGSM but not by PGD: 1% in the tutorial's model, 7% and more in the demo's
_MORE_STEPS = 0.05
_SQUARE = 0.01
_EXPLODES = 1e4  # increase of the loss within the threat model, if it were linear
_DEVIATIONS = 2  # standard deviations that count as chance
_MIN_EXAMPLES = 2  # no warning for this many examples or fewer
_ENOUGH_FOR_CHANCE = 30  # examples that a warning about accuracy at chance needs

MASKED_GRADIENTS = (
    "zero-gradients",
    "exploding-gradients",
    "fgsm-stronger",
    "more-steps",
    "square",
    "large-budget",
)
"""The kinds of warnings that are signs of masked gradients: attacks then miss adversarial examples."""


@dataclass(frozen=True)
class EvaluationWarning:
    """A warning: a kind for programs and a sentence for people."""

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


def check_deterministic(first: Tensor, repeated: Tensor, other_batches: Tensor) -> EvaluationWarning | None:
    """Compare the logits of the same images: first, repeated, and in other batches."""
    scale = max(float(first.nan_to_num(0, 0, 0).abs().max()), 1e-30)

    def change(other: Tensor) -> float:
        return float((first - other).nan_to_num(0, 0, 0).abs().max()) / scale

    if (by := change(repeated)) > _SAME_BATCH:
        return EvaluationWarning(
            "random",
            f"the model gives different outputs for the same images (logits change by up to {_percent(by)} of the "
            "largest): verdicts depend on chance, and gradients mislead attacks; use autoattack-rand, and report "
            "several seeds",
        )
    if (by := change(other_batches)) > _OTHER_BATCH:
        return EvaluationWarning(
            "batch",
            f"the model's output for an image depends on the other images of its batch (logits change by up to "
            f"{_percent(by)} of the largest): verdicts are not a property of the examples; look for a layer that "
            "computes over the batch in eval mode",
        )
    return None


def check_finite(output: Tensor) -> EvaluationWarning | None:
    """Warn if the model's output contains NaN or infinity.

    >>> import torch
    >>> str(check_finite(torch.tensor([[0.9, float("nan")], [0.2, 0.8], [float("inf"), 0.0]])))[:56]
    "the model's output is NaN or infinite on 2 of 3 images: "
    """
    if not (number := int((~output.isfinite()).any(1).sum())):
        return None
    return EvaluationWarning(
        "not-finite",
        f"the model's output is NaN or infinite on {number} of {len(output)} images: NaN counts as wrong, and attacks "
        "cannot compare infinities; look for an overflow or a division by zero in the model, or for damaged weights",
    )


def check_chance(num_correct: int, class_counts: Sequence[int]) -> EvaluationWarning | None:
    """Warn if the clean accuracy is not above the share of the most frequent class by more than its interval.

    >>> check_chance(12, [10] * 10).kind, check_chance(60, [10] * 10)
    ('chance', None)
    """
    n, most = sum(class_counts), max(class_counts)
    if n < _ENOUGH_FOR_CHANCE or most == n or wilson(num_correct, n)[0] > most / n:
        return None
    return EvaluationWarning(
        "chance",
        f"this model answers at chance: its clean accuracy of {100 * num_correct / n:.1f}% is not clearly above "
        f"{100 * most / n:.1f}%, the share of the most frequent class; check that these are its weights, and that "
        "the labels are in the order of its training",
    )


def check_logits(output: Tensor) -> EvaluationWarning | None:
    """Warn if the model's output is a softmax or a log-softmax.

    >>> import torch
    >>> check_logits(torch.tensor([[0.9, 0.1], [0.2, 0.8]])).kind
    'softmax'
    """
    output = output[~output.isnan().any(1)].double()
    if not len(output):
        return None
    # Some models add a small number before the logarithm; others do not and return minus infinity.
    if bool((output >= -_SUMS_TO_ONE).all()) and bool(((output.sum(1) - 1).abs() < _SUMS_TO_ONE).all()):
        kind, remedy = "probabilities", "return the input of the softmax"
    elif bool((output <= _SUMS_TO_ONE).all()) and bool((output.logsumexp(1).abs() < _SUMS_TO_ONE).all()):
        kind, remedy = "logarithms of probabilities", "return the input of the log-softmax"
    else:
        return None
    return EvaluationWarning(
        "softmax",
        f"the model returns {kind} instead of logits, which weakens gradient attacks: {remedy}",
    )


def check_gradients(largest: Tensor, rise: Tensor) -> list[EvaluationWarning]:
    """Warn about gradients that are zero or explode.

    Args:
        largest: the largest entry of each image's gradient.
        rise: the increase of each image's loss within the threat model, if the loss were linear.
    """
    warnings, count = [], len(largest)
    explodes = ~largest.isfinite() | ~rise.isfinite() | (rise > _EXPLODES)
    vanishes = ~explodes & (largest == 0)
    for flagged, kind, problem in (
        (vanishes, "zero-gradients", "zero"),
        (explodes, "exploding-gradients", "not finite, or too large to be correct,"),
    ):
        if (number := int(flagged.sum())) > max(_BAD_GRADIENTS * count, _MIN_EXAMPLES):
            warnings.append(
                EvaluationWarning(
                    kind,
                    f"the gradient of the cross-entropy is {problem} on {number} of {count} images, where FGSM and PGD "
                    "cannot work; look for rounding, saturation or a detached part in the model; rely on autoattack",
                )
            )
    return warnings


def check_single_step(fgsm: Tensor, iterated: Tensor, name: str) -> EvaluationWarning | None:
    """Compare the verdicts on the same examples under FGSM and under `name`, an attack of many steps."""
    only_fgsm, only_iterated = int((iterated & ~fgsm).sum()), int((fgsm & ~iterated).sum())
    lead = only_fgsm - only_iterated
    if lead > _beyond_chance(only_fgsm + only_iterated, _FGSM_LEAD * len(fgsm)):
        finding = f"FGSM breaks more examples than {name} ({lead} more of {len(fgsm)})"
    elif only_fgsm > max(_FGSM_ALONE * len(fgsm), _MIN_EXAMPLES):
        finding = f"FGSM breaks {only_fgsm} of {len(fgsm)} examples that {name} does not break"
    else:
        return None
    return EvaluationWarning(
        "fgsm-stronger",
        f"{finding}, a sign of masked gradients: the true accuracy is likely lower than under gradient attacks",
    )


def check_convergence(fewer: Tensor, more: Tensor, names: tuple[str, str]) -> EvaluationWarning | None:
    """Compare the verdicts on the same examples under PGD with fewer and with more steps."""
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
    """Warn if Square broke many of the examples that no gradient attack broke."""
    if by_square <= max(_SQUARE * count, _MIN_EXAMPLES):
        return None
    return EvaluationWarning(
        "square",
        f"Square, which uses no gradient, breaks {by_square} of {count} examples that no gradient attack breaks "
        f"({100 * by_square / count:.1f} points), a sign of masked gradients: the true accuracy is likely lower still",
    )


def check_large_budget(num_correct: int, count: int, budget: float) -> EvaluationWarning | None:
    """Warn if examples stay correct under a gradient attack that could turn them grey, which is misclassified."""
    if not num_correct:
        return None
    return EvaluationWarning(
        "large-budget",
        f"{num_correct} of {count} examples stay correct under a gradient attack at eps = {budget:g}, although the "
        "attack could turn each of them grey, which the model takes for another class: gradients are masked, and the "
        "true accuracy is likely lower",
    )


def _beyond_chance(differing: int, least: float) -> float:
    """Return the bound that a lead must exceed if `differing` examples differ in either direction."""
    return max(least, _DEVIATIONS * math.sqrt(differing))


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%"
