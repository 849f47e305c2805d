"""The worst case of a run, in the words of one rule: for pages, tables and model cards.

The worst case is the share of images that are robust to all attacks that were run. Without AutoAttack it is an upper
bound of the robust accuracy; with signs of masked gradients it says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from atas.evaluation import Evaluation
from atas.evaluation.warnings import MASKED_GRADIENTS
from atas.report.formatting import attack_names, format_interval, percent

NO_ROBUSTNESS = 0.05  # an accuracy that is significantly below this is none


Kind = Literal["measured", "bound", "unknown"]


@dataclass(frozen=True)
class Verdict:
    """The worst case: its figure, and how to read it."""

    kind: Kind
    accuracy: float | None
    """None if no attack was run."""
    interval: tuple[float, float]
    reason: str
    """Why the figure is a bound, or not known; empty if it is measured."""

    @property
    def is_low(self) -> bool:
        """Whether the model is not robust, even if the figure is an upper bound."""
        return self.accuracy is not None and self.interval[1] < NO_ROBUSTNESS

    @property
    def figure(self) -> str:
        """The figure in percent, as a bound unless it is measured.

        >>> Verdict("bound", 0.534, (0.52, 0.55), "").figure
        'at most 53.4%'
        """
        if self.accuracy is None:
            return "not known"
        return f"{'' if self.kind == 'measured' else 'at most '}{percent(self.accuracy)}%"

    def __str__(self) -> str:
        return "not known" if self.kind == "unknown" else self.figure

    def sentence(self) -> str:
        """Say the worst case in a sentence, with its interval and the reason."""
        if self.accuracy is None:
            return f"The worst case is not known. {self.reason}"
        interval = f" ({format_interval(self.interval)}% with 95% confidence)" if self.kind != "unknown" else ""
        return f"The worst case is {self}{interval}." + (f" {self.reason}" if self.reason else "")


def most_doubtful(verdicts: Iterable[Verdict]) -> Kind | None:
    """Return how to read the worst case of several runs together; None if none of them was attacked."""
    kinds = {verdict.kind for verdict in verdicts if verdict.accuracy is not None}
    doubts: tuple[Kind, ...] = ("unknown", "bound", "measured")
    return next((kind for kind in doubts if kind in kinds), None)


def judge(results: Sequence[Evaluation]) -> Verdict:
    """Return the worst case of the first result; the others are of the same weights and threat model."""
    if not results:
        return Verdict("unknown", None, (0.0, 1.0), "The run was not evaluated.")
    shown = results[0]
    if not attack_names(shown):
        return Verdict("unknown", None, (0.0, 1.0), "No attack was run.")
    accuracy, interval = shown.accuracy["worst"], shown.interval["worst"]
    signs = dict.fromkeys(
        warning.kind for result in results for warning in result.warnings if warning.kind in MASKED_GRADIENTS
    )
    if signs and interval[1] >= NO_ROBUSTNESS:
        reason = (
            f"There are signs of masked gradients (warnings: {', '.join(signs)}): attacks miss adversarial examples, "
            f"and the figure is at most {percent(accuracy)}%, probably lower."
        )
        return Verdict("unknown", accuracy, interval, reason)
    if not shown.has_autoattack:
        reason = "AutoAttack was not run, and weaker attacks miss adversarial examples: the true figure may be lower."
        return Verdict("bound", accuracy, interval, reason)
    return Verdict("measured", accuracy, interval, "")
