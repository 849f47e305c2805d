"""Accuracy of each class, and the confusion between classes under attack."""

from __future__ import annotations

from dataclasses import dataclass

from atas.attacks.registry import display_name
from atas.evaluation import wilson
from atas.report.elements import Cell, DataTable, Section, Whisker
from atas.report.formatting import attack_names, format_interval, percent
from atas.report.measurements import ConfusionMatrix, confusion_matrix
from atas.report.run_view import RunView, or_unavailable

_MATRIX_UP_TO = 20  # classes; a larger matrix is unreadable
_MISTAKES = 15


@dataclass(frozen=True)
class ConfusionView:
    """The confusion under attack: its most frequent mistakes in words, and a table."""

    num_images: int
    mistakes: str
    table: DataTable


def classes_section(view: RunView) -> Section:
    """Return accuracy by class and the confusion."""
    context = {
        "by_class": or_unavailable(lambda: _by_class(view)),
        "confusion": or_unavailable(lambda: _confusion(confusion_matrix(view))),
    }
    return Section("classes", "Classes", "classes", context)


def _by_class(view: RunView) -> DataTable:
    evaluation, test = view.test_split
    attacks = ["clean", *attack_names(evaluation)]
    columns = attacks if len(attacks) < 2 else [*attacks, "worst"]
    rows: list[list[Cell | str]] = []
    for number, label in enumerate(test.classes):
        members = test.labels == number
        n = int(members.sum())
        if not n:
            continue
        counts = [int(evaluation.correct[name][members].sum()) for name in columns]
        accuracy, interval = counts[-1] / n, wilson(counts[-1], n)
        rows.append(
            [
                Cell(label, sort=number),
                Cell(str(n), sort=n),
                *(Cell(percent(count / n), sort=count / n) for count in counts),
                Cell(format_interval(interval), sort=interval[0]),
                Cell(whisker=Whisker(accuracy, interval), sort=accuracy),
            ]
        )
    head = ["class", "images", *map(display_name, columns), "95% interval", ""]
    caption = (
        f"Accuracy of each class in percent, on {evaluation.n:,} test images. Worst case counts images that are "
        "correct under every attack; the interval is of the last accuracy"
    )
    return DataTable(head, rows, caption, sortable=True)


def _confusion(matrix: ConfusionMatrix) -> ConfusionView:
    mistakes = ", ".join(f"{true} as {other} ({count} of {n})" for true, other, count, n in matrix.top_mistakes(3))
    table = _matrix(matrix) if len(matrix.classes) <= _MATRIX_UP_TO else _mistakes(matrix)
    return ConfusionView(matrix.num_images, mistakes, table)


def _mistakes(matrix: ConfusionMatrix) -> DataTable:
    """List the most frequent mistakes, for data with many classes."""
    rows = [[true, other, str(count), str(n)] for true, other, count, n in matrix.top_mistakes(_MISTAKES)]
    head = ["true class", "predicted", "times", "of"]
    return DataTable(head, rows, "The most frequent mistakes under PGD-10", text_columns=2)


def _matrix(matrix: ConfusionMatrix) -> DataTable:
    rows: list[list[Cell | str]] = []
    for number, label in enumerate(matrix.classes):
        counts = matrix.counts[number].tolist()
        total = sum(counts) or 1
        cells = [
            Cell(
                str(count) if count else "",
                style=f"--share:{100 * count / total:.0f}%",
                title=f"{label} predicted as {matrix.classes[other]}: {count} of {total}",
                class_="right" if other == number else "heat",
            )
            for other, count in enumerate(counts)
        ]
        rows.append([label, *cells])
    caption = "True classes (rows) and predicted classes (columns) under PGD-10"
    return DataTable(["", *matrix.classes], rows, caption, class_="matrix")
