"""The three questions that a page answers first.

For one run: is it robust, how sure is that, can the evaluation be trusted. For several runs: which is the most robust,
is its lead real, can the evaluations be trusted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atas.evaluation import Evaluation
from atas.recipes.expected import Expected
from atas.report.compare import RankedRun, Ranking
from atas.report.formatting import attack_names, describe_threat, format_interval, join_names, percent
from atas.report.run_view import RunView
from atas.report.verdict import NO_ROBUSTNESS

_ROBUST_FROM = 0.9  # from this robust accuracy on the answer is yes
_WIDE_INTERVAL = 0.03  # from the accuracy to the further end of its interval
_COLLAPSED = " Training collapsed in epoch {}: see the curves."


@dataclass(frozen=True)
class HeadlineAnswer:
    """A question, a short answer, and the reason. `tone` is good, plain, care or bad."""

    question: str
    word: str
    why: str
    tone: str


def run_answers(view: RunView, expected: Expected | None) -> list[HeadlineAnswer]:
    """Answer the three questions for one run."""
    evaluation = view.evaluation
    if evaluation is None:
        return [_robust_by_monitor(view), *_not_evaluated(view)]
    return [_robust(view, evaluation), _sure(view, evaluation, expected), _trust(view, evaluation)]


def _robust(view: RunView, evaluation: Evaluation) -> HeadlineAnswer:
    question, verdict = "Is it robust?", view.summary.verdict
    clean, worst = evaluation.accuracy["clean"], verdict.accuracy
    if worst is None:
        return HeadlineAnswer(question, "Not known", f"{verdict.reason} Clean accuracy is {percent(clean)}%.", "care")
    why = (
        f"Of 100 new images, the model classifies about {100 * clean:.0f} correctly, and about {100 * worst:.0f} in "
        f"the worst case: under every attack by {join_names(attack_names(evaluation))}, which may change "
        f"{describe_threat(evaluation.threat)}."
    )
    collapsed = view.summary.epochs[-1]["collapsed"]
    if collapsed:
        why += _COLLAPSED.format(view.summary.collapse_epoch)
    if collapsed or verdict.is_low:
        return HeadlineAnswer(question, f"No: {verdict.figure}", why, "bad")
    if verdict.kind == "unknown":
        return HeadlineAnswer(question, "Not known", f"{verdict.reason} {why}", "care")
    if verdict.kind == "bound":
        return HeadlineAnswer(question, f"At most {percent(worst)}%", f"{why} {verdict.reason}", "care")
    if worst < _ROBUST_FROM:
        return HeadlineAnswer(question, f"In part: {verdict}", why, "plain")
    return HeadlineAnswer(question, f"Yes: {verdict}", why, "good")


def _sure(view: RunView, evaluation: Evaluation, expected: Expected | None) -> HeadlineAnswer:
    low, high = evaluation.interval["worst"]
    half = max(high - evaluation.accuracy["worst"], evaluation.accuracy["worst"] - low)
    why = (
        f"On {evaluation.n:,} images, the worst case is known to within {100 * half:.1f} points: "
        f"{format_interval((low, high))}% with 95% confidence."
    )
    figure = expected.figure("pgd50") if expected and not expected.differences else None
    spread = f" (the recipe's range over seeds under PGD-50: {figure})" if figure and "to" in figure else ""
    why += f" This is one training run with seed {view.recipe.training.seed}; other seeds give other results{spread}."
    return HeadlineAnswer(
        "How sure is that?", f"To {100 * half:.1f} points", why, "care" if half > _WIDE_INTERVAL else "good"
    )


def _trust(view: RunView, evaluation: Evaluation) -> HeadlineAnswer:
    question = "Can the evaluation be trusted?"
    if view.weights_differ:
        return HeadlineAnswer(
            question, "No", "It used other weights than those in the run's folder: evaluate again.", "bad"
        )
    if warnings := view.summary.warnings:
        count = len(warnings)
        why = f"{count} {'warning' if count == 1 else 'warnings'}: {warnings[0]}."
        return HeadlineAnswer(question, "With care", why, "care")
    strong = view.summary.autoattack_result
    if strong is None:
        why = "AutoAttack was not run. Weaker attacks miss adversarial examples, so the result is an upper bound."
        return HeadlineAnswer(question, "In part", why, "care")
    if strong is not evaluation:
        return HeadlineAnswer(question, "In part", other_autoattack_result(strong), "care")
    same = "" if view.weights_differ is None else " The evaluated weights are those in the folder."
    why = (
        "AutoAttack, which includes a black-box attack, was run, and there was no sign of masked gradients. "
        f"Predictions were made in {evaluation.protocol.get('precision', 'float32')}.{same}"
    )
    return HeadlineAnswer(question, "Yes, as far as is known", why, "good")


def other_autoattack_result(strong: Evaluation) -> str:
    """Describe a result with AutoAttack beside a shown result without it."""
    accuracy, interval = percent(strong.accuracy["worst"]), format_interval(strong.interval["worst"])
    return (
        f"This evaluation did not run AutoAttack. Another one did, on {strong.n:,} images: its worst case is "
        f"{accuracy}% ({interval}%)."
    )


def _robust_by_monitor(view: RunView) -> HeadlineAnswer:
    rows = view.summary.epochs
    why = f"The run has not been evaluated.{_last_probe(rows)}"
    if rows[-1]["collapsed"]:
        why += _COLLAPSED.format(view.summary.collapse_epoch)
        return HeadlineAnswer("Is it robust?", "No", why, "bad")
    return HeadlineAnswer("Is it robust?", "Not known", why, "care")


def _last_probe(rows: list[dict[str, Any]]) -> str:
    """Return a sentence about the monitor's last probe; empty if there was none."""
    last = next((row for row in reversed(rows) if "pgd10" in row), None)
    if last is None:
        return ""
    when = "the last epoch" if last is rows[-1] else f"epoch {last['epoch'] + 1}"
    return (
        f" On the monitor's training images, accuracy after {when} was {percent(last['clean'])}% clean and "
        f"{percent(last['pgd10'])}% under PGD-10."
    )


