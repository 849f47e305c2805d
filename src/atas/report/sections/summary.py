"""How the run ended: three answers, accuracy under each attack beside what was expected, and how it was trained."""

from __future__ import annotations

from typing import Any

from atas.evaluation import Evaluation
from atas.evaluation._names import written
from atas.report._expected import Expected, Paper, PaperRow, expected, in_paper
from atas.report._html import Content, Markup, tag
from atas.report._section import Section
from atas.report._subject import Subject
from atas.report._table import Cell, table
from atas.report._verdict import Answer, answers
from atas.report._words import between, duration, percent, whisker
from atas.training.weights import GIVEN


def section(subject: Subject, paper: Paper | None) -> Section:
    """The first screen."""
    foreseen = expected(subject.recipe, subject.environment)
    parts: list[Content] = [answer_list(answers(subject, foreseen))]
    if subject.evaluation is not None:
        parts.append(_accuracy(subject.evaluation, foreseen, in_paper(subject.recipe, paper)))
    parts += [_expectation(foreseen), _facts(subject)]
    return Section("summary", "How it ended", parts)


def answer_list(found: list[Answer]) -> Markup:
    """Question, answer in a word, and why."""
    return tag(
        "dl",
        [
            tag(
                "div",
                tag("dt", answer.question),
                tag("dd", tag("strong", answer.word, class_=answer.tone), tag("span", answer.why)),
            )
            for answer in found
        ],
        class_="answers",
    )


def _accuracy(found: Evaluation, foreseen: Expected | None, row: PaperRow | None) -> Markup:
    head = ["attack", "accuracy, %", "95% interval", "", "right", "time"]
    if foreseen is not None and foreseen.differences:
        foreseen = None  # said of another training
    if foreseen is not None:
        head.append("recipe expects")
    if row is not None:
        head.append("paper")
    lowest = min(accuracy for name, accuracy in found.accuracy.items() if name != "worst")
    rows: list[list[Cell | Content]] = []
    for name in found.correct:
        if name == "worst" and found.accuracy[name] >= lowest:
            continue  # no worse than the worst attack: nothing that is not said already
        label = "all of them together" if name == "worst" else written(name)
        cells = _figures(label, found.accuracy[name], found.interval[name], int(found.correct[name].sum()), found.n)
        cells.append(duration(found.seconds[name]))
        if foreseen is not None:
            cells.append(foreseen.figure(name) or "-")
        if row is not None:
            printed = row.accuracy(name)
            cells.append("-" if printed is None else f"{printed:.2f}")
        rows.append(cells)
        for stage in found.stages.get(name, ()):
            cells = _figures(f"after {written(stage.name)}", stage.accuracy, stage.interval, stage.right, found.n)
            cells += [duration(stage.seconds), *[""] * (len(head) - len(cells) - 1)]
            rows.append([Cell(cells[0], class_="stage"), *cells[1:]])  # type: ignore[arg-type]
    caption = f"Accuracy on {found.n:,} test images, {found.threat}; verdicts in {found.protocol.get('precision', '?')}"
    return table(head, rows, caption=caption, class_="accuracy")


def _figures(label: str, accuracy: float, interval: tuple[float, float], right: int, n: int) -> list[Cell | Content]:
    return [label, percent(accuracy), between(interval), Cell(whisker(accuracy, interval)), f"{right:,}/{n:,}"]


def _expectation(foreseen: Expected | None) -> Content:
    if foreseen is None:
        return None
    said: list[Content] = ["The recipe ", tag("code", foreseen.recipe), f" says: {foreseen.sentence}"]
    if foreseen.differences:
        said.append(f" This run differs from it ({'; '.join(foreseen.differences)}), so its figures may.")
    return tag("p", said, class_="small")


def _facts(subject: Subject) -> Markup:
    recipe, around = subject.recipe, subject.environment
    facts: dict[str, Any] = {
        "Method": recipe.method.name,
        "Threat": repr(recipe.threat),
        "Data": recipe.data.name.removeprefix(GIVEN),
        "Network": recipe.model.name.removeprefix(GIVEN),
        "Training": f"{len(subject.summary.epochs)} of {recipe.training.epochs} epochs, batch "
        f"{recipe.training.batch_size}, {duration(subject.summary.seconds)}",
        "Collapse": subject.summary.collapse,
        "Seed": recipe.training.seed,
        "Hardware": around.get("device"),
        "Engine": _words(around.get("engine"), around.get("precision")),
        "Software": _words(*(f"{name} {around[name]}" for name in ("atas", "torch", "python") if around.get(name))),
        "Commit": _short(around.get("commit")),
        "Date": str(around.get("date") or "")[:16].replace("T", " "),
    }
    shown = {name: value for name, value in facts.items() if value not in (None, "")}
    return tag(
        "dl", [tag("div", tag("dt", name), tag("dd", str(value))) for name, value in shown.items()], class_="facts"
    )


def _short(commit: str | None) -> str | None:
    """Enough of a commit to find it; the plus that marks a changed checkout stays."""
    return commit and commit[:12] + ("+ (changed since)" if commit.endswith("+") else "")


def _words(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part)
