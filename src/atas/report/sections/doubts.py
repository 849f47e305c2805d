"""Reasons to doubt the figures: the evaluation's own warnings, and what the page itself sees."""

from __future__ import annotations

from atas.report._html import Content, tag
from atas.report._section import Section
from atas.report._subject import Subject
from atas.report._verdict import elsewhere

_FEW = 1000


def section(subject: Subject) -> Section:
    """Warnings first, then what to keep in mind."""
    return Section("warnings", "Warnings", [_warnings(subject), _notes(subject)])


def notes(subject: Subject) -> list[str]:
    """What the evaluation did not look for, in sentences."""
    found, said = subject.evaluation, []
    if found is None:
        return [f"The run has not been evaluated; run: {subject.to_evaluate}"]
    if subject.weights_differ:
        said.append("The evaluation was made with other weights than those in the run's folder; evaluate again.")
    if found.threat != subject.recipe.threat:
        said.append(f"The model was trained against {subject.recipe.threat} and evaluated against {found.threat}.")
    strong = subject.summary.by_autoattack
    if strong is None:
        said.append("AutoAttack was not run: the figures are upper bounds of the true robust accuracy.")
    elif strong is not found:
        said.append(elsewhere(strong))
    if found.n < _FEW:
        said.append(f"There were only {found.n} test images, so intervals are wide.")
    return said


def _warnings(subject: Subject) -> Content:
    if subject.evaluation is None:
        return None
    if not subject.summary.warnings:
        return tag(
            "p",
            "The evaluation gave no warnings: it looked for outputs that are NaN or infinite, for random answers, "
            "outputs that are no logits, gradients that vanish or explode, and signs of masked gradients.",
        )
    rows = [tag("li", tag("b", caution.kind), f": {caution}.") for caution in subject.summary.warnings]
    return tag("ul", rows, class_="warnings")


def _notes(subject: Subject) -> Content:
    said = notes(subject)
    return [tag("p", "To keep in mind:"), tag("ul", [tag("li", sentence) for sentence in said])] if said else None
