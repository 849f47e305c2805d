"""The three questions that a page answers first, for one run and for several.

Of one run: is it robust, how sure is that, can the evaluation be trusted. Of several: which is the most robust, is its
lead real, can the evaluations be trusted.
"""

from __future__ import annotations

from dataclasses import dataclass

from atas.evaluation import Evaluation
from atas.recipes.expected import Expected
from atas.report.compare import RankedRun, Ranking
from atas.report.formatting import attack_names, describe_threat, format_interval, join_names, percent
from atas.report.run_view import RunView

NO_ROBUSTNESS = 0.05  # robust accuracy that is as good as none
_ROBUST_FROM = 0.9  # robust accuracy that deserves a yes
_WIDE_INTERVAL = 0.03  # of an interval, from the figure to its further end
_COLLAPSED = " Training collapsed in epoch {}: see the curves."


@dataclass(frozen=True)
class HeadlineAnswer:
    """A question, the answer in a word or two, and why. `tone` is good, plain, care or bad."""

    question: str
    word: str
    why: str
    tone: str


def run_answers(view: RunView, expected: Expected | None) -> list[HeadlineAnswer]:
    """All three, in the order in which one would ask."""
    evaluation = view.evaluation
    if evaluation is None:
        return [_robust_by_monitor(view), *_not_evaluated(view)]
    return [_robust(view, evaluation), _sure(view, evaluation, expected), _trust(view, evaluation)]


def _robust(view: RunView, evaluation: Evaluation) -> HeadlineAnswer:
    question, names = "Is it robust?", attack_names(evaluation)
    worst, clean = evaluation.accuracy["worst"], evaluation.accuracy["clean"]
    if not names:
        why = f"No attack was run; without one it is right on {percent(clean)}% of the images."
        return HeadlineAnswer(question, "Not known", why, "care")
    why = (
        f"Of 100 images that it has not seen, it is right on about {100 * clean:.0f}, and on about {100 * worst:.0f} "
        f"whatever {join_names(names)} {'does' if len(names) == 1 else 'do'} to them, changing "
        f"{describe_threat(evaluation.threat)}."
    )
    collapsed = view.summary.epochs[-1]["collapsed"]
    if collapsed:
        why += _COLLAPSED.format(view.summary.collapse_epoch)
    if collapsed or evaluation.interval["worst"][1] < NO_ROBUSTNESS:
        return HeadlineAnswer(question, f"No: {percent(worst)}%", why, "bad")
    if worst < _ROBUST_FROM:
        return HeadlineAnswer(question, f"In part: {percent(worst)}%", why, "plain")
    return HeadlineAnswer(question, f"Yes: {percent(worst)}%", why, "good")


def _sure(view: RunView, evaluation: Evaluation, expected: Expected | None) -> HeadlineAnswer:
    low, high = evaluation.interval["worst"]
    half = max(high - evaluation.accuracy["worst"], evaluation.accuracy["worst"] - low)
    why = (
        f"On {evaluation.n:,} images the figure is known to within {100 * half:.1f} points: "
        f"{format_interval((low, high))}% with 95% confidence."
    )
    said = expected.figure("pgd50") if expected and not expected.differences else None
    spread = f" (the recipe's range over seeds under PGD-50: {said})" if said and "to" in said else ""
    why += f" It is one training, seed {view.recipe.training.seed}; another seed gives another figure{spread}."
    return HeadlineAnswer(
        "How sure is that?", f"To {100 * half:.1f} points", why, "care" if half > _WIDE_INTERVAL else "good"
    )


def _trust(view: RunView, evaluation: Evaluation) -> HeadlineAnswer:
    question = "Can the evaluation be trusted?"
    if view.weights_differ:
        return HeadlineAnswer(
            question, "No", "It was made with other weights than this run ends with: evaluate again.", "bad"
        )
    if warnings := view.summary.warnings:
        count = len(warnings)
        why = f"{count} {'reason' if count == 1 else 'reasons'} to doubt the figures: {warnings[0]}."
        return HeadlineAnswer(question, "With care", why, "care")
    strong = view.summary.autoattack_result
    if strong is None:
        why = "AutoAttack was not run. Weaker attacks can miss what it finds, so the figure is an upper bound."
        return HeadlineAnswer(question, "In part", why, "care")
    if strong is not evaluation:
        return HeadlineAnswer(question, "In part", other_autoattack_result(strong), "care")
    same = "" if view.weights_differ is None else " The weights in the folder are those that were evaluated."
    why = (
        "AutoAttack was run, which includes an attack without gradients, and no sign of masked gradients was seen; "
        f"every verdict was given in {evaluation.protocol.get('precision', 'float32')}.{same}"
    )
    return HeadlineAnswer(question, "Yes, as far as is known", why, "good")


