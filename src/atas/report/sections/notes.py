"""The end of the page: warnings about the results, and the commands and the recipe that repeat the run."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from atas.report.elements import Section
from atas.report.formatting import attack_names
from atas.report.headline import other_autoattack_result
from atas.report.run_view import RunView

_FEW_IMAGES = 1000


def warnings_section(view: RunView) -> Section:
    """Return the warnings of the evaluation, then its limits."""
    context = {
        "evaluated": view.evaluation is not None,
        "warnings": view.summary.warnings,
        "caveats": caveats(view),
    }
    return Section("warnings", "Warnings and limitations", "warnings", context)


def caveats(view: RunView) -> list[str]:
    """Return sentences about what the evaluation does not cover."""
    evaluation, sentences = view.evaluation, []
    if evaluation is None:
        return [f"The run has not been evaluated; run: {view.evaluate_command}"]
    if view.weights_differ:
        sentences.append("The evaluation used other weights than those in the run's folder; evaluate again.")
    if evaluation.threat != view.recipe.threat:
        sentences.append(
            f"The model was trained against {view.recipe.threat} and evaluated against {evaluation.threat}."
        )
    strongest = view.summary.autoattack_result
    if strongest is None:
        sentences.append("AutoAttack was not run: the results are upper bounds of the true robust accuracy.")
    elif strongest is not evaluation:
        sentences.append(other_autoattack_result(strongest))
    if evaluation.n < _FEW_IMAGES:
        sentences.append(f"Only {evaluation.n} test images were used, so intervals are wide.")
    return sentences


@dataclass(frozen=True)
class Repetition:
    """How to repeat a run. `commands` is None where a Python program is needed."""

    name: str
    typed: str
    commands: str | None
    protocol: str | None
    recipe: str


def repeat_section(views: list[RunView]) -> Section:
    """Return the commands that were typed, and those that repeat the runs."""
    return Section("repeat", "To repeat it", "repeat", {"runs": [_repetition(view) for view in views]})


def _repetition(view: RunView) -> Repetition:
    evaluation = view.evaluation
    environments = [view.environment, {} if evaluation is None else evaluation.environment]
    typed = dict.fromkeys(str(environment["command"]) for environment in environments if environment.get("command"))
    return Repetition(
        view.summary.name,
        "\n".join(typed),
        None if view.recipe.given_in_python else _commands(view),
        None if evaluation is None else evaluation.sentence(),
        view.recipe.to_toml(),
    )


def _commands(view: RunView) -> str:
    folder, evaluation = view.folder.path, view.evaluation
    copy = folder.with_name(f"{folder.resolve().name}-again")
    train: list[str | Path] = ["atas", "train", view.folder.recipe, "--out", copy]
    evaluate: list[str | Path] = ["atas", "evaluate"]
    if evaluation is None:
        evaluate += [folder, "--attacks", "pgd50,autoattack"]
    elif not attack_names(evaluation):
        return shlex.join(map(str, train))  # the command cannot evaluate without an attack
    else:
        evaluate += [copy, "--attacks", ",".join(attack_names(evaluation))]
        if evaluation.threat != view.recipe.threat:
            evaluate += ["--norm", evaluation.threat.name, "--eps", repr(evaluation.threat.eps)]
        evaluate += ["--examples", str(evaluation.n), "--seed", str(evaluation.protocol.get("seed", 0))]
    return "\n".join(shlex.join(map(str, words)) for words in (train, evaluate))
