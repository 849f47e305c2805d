"""The first screen: three answers, accuracy under each attack beside what was expected, and facts of the training."""

from __future__ import annotations

from typing import Any

from atas.attacks.registry import display_name
from atas.evaluation import Evaluation
from atas.models.weights import GIVEN
from atas.recipes.expected import Expected, find_expected
from atas.report.formatting import format_interval, format_seconds, percent, whisker
from atas.report.headline import HeadlineAnswer, run_answers
from atas.report.html import Cell, Content, Markup, Section, html_table, tag
from atas.report.paper import Paper, PaperRow, paper_row
from atas.report.run_view import RunView
from atas.training.run import ROWS_KEY


def summary_section(view: RunView, paper: Paper | None) -> Section:
    """The first screen."""
    expectation = find_expected(view.recipe, on_subset=ROWS_KEY in view.environment)
    parts: list[Content] = [answer_list(run_answers(view, expectation))]
    if view.evaluation is not None:
        parts.append(_accuracy(view.evaluation, expectation, paper_row(view.recipe, paper)))
    parts += [_expectation_note(expectation), _facts(view)]
    return Section("summary", "How it ended", parts)


def answer_list(answers: list[HeadlineAnswer]) -> Markup:
    """Question, answer in a word, and why."""
    return tag(
        "dl",
        [
            tag(
                "div",
                tag("dt", answer.question),
                tag("dd", tag("strong", answer.word, class_=answer.tone), tag("span", answer.why)),
            )
            for answer in answers
        ],
        class_="answers",
    )


def _accuracy(evaluation: Evaluation, expectation: Expected | None, row: PaperRow | None) -> Markup:
    head = ["attack", "accuracy, %", "95% interval", "", "right", "time"]
    if expectation is not None and expectation.differences:
        expectation = None  # said of another training
    if expectation is not None:
        head.append("recipe expects")
    if row is not None:
        head.append("paper")
    lowest = min(accuracy for name, accuracy in evaluation.accuracy.items() if name != "worst")
    rows: list[list[Cell | Content]] = []
    for name in evaluation.correct:
        if name == "worst" and evaluation.accuracy[name] >= lowest:
            continue  # no worse than the worst attack: nothing that is not said already
        label = "all of them together" if name == "worst" else display_name(name)
        cells = _figures(
            label,
            evaluation.accuracy[name],
            evaluation.interval[name],
            int(evaluation.correct[name].sum()),
            evaluation.n,
        )
        cells.append(format_seconds(evaluation.seconds[name]))
        if expectation is not None:
            cells.append(expectation.figure(name) or "-")
        if row is not None:
            printed = row.accuracy(name)
            cells.append("-" if printed is None else f"{printed:.2f}")
        rows.append(cells)
        for stage in evaluation.stages.get(name, ()):
            cells = _figures(
                f"after {display_name(stage.name)}", stage.accuracy, stage.interval, stage.num_correct, evaluation.n
            )
            cells += [format_seconds(stage.seconds), *[""] * (len(head) - len(cells) - 1)]
            rows.append([Cell(cells[0], class_="stage"), *cells[1:]])  # type: ignore[arg-type]
    precision = evaluation.protocol.get("precision", "?")
    caption = f"Accuracy on {evaluation.n:,} test images, {evaluation.threat}; verdicts in {precision}"
    return html_table(head, rows, caption=caption, class_="accuracy")


def _figures(label: str, accuracy: float, interval: tuple[float, float], right: int, n: int) -> list[Cell | Content]:
    return [label, percent(accuracy), format_interval(interval), Cell(whisker(accuracy, interval)), f"{right:,}/{n:,}"]


def _expectation_note(expectation: Expected | None) -> Content:
    if expectation is None:
        return None
    said: list[Content] = ["The recipe ", tag("code", expectation.recipe), f" says: {expectation.sentence}"]
    if expectation.differences:
        said.append(f" This run differs from it ({'; '.join(expectation.differences)}), so its figures may.")
    return tag("p", said, class_="small")


def _facts(view: RunView) -> Markup:
    recipe, around = view.recipe, view.environment
    facts: dict[str, Any] = {
        "Method": recipe.method.name,
        "Threat": repr(recipe.threat),
        "Data": recipe.data.name.removeprefix(GIVEN),
        "Network": recipe.model.name.removeprefix(GIVEN),
        "Training": f"{len(view.summary.epochs)} of {recipe.training.epochs} epochs, batch "
        f"{recipe.training.batch_size}, {format_seconds(view.summary.seconds)}",
        "Collapse": view.summary.collapse_status,
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
