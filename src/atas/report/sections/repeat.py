"""The commands that made the run, that make it again, and its whole recipe."""

from __future__ import annotations

import shlex
from pathlib import Path

from atas.report._html import Content, tag
from atas.report._section import Section
from atas.report._subject import Subject


def section(subjects: list[Subject]) -> Section:
    """What was typed, and what to type."""
    parts: list[Content] = []
    for subject in subjects:
        if len(subjects) > 1:
            parts.append(tag("h3", subject.summary.name))
        parts += _commands(subject)
    return Section("repeat", "To repeat it", parts)


def _commands(subject: Subject) -> list[Content]:
    folder, found = subject.place.path, subject.evaluation
    again = folder.with_name(f"{folder.resolve().name}-again")
    surroundings = [subject.environment, {} if found is None else found.environment]
    typed = list(dict.fromkeys(str(around["command"]) for around in surroundings if around.get("command")))
    commands = [_line("atas", "train", subject.place.recipe, "--out", again)]
    evaluated = (
        "pgd50,autoattack" if found is None else ",".join(key for key in found.correct if key not in ("clean", "worst"))
    )
    evaluate: list[str | Path] = ["atas", "evaluate", again if found is not None else folder, "--attacks", evaluated]
    if found is not None and found.threat != subject.recipe.threat:
        evaluate += ["--norm", found.threat.name, "--eps", repr(found.threat.eps)]
    if found is not None:
        evaluate += ["--examples", str(found.n), "--seed", str(found.protocol.get("seed", 0))]
    commands.append(_line(*evaluate))
    repeated: list[Content] = [
        tag("p", "What trains and evaluates it again, to the same bits on the same CPU:"),
        tag("pre", "\n".join(commands)),
    ]
    if subject.of_python:
        repeated = [tag("p", "The model or the data were objects of a Python program: that program repeats it.")]
    return [
        tag("p", "What was typed:") if typed else None,
        tag("pre", "\n".join(typed)) if typed else None,
        *repeated,
        tag("p", found.sentence(), class_="small") if found is not None else None,
        tag(
            "details",
            tag("summary", "The whole recipe"),
            tag("pre", subject.recipe.to_toml()),
        ),
    ]


def _line(*words: str | Path) -> str:
    return shlex.join(map(str, words))