def other_autoattack_result(strong: Evaluation) -> str:
    """What AutoAttack left, where it is not in the result that is shown."""
    left, ends = percent(strong.accuracy["worst"]), format_interval(strong.interval["worst"])
    return (
        f"AutoAttack was run in another evaluation, on {strong.n:,} images, of which {left}% hold ({ends}%); this one "
        f"is without it."
    )


def _robust_by_monitor(view: RunView) -> HeadlineAnswer:
    last = view.summary.epochs[-1]
    why = (
        f"The run has not been evaluated. On the training images that the monitor attacks, the last epoch ended at "
        f"{percent(last['clean'])}% clean and {percent(last['pgd10'])}% under PGD-10."
    )
    if last["collapsed"]:
        why += _COLLAPSED.format(view.summary.collapse_epoch)
        return HeadlineAnswer("Is it robust?", "No", why, "bad")
    return HeadlineAnswer("Is it robust?", "Not known", why, "care")


def _not_evaluated(view: RunView) -> list[HeadlineAnswer]:
    why = (
        f"All there is are images of the training set, {view.recipe.training.probe:,} at most, which say little "
        f"about others."
    )
    remedy = f"There is none. Make one: {view.evaluate_command}"
    return [
        HeadlineAnswer("How sure is that?", "Not at all", why, "care"),
        HeadlineAnswer("Can the evaluation be trusted?", "Not evaluated", remedy, "care"),
    ]


def comparison_answers(views: list[RunView], ranking: Ranking | str) -> list[HeadlineAnswer]:
    """The same three questions of several runs: which leads, by more than chance, and by evaluations to be trusted."""
    collapsed = [view.summary.name for view in views if view.summary.epochs[-1]["collapsed"]]
    fallen = f" Collapsed in training: {', '.join(collapsed)}." if collapsed else ""
    which, real, trust = "Which is the most robust?", "Is its lead real?", "Can the evaluations be trusted?"
    if isinstance(ranking, str):
        return [
            HeadlineAnswer(which, "Not known", ranking + fallen, "care"),
            HeadlineAnswer(real, "Not known", "Evaluate all of them with the same attacks on the same images.", "care"),
            _trust_all(trust, views),
        ]
    best, second = ranking.runs[:2]
    leader = (
        f"{percent(best.accuracy)}% ({format_interval(best.interval)}) of {best.n:,} images hold under "
        f"{join_names(ranking.attacks)}; next is {second.run.name} with {percent(second.accuracy)}%."
        f"{_under_own_attacks(best)}{fallen}"
    )
    robust = any(_worst_accuracy(ranked) > NO_ROBUSTNESS for ranked in ranking.runs)
    leader = leader if robust else f"{best.run.name} leads: {leader}"
    low, high = (-100 * end for end in reversed(second.gap_interval))
    lead = f"{-100 * second.gap:.1f} points before {second.run.name}, {low:.1f} to {high:.1f} with 95% confidence"
    larger = low > 0
    lead += ", on the same images. " + (
        "That is more than the choice of images explains" if larger else "The choice of images alone may explain that"
    )
    lead += "; what another seed would give is not in it."
    return [
        HeadlineAnswer(which, best.run.name if robust else "None of them", leader, "good" if robust else "bad"),
        HeadlineAnswer(real, "Yes, on these images" if larger else "Not shown", lead, "good" if larger else "care"),
        _trust_all(trust, views),
    ]


def _worst_accuracy(ranked: RankedRun) -> float:
    """What holds under everything that the run was put to."""
    return ranked.run.evaluation.accuracy["worst"] if ranked.run.evaluation else ranked.accuracy


def _under_own_attacks(ranked: RankedRun) -> str:
    """What attacks that not all runs were put to leave of the figure."""
    least = _worst_accuracy(ranked)
    return f" Under all attacks that it was put to itself, {percent(least)}%." if least < ranked.accuracy else ""


def _trust_all(question: str, views: list[RunView]) -> HeadlineAnswer:
    missing = [view.summary.name for view in views if view.evaluation is None]
    warned = [view.summary.name for view in views if view.summary.warnings]
    weak = [view.summary.name for view in views if view.evaluation and not view.evaluation.has_autoattack]
    said = []
    if missing:
        said.append(f"Not evaluated: {', '.join(missing)}.")
    if warned:
        said.append(f"With warnings: {', '.join(warned)}.")
    if weak:
        said.append(f"Without AutoAttack, so an upper bound: {', '.join(weak)}.")
    if said:
        return HeadlineAnswer(question, "With care", " ".join(said), "care")
    return HeadlineAnswer(question, "Yes, as far as is known", "All ran AutoAttack, and none gave a warning.", "good")