def _not_evaluated(view: RunView) -> list[HeadlineAnswer]:
    probe = view.recipe.training.probe
    at_most = "" if probe == "auto" else f"at most {probe:,} "
    why = f"Only the monitor's images were measured, {at_most}of the training set, which say little about new images."
    remedy = f"There is no evaluation. Run {view.evaluate_command}"
    return [
        HeadlineAnswer("How sure is that?", "Not at all", why, "care"),
        HeadlineAnswer("Can the evaluation be trusted?", "Not evaluated", remedy, "care"),
    ]


def comparison_answers(views: list[RunView], ranking: Ranking | str) -> list[HeadlineAnswer]:
    """Answer the three questions for several runs."""
    collapsed = [view.summary.name for view in views if view.summary.epochs[-1]["collapsed"]]
    collapses = f" Collapsed in training: {', '.join(collapsed)}." if collapsed else ""
    which, real, trust = "Which is the most robust?", "Is its lead real?", "Can the evaluations be trusted?"
    if isinstance(ranking, str):
        return [
            HeadlineAnswer(which, "Not known", ranking + collapses, "care"),
            HeadlineAnswer(real, "Not known", "Evaluate all runs with the same attacks on the same images.", "care"),
            _trust_all(trust, views),
        ]
    best, second = ranking.runs[:2]
    leader = (
        f"Its accuracy is {percent(best.accuracy)}% ({format_interval(best.interval)}) under "
        f"{join_names(ranking.attacks)} together, on {best.n:,} images; next is {second.run.name} with "
        f"{percent(second.accuracy)}%.{_own_worst_case(best)}{collapses}"
    )
    word, tone = best.run.name, "good"
    if not any(_worst_accuracy(ranked) > NO_ROBUSTNESS for ranked in ranking.runs):
        word, tone = "None of them", "bad"
    elif best.run.verdict.kind == "unknown":
        word, tone = "Not known", "care"
    leader = leader if word == best.run.name else f"{best.run.name} leads: {leader}"
    low, high = (-100 * end for end in reversed(second.gap_interval))
    lead = f"{-100 * second.gap:.1f} points above {second.run.name}, {low:.1f} to {high:.1f} with 95% confidence"
    significant = low > 0
    lead += ", on the same images. " + (
        "The choice of test images does not explain that"
        if significant
        else "The choice of test images may explain that"
    )
    lead += "; the spread over seeds is not included."
    return [
        HeadlineAnswer(which, word, leader, tone),
        HeadlineAnswer(
            real, "Yes, on these images" if significant else "Not shown", lead, "good" if significant else "care"
        ),
        _trust_all(trust, views),
    ]


def _worst_accuracy(ranked: RankedRun) -> float:
    """Return the accuracy under all attacks that the run was evaluated with."""
    return ranked.run.evaluation.accuracy["worst"] if ranked.run.evaluation else ranked.accuracy


def _own_worst_case(ranked: RankedRun) -> str:
    """Mention the worst case of a run if it says more than the accuracy under the common attacks."""
    verdict = ranked.run.verdict
    if verdict.kind == "measured" and _worst_accuracy(ranked) == ranked.accuracy:
        return ""
    return f" Its worst case, under all attacks that it was evaluated with, is {verdict}. {verdict.reason}".rstrip()


def _trust_all(question: str, views: list[RunView]) -> HeadlineAnswer:
    missing = [view.summary.name for view in views if view.evaluation is None]
    stale = [view.summary.name for view in views if view.weights_differ]
    warned = [view.summary.name for view in views if view.summary.warnings]
    weak = [view.summary.name for view in views if view.evaluation and view.summary.autoattack_result is None]
    sentences = []
    if missing:
        sentences.append(f"Not evaluated: {', '.join(missing)}.")
    if stale:
        sentences.append(f"Evaluated with other weights than those in the folder: {', '.join(stale)}.")
    if warned:
        sentences.append(f"With warnings: {', '.join(warned)}.")
    if weak:
        sentences.append(f"Without AutoAttack, so an upper bound: {', '.join(weak)}.")
    if sentences:
        return HeadlineAnswer(question, "With care", " ".join(sentences), "care")
    return HeadlineAnswer(question, "Yes, as far as is known", "All ran AutoAttack, and none gave a warning.", "good")
