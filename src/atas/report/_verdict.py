"""The three questions that the page answers first: is the model robust, how sure is that, can the evaluation be
trusted."""

from __future__ import annotations

from dataclasses import dataclass

from atas.evaluation import Evaluation
from atas.report._expected import Expected
from atas.report._subject import Subject
from atas.report._words import attacks_of, ball, between, listed, percent

NOTHING = 0.05  # robust accuracy that is as good as none
_MOST = 0.9  # robust accuracy that deserves a yes
_WIDE = 0.03  # of an interval, from the figure to its further end
_COLLAPSED = " Training collapsed in epoch {}: see the curves."


@dataclass(frozen=True)
class Answer:
    """A question, the answer in a word or two, and why. `tone` is good, plain, care or bad."""

    question: str
    word: str
    why: str
    tone: str


def answers(subject: Subject, expected: Expected | None) -> list[Answer]:
    """All three, in the order in which one would ask."""
    found = subject.evaluation
    if found is None:
        return [_unknown(subject), *_not_evaluated(subject)]
    return [_robust(subject, found), _sure(subject, found, expected), _trust(subject, found)]


def _robust(subject: Subject, found: Evaluation) -> Answer:
    question, names = "Is it robust?", attacks_of(found)
    worst, clean = found.accuracy["worst"], found.accuracy["clean"]
    if not names:
        why = f"No attack was run; without one it is right on {percent(clean)}% of the images."
        return Answer(question, "Not known", why, "care")
    why = (
        f"Of 100 images that it has not seen, it is right on about {100 * clean:.0f}, and on about {100 * worst:.0f} "
        f"whatever {listed(names)} {'does' if len(names) == 1 else 'do'} to them, changing {ball(found.threat)}."
    )
    collapsed = subject.summary.epochs[-1]["collapsed"]
    if collapsed:
        why += _COLLAPSED.format(subject.summary.collapsed_in)
    if collapsed or found.interval["worst"][1] < NOTHING:
        return Answer(question, f"No: {percent(worst)}%", why, "bad")
    if worst < _MOST:
        return Answer(question, f"In part: {percent(worst)}%", why, "plain")
    return Answer(question, f"Yes: {percent(worst)}%", why, "good")


def _sure(subject: Subject, found: Evaluation, expected: Expected | None) -> Answer:
    low, high = found.interval["worst"]
    half = max(high - found.accuracy["worst"], found.accuracy["worst"] - low)
    why = (
        f"On {found.n:,} images the figure is known to within {100 * half:.1f} points: {between((low, high))}% "
        f"with 95% confidence."
    )
    said = expected.figure("pgd50") if expected and not expected.differences else None
    spread = f" (the recipe's range over seeds under PGD-50: {said})" if said and "to" in said else ""
    why += f" It is one training, seed {subject.recipe.training.seed}; another seed gives another figure{spread}."
    return Answer("How sure is that?", f"To {100 * half:.1f} points", why, "care" if half > _WIDE else "good")


def _trust(subject: Subject, found: Evaluation) -> Answer:
    question = "Can the evaluation be trusted?"
    if subject.weights_differ:
        return Answer(question, "No", "It was made with other weights than this run ends with: evaluate again.", "bad")
    if warnings := subject.summary.warnings:
        count = len(warnings)
        why = f"{count} {'reason' if count == 1 else 'reasons'} to doubt the figures: {warnings[0]}."
        return Answer(question, "With care", why, "care")
    strong = subject.summary.by_autoattack
    if strong is None:
        why = "AutoAttack was not run. Weaker attacks can miss what it finds, so the figure is an upper bound."
        return Answer(question, "In part", why, "care")
    if strong is not found:
        return Answer(question, "In part", elsewhere(strong), "care")
    same = "" if subject.weights_differ is None else " The weights in the folder are those that were evaluated."
    why = (
        "AutoAttack was run, which includes an attack without gradients, and no sign of masked gradients was seen; "
        f"every verdict was given in {found.protocol.get('precision', 'float32')}.{same}"
    )
    return Answer(question, "Yes, as far as is known", why, "good")


def elsewhere(strong: Evaluation) -> str:
    """What AutoAttack left, where it is not in the result that is shown."""
    left, ends = percent(strong.accuracy["worst"]), between(strong.interval["worst"])
    return (
        f"AutoAttack was run in another evaluation, on {strong.n:,} images, of which {left}% hold ({ends}%); this one "
        f"is without it."
    )


def _unknown(subject: Subject) -> Answer:
    last = subject.summary.epochs[-1]
    why = (
        f"The run has not been evaluated. On the training images that the monitor attacks, the last epoch ended at "
        f"{percent(last['clean'])}% clean and {percent(last['pgd10'])}% under PGD-10."
    )
    if last["collapsed"]:
        why += _COLLAPSED.format(subject.summary.collapsed_in)
        return Answer("Is it robust?", "No", why, "bad")
    return Answer("Is it robust?", "Not known", why, "care")


def _not_evaluated(subject: Subject) -> list[Answer]:
    why = (
        f"All there is are images of the training set, {subject.recipe.training.probe:,} at most, which say little "
        f"about others."
    )
    remedy = f"There is none. Make one: {subject.to_evaluate}"
    return [
        Answer("How sure is that?", "Not at all", why, "care"),
        Answer("Can the evaluation be trusted?", "Not evaluated", remedy, "care"),
    ]
