"""The first screen: three answers, accuracy under each attack beside the expected one, and facts of the training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from atas._utils.formatting import format_seconds
from atas._utils.imports import GIVEN
from atas.attacks.registry import display_name
from atas.evaluation import Evaluation, wilson
from atas.recipes import Recipe
from atas.recipes.expected import Expected, find_expected
from atas.report.elements import Cell, DataTable, Section, Whisker
from atas.report.formatting import attack_names, format_interval, percent
from atas.report.headline import run_answers
from atas.report.run_view import RunView
from atas.training.run import ROWS_KEY


class PaperRow(Protocol):
    """A row of the paper's tables, in percent."""

    def accuracy(self, attack: str) -> float | None:
        """Return the printed accuracy; None for an attack that the paper did not run."""


Paper = Callable[[str, str, float, str], PaperRow | None]
"""Returns the row of a data set, network, budget and method. The tables lie above this package: they are passed in."""


def summary_section(view: RunView, paper: Paper | None) -> Section:
    """Return the first screen."""
    expected, evaluation = find_expected(view.recipe, on_subset=ROWS_KEY in view.environment), view.evaluation
    corrupted = view.summary.corruption_result
    context = {
        "answers": run_answers(view, expected),
        "accuracy": None
        if evaluation is None
        else _accuracy_table(evaluation, expected, paper_row(view.recipe, paper)),
        "corruptions": None if corrupted is None else _corruption_table(corrupted),
        "expected": expected,
        "facts": _facts(view),
    }
    return Section("summary", "How it ended", "summary", context)


def _accuracy_table(evaluation: Evaluation, expected: Expected | None, row: PaperRow | None) -> DataTable:
    head = ["attack", "accuracy, %", "95% interval", "", "right", "time"]
    if expected is not None and expected.differences:
        expected = None  # measured with another training
    if expected is not None:
        head.append("recipe expects")
    if row is not None:
        head.append("paper")
    rows: list[list[Cell | str]] = []
    for name in evaluation.correct:
        if name == "worst" and not attack_names(evaluation):
            continue
        label = display_name(name)
        correct = int(evaluation.correct[name].sum())
        cells = _cells(Cell(label), evaluation.accuracy[name], evaluation.interval[name], correct, evaluation.n)
        cells.append(format_seconds(evaluation.seconds[name]))
        if expected is not None:
            cells.append(expected.figure(name) or "-")
        if row is not None:
            printed = row.accuracy(name)
            cells.append("-" if printed is None else f"{printed:.2f}")
        rows.append(cells)
        for stage in evaluation.stages.get(name, ()):
            after = Cell(f"after {display_name(stage.name)}", class_="stage")
            cells = _cells(after, stage.accuracy, stage.interval, stage.num_correct, evaluation.n)
            cells.append(format_seconds(stage.seconds))
            rows.append(cells + [""] * (len(head) - len(cells)))
    precision = evaluation.protocol.get("precision", "?")
    caption = (
        f"Accuracy on {evaluation.n:,} test images, {evaluation.threat}; verdicts in {precision}. The worst case "
        "counts images that are robust to all attacks that were run"
    )
    return DataTable(head, rows, caption, class_="accuracy")


def _cells(label: Cell, accuracy: float, interval: tuple[float, float], correct: int, n: int) -> list[Cell | str]:
    whisker = Cell(whisker=Whisker(accuracy, interval))
    return [label, percent(accuracy), format_interval(interval), whisker, f"{correct:,}/{n:,}"]


def _corruption_table(evaluation: Evaluation) -> DataTable:
    severities = range(1, 1 + max(map(len, evaluation.corruptions.values())))
    rows: list[list[Cell | str]] = [
        [name, *(percent(count / evaluation.n) for count in counts), format_interval(wilson(counts[-1], evaluation.n))]
        for name, counts in evaluation.corruptions.items()
    ]
    caption = (
        f"Accuracy on {evaluation.n:,} test images under common corruptions, in percent; the interval is of "
        "the last severity"
    )
    head = ["corruption", *(f"severity {number}" for number in severities), "95% interval"]
    return DataTable(head, rows, caption)


def _facts(view: RunView) -> dict[str, str]:
    recipe, environment = view.recipe, view.environment
    software = (f"{name} {environment[name]}" for name in ("atas", "torch", "python") if environment.get(name))
    facts: dict[str, Any] = {
        "Method": recipe.method.name,
        "Threat": repr(recipe.threat),
        "Data": recipe.data.label,
        "Network": recipe.model.name.removeprefix(GIVEN),
        "Training": f"{len(view.summary.epochs)} of {recipe.training.epochs} epochs, batch "
        f"{recipe.training.batch_size}, {format_seconds(view.summary.seconds)}",
        "Collapse": view.summary.collapse_status,
        "Seed": recipe.training.seed,
        "Hardware": environment.get("device"),
        "Engine": ", ".join(filter(None, (environment.get("engine"), environment.get("precision")))),
        "Software": ", ".join(software),
        "Commit": _short_commit(environment.get("commit")),
        "Date": str(environment.get("date") or "")[:16].replace("T", " "),
    }
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}


def _short_commit(commit: str | None) -> str | None:
    """Shorten a commit; the plus that marks a modified checkout stays."""
    return commit and commit[:12] + ("+ (changed since)" if commit.endswith("+") else "")


def paper_row(recipe: Recipe, paper: Paper | None) -> PaperRow | None:
    """Return the paper's row of this recipe, if there is one."""
    if paper is None or recipe.method.norm != "linf":
        return None
    return paper(recipe.data.name, recipe.model.name, recipe.method.eps, recipe.method.name)
