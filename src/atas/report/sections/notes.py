"""The end of the page: reasons to doubt the figures, and the commands and the recipe that repeat the run."""

from __future__ import annotations

import shlex
from pathlib import Path

from atas.report.headline import other_autoattack_result
from atas.report.html import Content, Section, tag
from atas.report.run_view import RunView

_FEW_IMAGES = 1000


def warnings_section(view: RunView) -> Section:
    """Warnings first, then what to keep in mind."""
    return Section("warnings", "Warnings", [_warnings(view), _caveat_list(view)])


def caveats(view: RunView) -> list[str]:
    """What the evaluation did not look for, in sentences."""
    evaluation, said = view.evaluation, []
    if evaluation is None:
        return [f"The run has not been evaluated; run: {view.evaluate_command}"]
    if view.weights_differ:
        said.append("The evaluation was made with other weights than those in the run's folder; evaluate again.")
    if evaluation.threat != view.recipe.threat:
        said.append(f"The model was trained against {view.recipe.threat} and evaluated against {evaluation.threat}.")
    strong = view.summary.autoattack_result
    if strong is None:
        said.append("AutoAttack was not run: the figures are upper bounds of the true robust accuracy.")
    elif strong is not evaluation:
        said.append(other_autoattack_result(strong))
    if evaluation.n < _FEW_IMAGES:
        said.append(f"There were only {evaluation.n} test images, so intervals are wide.")
    return said


def _warnings(view: RunView) -> Content:
    if view.evaluation is None:
        return None
    if not view.summary.warnings:
        return tag(
            "p",
            "The evaluation gave no warnings: it looked for outputs that are NaN or infinite, for random answers, "
            "outputs that are no logits, gradients that vanish or explode, and signs of masked gradients.",
        )
    rows = [tag("li", tag("b", caution.kind), f": {caution}.") for caution in view.summary.warnings]
    return tag("ul", rows, class_="warnings")


def _caveat_list(view: RunView) -> Content:
    said = caveats(view)
    return [tag("p", "To keep in mind:"), tag("ul", [tag("li", sentence) for sentence in said])] if said else None


def repeat_section(views: list[RunView]) -> Section:
    """What was typed, and what to type."""
    parts: list[Content] = []
    for view in views:
        if len(views) > 1:
            parts.append(tag("h3", view.summary.name))
        parts += _commands(view)
    return Section("repeat", "To repeat it", parts)


def _commands(view: RunView) -> list[Content]:
    folder, evaluation = view.folder.path, view.evaluation
    again = folder.with_name(f"{folder.resolve().name}-again")
    surroundings = [view.environment, {} if evaluation is None else evaluation.environment]
    typed = list(dict.fromkeys(str(around["command"]) for around in surroundings if around.get("command")))
    commands = [_line("atas", "train", view.folder.recipe, "--out", again)]
    evaluated = (
        "pgd50,autoattack"
        if evaluation is None
        else ",".join(key for key in evaluation.correct if key not in ("clean", "worst"))
    )
    evaluate: list[str | Path] = [
        "atas",
        "evaluate",
        again if evaluation is not None else folder,
        "--attacks",
        evaluated,
    ]
    if evaluation is not None and evaluation.threat != view.recipe.threat:
        evaluate += ["--norm", evaluation.threat.name, "--eps", repr(evaluation.threat.eps)]
    if evaluation is not None:
        evaluate += ["--examples", str(evaluation.n), "--seed", str(evaluation.protocol.get("seed", 0))]
    commands.append(_line(*evaluate))
    repeated: list[Content] = [
        tag("p", "What trains and evaluates it again, to the same bits on the same CPU:"),
        tag("pre", "\n".join(commands)),
    ]
    if view.uses_python_objects:
        repeated = [tag("p", "The model or the data were objects of a Python program: that program repeats it.")]
    return [
        tag("p", "What was typed:") if typed else None,
        tag("pre", "\n".join(typed)) if typed else None,
        *repeated,
        tag("p", evaluation.sentence(), class_="small") if evaluation is not None else None,
        tag(
            "details",
            tag("summary", "The whole recipe"),
            tag("pre", view.recipe.to_toml()),
        ),
    ]


def _line(*words: str | Path) -> str:
    return shlex.join(map(str, words))
